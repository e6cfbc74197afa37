"""Every collective as a case: tensors, call, right results, and where tests that stop rank 1 in its middle stop it.

Rank 1 stops in the middle of what it takes from rank 0 or gives to it. The root is rank 0 if the root gives, and rank 1
if the root reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from symcomm.group.process_group import ProcessGroup

Make = Callable[[int], torch.Tensor]
PATTERN = -77.0
HALTED = 1
_shift = 0.0  # added to all values, so that values of an earlier call are not right by chance


def shift_values(by: float) -> None:
    global _shift
    _shift = by


@dataclass
class Case:
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    values: list[torch.Tensor]  # of the inputs
    right: list[torch.Tensor]  # of the outputs
    run: Callable[[], Any]
    at: tuple[torch.Tensor, int] | None = None  # where rank 1 stops

    def fill(self) -> None:
        for out in self.outputs:
            out.fill_(0.5)
        for tensor, value in zip(self.inputs, self.values, strict=True):
            tensor.copy_(value)

    def overwrite(self) -> None:
        for tensor in (*self.inputs, *self.outputs):
            tensor.fill_(PATTERN)

    def touched(self) -> int:
        """Elements that somebody wrote to since overwrite()."""
        return sum(int((t != PATTERN).sum()) for t in (*self.inputs, *self.outputs))

    def wrong(self) -> int:
        return sum(int((out != value).sum()) for out, value in zip(self.outputs, self.right, strict=True))

    @property
    def address(self) -> int:
        assert self.at is not None
        return self.at[0].data_ptr() + 4 * self.at[1]


def of_rank(rank: int, count: int, piece: int = 0) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) % 251 + 1000 * rank + 10_000 * piece + _shift


def total(count: int, world: int, piece: int = 0) -> torch.Tensor:
    return torch.stack([of_rank(r, count, piece) for r in range(world)]).sum(0)


def parts_of(g: ProcessGroup, n: int) -> torch.Tensor:
    """This rank's ``n`` elements for each rank."""
    return torch.cat([of_rank(g.rank, n, p) for p in range(g.size)])


def broadcast(g: ProcessGroup, make: Make, n: int) -> Case:
    t = make(n)
    value = of_rank(g.rank, n)
    return Case([t], [t], [value], [of_rank(0, n)], lambda: g.broadcast(t, 0), (t, n // 2))


def all_gather_single(g: ProcessGroup, make: Make, n: int) -> Case:
    x, out = make(n), make(n * g.size)
    right = torch.cat([of_rank(r, n) for r in range(g.size)])
    return Case([x], [out], [of_rank(g.rank, n)], [right], lambda: g.all_gather_single(out, x), (out, n // 2))


def all_gather(g: ProcessGroup, make: Make, n: int) -> Case:
    x, outs = make(n), [make(n) for _ in range(g.size)]
    right = [of_rank(r, n) for r in range(g.size)]
    return Case([x], outs, [of_rank(g.rank, n)], right, lambda: g.all_gather(outs, x), (outs[0], n // 2))


def gather(g: ProcessGroup, make: Make, n: int) -> Case:
    root = HALTED % g.size
    x, outs = make(n), [make(n) for _ in range(g.size)] if g.rank == root else []
    right = [of_rank(r, n) for r in range(g.size)] if outs else []
    at = (outs[0], n // 2) if outs else None
    return Case([x], outs, [of_rank(g.rank, n)], right, lambda: g.gather(outs or None, x, root), at)


def gather_single(g: ProcessGroup, make: Make, n: int) -> Case:
    root = HALTED % g.size
    x, outs = make(n), [make(n * g.size)] if g.rank == root else []
    right = [torch.cat([of_rank(r, n) for r in range(g.size)])] if outs else []
    at = (outs[0], n // 2) if outs else None
    out = outs[0] if outs else None
    return Case([x], outs, [of_rank(g.rank, n)], right, lambda: g.gather_single(out, x, root), at)


def scatter(g: ProcessGroup, make: Make, n: int) -> Case:
    whole, out = make(n * g.size), make(n)
    pieces = list(whole.split(n)) if g.rank == 0 else None
    return Case(
        [whole], [out], [parts_of(g, n)], [of_rank(0, n, g.rank)], lambda: g.scatter(out, pieces, 0), (out, n // 2)
    )


def reduce_scatter_single(g: ProcessGroup, make: Make, n: int) -> Case:
    x, out = make(n * g.size), make(n)
    right = [total(n, g.size, g.rank)]
    return Case([x], [out], [parts_of(g, n)], right, lambda: g.reduce_scatter_single(out, x), (out, n // 2))


def reduce_scatter(g: ProcessGroup, make: Make, n: int) -> Case:
    x, out = make(n * g.size), make(n)
    pieces = list(x.split(n))
    right = [total(n, g.size, g.rank)]
    return Case([x], [out], [parts_of(g, n)], right, lambda: g.reduce_scatter(out, pieces), (out, n // 2))


def all_to_all_single(g: ProcessGroup, make: Make, n: int) -> Case:
    x, out = make(n * g.size), make(n * g.size)
    right = [torch.cat([of_rank(r, n, g.rank) for r in range(g.size)])]
    return Case([x], [out], [parts_of(g, n)], right, lambda: g.all_to_all_single(out, x), (out, n // 2))


def all_to_all(g: ProcessGroup, make: Make, n: int) -> Case:
    x, out = make(n * g.size), make(n * g.size)
    right = [torch.cat([of_rank(r, n, g.rank) for r in range(g.size)])]
    ins, outs = list(x.split(n)), list(out.split(n))
    return Case([x], [out], [parts_of(g, n)], right, lambda: g.all_to_all(outs, ins), (out, n // 2))


def all_reduce(g: ProcessGroup, make: Make, n: int) -> Case:
    """Rank k combines the k-th third, and stops in its middle."""
    t = make(n)
    value = of_rank(g.rank, n)
    at = (t, n // 6 + g.rank * n // 3)
    return Case([t], [t], [value], [total(n, g.size)], lambda: g.all_reduce(t), at)


def reduce_to_halted(g: ProcessGroup, make: Make, n: int) -> Case:
    return _reduce(g, make, n, HALTED % g.size)


def reduce_to_owner(g: ProcessGroup, make: Make, n: int) -> Case:
    """Rank k combines the k-th third, into rank 0's tensor where that is symmetric."""
    return _reduce(g, make, n, 0)


def _reduce(g: ProcessGroup, make: Make, n: int, root: int) -> Case:
    t = make(n)
    value = of_rank(g.rank, n)
    right = total(n, g.size) if g.rank == root else value
    return Case([t], [t], [value], [right], lambda: g.reduce(t, root), (t, n // 6 + g.rank * n // 3))


# Input and output are two tensors, so even a tensor of less than a page can stop the copy out and nothing else.
APART = (
    broadcast, all_gather_single, all_gather, gather, gather_single, scatter, reduce_scatter_single, reduce_scatter,
    all_to_all_single, all_to_all,
)  # fmt: skip
CASES = (*APART, all_reduce, reduce_to_halted, reduce_to_owner)
# Cases in which rank 0 learns at once that rank 2 died; a rank that gives its tensor to a gather waits only for the
# root.
MUTUAL = tuple(case for case in CASES if case not in (gather, gather_single))
