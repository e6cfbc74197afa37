"""Turns each request into a recipe: the staging memory that it needs, and the work for the stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from symcomm.cuda.stream_collectives import StreamCollectives
from symcomm.group.request import Request, addresses_of
from symcomm.types import RedOpType


@dataclass(frozen=True)
class CudaLimits:
    """Where one algorithm takes over from another; the same on all ranks. Measured on one H200 with two ranks."""

    first_half: int = 4 << 20  # bytes of half a staging area, at first
    most_half: int = 64 << 20  # and at most: it grows with the tensors that need it
    one_shot_bytes: int = 16 << 20  # tensor x ranks: up to here all_reduce is one-shot
    direct_bytes: int = 4 << 20  # from here on symmetric tensors take part without copies
    direct_reduce_bytes: int | None = None  # and from here on in all_reduce; None: where it is not one-shot


TIME_SLICED = CudaLimits(one_shot_bytes=128 << 20, direct_bytes=128 << 20)  # a barrier costs 150 us: one, not two
# Single kernels choose by themselves. In place, 8 MiB take 30 us, 20 through the staging areas; 16 MiB 30 and 38.
SINGLE_KERNEL = CudaLimits(one_shot_bytes=1 << 62, direct_reduce_bytes=8 << 20)


class Recipe(NamedTuple):
    """How to execute one request."""

    need: int  # bytes of a half staging area that it can make use of
    enqueue: Callable[[int, list[int] | None], None]  # (stream, where all ranks' symmetric tensors are)
    symmetric: Any = None  # the tensor that peers may use in tensor_view
    may_be_direct: bool = False  # whether all ranks ask for that
    cached: bool = False  # whether the next call of this kind may take the fast path


class Recipes:
    """The recipes of one group. ``small`` makes what runs operations on up to ``small_half`` bytes of each rank, if
    that is not the same as for larger ones."""

    def __init__(
        self, rank: int, size: int, limits: CudaLimits, prefers_one_shot: bool, collectives: StreamCollectives,
        small: Callable[[], StreamCollectives], small_half: int,
    ):  # fmt: skip
        self.rank, self.size, self.limits, self.prefers_one_shot = rank, size, limits, prefers_one_shot
        self.collectives, self._small, self.small_half = collectives, small, small_half

    def of(self, request: Request) -> Recipe:
        return _RECIPES[request.op.plan](self, request)

    def collectives_for(self, nbytes: int) -> Any:
        """How to run an operation on ``nbytes`` of each rank: the same on all ranks."""
        return self._small() if nbytes <= self.small_half else self.collectives

    def kernel(self, collectives: Any, request: Request, targets: int = 1) -> RedOpType:
        """How to combine. Raises here, before ranks meet, if there is no kernel for it."""
        how = RedOpType.SUM if request.redop is RedOpType.PREMUL_SUM else request.redop
        collectives.kernel(request.dtype, how, self.size, targets)
        return how

    def slots(self, nbytes: int) -> int:
        """Bytes of a half staging area in which every rank has a slot of ``nbytes``."""
        return (nbytes + 16) * self.size

    def is_large(self, nbytes: int) -> bool:
        return nbytes > self.limits.direct_bytes


def _pieces(views: Sequence[Any], counts: Sequence[int], listed: bool | None) -> list[int | None]:
    """As ``addresses_of``; a list of None if there is no tensor."""
    return list(addresses_of(views, counts, listed)) or [None] * len(counts)


# --- one for each family of collectives --------------------------------------------------------------------------


def _all_reduce(recipes: Recipes, r: Request) -> Recipe:
    [source], [out] = r.inputs, r.outputs
    count, dtype, nbytes = out.count, out.dtype, out.nbytes
    collectives = recipes.collectives_for(nbytes)
    how = recipes.kernel(collectives, r)
    one_shot = nbytes * recipes.size <= recipes.limits.one_shot_bytes or recipes.size == 1
    if not one_shot:
        collectives.kernel(dtype, how, recipes.size, recipes.size)

    def enqueue(stream: int, symmetric: list[int] | None) -> None:
        if recipes.size == 1:
            collectives.combine(dtype, how, [source.address], [out.address], count, stream)
        elif symmetric is not None:
            collectives.reduce_in_place(dtype, how, symmetric, count, stream)
        elif one_shot:
            collectives.reduce_small(dtype, how, source.address, out.address, count, stream)
        elif recipes.prefers_one_shot:
            collectives.reduce_one_shot(dtype, how, source.address, out.address, count, stream)
        else:
            collectives.reduce_two_shot(dtype, how, source.address, out.address, count, stream)

    in_place = out if source is out and out.target is None else None
    least = recipes.limits.direct_reduce_bytes
    may_be_direct = recipes.size > 1 and (not one_shot if least is None else nbytes > least)
    return Recipe(nbytes, enqueue, in_place, may_be_direct, one_shot)


def _reduce(recipes: Recipes, r: Request) -> Recipe:
    [source] = r.inputs
    collectives = recipes.collectives_for(source.nbytes)
    how = recipes.kernel(collectives, r)
    target = r.outputs[0].address if r.outputs else None

    def enqueue(stream: int, _: Any) -> None:
        if recipes.size == 1:
            collectives.combine(r.dtype, how, [source.address], [target], r.sizes, stream)
        else:
            collectives.reduce_one_shot(r.dtype, how, source.address, target, r.sizes, stream)

    return Recipe(source.nbytes, enqueue)


def _reduce_scatter(recipes: Recipes, r: Request) -> Recipe:
    [out], sources = r.outputs, r.inputs
    need = recipes.slots(max(r.sizes) * r.dtype.itemsize)
    collectives = recipes.collectives_for(need)
    how = recipes.kernel(collectives, r)
    pieces = _pieces(sources, r.sizes, r.op.listed)

    def enqueue(stream: int, symmetric: list[int] | None) -> None:
        if recipes.size == 1:
            collectives.combine(r.dtype, how, pieces, [out.address], out.count, stream)
        elif symmetric is not None:
            collectives.reduce_scatter_direct(r.dtype, how, symmetric, out.count, out.address, stream)
        else:
            collectives.reduce_scatter(r.dtype, how, pieces, list(r.sizes), out.address, stream)

    if r.op.listed:
        return Recipe(need, enqueue)
    in_place = sources[0] if r.redop is not RedOpType.PREMUL_SUM else None
    return Recipe(need, enqueue, in_place, recipes.is_large(sources[0].nbytes))


def _spread(recipes: Recipes, source: Any, sizes: Sequence[int], targets: Sequence[Any], direct: bool) -> Recipe:
    """Rank q shows its ``sizes[q]`` bytes to all; ``targets[q]``: where I want them."""
    collectives = recipes.collectives_for(max(sizes))

    def enqueue(stream: int, symmetric: list[int] | None) -> None:
        if recipes.size == 1:
            if targets[0] is not None:
                collectives.copy(targets[0], source.address, source.nbytes, stream)
        elif symmetric is not None:
            collectives.all_gather_direct(symmetric, sizes, targets, stream)
        else:
            collectives.all_gather(source.address, sizes, targets, stream)

    return Recipe(max(sizes), enqueue, source, direct)


def _broadcast(recipes: Recipes, r: Request) -> Recipe:
    [view] = r.inputs
    sizes = [view.nbytes if q == r.root else 0 for q in range(recipes.size)]
    targets = [view.address if q == r.root and recipes.rank != r.root else None for q in range(recipes.size)]
    return _spread(recipes, view, sizes, targets, False)


def _all_gather(recipes: Recipes, r: Request) -> Recipe:
    [source] = r.inputs
    sizes = [n * r.dtype.itemsize for n in r.sizes]
    direct = not r.op.listed and recipes.is_large(source.nbytes)
    return _spread(recipes, source, sizes, _pieces(r.outputs, r.sizes, r.op.listed), direct)


def _gather(recipes: Recipes, r: Request) -> Recipe:
    [source] = r.inputs
    return _spread(recipes, source, [source.nbytes] * recipes.size, _pieces(r.outputs, r.sizes, r.op.listed), False)


def _exchange(recipes: Recipes, sources: Sequence[Any], matrix: Sequence[Any], targets: Sequence[Any]) -> Recipe:
    """Rank i has ``matrix[i][j]`` bytes for rank j."""
    need = recipes.slots(max(map(max, matrix)))
    collectives = recipes.collectives_for(need)

    def enqueue(stream: int, _: Any) -> None:
        if recipes.size > 1:
            collectives.all_to_all(sources, matrix, targets, stream)
        elif sources[0] is not None and targets[0] is not None:
            collectives.copy(targets[0], sources[0], matrix[0][0], stream)

    return Recipe(need, enqueue)


def _scatter(recipes: Recipes, r: Request) -> Recipe:
    [out], size = r.outputs, recipes.size
    matrix = [[out.nbytes if i == r.root else 0] * size for i in range(size)]
    targets = [out.address if i == r.root else None for i in range(size)]
    return _exchange(recipes, _pieces(r.inputs, r.sizes, r.listed), matrix, targets)


def _all_to_all(recipes: Recipes, r: Request) -> Recipe:
    counts = [[r.sizes] * recipes.size] * recipes.size if isinstance(r.sizes, int) else r.sizes
    sources = _pieces(r.inputs, counts[recipes.rank], r.op.listed)
    targets = _pieces(r.outputs, [row[recipes.rank] for row in counts], r.op.listed)
    return _exchange(recipes, sources, [[n * r.dtype.itemsize for n in row] for row in counts], targets)


def _barrier(recipes: Recipes, r: Request) -> Recipe:
    """Later work in any rank's stream begins when all earlier work in all ranks' streams is done."""
    barrier = recipes.collectives.barrier
    return Recipe(0, lambda stream, _: barrier(stream))


_RECIPES: dict[str, Callable[[Recipes, Request], Recipe]] = {
    "all_reduce": _all_reduce, "reduce": _reduce, "reduce_scatter": _reduce_scatter, "broadcast": _broadcast,
    "all_gather": _all_gather, "gather": _gather, "scatter": _scatter, "all_to_all": _all_to_all, "barrier": _barrier,
}  # fmt: skip
