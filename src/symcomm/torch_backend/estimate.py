"""Estimates collectives instead of running them, by symcomm.simulate's cost model: torch's ``_time_estimator``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from symcomm import errors
from symcomm.group.call_names import HookOpName
from symcomm.group.interception import Call
from symcomm.group.process_group import ProcessGroup
from symcomm.ops import OPS, Op
from symcomm.torch_backend.work import DoneWork


def _model(op: Op) -> tuple[str, str, bool]:
    """(the model of a call, whether its inputs or outputs count, whether they count once for each rank)"""
    if op.name in ("send", "recv", "recv_anysource"):
        return "message", "inputs" if op.name == "send" else "outputs", False
    model = op.plan or op.name.removesuffix("_coalesced").removesuffix("_lists")
    return model, "outputs" if model in ("all_gather", "scatter") else "inputs", model in ("gather", "scatter")


_MODELS = {HookOpName[op.hook_name]: _model(op) for op in OPS}
_COALESCED = (
    HookOpName.ALLREDUCE_COALESCED,
    HookOpName.ALLGATHER_INTO_TENSOR_COALESCED,
    HookOpName.REDUCE_SCATTER_TENSOR_COALESCED,
)
# Between hosts the model knows four collectives. Each of the others moves about as much as one of these.
_BETWEEN_HOSTS = {
    "reduce": "reduce_scatter",
    "gather": "all_gather",
    "scatter": "broadcast",
    "all_to_all": "all_gather",
    "barrier": "broadcast",
    "message": "broadcast",
}


class TimeEstimate:
    """How long collectives of a group would take. During an estimate they return at once and leave their tensors as
    they are."""

    _core: Any = None  # set during an estimate
    _seconds = 0.0

    def start(self, core: ProcessGroup) -> None:
        if self._core is not None:
            raise errors.CallerError("_start_time_estimate: an estimate is under way; call _end_time_estimate first.")
        self._core, self._seconds = core, 0.0
        core.interception.add(self._estimate)

    def end(self) -> float:
        """Seconds that the collectives since the start would have taken."""
        if self._core is None:
            raise errors.CallerError("_end_time_estimate: no estimate is under way; call _start_time_estimate first.")
        self._core.interception.remove(self._estimate)
        self._core = None
        return self._seconds

    def _estimate(self, call: Call, make: Callable[[], Any]) -> Any:
        if call.name not in _MODELS:
            return make()
        elsewhere = next((t.device.type for t in (*call.inputs, *call.outputs) if not t.is_cpu), None)
        if elsewhere is not None:
            raise errors.CallerError(
                f"{call.method}: times are estimated for tensors in host memory only, and this one is on {elsewhere}; "
                "measure it instead."
            )
        self._seconds += sum(_seconds(self._core, model, nbytes) for model, nbytes in _parts(call, self._core.size))
        is_torchs = isinstance(call.owner, dist.ProcessGroup)
        return DoneWork(call.outputs or call.inputs) if is_torchs else None


def _parts(call: Call, ranks: int) -> list[tuple[str, int]]:
    """(model, bytes) of each operation in the call."""
    model, which, each = _MODELS[call.name]
    sizes = [t.numel() * t.element_size() for t in getattr(call, which)]
    if call.name in _COALESCED:
        return [(model, size) for size in sizes]
    return [(model, sum(sizes) * (ranks if each else 1))]


def _seconds(core: Any, model: str, nbytes: int) -> float:
    from symcomm.simulate.host import host_seconds  # few programs need it
    from symcomm.simulate.machine import load
    from symcomm.simulate.predict import COLLECTIVES, predict

    if core.spans_hosts:
        hosts = core.layout.hosts
        name = model if model in COLLECTIVES else _BETWEEN_HOSTS[model]
        return predict(name, max(nbytes, 1), len(hosts), max(map(len, hosts)))
    if model == "message":
        return host_seconds("broadcast", nbytes, 2, load())
    return host_seconds(model, nbytes, core.size, load())
