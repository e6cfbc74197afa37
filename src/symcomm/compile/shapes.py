"""Makes the empty result of each functional collective: for the compiler (meta tensors) and for the call itself.

Each function takes its operator's arguments, up to the group. Results are contiguous, whatever the input is.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def same(input: Tensor, *_: object) -> Tensor:
    return input.new_empty(input.shape)


def same_each(inputs: Sequence[Tensor], *_: object) -> list[Tensor]:
    return [same(input) for input in inputs]


def sent(input: Tensor, *_: object) -> Tensor:
    """An empty tensor to wait for: sending gives no other result."""
    return input.new_empty(0)


def messages(
    ops: Sequence[str], peers: Sequence[int], tags: Sequence[int], tensors: Sequence[Tensor], *_: object
) -> list[Tensor]:
    return [same(tensor) if op == "irecv" else sent(tensor) for op, tensor in zip(ops, tensors, strict=True)]


def all_gather(input: Tensor, group_size: int, *_: object) -> Tensor:
    """The parts one after the other along the first dimension; numbers become a list of them."""
    rows, rest = (input.shape[0], input.shape[1:]) if input.dim() else (1, ())
    return input.new_empty((rows * group_size, *rest))


def all_gather_each(inputs: Sequence[Tensor], group_size: int, *_: object) -> list[Tensor]:
    return [all_gather(input, group_size) for input in inputs]


def reduce_scatter(input: Tensor, op: str, group_size: int, *_: object) -> Tensor:
    return input.new_empty((input.shape[0] // group_size, *input.shape[1:]))


def reduce_scatter_each(inputs: Sequence[Tensor], op: str, group_size: int, *_: object) -> list[Tensor]:
    return [reduce_scatter(input, op, group_size) for input in inputs]


def all_to_all(input: Tensor, out_splits: Sequence[int], *_: object) -> Tensor:
    return input.new_empty((sum(out_splits), *input.shape[1:]))


def shard_dim(input: Tensor, gather_dim: int, shard_dim: int, group_size: int, *_: object) -> Tensor:
    """The result of a tensor split along ``gather_dim`` before, and along ``shard_dim`` afterwards."""
    shape = list(input.shape)
    shape[gather_dim] *= group_size
    shape[shard_dim] //= group_size
    return input.new_empty(shape)
