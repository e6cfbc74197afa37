"""A rank that has no file descriptors left for the store where ranks meet: all others are told at once."""

from __future__ import annotations

import time

import pytest

import symcomm
from symcomm import errors
from tests.support.faults import few_descriptors
from tests.support.ports import free_port
from tests.support.ranks import run_ranks

SOON = 30.0  # a wide bound of "at once", where ranks would wait for minutes


def _meet(rank: int, world: int, port: int, victim: int, spare: int) -> tuple[str, str, float]:
    if rank == victim:
        few_descriptors(spare)
    begun = time.monotonic()
    try:
        symcomm.init(f"tcp://127.0.0.1:{port}", rank, world)
        symcomm.barrier()
    except errors.SymcommError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "", "", 0.0


@pytest.mark.parametrize(("victim", "spare"), [(2, 0), (2, 1), (0, 0)])
def test_a_rank_that_cannot_reach_the_store(victim: int, spare: int):
    told = run_ranks(_meet, 3, free_port(), victim, spare, deadline=SOON)
    kind, own, _ = told.pop(victim)
    assert kind == "ResourceError" and "ulimit -n" in own, own
    for kind, words, _ in told:
        assert kind == "_GaveUp" and words == f"init: rank {victim} gave up: {own}", told


@pytest.mark.parametrize("spare", [3, 12])
def test_the_rank_that_serves_the_store_makes_room_for_the_others(spare: int):
    assert run_ranks(_meet, 3, free_port(), 0, spare, deadline=SOON) == [("", "", 0.0)] * 3
