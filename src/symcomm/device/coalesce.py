"""broadcast and reduce_add of many tensors at once: packed where they cross from one device to another.

Results are detached from autograd, each with a version counter of its own: changing one in place is no change of
another. ``Broadcast`` and ``ReduceAddCoalesced`` in functions.py are the differentiable forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from symcomm import errors
from symcomm._core import native
from symcomm.device import packing
from symcomm.device.copies import copy_to
from symcomm.device.devices import as_destination, as_devices, as_tensors, check_has_data
from symcomm.device.sums import NARROW, add_on, check_same
from symcomm.types import DType

BUFFER_SIZE = 10 << 20  # bytes, as in PyTorch
GRAIN = 32768  # elements; torch adds larger tensors with several threads, and our core with one

_numbers = {getattr(torch, dtype.label): int(dtype) for dtype in DType if hasattr(torch, dtype.label)}


def _check_buffer_size(call: str, buffer_size: Any) -> int:
    if not isinstance(buffer_size, int) or buffer_size < 1:
        raise errors.bad_argument(call, "buffer_size", buffer_size, "a number of bytes, 1 or more")
    return buffer_size


# --- broadcast -----------------------------------------------------------------------------------------------


@torch.no_grad()
def broadcast_coalesced(tensors: Any, devices: Any, buffer_size: int = BUFFER_SIZE) -> list[list[torch.Tensor]]:
    """For each device, copies of all ``tensors`` in their order.

    The first entry of ``devices`` that is the tensors' own device gets the tensors themselves; every other entry gets
    copies of its own, even when it is the same device again.
    """
    call = "broadcast_coalesced"
    tensors = as_tensors(call, "tensors", tensors)
    targets = as_devices(call, "devices", devices)
    limit = _check_buffer_size(call, buffer_size)
    for i, tensor in enumerate(tensors):
        if tensor.device != tensors[0].device:
            raise errors.bad_argument(call, f"tensors[{i}]", tensor.device, f"on {tensors[0].device} as tensors[0] is")
    if not tensors:
        return [[] for _ in targets]
    for target in targets:
        check_has_data(call, "tensors[0]", tensors[0], target)
    own = own_entry(tensors[0].device, targets)
    return [tensors if i == own else copies_on(target, tensors, limit) for i, target in enumerate(targets)]


def own_entry(device: torch.device, devices: Sequence[torch.device]) -> int | None:
    """The index of the entry that gets the tensors themselves."""
    return next((i for i, d in enumerate(devices) if d == device), None)


def copies_on(device: torch.device, tensors: Sequence[torch.Tensor], limit: int) -> list[torch.Tensor]:
    """Copies of tensors of any layout: what is made of dense parts travels as these."""
    if all(t.layout is torch.strided for t in tensors):
        return packing.copies(tensors, device, limit)
    parts = [part for tensor in tensors for part in _parts(tensor)]
    arrived = iter(packing.copies(parts, device, limit))
    return [_whole(tensor, device, arrived) for tensor in tensors]


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor] if tensor.layout is torch.strided else []


def _whole(tensor: torch.Tensor, device: torch.device, arrived: Iterator[torch.Tensor]) -> torch.Tensor:
    if tensor.layout is torch.strided:
        return next(arrived)
    if tensor.layout is torch.sparse_coo:
        indices, values = next(arrived), next(arrived)
        coalesced = tensor.is_coalesced()
        return torch.sparse_coo_tensor(indices, values, tensor.shape, is_coalesced=coalesced, check_invariants=False)
    return copy_to(tensor, device)  # compressed sparse and other rare layouts, one by one


# --- reduce_add ----------------------------------------------------------------------------------------------


@torch.no_grad()
def reduce_add_coalesced(
    inputs: Any, destination: Any = None, buffer_size: int = BUFFER_SIZE
) -> tuple[torch.Tensor, ...]:
    """``inputs[d]`` lists the tensors of one device; result ``i`` is the sum of tensor ``i`` of every list.

    A column whose tensors are all sparse has a sparse sum, and a dense one if only some are. A single list that is
    already on ``destination`` is given back as it is.
    """
    call = "reduce_add_coalesced"
    limit = _check_buffer_size(call, buffer_size)
    lists = [as_tensors(call, f"inputs[{d}]", tensors) for d, tensors in enumerate(inputs)]
    _check_lists(call, lists)
    if not lists[0]:
        return ()
    device = as_destination(call, destination, [tensors[0] for tensors in lists])
    sums: dict[int, torch.Tensor] = {}
    dense: list[int] = []
    for i, column in enumerate(zip(*lists, strict=True)):
        for d, tensor in enumerate(column):
            check_has_data(call, f"inputs[{d}][{i}]", tensor, device)
        if all(t.layout is torch.strided for t in column):
            dense.append(i)
        elif all(t.layout == column[0].layout for t in column):
            sums[i] = add_on(device, column)
        else:
            dense.append(i)
            for tensors in lists:
                tensors[i] = tensors[i] if tensors[i].layout is torch.strided else tensors[i].to_dense()
    chosen = lists if len(dense) == len(lists[0]) else [[tensors[i] for i in dense] for tensors in lists]
    sums.update(zip(dense, _add_dense(device, chosen, limit), strict=True))
    return tuple(sums[i] for i in range(len(lists[0])))


def _check_lists(call: str, lists: list[list[torch.Tensor]]) -> None:
    if not lists:
        raise errors.bad_argument(call, "inputs", lists, "at least one list of tensors")
    for d, tensors in enumerate(lists):
        if len(tensors) != len(lists[0]):
            allowed = f"a list of {len(lists[0])} tensors, as many as in inputs[0]"
            raise errors.bad_argument(call, f"inputs[{d}]", f"{len(tensors)} tensors", allowed)
    for i, column in enumerate(zip(*lists, strict=True)):
        layouts = {t.layout for t in column}
        same = (
            column if len(layouts) == 1 else [torch.empty_like(t, layout=torch.strided, device="meta") for t in column]
        )
        check_same(call, f"inputs[{{}}][{i}]", same)


def _add_dense(device: torch.device, lists: list[list[torch.Tensor]], limit: int) -> Sequence[torch.Tensor]:
    if not lists[0]:
        return []
    if all(t.device == device for tensors in lists for t in tensors):
        return _add_here(lists)
    if any(t.device != tensors[0].device for tensors in lists for t in tensors):  # nothing to pack together
        return [add_on(device, column) for column in zip(*lists, strict=True)]
    result: list[torch.Tensor] = [torch.empty(0)] * len(lists[0])
    for group in packing.buckets(lists[0], limit):
        members = [_alike([tensors[i] for tensors in lists]) for i in group]
        if len(members) == 1:
            result[group[0]] = add_on(device, members[0])
            continue
        flat = add_on(device, [packing.pack(tensors) for tensors in zip(*members, strict=True)])
        for i, part in zip(group, packing.parts_of(flat, [column[0] for column in members]), strict=True):
            result[i] = part.data
    return result


def _alike(column: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Dense tensors with the same strides, so that their memory can be added as it lies."""
    column = [packing.dense(t) for t in column]
    if any(t.stride() != column[0].stride() for t in column):
        return [t.contiguous() for t in column]
    return list(column)


def _add_here(lists: list[list[torch.Tensor]]) -> Sequence[torch.Tensor]:
    """Sums of tensors that are all where the result shall be."""
    first = lists[0]
    if len(lists) == 1:
        return first
    rounds_once = len(lists) == 2 and not any(t.dtype in NARROW and t.dtype.itemsize == 1 for t in first)
    if rounds_once:  # one call; our core needs two, so it is ahead only from three lists on (bench: 1.5 times at four)
        return torch._foreach_add(first, lists[1])
    return _by_core(lists, _core_can_add, add_on)


def _core_can_add(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)  # a subclass may hide anything
        and tensor.device.type == "cpu"
        and tensor.dtype in _numbers
        and tensor.numel() <= GRAIN
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _by_core(
    lists: list[list[torch.Tensor]],
    can_add: Callable[[torch.Tensor], bool],
    otherwise: Callable[[torch.device, Sequence[torch.Tensor]], torch.Tensor],
) -> list[torch.Tensor]:
    """One pass over all sources of each tensor, in C for those that it takes."""
    result: list[torch.Tensor] = []
    jobs: dict[torch.dtype, list[tuple[torch.Tensor, list[torch.Tensor]]]] = {}
    for column in zip(*lists, strict=True):
        if all(map(can_add, column)):
            column = column if all(t.is_contiguous() for t in column) else _alike(column)
            total = torch.empty_like(column[0])
            jobs.setdefault(total.dtype, []).append((total, column))
        else:
            total = otherwise(column[0].device, column)
        result.append(total)
    for dtype, pairs in jobs.items():
        sources = [[column[d].data_ptr() for _, column in pairs] for d in range(len(lists))]
        into, counts = [t.data_ptr() for t, _ in pairs], [t.numel() for t, _ in pairs]
        native.add_many(_numbers[dtype], into, sources, counts)
    return result
