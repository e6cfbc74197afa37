"""broadcast and reduce_add of many tensors at once, packed where they cross devices.

Results are detached from autograd, and each has its own version counter: changing one in place does not change
another. ``Broadcast`` and ``ReduceAddCoalesced`` in functions.py are the differentiable forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from numbers import Real
from typing import Any

import torch

from symcomm import errors
from symcomm._core import native
from symcomm.device import packing
from symcomm.device.copies import copy_to
from symcomm.device.devices import as_destination, as_devices, as_integer, as_tensors, check_has_data
from symcomm.device.sums import NARROW, add_on, check_same
from symcomm.group.buffers import torch_dtypes

BUFFER_SIZE = 10 << 20  # bytes, as in PyTorch
MOST_LISTS = 1024  # how many the core adds in one pass
GRAIN = 32768  # elements; torch adds larger tensors with several threads, and our core with one


def _check_buffer_size(call: str, buffer_size: Any) -> int:
    """A limit of 0 packs nothing: every tensor travels alone."""
    limit = as_integer(buffer_size)
    if limit is None or not 0 <= limit < 2**64:
        raise errors.wrong_type(call, "buffer_size", buffer_size, "a number of bytes, 0 or more")
    return limit


# --- broadcast -----------------------------------------------------------------------------------------------


@torch.no_grad()
def broadcast_coalesced(tensors: Any, devices: Any, buffer_size: int = BUFFER_SIZE) -> list[list[torch.Tensor]]:
    """For each device, copies of all ``tensors`` in their order.

    The first entry of ``devices`` that is the tensors' own device gets the tensors themselves. Every other entry gets
    its own copies, even if it is the same device again.

    Raises: BadArgumentError.
    """
    call = "broadcast_coalesced"
    tensors = as_tensors(call, "tensors", tensors)
    targets = as_devices(call, "devices", devices)
    limit = _check_buffer_size(call, buffer_size)
    if not tensors:
        return [[] for _ in targets]
    source = tensors[0].device
    for i, tensor in enumerate(tensors):
        if tensor.device != source:
            raise errors.bad_argument(call, f"tensors[{i}]", tensor.device, f"on {source} as tensors[0] is")
    for target in targets:
        check_has_data(call, "tensors[0]", tensors[0], target)
    own = own_entry(source, targets)
    made = iter(_copies(tensors, [target for i, target in enumerate(targets) if i != own], limit))
    return [tensors if i == own else next(made) for i in range(len(targets))]


def own_entry(device: torch.device, devices: Sequence[torch.device]) -> int | None:
    """The index of the entry that gets the tensors themselves."""
    return next((i for i, d in enumerate(devices) if d == device), None)


def _copies(tensors: Sequence[torch.Tensor], devices: Sequence[torch.device], limit: int) -> list[list[torch.Tensor]]:
    """Copies of tensors of any layout; sparse ones travel as their dense parts."""
    if all(t.layout is torch.strided for t in tensors):
        return packing.copies(tensors, devices, limit)
    parts = [part for tensor in tensors for part in _parts(tensor)]
    made = []
    for device, copied in zip(devices, packing.copies(parts, devices, limit), strict=True):
        arrived = iter(copied)
        made.append([_whole(tensor, device, arrived) for tensor in tensors])
    return made


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
    already on ``destination`` is returned as it is.

    Raises: BadArgumentError.
    """
    call = "reduce_add_coalesced"
    if not isinstance(buffer_size, Real):
        raise errors.wrong_type(call, "buffer_size", buffer_size, "a number of bytes")
    if not isinstance(inputs, Iterable):
        raise errors.bad_argument(call, "inputs", type(inputs), "a list of tensors for each device")
    lists = [as_tensors(call, f"inputs[{d}]", tensors) for d, tensors in enumerate(inputs)]
    _check_lists(call, lists)
    if not lists[0]:
        return ()
    device = as_destination(call, destination, [tensors[0] for tensors in lists])
    sums, left = _add_in_core(lists, device)
    if left:
        columns = [[tensors[i] for tensors in lists] for i in left]
        for i, column in zip(left, columns, strict=True):
            check_same(call, f"inputs[{{}}][{i}]", column, layouts=False)
            for d, tensor in enumerate(column):
                check_has_data(call, f"inputs[{d}][{i}]", tensor, device)
        for i, total in zip(left, _add_columns(device, columns, buffer_size), strict=True):
            sums[i] = total
    return tuple(sums)


def _check_lists(call: str, lists: list[list[torch.Tensor]]) -> None:
    if not lists:
        raise errors.bad_argument(call, "inputs", lists, "at least one list of tensors")
    shapes = [t.shape for t in lists[0]]
    for d, tensors in enumerate(lists):
        if len(tensors) != len(shapes):
            allowed = f"a list of {len(shapes)} tensors, as many as in inputs[0]"
            raise errors.bad_argument(call, f"inputs[{d}]", f"{len(tensors)} tensors", allowed)
        if [t.shape for t in tensors] != shapes:
            i = next(i for i, t in enumerate(tensors) if t.shape != shapes[i])
            allowed = f"of the shape {tuple(shapes[i])} of inputs[0][{i}]"
            raise errors.bad_argument(call, f"inputs[{d}][{i}]", tuple(tensors[i].shape), allowed)


def _add_in_core(lists: list[list[torch.Tensor]], device: torch.device) -> tuple[list[torch.Tensor], Sequence[int]]:
    """If all tensors are on the CPU: their sums, made in C in one pass. Also the indices that the core left out."""
    first = lists[0]
    on_cpu = device.type == "cpu" and all(tensors[0].device.type == "cpu" for tensors in lists)
    if not on_cpu or not 1 < len(lists) <= MOST_LISTS:
        return list(first), range(len(first))
    torch_dtypes()  # the core knows torch's tensors from then on
    sums = [torch.empty_like(t) for t in first]
    return sums, native.add_many(sums, lists, GRAIN)


def _add_columns(device: torch.device, columns: list[list[torch.Tensor]], limit: int) -> list[torch.Tensor]:
    """Sums of columns of any layout: sparse ones alone, dense ones together."""
    sums: list[torch.Tensor | None] = [None] * len(columns)
    dense = []
    for i, column in enumerate(columns):
        layouts = {t.layout for t in column}
        if layouts == {torch.strided} or len(layouts) > 1:
            dense.append((i, [t if t.layout is torch.strided else t.to_dense() for t in column]))
        else:
            sums[i] = add_on(device, column)
    for (i, _), total in zip(dense, _add_dense(device, [column for _, column in dense], limit), strict=True):
        sums[i] = total
    return sums


def _add_dense(device: torch.device, columns: list[list[torch.Tensor]], limit: int) -> list[torch.Tensor]:
    homes = [t.device for t in columns[0]] if columns else []
    packable = all([t.device for t in column] == homes for column in columns)
    if not packable:
        return [add_on(device, column) for column in columns]
    if all(home == device for home in homes):
        return _add_here(device, columns)
    return add_packed(device, columns, limit)


def add_packed(device: torch.device, columns: list[list[torch.Tensor]], limit: int) -> list[torch.Tensor]:
    """Each device's tensors packed, the buffers added on ``device`` and the sum split."""
    sums: list[torch.Tensor] = [torch.empty(0)] * len(columns)
    for group in packing.buckets([column[0] for column in columns], limit):
        members = [_alike(columns[i]) for i in group]
        if len(members) == 1:
            sums[group[0]] = add_on(device, members[0])
            continue
        flat = add_on(device, [packing.pack(tensors) for tensors in zip(*members, strict=True)])
        for i, part in zip(group, packing.parts_of(flat, [column[0] for column in members]), strict=True):
            sums[i] = part.data
    return sums


def _add_here(device: torch.device, columns: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Sums of tensors already on ``device``: on a GPU with a few launches for all of them, if that rounds once."""
    count = len(columns[0]) if columns else 0
    twice_rounded = any(c[0].dtype in NARROW and (count > 2 or c[0].dtype.itemsize == 1) for c in columns)
    if count < 2 or device.type == "cpu" or twice_rounded:
        return [add_on(device, column) for column in columns]
    sums = [column[0] for column in columns]
    for group in packing.by_dtype(sums):
        total = torch._foreach_add([columns[i][0] for i in group], [columns[i][1] for i in group])
        for k in range(2, count):
            torch._foreach_add_(total, [columns[i][k] for i in group])
        for i, tensor in zip(group, total, strict=True):
            sums[i] = tensor
    return sums


def _alike(column: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Dense tensors with equal strides, so that their memory can be added directly."""
    column = [packing.dense(t) for t in column]
    if any(t.stride() != column[0].stride() for t in column):
        return [t.contiguous() for t in column]
    return list(column)
