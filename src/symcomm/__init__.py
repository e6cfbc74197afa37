"""Symcomm: PyTorch's communication layer on symmetric memory.

Where things are (imports point down only)::

    cli/            the `symcomm` command
    demo/           what `symcomm demo` trains and draws
    bench/          what `symcomm bench` measures
    launcher/       ranks as processes: start, watch, end; what `symcomm run` does
    ray.py          ranks on a Ray cluster
    integrations/   other programs on Symcomm without a change: vLLM's plugin, torch's operators
    c10d/           all of this by PyTorch's names
    elastic/        training that outlives its ranks
    compile/        torch.compile with our collectives: lowerings, passes, explain
    device/         one process, many devices: broadcast, scatter, gather, DataParallel (symcomm.comm)
    nn.py           linear layers split over ranks, in logical shards
    ddp/            DistributedDataParallel, Reducer, communication hooks
    torch_backend/  the torch.distributed backend, and torch_patches/: every change of torch's behaviour
    observe/        what ranks did and do: records, verdicts, the control plane, `top`, `doctor`
    simulate/       what plans would cost on a cluster that is only described
    windows/        one-sided puts and signals
    symm_mem/       symmetric tensors: allocate, rendezvous, signals, symmetrize
    cuda/           the same collectives on CUDA tensors of ranks that share a host
    hierarchical/   the same collectives between hosts: Gloo, MPI or NCCL carries what each host has reduced
    group/          ProcessGroup, Work, spawn, the default group
    collectives/    plans: one file per family of collectives, and the choice between them
    testing/        a kit for tests of distributed code
    sharing/        memory that one process writes and others read: queues, boards
    memory/         arenas: memory that all ranks of a host have mapped
    store/          key-value stores and rendezvous
    _core/          C: reductions, the plan executor, waits, mailboxes, the store's server
    errors.py       every exception, and the words of every error
    undo.py         the one way to change torch, and to change it back
    arguments.py    what counts as an int, a bool, text or a list
    types.py        dtypes and reduce operations

Names below are loaded on first use, so that ``import symcomm`` stays instant and never imports torch.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from symcomm import errors

__version__ = "0.1.0"

# module -> the public names it defines
_PUBLIC = {
    "symcomm.sharing.queue": ("Queue", "QueueReader"),
    "symcomm.sharing.board": ("Board", "BoardReader", "Snapshot"),
    "symcomm.store": ("Store", "HashStore", "FileStore", "TCPStore", "PrefixStore"),
    "symcomm.device.data_parallel": ("DataParallel",),
    "symcomm.symm_mem.symmetrize": ("symmetrize",),
    "symcomm.memory.shared_heap": ("HeapStats", "heap_stats"),
    "symcomm.symm_mem.groups": ("of",),
    "symcomm.torch_backend.wrapped": ("torch_process_group",),
    "symcomm.windows.window": ("Window",),
    "symcomm.ddp.module": ("DistributedDataParallel",),
    "symcomm.ddp.sampling": ("ShardSampler", "shard_seed"),
    "symcomm.types": ("DType", "ReduceOp", "make_premul_sum"),
    "symcomm.group.process_group": ("ProcessGroup",),
    "symcomm.group.reconfigure": ("ReconfigurableGroup",),
    "symcomm.group.call_hooks": ("HookOpName", "PostHookArgs", "PreHookArgs"),
    "symcomm.group.hook_classes": ("HealthCheckHook", "NanCheckHook"),
    "symcomm.observe.recorder.flight_hook": ("FlightRecorderHook",),
    "symcomm.group.p2p": ("ANY_SOURCE", "Message"),
    "symcomm.group.work": ("Work",),
    "symcomm.group.relay": ("relay",),
    "symcomm.group.spawn": ("spawn",),
    "symcomm.group.default": (
        "init", "join", "destroy", "default_group", "is_initialized", "rank", "world_size",
        "all_gather", "all_gather_coalesced", "all_gather_object", "all_gather_single", "all_reduce",
        "all_reduce_coalesced", "all_reduce_shards", "all_to_all", "all_to_all_single", "barrier", "batch", "broadcast",
        "broadcast_object", "gather", "gather_object", "gather_single", "irecv", "isend", "monitored_barrier",
        "new_group", "new_window", "recv", "reduce", "reduce_scatter", "reduce_scatter_coalesced",
        "reduce_scatter_shards", "reduce_scatter_single", "scatter", "scatter_object", "scatter_single", "send",
        "shard_range", "split",
    ),
}  # fmt: skip
_LAZY = {name: module for module, names in _PUBLIC.items() for name in names}

_MODULES = (
    "c10d",
    "comm",
    "compile",
    "ddp",
    "elastic",
    "nn",
    "ray",
    "simulate",
    "symm_mem",
    "testing",
    "windows",
)  # loaded on first use as well

__all__ = ["__version__", "errors", *_MODULES, *_LAZY]


def _load(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        needs = f"symcomm.{name} needs torch, which is not installed; run `pip install 'symcomm[torch]'`."
        raise ModuleNotFoundError(needs, name="torch") from None


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return _load(f"symcomm.{name}", name)
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'symcomm' has no attribute {name!r}")
    value = getattr(_load(module, name), name)
    globals()[name] = value
    return value


if os.environ.get("SYMCOMM_SERVER", "0") not in ("", "0"):
    importlib.import_module("symcomm.observe.server.autostart")


def __dir__() -> list[str]:
    return sorted(__all__)
