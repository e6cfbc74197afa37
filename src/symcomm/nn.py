"""Linear layers split over ranks, with the same bits on any number of them: tensor parallelism in logical shards.

A layer is cut into a fixed number of shards, and each rank has its range of them. Every shard is a matmul of its own,
since libraries may choose other kernels, which add in other orders, for matrices of other sizes; and what ranks add
together is a tree over shards (docs/explanation/bits.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from symcomm import errors
from symcomm.group.process_group import ProcessGroup
from symcomm.group.shards import share_of
from symcomm.symm_mem.groups import find_group

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "parallelize", "sum_shards"]

_not_compiled: Any = torch._disable_dynamo  # a compiled model calls these layers as they are


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, shards: int, *parts: Tensor) -> Tensor:
        ctx.count = len(parts)
        return _added(group, shards, parts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, None, *grads * ctx.count)


class _Copies(torch.autograd.Function):
    """An input for each of this rank's shards. Its gradient is the sum of theirs, and of the other ranks'."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, shards: int, count: int, x: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.shards = group, shards
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, None, _added(ctx.group, ctx.shards, grads)


class _Joined(torch.autograd.Function):
    """This rank's outputs, or all ranks', as one. Each shard's gradient is a matrix of its own, as it is alone."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, gather: bool, *outputs: Tensor) -> Tensor:
        ctx.count, ctx.ranks, ctx.rank = len(outputs), group.size if gather else 1, group.rank if gather else 0
        own = torch.cat(outputs, -1)
        if ctx.ranks == 1:
            return own
        parts = [torch.empty_like(own) for _ in range(group.size)]
        group.all_gather(parts, own)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        own = grads[0].chunk(ctx.ranks, -1)[ctx.rank]
        return (None, None, *(piece.contiguous() for piece in own.chunk(ctx.count, -1)))


def _added(group: ProcessGroup, shards: int, parts: Sequence[Tensor]) -> Tensor:
    total = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    group.all_reduce_shards(total, [part.contiguous() for part in parts], shards)
    return total


@_not_compiled
def sum_shards(parts: Sequence[Tensor], shards: int, group: Any = None) -> Tensor:
    """The sum of all logical shards, of which ``parts`` are this rank's; autograd goes through it.

    ``group``: one of ours, one of torch's on backend symcomm, its name, or None for the default group.

    Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
    group = find_group("sum_shards", group)
    if not parts:
        raise errors.bad_argument("sum_shards", "parts", len(parts), f"as many as this rank has of {shards} shards")
    total: Tensor = _Sum.apply(group, shards, *parts)
    return total


class _ParallelLinear(nn.Module):
    """This rank's shards of ``linear``, each in memory of its own: kernels may look at how it is aligned."""

    def __init__(self, linear: nn.Linear, shards: int, group: Any, dimension: int):
        super().__init__()
        call = type(self).__name__
        if not isinstance(linear, nn.Linear):
            raise errors.wrong_type(call, "linear", linear, "a torch.nn.Linear")
        self.group, self.shards = find_group(call, group), shards
        self._mine = share_of(call, "shards", shards, self.group.rank, self.group.size)
        features = linear.weight.shape[dimension]
        if features % shards:
            name = ("out_features", "in_features")[dimension]
            raise errors.bad_argument(call, f"linear.{name}", features, f"a multiple of shards, {shards}")
        self.weights = self._cut(linear.weight, dimension)

    def _cut(self, whole: nn.Parameter, dimension: int) -> nn.ParameterList:
        pieces = [whole.detach().chunk(self.shards, dimension)[shard] for shard in self._mine]
        own = [piece.clone(memory_format=torch.contiguous_format) for piece in pieces]
        return nn.ParameterList(nn.Parameter(piece, requires_grad=whole.requires_grad) for piece in own)

    def extra_repr(self) -> str:
        return f"shards {self._mine.start} to {self._mine.stop - 1} of {self.shards}"


class ColumnParallelLinear(_ParallelLinear):
    """``linear`` with its outputs divided among ranks: forward returns this rank's, or with ``gather`` all of them.

    ``linear`` is the whole layer, the same on all ranks; each keeps a copy of its shards. The other arguments are those
    of ``sum_shards``.

    Raises: BadArgumentError; from forward and backward what a group's all_reduce raises."""

    def __init__(self, linear: nn.Linear, shards: int, group: Any = None, gather: bool = False):
        super().__init__(linear, shards, group, 0)
        self.gather = gather
        self.biases = None if linear.bias is None else self._cut(linear.bias, 0)

    @_not_compiled
    def forward(self, x: Tensor) -> Tensor:
        inputs = _Copies.apply(self.group, self.shards, len(self._mine), x)
        biases = [None] * len(self._mine) if self.biases is None else self.biases
        outputs = [F.linear(*shard) for shard in zip(inputs, self.weights, biases, strict=True)]
        joined: Tensor = _Joined.apply(self.group, self.gather, *outputs)
        return joined


class RowParallelLinear(_ParallelLinear):
    """``linear`` with its inputs divided among ranks: forward takes this rank's, such as a ColumnParallelLinear
    returns, and all ranks get the whole output, the same bits on any number of them.

    ``linear`` is the whole layer, the same on all ranks; each keeps a copy of its shards. The other arguments are those
    of ``sum_shards``.

    Raises: BadArgumentError; from forward what a group's all_reduce raises."""

    def __init__(self, linear: nn.Linear, shards: int, group: Any = None):
        super().__init__(linear, shards, group, 1)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    @_not_compiled
    def forward(self, x: Tensor) -> Tensor:
        wanted = len(self._mine) * self.weights[0].shape[1]
        if x.shape[-1] != wanted:
            raise errors.bad_argument("RowParallelLinear", "x.shape[-1]", x.shape[-1], f"{wanted}: this rank's inputs")
        inputs = [piece.contiguous() for piece in x.chunk(len(self._mine), -1)]
        products = [F.linear(*shard) for shard in zip(inputs, self.weights, strict=True)]
        total = sum_shards(products, self.shards, self.group)
        return total if self.bias is None else total + self.bias


_STYLES: dict[str, Any] = {
    "colwise": ColumnParallelLinear,
    "colwise_gather_output": partial(ColumnParallelLinear, gather=True),
    "rowwise": RowParallelLinear,
    "embedding_rowwise": None,  # stays whole: looking up a row adds nothing
}


def parallelize(model: nn.Module, plan: Mapping[str, str], shards: int, group: Any = None) -> nn.Module:
    """Replace linear layers of ``model``, which all ranks have whole, by split ones; returns it.

    ``plan``: names of layers, perhaps with ``*``, to "colwise", "colwise_gather_output", "rowwise" or
    "embedding_rowwise" (which stays whole): the ``tp_plan`` of transformers.

    Raises: BadArgumentError."""
    for pattern, style in plan.items():
        if style not in _STYLES:
            raise errors.bad_choice("parallelize", f"plan[{pattern!r}]", style, list(_STYLES))
    chosen = {
        name: style
        for name, _ in model.named_modules()
        for pattern, style in plan.items()
        if fnmatchcase(name, pattern) and _STYLES[style]
    }
    if not chosen:
        raise errors.bad_argument("parallelize", "plan", sorted(plan), "names of the model's linear layers")
    for name, style in chosen.items():
        parent, _, own_name = name.rpartition(".")
        split = _STYLES[style](model.get_submodule(name), shards, group)
        setattr(model.get_submodule(parent), own_name, split)
    return model
