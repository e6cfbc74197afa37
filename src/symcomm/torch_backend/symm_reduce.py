"""Operators of torch.ops.symm_mem that reduce or gather, alone or around a matmul.

Reductions run on the group's own collectives, so they add in the group's one order, a tree over ranks, and give all
ranks the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed._symmetric_memory import _maybe_convert_scalar_types_to_dtypes

from symcomm import errors
from symcomm.group.process_group import ProcessGroup
from symcomm.symm_mem.groups import find_group

PIECES_FROM = 1 << 20  # bytes of a collective below which handing it to another thread costs more than it hides


# --- checks -------------------------------------------------------------------------------------------------


def check_like(call: str, name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise errors.bad_argument(call, name, got, f"{dtype} of shape {tuple(shape)}")


def check_divisible(call: str, name: str, size: int, by: int) -> None:
    if size % by:
        raise errors.bad_argument(call, name, size, f"divisible by the group's {by} ranks")


def check_dim(call: str, name: str, dim: int, tensor: Tensor) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise errors.bad_argument(call, name, dim, f"a dimension of a tensor that has {tensor.dim()}")
    return dim % tensor.dim()


# --- all-reduce, reduce-scatter, all-gather -----------------------------------------------------------------


def one_shot_all_reduce(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    out = torch.empty_like(input)
    return _all_reduced(find_group("one_shot_all_reduce", group_name), input, reduce_op, out)


def one_shot_all_reduce_out(input: Tensor, reduce_op: str, group_name: str, out: Tensor) -> Tensor:
    check_like("one_shot_all_reduce_out", "out", out, input.shape, input.dtype)
    return _all_reduced(find_group("one_shot_all_reduce_out", group_name), input, reduce_op, out)


def one_shot_all_reduce_copy(symm_buffer: Tensor, local_input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    out = torch.empty_like(local_input)
    return one_shot_all_reduce_copy_out(symm_buffer, local_input, reduce_op, group_name, out)


def one_shot_all_reduce_copy_out(
    symm_buffer: Tensor, local_input: Tensor, reduce_op: str, group_name: str, out: Tensor
) -> Tensor:
    """Reduce ``local_input``; afterwards ``symm_buffer`` holds a copy of it, as in torch."""
    call = "one_shot_all_reduce_copy"
    check_like(call, "out", out, local_input.shape, local_input.dtype)
    count = local_input.numel()
    if symm_buffer.dtype != local_input.dtype or symm_buffer.numel() < count or not symm_buffer.is_contiguous():
        got = f"{symm_buffer.dtype} of shape {tuple(symm_buffer.shape)}"
        raise errors.bad_argument(call, "symm_buffer", got, f"contiguous, {count} or more of {local_input.dtype}")
    symm_buffer.view(-1)[:count].copy_(local_input.reshape(-1))
    return _all_reduced(find_group(call, group_name), local_input, reduce_op, out)


def two_shot_all_reduce_(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    find_group("two_shot_all_reduce_", group_name).all_reduce(input, reduce_op)
    return input


def two_shot_all_reduce_out(input: Tensor, reduce_op: str, group_name: str, output: Tensor) -> Tensor:
    check_like("two_shot_all_reduce_out", "output", output, input.shape, input.dtype)
    return _all_reduced(find_group("two_shot_all_reduce_out", group_name), input, reduce_op, output)


def _all_reduced(group: ProcessGroup, input: Tensor, reduce_op: str, out: Tensor) -> Tensor:
    out.copy_(input)
    group.all_reduce(out, reduce_op)
    return out


def reduce_scatter_out(input: Tensor, group_name: str, split_last_dim: bool, output: Tensor) -> Tensor:
    """The sum, split along the last dimension or along the first."""
    call = "reduce_scatter_out"
    group = find_group(call, group_name)
    dim = check_dim(call, "input", -1 if split_last_dim else 0, input)
    return _scattered(call, group, input, "sum", dim, output)


def _scattered(
    call: str, group: ProcessGroup, input: Tensor, reduce_op: str, dim: int, output: Tensor | None = None
) -> Tensor:
    """Reduce ``input`` over the ranks; each gets its part along ``dim``."""
    check_divisible(call, f"size {dim} of the input", input.shape[dim], group.size)
    shape = list(input.shape)
    shape[dim] //= group.size
    if output is None:
        output = input.new_empty(shape)
    check_like(call, "output", output, shape, input.dtype)
    pieces = input if dim == 0 else torch.cat(input.chunk(group.size, dim))
    group.reduce_scatter_single(output, pieces, reduce_op)
    return output


def low_contention_all_gather(tensor: Tensor, group_name: str) -> Tensor:
    call = "_low_contention_all_gather"
    check_dim(call, "tensor", 0, tensor)
    return gathered(find_group(call, group_name), tensor)


def low_contention_all_gather_multicast(tensor: Tensor, group_name: str) -> Tensor:
    """low_contention_all_gather, which also takes a single number of each rank."""
    return gathered(find_group("_low_contention_all_gather_ce_multicast", group_name), torch.atleast_1d(tensor))


def low_contention_all_gather_out(tensor: Tensor, group_name: str, out: Tensor) -> Tensor:
    call = "_low_contention_all_gather_ce_multicast_out"
    group = find_group(call, group_name)
    tensor = torch.atleast_1d(tensor)
    shape = (tensor.shape[0] * group.size, *tensor.shape[1:])
    check_like(call, "out", out, shape, tensor.dtype)
    group.all_gather_single(out, tensor)
    return out


def low_contention_reduce_scatter(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    call = "_low_contention_reduce_scatter"
    check_dim(call, "tensor", 0, tensor)
    return _scattered(call, find_group(call, group_name), tensor, reduce_op, 0)


def gathered(group: ProcessGroup, tensor: Tensor) -> Tensor:
    """All ranks' tensors, one after the other along dimension 0."""
    out = tensor.new_empty(tensor.shape[0] * group.size, *tensor.shape[1:])
    group.all_gather_single(out, tensor)
    return out


# --- matmuls with a collective before or after --------------------------------------------------------------


def _gathered_first(group: ProcessGroup, shard: Tensor, dim: int) -> Tensor:
    """The shards joined along ``dim``, which comes first in the result."""
    return gathered(group, shard.movedim(dim, 0).contiguous())


def pays_in_pieces(group: ProcessGroup, nbytes: int) -> bool:
    """Whether a matmul and a collective of this size should run beside each other, which takes an idle core."""
    return nbytes >= PIECES_FROM and len(os.sched_getaffinity(0)) > group.size * torch.get_num_threads()


def _gather_beside(group: ProcessGroup, A: Tensor, Bs: Sequence[Tensor], dim: int) -> tuple[Tensor, list[Tensor]]:
    """Multiply this rank's rows while the others' arrive. Both results have ``dim`` first."""
    shard = A.movedim(dim, 0).contiguous()
    count, rank = shard.shape[0], group.rank
    full = shard.new_empty(count * group.size, *shard.shape[1:])
    work = group.all_gather_single(full, shard, async_op=True)
    products = [shard.new_empty(*full.shape[:-1], B.shape[-1]) for B in Bs]
    mine, before, after = slice(rank * count, (rank + 1) * count), slice(rank * count), slice((rank + 1) * count, None)
    for product, B in zip(products, Bs, strict=True):
        product[mine] = torch.matmul(shard, B)
    assert work is not None
    work.wait()
    for others in (before, after):
        for product, B in zip(products, Bs, strict=True):
            product[others] = torch.matmul(full[others], B)
    return full, products


def _scatter_beside(group: ProcessGroup, A: Tensor, B: Tensor, reduce_op: str, dim: int) -> Tensor:
    """Reduce one half of all ranks' rows while multiplying the other. The result has ``dim`` first."""
    rows = A.movedim(dim, 0).unflatten(0, (group.size, -1))
    count = rows.shape[1]
    out = A.new_empty(count, *rows.shape[2:-1], B.shape[-1])
    works = []
    for half in (slice(count // 2), slice(count // 2, None)):
        product = torch.matmul(rows[:, half], B).flatten(0, 1)
        works.append(group.reduce_scatter_single(out[half], product, reduce_op, async_op=True))
    for work in works:
        assert work is not None
        work.wait()
    return out


def fused_all_gather_matmul(
    A: Tensor, Bs: Sequence[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    call = "fused_all_gather_matmul"
    dim = check_dim(call, "gather_dim", gather_dim, A)
    group = find_group(call, group_name)
    if dim != A.dim() - 1 and pays_in_pieces(group, A.numel() * group.size * A.dtype.itemsize):
        first, products = _gather_beside(group, A, Bs, dim)
        return first.movedim(0, dim) if return_A else None, [product.movedim(0, dim) for product in products]
    first = _gathered_first(group, A, dim)
    if dim == A.dim() - 1:  # the product sums over this dimension, so it must be whole, and last
        full = first.movedim(0, -1).contiguous()
        return full if return_A else None, [torch.matmul(full, B) for B in Bs]
    products = [torch.matmul(first, B).movedim(0, dim) for B in Bs]
    return first.movedim(0, dim) if return_A else None, products


def fused_matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    call = "fused_matmul_reduce_scatter"
    group = find_group(call, group_name)
    dim = check_dim(call, "scatter_dim", scatter_dim, A)  # the product has as many dimensions
    nbytes = A.numel() // max(1, A.shape[-1]) * B.shape[-1] * A.dtype.itemsize
    if dim != A.dim() - 1 and pays_in_pieces(group, nbytes):
        check_divisible(call, f"size {dim} of the input", A.shape[dim], group.size)
        return _scatter_beside(group, A, B, reduce_op, dim).movedim(0, dim)
    return _scattered(call, group, torch.matmul(A, B), reduce_op, dim)


def fused_all_gather_scaled_matmul(
    A: Tensor,
    Bs: Sequence[Tensor],
    A_scale: Tensor,
    B_scales: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[torch.dtype | None],
    use_fast_accum: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    """``A_scale``: one number, one for each row of the shard, or one for each row of the whole."""
    call = "fused_all_gather_scaled_matmul"
    group = find_group(call, group_name)
    dim = check_dim(call, "gather_dim", gather_dim, A)
    lists = {"B_scales": B_scales, "biases": biases, "result_scales": result_scales, "out_dtypes": out_dtypes}
    for name, values in {**lists, "use_fast_accum": use_fast_accum}.items():
        if len(values) != len(Bs):
            raise errors.bad_argument(call, name, f"{len(values)} long", f"as long as Bs, {len(Bs)}")
    if dim == A.dim() - 1:
        raise errors.bad_argument(call, "gather_dim", gather_dim, "another than the last, which the product sums over")
    full = _gathered_first(group, A, dim)
    scale = _scale_of_whole(call, group, A, A_scale, dim)
    rows, leading = full.flatten(0, -2), full.shape[:-1]
    dtypes = _maybe_convert_scalar_types_to_dtypes(list(out_dtypes))  # in lists, torch passes dtypes as numbers
    products = []
    for B, b_scale, bias, result_scale, dtype, fast in zip(
        Bs, B_scales, biases, result_scales, dtypes, use_fast_accum, strict=True
    ):
        product = torch._scaled_mm(rows, B, scale, b_scale, bias, result_scale, dtype, fast)
        products.append(product.unflatten(0, leading).movedim(0, dim))
    return full.movedim(0, dim), products


def _scale_of_whole(call: str, group: ProcessGroup, shard: Tensor, scale: Tensor, dim: int) -> Tensor:
    whole = list(shard.shape)
    whole[dim] *= group.size
    if scale.shape[:-1] == shard.shape[:-1] and scale.dim() and scale.shape[-1] == 1:
        return _gathered_first(group, scale, dim).flatten(0, -2)
    if scale.numel() == 1:
        return scale
    if list(scale.shape[:-1]) == whole[:-1]:
        return scale.movedim(dim, 0).flatten(0, -2).contiguous()
    allowed = f"one number, {(*shard.shape[:-1], 1)} or {(*whole[:-1], 1)}"
    raise errors.bad_argument(call, "A_scale", tuple(scale.shape), allowed)


def fused_scaled_matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """``A`` may be flattened; ``output_shape`` and ``orig_scatter_dim`` describe the product before that."""
    call = "fused_scaled_matmul_reduce_scatter"
    if A_scale.numel() > 1:
        if A_scale.shape[:-1] != A.shape[:-1]:
            allowed = f"one number, or {(*A.shape[:-1], 1)}"
            raise errors.bad_argument(call, "A_scale", tuple(A_scale.shape), allowed)
        A_scale = A_scale.flatten(0, -2).contiguous()
    rows = A.flatten(0, -2).contiguous()
    product = torch._scaled_mm(rows, B, A_scale, B_scale, bias, result_scale, out_dtype, use_fast_accum)
    leading = A.shape[:-1] if output_shape is None else output_shape[:-1]
    product = product.view(*leading, B.shape[1])
    dim = check_dim(call, "orig_scatter_dim", orig_scatter_dim, product)
    return _scattered(call, find_group(call, group_name), product, reduce_op, dim)


# --- reductions of parts to chosen ranks --------------------------------------------------------------------


def tile_reduce(in_tile: Tensor, out_tile: Tensor, root: int, group_name: str, reduce_op: str = "sum") -> None:
    multi_root_tile_reduce([in_tile], out_tile, [root], group_name, reduce_op)


def multi_root_tile_reduce(
    in_tiles: Sequence[Tensor], out_tile: Tensor, roots: Sequence[int], group_name: str, reduce_op: str = "sum"
) -> None:
    """Reduce tile k into ``out_tile`` of rank ``roots[k]``."""
    call = "tile_reduce"
    group = find_group(call, group_name)
    if len(set(roots)) != len(roots) or len(roots) != len(in_tiles):
        raise errors.bad_argument(call, "roots", list(roots), f"{len(in_tiles)} different ranks, one for each tile")
    for tile, root in zip(in_tiles, roots, strict=True):
        check_like(call, "out_tile", out_tile, tile.shape, tile.dtype)
        _reduced_to(group, tile, root, reduce_op, out_tile)


def _reduced_to(group: ProcessGroup, tile: Tensor, root: int, reduce_op: str, out: Tensor) -> None:
    """Reduce into the root's ``out``, leaving all tiles as they are."""
    part = tile.clone(memory_format=torch.contiguous_format) if group.rank == root else tile.contiguous()
    group.reduce(part, root, reduce_op)
    if group.rank == root:
        out.copy_(part)


def nccl_reduce_scatter_offset(
    input: Tensor,
    out: Sequence[Tensor],
    group_name: str,
    dim: int,
    offsets: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    red_op: str = "sum",
) -> None:
    """Blocks along ``dim`` end at ``offsets``; block k goes to rank ``dst_ranks[k]``, whose j-th is ``out[j]``."""
    call = "reduce_scatter_offset"
    group = find_group(call, group_name)
    dim = check_dim(call, "dim", dim, input)
    if offsets is None:
        check_divisible(call, f"size {dim} of the input", input.shape[dim], group.size)
        offsets = [input.shape[dim] // group.size * (k + 1) for k in range(group.size)]
    ends, starts = list(offsets), [0, *offsets][:-1]
    if any(a > b for a, b in zip(starts, ends, strict=True)) or (ends and ends[-1] > input.shape[dim]):
        raise errors.bad_argument(call, "offsets", ends, f"rising, up to {input.shape[dim]} at most")
    owners = [k % group.size for k in range(len(ends))] if dst_ranks is None else list(dst_ranks)
    if len(owners) != len(ends) or not all(0 <= r < group.size for r in owners):
        raise errors.bad_argument(call, "dst_ranks", owners, f"a rank of the group for each of the {len(ends)} blocks")
    mine = iter(out)
    if len(out) != owners.count(group.rank):
        raise errors.bad_argument(call, "out", f"{len(out)} tensors", f"{owners.count(group.rank)}, one for each block")
    for start, end, owner in zip(starts, ends, owners, strict=True):
        block = input.narrow(dim, start, end - start)
        _reduced_to(group, block, owner, red_op, next(mine) if owner == group.rank else block)
