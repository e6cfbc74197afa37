"""The functions that compiled graphs call.

A graph's generated code allocates comm buffers here, and runs the collectives beside which nothing can run. Both happen
in every iteration, so both are fast.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _storage_Use_Count
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
    _resolve_process_group,
    _SymmetricMemory,
)

from symcomm import errors
from symcomm.compile import shapes
from symcomm.group.process_group import ProcessGroup
from symcomm.symm_mem.allocate import empty_strided_p2p
from symcomm.symm_mem.groups import find_group
from symcomm.torch_backend.profile import is_profiling
from symcomm.torch_backend.work import late
from symcomm.types import RedOpType

_view: Any = torch._C._dynamo.guards._reinterpret_tensor
_resolve: Any = _resolve_process_group

# --- comm buffers -----------------------------------------------------------------------------------------------------

MOST = 32  # buffers that one line of code keeps; only a program that keeps all results would need more


class BufferSlot:
    """Symmetric memory that one line of generated code allocates again and again. Tensors over it are views."""

    __slots__ = ("idle", "storage", "tensor")

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        self.storage = tensor.untyped_storage()._cdata
        self.idle = _storage_Use_Count(self.storage)  # the count while nothing else has a view

    def is_free(self) -> bool:
        return _storage_Use_Count(self.storage) == self.idle


_places: weakref.WeakKeyDictionary[ProcessGroup, dict[int, list[BufferSlot]]] = weakref.WeakKeyDictionary()


def comm_buffer(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: Any, group_name: str, alloc_id: int
) -> Tensor:
    """An empty tensor in symmetric memory: the same memory each time the line ``alloc_id`` runs, unless a result of an
    earlier run still lies there. So results may leave the graph without a copy, and peers see the same addresses every
    iteration. Devices other than "cpu" are torch's.
    """
    if device != "cpu":
        return _SymmetricMemory.empty_strided_p2p(size, stride, dtype, device, group_name, alloc_id)
    core = _core_of(group_name)
    known = _places.get(core)
    if known is None:
        known = _places.setdefault(core, {})
    kept = known.setdefault(alloc_id, [])
    for _ in range(len(kept)):
        try:
            place = kept.pop(0)  # taken out, so that no other thread uses it meanwhile
        except IndexError:
            break
        tensor = _view(place.tensor, size, stride, 0) if place.is_free() else None
        kept.append(place)
        if tensor is not None:
            return tensor
    fresh = empty_strided_p2p(size, stride, dtype, "cpu", core)
    if len(kept) >= MOST:
        return fresh
    place = BufferSlot(fresh)
    tensor = _view(fresh, size, stride, 0)
    kept.append(place)
    return tensor


def _core_of(group_name: str) -> ProcessGroup:
    try:
        return _resolve(group_name).core
    except RuntimeError:  # torch.ops.symm_mem also takes names of groups that torch does not know
        return find_group("comm_buffer", group_name)


def places(group: ProcessGroup) -> dict[int, int]:
    """How many buffers each line of generated code keeps on this group."""
    return {line: len(kept) for line, kept in _places.get(group, {}).items()}


# --- collectives that block -------------------------------------------------------------------------------------------

_REDOPS = {op.name.lower(): op for op in RedOpType}


@functools.cache
def _options(kind: Any, op: str | None = None, root: int | None = None) -> Any:
    options = kind()
    options.asyncOp = False
    if op is not None:
        options.reduceOp = getattr(torch.distributed.ReduceOp, op.upper())
    if root is not None:
        options.rootRank = root
    return options


def all_reduce_(tensor: Tensor, op: str, group_name: str) -> None:
    """Runs in the core alone, unless an observer watches the group's calls. A model that writes tokens waits for many
    of these calls. Between them its weights push everything else out of the caches, so each object on the way costs."""
    group = _resolve(group_name)
    if group.calls.handle is None or is_profiling():
        group.allreduce([tensor], _options(AllreduceOptions, op))
        return
    core = group.core
    try:
        core.all_reduce(tensor, _REDOPS[op])
    except errors.DeadlineError as error:
        raise late(error, core.timeout, core.timeout) from None


def all_reduce_coalesced_(tensors: list[Tensor], op: str, group_name: str) -> None:
    _resolve(group_name).allreduce_coalesced(tensors, _options(AllreduceCoalescedOptions, op))


def broadcast_(tensor: Tensor, root: int, group_name: str) -> None:
    _resolve(group_name).broadcast([tensor], _options(BroadcastOptions, root=root))


def all_gather_into_tensor(input: Tensor, group_size: int, group_name: str) -> Tensor:
    out = shapes.all_gather(input, group_size)
    _resolve(group_name).all_gather_single(out, input.contiguous(), _options(AllgatherOptions))
    return out


def all_gather_into_tensor_coalesced(inputs: list[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    outs = [shapes.all_gather(input, group_size) for input in inputs]
    flat = [input.contiguous() for input in inputs]
    _resolve(group_name).all_gather_single_coalesced(outs, flat, _options(AllgatherOptions))
    return outs


def all_gather_into_tensor_out(input: Tensor, group_size: int, group_name: str, *, out: Tensor) -> None:
    _resolve(group_name).all_gather_single(out, input.contiguous(), _options(AllgatherOptions))


def reduce_scatter_tensor(input: Tensor, op: str, group_size: int, group_name: str) -> Tensor:
    out = shapes.reduce_scatter(input, op, group_size)
    _resolve(group_name).reduce_scatter_single(out, input.contiguous(), _options(ReduceScatterOptions, op))
    return out


def reduce_scatter_tensor_coalesced(inputs: list[Tensor], op: str, group_size: int, group_name: str) -> list[Tensor]:
    outs = [shapes.reduce_scatter(input, op, group_size) for input in inputs]
    flat = [input.contiguous() for input in inputs]
    _resolve(group_name).reduce_scatter_single_coalesced(outs, flat, _options(ReduceScatterOptions, op))
    return outs


def all_to_all_single(input: Tensor, out_splits: list[int], in_splits: list[int], group_name: str) -> Tensor:
    out = shapes.all_to_all(input, out_splits)
    group = _resolve(group_name)
    group.all_to_all_single(out, input.contiguous(), out_splits, in_splits, _options(AllToAllOptions))
    return out
