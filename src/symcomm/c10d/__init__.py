"""symcomm.c10d: the names of PyTorch's ``torch._C._distributed_c10d``, on our implementation.

enums.py      DebugLevel, OpType, ...; the debug level; named()
options.py    AllreduceOptions and its kin, PREMUL_SUM
vendors.py    names of other vendors' libraries: PyTorch's own, or a sentence
stores.py     stores, and the bridge between ours and PyTorch's
works.py      Work and what it comes as
backend.py    Backend: the base of engines, which Python classes can subclass
fake.py       FakeProcessGroup: collectives that do nothing
wrapper.py    _ProcessGroupWrapper: checks that all ranks call the same
group.py      ProcessGroup: operations to backends by device
flight.py     _dump_fr_trace and its kin
symmetric.py  _SymmetricMemory, _detect_dma_connectivity
registry.py   groups by name, works by tensor

Reducer, Logger, GradBucket and their kin are those of symcomm.ddp; _WorkerServer and its handlers of symcomm.observe.

PyTorch's own engines (ProcessGroupGloo, ProcessGroupNCCL, ...) are passed on where PyTorch has them.
"""

from __future__ import annotations

from datetime import timedelta

from symcomm.c10d.backend import Backend
from symcomm.c10d.enums import (
    BackendType,
    DebugLevel,
    ErrorType,
    OpType,
    WorkResult,
    get_debug_level,
    set_debug_level,
    set_debug_level_from_env,
)
from symcomm.c10d.fake import FakeProcessGroup
from symcomm.c10d.flight import (
    _dump_fr_trace,
    _dump_fr_trace_file,
    _dump_fr_trace_json,
    _dump_nccl_trace,
    _dump_nccl_trace_json,
    _reset_fr_recording_nccl,
    _reset_fr_trace,
)
from symcomm.c10d.group import ProcessGroup
from symcomm.c10d.options import DEFAULT_TIMEOUT as _DEFAULT_PG_TIMEOUT
from symcomm.c10d.options import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    PutOptions,
    ReconfigureOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    SignalOptions,
    WaitSignalOptions,
    _DistributedBackendOptions,
    _make_nccl_premul_sum,
)
from symcomm.c10d.registry import shared as _shared
from symcomm.c10d.stores import (
    FakeStore,
    FileStore,
    HashStore,
    PrefixStore,
    QueueEmptyError,
    Store,
    TCPStore,
    _ControlCollectives,
    _StoreCollectives,
    _test_python_store,
    as_torch_store,
)
from symcomm.c10d.symmetric import _detect_dma_connectivity, _DMAConnectivity, _SymmetricMemory
from symcomm.c10d.vendors import vendors as _vendors
from symcomm.c10d.works import FakeWork, PythonCallbackWork, Work, WorkInfo, _create_work_from_future
from symcomm.c10d.wrapper import _ProcessGroupWrapper
from symcomm.ddp.assign import compute_bucket_assignment_by_size as _compute_bucket_assignment_by_size
from symcomm.ddp.broadcast import broadcast_coalesced as _broadcast_coalesced
from symcomm.ddp.bucket import GradBucket
from symcomm.ddp.comm_hook import BuiltinCommHookType
from symcomm.ddp.comm_hook import register_builtin_comm_hook as _register_builtin_comm_hook
from symcomm.ddp.comm_hook import register_comm_hook as _register_comm_hook
from symcomm.ddp.logger import DDPLoggingData, Logger
from symcomm.ddp.reducer import Reducer
from symcomm.ddp.verify import verify_params_across_processes as _verify_params_across_processes
from symcomm.group.call_hooks import HookOpName, PostHookArgs, PreHookArgs
from symcomm.group.hook_classes import HealthCheckHook, NanCheckHook
from symcomm.observe.recorder.flight_hook import FlightRecorderHook
from symcomm.observe.server.handlers import get_handler as _get_handler
from symcomm.observe.server.handlers import get_handler_names as _get_handler_names
from symcomm.observe.server.handlers import register_handler as _register_handler
from symcomm.observe.server.requests import Request as _Request
from symcomm.observe.server.requests import Response as _Response
from symcomm.observe.server.server import WorkerServer as _WorkerServer
from symcomm.types import ReduceOp
from symcomm.windows import Window, WindowAccessType, WindowAttr

_DEFAULT_FIRST_BUCKET_BYTES = 1024 * 1024
_DEFAULT_NO_TIMEOUT = timedelta(0)

_engines = _vendors()
globals().update(_engines | _shared)

__all__ = [
    "AllToAllOptions", "AllgatherOptions", "AllreduceCoalescedOptions", "AllreduceOptions", "Backend", "BackendType",
    "BarrierOptions", "BroadcastOptions", "DebugLevel", "ErrorType", "FakeProcessGroup", "FakeStore", "FakeWork",
    "FileStore", "FlightRecorderHook", "GatherOptions", "HashStore", "HealthCheckHook", "HookOpName", "NanCheckHook",
    "OpType", "PostHookArgs", "PreHookArgs", "PrefixStore", "ProcessGroup", "PutOptions", "PythonCallbackWork",
    "QueueEmptyError", "ReconfigureOptions", "ReduceOp", "ReduceOptions", "ReduceScatterOptions", "ScatterOptions",
    "SignalOptions", "Store", "TCPStore", "WaitSignalOptions", "Window", "WindowAccessType", "WindowAttr", "Work",
    "WorkInfo", "WorkResult", "_DEFAULT_FIRST_BUCKET_BYTES", "_DEFAULT_NO_TIMEOUT", "_DEFAULT_PG_TIMEOUT",
    "_ControlCollectives", "_DMAConnectivity", "_DistributedBackendOptions", "_ProcessGroupWrapper", "_Request",
    "_Response", "_StoreCollectives", "_SymmetricMemory", "_WorkerServer", "_create_work_from_future",
    "_detect_dma_connectivity", "_dump_fr_trace", "_dump_fr_trace_file", "_dump_fr_trace_json", "_dump_nccl_trace",
    "_dump_nccl_trace_json", "_get_handler", "_get_handler_names", "_make_nccl_premul_sum", "_register_handler",
    "_reset_fr_recording_nccl", "_reset_fr_trace", "_test_python_store", "as_torch_store", "get_debug_level",
    "set_debug_level", "set_debug_level_from_env", "BuiltinCommHookType", "DDPLoggingData", "GradBucket", "Logger",
    "Reducer", "_broadcast_coalesced", "_compute_bucket_assignment_by_size", "_register_builtin_comm_hook",
    "_register_comm_hook", "_verify_params_across_processes",
    *_engines, *_shared,
]  # fmt: skip
