"""Results that are awaited more than once, elsewhere, or never."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tests.compile.checks import WORLD, Compiled, alike, check

c = torch.ops._c10d_functional
wait = c.wait_tensor


def _awaited(results: Any) -> list[torch.Tensor]:
    """What a graph hands out before it is there, its caller waits for."""
    return [wait(result) for result in results]


def _as_eager(function: Any, *args: torch.Tensor, **chosen: bool | None) -> Compiled:
    """Results, and what became of the arguments."""
    theirs, ours = [a.clone() for a in args], [a.clone() for a in args]
    expected = _awaited(function(*theirs))
    compiled = Compiled(function, *ours, **chosen)
    alike(_awaited(compiled.result), expected)
    alike(ours, theirs)
    return compiled


def _launched(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """Each functional collective: two of a kind, so that those which can be joined are."""
    half = a.shape[0] // WORLD
    return [
        c.all_reduce(a, "sum", "0"),
        c.all_reduce(b, "sum", "0"),
        c.all_gather_into_tensor(a, WORLD, "0"),
        c.all_gather_into_tensor(b, WORLD, "0"),
        c.reduce_scatter_tensor(a, "sum", WORLD, "0"),
        c.reduce_scatter_tensor(b, "sum", WORLD, "0"),
        c.broadcast(a, 1, "0"),
        c.all_to_all_single(a, [half, half], [half, half], "0"),
        *c.all_reduce_coalesced([a, b], "max", "0"),
        *c.all_gather_into_tensor_coalesced([a, b], WORLD, "0"),
        *c.reduce_scatter_tensor_coalesced([a, b], "sum", WORLD, "0"),
    ]


@check
def awaited_more_than_once(rank: int) -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        results = _launched(a, b)
        once = [wait(z) + 1 for z in results]
        return once + [wait(z) * 2 for z in results] + [wait(results[0]), wait(results[0]), wait(results[2])]

    a, b = torch.randn(8, 3), torch.randn(8, 3)
    joined = _as_eager(function, a, b, block=True)
    assert [record.op for record in joined.records].count("all_reduce_") == 1, joined.records  # two that were joined
    _as_eager(function, a, b, block=False, overlap=True)


@check
def awaited_here_and_elsewhere(rank: int) -> None:
    """A graph uses a result, and hands it out as it was before its wait."""

    def function(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        results = _launched(a, b)
        return [wait(z) * 2 for z in results[::2]] + results

    a, b = torch.randn(8, 3), torch.randn(8, 3)
    _as_eager(function, a, b)
    _as_eager(function, a, b, block=False)


@check
def results_of_other_strides_are_there_before_they_are_copied(rank: int) -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        first, second = c.all_reduce_coalesced([a, b], "max", "0")
        return [first, second, wait(second) * 2]

    given = [torch.randn(300, 800).t() for _ in range(2)]
    for _ in range(5):
        _as_eager(function, *given, block=False)
        _as_eager(lambda a, b: _launched(a, b)[-6:], *given, block=False)


@check
def what_nobody_waits_for_keeps_its_memory(rank: int) -> None:
    """One of two results is awaited; a later collective's input is of the other's size."""

    def results(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        _, second = c.all_reduce_coalesced([a, b], "max", "0")
        _, least = c.all_reduce_coalesced([wait(second), a], "min", "0")
        return [wait(least)]

    def inputs(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        _, second = c.reduce_scatter_tensor_coalesced([a * 2, b * 2], "sum", WORLD, "0")
        return [wait(c.all_reduce(a * 3, "sum", "0")), wait(second)]

    def gathered(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        c.all_gather_into_tensor_coalesced([a * 2, b * 2], WORLD, "0")
        return [wait(c.all_reduce(a * 3, "sum", "0"))]

    for function, _ in itertools.product((results, inputs, gathered), range(3)):
        _as_eager(function, torch.randn(8, 600), torch.randn(16, 600), block=False)


@check
def results_are_not_written_over(rank: int) -> None:
    """torch lets a collective write its input where nobody reads that afterwards; but somebody reads the result."""

    def input_is_written_later(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        least = c.all_reduce(a, "min", "0")
        a.copy_(b)
        return least, wait(c.all_reduce(b, "sum", "0"))

    def result_is_reduced_again(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = c.all_reduce(a * b, "sum", "0")
        return total, wait(c.all_reduce(wait(total), "sum", "0"))

    def in_place(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a.copy_(wait(c.all_reduce(a, "sum", "0")))
        return (a + b,)

    a, b = torch.randn(8, 3), torch.randn(8, 3)
    for block in (True, False):
        _as_eager(input_is_written_later, a, b, block=block)
        _as_eager(result_is_reduced_again, a, b, block=block)
        compiled = _as_eager(in_place, a, b, block=block)
        assert "all_reduce_" in compiled.code and "empty_strided_p2p(" not in compiled.code  # where it lies
