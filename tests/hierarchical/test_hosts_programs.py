"""Random programs across hosts end, with the right values; `make soak` runs hundreds more.

Gloo runs those that it can: what they expect is what it computes.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

import symcomm
from tests.soak.host_programs import LAYOUTS, by_torch, groups_of, soak
from tests.support.host_programs import Program, SymcommCalls, run_program
from tests.support.ranks import run_ranks

PROGRAMS = 6


def run_many(world: symcomm.ProcessGroup, first: int) -> int:
    members, groups = groups_of(world, first)
    for seed in range(first, first + PROGRAMS):
        try:
            run_program(Program(seed, members), groups, world.rank, SymcommCalls())
        except BaseException as error:
            raise AssertionError(f"seed {seed}, groups {members}: {error}") from error
    return PROGRAMS


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_random_programs_end_with_the_right_values(layout: list[int]):
    first = 1000 * sum(layout) + len(layout)
    done = symcomm.spawn(run_many, sum(layout), (first,), mode="threads", hosts=layout, timeout=30, deadline=100)
    assert done == [PROGRAMS] * sum(layout)


@pytest.mark.parametrize("backend", ["gloo", "symcomm"])
def test_programs_of_torch_end_alike_on_gloo(tmp_path, backend: str):
    done = run_ranks(by_torch, 3, str(tmp_path / "store"), backend, [0, 0, 1], range(500, 505), deadline=100)
    assert done == [5] * 3


def test_the_soak_itself():
    assert soak([77, 78], [1, 1]) == {}
    assert not dist.is_initialized()
