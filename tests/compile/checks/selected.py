"""Inductor's own choice of one-shot all_reduces, by our lowerings and by torch's once ours are taken away."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._inductor import config

from symcomm import compile as symcompile
from symcomm import symm_mem
from tests.compile.checks import Compiled, alike, as_eager, check

CHOSEN = "symm_mem.one_shot_all_reduce_out.default("  # Inductor plans where its result goes


def sums(a: torch.Tensor) -> list[torch.Tensor]:
    """Of 64 bytes, of a KiB, and what auto_select leaves alone: another operation, and an input of the graph."""
    small = functional.all_reduce(a[:16] * 2, "sum", "0")
    large = functional.all_reduce(a[:256] * 3, "sum", "0")
    return [small, large, functional.all_reduce(a[:16] * 5, "max", "0"), functional.all_reduce(a, "sum", "0")]


def chosen(threshold: int, selecting: bool = True) -> int:
    """How many of the sums became one-shot operators. Their values are those of the function as it is."""
    settings = {
        "_collective.auto_select": selecting,
        "_collective.one_shot_all_reduce_threshold_bytes": threshold,
    }
    with config.patch(settings):
        return as_eager(sums, torch.randn(300), bucket=False).code.count(CHOSEN)


@contextlib.contextmanager
def torchs_lowerings() -> Iterator[None]:
    symcompile.uninstall()
    try:
        yield
    finally:
        symcompile.install()


@check
def one_shot_where_torch_has_it(rank: int) -> None:
    thresholds = (64, 1024)
    ours = [chosen(threshold) for threshold in thresholds]
    assert chosen(1024, selecting=False) == 0
    symm_mem.install()
    with torchs_lowerings():
        theirs = [chosen(threshold) for threshold in thresholds]
    symm_mem.uninstall()
    assert ours == theirs == [1, 2], (ours, theirs)


@check
def without_symmetric_memory_torch_selects_nothing(rank: int) -> None:
    symm_mem.uninstall()
    with torchs_lowerings():
        assert chosen(1024) == 0


@check
def symm_mem_operators_in_a_graph(rank: int) -> None:
    """Their inputs are comm buffers, by torch's own lowering. What they write outside the graph is written."""
    symm_mem.install()
    name = dist.group.WORLD.group_name

    def function(a: torch.Tensor, given: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        torch.ops.symm_mem.two_shot_all_reduce_(given, "sum", name)
        torch.ops.symm_mem.two_shot_all_reduce_out(a * 3, "min", name, out)
        made = torch.ops.symm_mem.two_shot_all_reduce_(a * 2, "sum", name)
        return [made + 1, torch.ops.symm_mem.one_shot_all_reduce(a * 5, "max", name), given * 2]

    with torchs_lowerings():
        a, given = torch.randn(100), torch.randn(7)
        expected = [given.clone(), torch.empty(100)]
        results = function(a, *expected)
        got = [given.clone(), torch.empty(100)]
        compiled = Compiled(function, a, *got)
        alike(compiled.result, results)
        alike(got, expected)
        assert compiled.code.count("empty_strided_p2p(") >= 3, compiled.code
    symm_mem.uninstall()
