"""Operators of torch.ops.symm_mem that send each rank its part: all-to-all, with the splits in tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from symcomm import errors
from symcomm.collectives.chunks import starts_of
from symcomm.group.process_group import ProcessGroup
from symcomm.symm_mem.groups import find_group
from symcomm.torch_backend.symm_reduce import check_dim, check_divisible, check_like, gathered


def nvshmem_all_to_all(input: Tensor, out: Tensor, group_name: str) -> Tensor:
    find_group("nvshmem_all_to_all", group_name).all_to_all_single(out, input)
    return out


def nccl_all_to_all_nd(input: Tensor, out: Tensor, scatter_dim: int, gather_dim: int, group_name: str) -> None:
    """Send part k of the input along ``scatter_dim`` to rank k, and join what arrives along ``gather_dim``."""
    call = "nccl_all_to_all_nd"
    group = find_group(call, group_name)
    scatter = check_dim(call, "scatter_dim", scatter_dim, input)
    gather = check_dim(call, "gather_dim", gather_dim, input)
    check_divisible(call, f"the input's dimension {scatter_dim}", input.shape[scatter], group.size)
    shape = list(input.shape)
    shape[scatter] //= group.size
    shape[gather] *= group.size
    check_like(call, "out", out, shape, input.dtype)
    parts = [part.contiguous() for part in input.tensor_split(group.size, scatter)]
    received = [torch.empty_like(part) for part in parts]
    group.all_to_all(received, parts)
    torch.cat(received, gather, out=out)


def nvshmem_broadcast(input: Tensor, root: int, group_name: str) -> Tensor:
    find_group("nvshmem_broadcast", group_name).broadcast(input, root)
    return input


def _all_splits(call: str, group: ProcessGroup, splits: Tensor) -> list[list[int]]:
    """Row r: how rank r splits its input. All ranks see if any row is wrong; rows must be equally long."""
    check_divisible(call, "the number of splits", splits.numel(), group.size)
    matrix = gathered(group, splits.reshape(1, -1).to(torch.int64)).tolist()
    for rank, row in enumerate(matrix):
        if any(size < 0 for size in row):
            raise errors.bad_argument(call, "splits", f"{row} on rank {rank}", "not negative")
    return matrix


def _check_room(call: str, name: str, needed: Sequence[int], tensor: Tensor) -> None:
    """``needed``: rows, by rank. All ranks have the same numbers, so all of them refuse, and none waits."""
    for rank, rows in enumerate(needed):
        if rows > tensor.shape[0]:
            raise errors.bad_argument(call, name, f"{tensor.shape[0]} rows", f"{rows} or more, which rank {rank} needs")


def _report(out_splits_offsets: Tensor, splits: Sequence[int], offsets: Sequence[int]) -> None:
    out_splits_offsets.copy_(torch.tensor([splits, offsets], dtype=out_splits_offsets.dtype))


def all_to_all_vdev(input: Tensor, out: Tensor, in_splits: Tensor, out_splits_offsets: Tensor, group_name: str) -> None:
    """Send ``in_splits[k]`` rows to rank k. ``out_splits_offsets``: how many came from each rank, and where they
    begin."""
    call = "all_to_all_vdev"
    group = find_group(call, group_name)
    matrix = _all_splits(call, group, in_splits)
    sent, got = matrix[group.rank], [row[group.rank] for row in matrix]
    _check_room(call, "input", [sum(row) for row in matrix], input)
    _check_room(call, "out", [sum(row[r] for row in matrix) for r in range(group.size)], out)
    group.all_to_all_single(out[: sum(got)], input[: sum(sent)], got, sent)
    _report(out_splits_offsets, got, starts_of(got))


def all_to_all_vdev_2d(
    input: Tensor,
    out: Tensor,
    in_splits: Tensor,
    out_splits_offsets: Tensor,
    group_name: str,
    major_align: int | None = None,
) -> None:
    """Tokens to experts: the input is in order of (rank, expert of that rank), the output in order of (expert, rank).

    Each expert's rows begin at a multiple of ``major_align``; an expert without rows still takes up ``major_align``.
    """
    call = "all_to_all_vdev_2d"
    group = find_group(call, group_name)
    align = 1 if major_align is None else major_align
    if align < 1:
        raise errors.bad_argument(call, "major_align", major_align, "1 or more")
    matrix = _all_splits(call, group, in_splits)
    experts = len(matrix[0]) // group.size
    plans = [_by_expert(matrix, rank, experts, align) for rank in range(group.size)]
    _check_room(call, "input", [sum(row) for row in matrix], input)
    _check_room(call, "out", [max(map(sum, zip(*plan, strict=True)), default=0) for plan in plans], out)

    def for_rank(row: list[int], rank: int) -> int:
        return sum(row[rank * experts : (rank + 1) * experts])

    sent = [for_rank(matrix[group.rank], rank) for rank in range(group.size)]
    got = [for_rank(row, group.rank) for row in matrix]
    came = out.new_empty(sum(got), *out.shape[1:])
    group.all_to_all_single(came, input[: sum(sent)], got, sent)
    splits, offsets = plans[group.rank]
    start = 0
    for source in range(group.size):
        for expert in range(experts):
            place = expert * group.size + source
            out[offsets[place] : offsets[place] + splits[place]] = came[start : start + splits[place]]
            start += splits[place]
    _report(out_splits_offsets, splits, offsets)


def _by_expert(matrix: list[list[int]], rank: int, experts: int, align: int) -> tuple[list[int], list[int]]:
    """(how many rows ``rank`` gets, where they begin), in order of (expert, source)."""
    splits, offsets, start = [], [], 0
    for expert in range(experts):
        sizes = [row[rank * experts + expert] for row in matrix]
        splits += sizes
        offsets += [start + before for before in starts_of(sizes)]
        start += max(-(-sum(sizes) // align), 1) * align
    return splits, offsets


def all_to_all_vdev_2d_offset(
    input: Tensor, out: Tensor, in_splits_offsets: Tensor, out_splits_offsets: Tensor, group_name: str
) -> None:
    """Tokens back from experts: the input's pieces, perhaps with gaps, are (expert, rank), the output's (rank,
    expert)."""
    call = "all_to_all_vdev_2d_offset"
    group = find_group(call, group_name)
    matrix = _all_splits(call, group, in_splits_offsets[0])
    experts = len(matrix[0]) // group.size

    def from_rank(rank: int, to: int) -> list[int]:
        return [matrix[rank][expert * group.size + to] for expert in range(experts)]

    _check_room(call, "out", [sum(sum(from_rank(r, to)) for r in range(group.size)) for to in range(group.size)], out)
    starts = in_splits_offsets[1].tolist()
    order = [expert * group.size + to for to in range(group.size) for expert in range(experts)]
    packed = torch.cat([input[starts[k] : starts[k] + matrix[group.rank][k]] for k in order])
    sent = [sum(from_rank(group.rank, to)) for to in range(group.size)]
    splits = [size for rank in range(group.size) for size in from_rank(rank, group.rank)]
    got = [sum(from_rank(rank, group.rank)) for rank in range(group.size)]
    group.all_to_all_single(out[: sum(got)], packed, got, sent)
    _report(out_splits_offsets, splits, starts_of(splits))
