"""Every collective while a rank fails at every one of its steps: whoever succeeds has the right values, everybody
ends, and nobody writes into a tensor whose owner's call has returned with an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from symcomm.collectives import interpret_failures
from symcomm.collectives.interpret import PlanError
from symcomm.collectives.interpret_failures import Failure, run_failing
from tests.support.plan_cases import BY_NODE, ROOTED, TINY, UNROOTED, Case, Operation, combine, explain, on_nodes

pytestmark = [pytest.mark.without_torch, pytest.mark.long]

PUSHING = [Case(name, 3, 40, 1, symmetric="all") for name in ("all_reduce", "reduce")]


def schedules(world: int, failing: int) -> list[int | str]:
    after = (failing + 1) % world
    return [f"fastest {failing}", 1, f"slowest {failing}", f"stalled {after}", "round-robin", f"slowest {after}"]


def failures(rank: int, world: int, operation: int, step: int) -> list[Failure]:
    """Waiting for the others, giving up on them, killed with some of them told."""
    killed = [Failure(rank, step, operation, killed=told) for told in range(1, world)]
    return [Failure(rank, step, operation), Failure(rank, step, operation, patient=False), *killed]


def compare(operations: Sequence[Operation], results: Any) -> Counter[str]:
    """How many ranks succeeded with the right values, and how many failed; raises for wrong values."""
    counts: Counter[str] = Counter()
    for operation, result in zip(operations, results, strict=True):
        for rank, expected in enumerate(operation.expected):
            if result[rank] is None:
                counts["failed"] += 1
                continue
            for want, got in zip(expected, result[rank], strict=True):
                assert np.array_equal(want, got), f"{operation.case}: rank {rank} succeeded with {got}, wanted {want}"
            counts["right"] += 1
    return counts


def play(cases: Sequence[Case], failure: Failure, schedule: int | str) -> tuple[bool, Counter[str]]:
    operations = [Operation(case, salt) for salt, case in enumerate(cases)]
    stage = max(case.limits.stage_bytes for case in cases)
    plans, tensors = [o.plans for o in operations], [o.tensors for o in operations]
    outcome = run_failing(plans, tensors, failure, schedule, stage, combine)
    return outcome.happened, compare(operations, outcome.results)


def fail_everywhere(cases: Sequence[Case], operation: int = 1) -> Counter[str]:
    """One rank after the other fails at one step after the other. Where steps are few in every way and every schedule,
    else in one of them each."""
    world = cases[0].world
    short = world < 4 and all(case.symmetric == "all" and not case.in_place for case in cases)
    counts: Counter[str] = Counter()
    for rank in range(world):
        for step in range(1, 10_000):
            ways = list(product(failures(rank, world, operation, step), schedules(world, rank)))
            tried = [fail_once(cases, *way) for way in (ways if short else [ways[step * 7 % len(ways)]])]
            if not all(tried):
                break
            counts = sum(tried, counts) + Counter(runs=len(tried))
    return counts


def fail_once(cases: Sequence[Case], failure: Failure, schedule: int | str) -> Counter[str]:
    """Empty when the operation has fewer steps."""
    try:
        happened, outcomes = play(cases, failure, schedule)
    except (PlanError, AssertionError) as error:
        raise AssertionError(f"{failure}, {explain(cases, schedule)}") from error
    assert not happened or outcomes["failed"] >= 1
    return outcomes if happened else Counter()


def variants(name: str, world: int) -> list[Case]:
    """Staged and direct, with several chunks and with one, in place and not, even and not."""
    base = Case(name, world, 100 if world < 4 else 40, 1, limits=replace(TINY, chunk_bytes=256))
    if name == "all_to_all" and world > 2:
        base = replace(base, count=base.count // 2)
    cases = [
        base,
        replace(base, symmetric="all"),
        replace(base, count=20, symmetric="mixed"),
        replace(base, count=30, in_place=True, symmetric="all"),
        replace(base, in_place=True, limits=replace(base.limits, two_rank_variant="one_shot")),
        replace(base, count=45, uneven=True, listed=True),
        replace(base, count=30, uneven=True, symmetric="mixed"),
    ]
    return cases if world < 4 else cases[:3]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", [*ROOTED, *UNROOTED])
def test_a_failure_at_every_step(name: str, world: int):
    total: Counter[str] = Counter()
    for case in variants(name, world):
        total += fail_everywhere([case])
    assert total["runs"] > 50
    assert total["right"] > 0, "some ranks were through before the failure"
    assert total["failed"] > total["runs"]


@pytest.mark.parametrize("form", [{}, {"symmetric": "all"}, {"symmetric": "all", "in_place": True}])
@pytest.mark.parametrize("name", BY_NODE)
def test_a_failure_at_every_step_of_a_plan_by_node(name: str, form: dict[str, Any]):
    total = fail_everywhere([Case(name, 4, 60, 1, limits=on_nodes(2, 2, replace(TINY, chunk_bytes=128)), **form)])
    assert total["runs"] > 20
    assert total["right"] > 0
    assert total["failed"] > total["runs"]


@pytest.mark.parametrize("operation", [1, 2, 3])
def test_a_failure_in_the_middle_of_several_operations(operation: int):
    """Staging halves are used again, and some ranks are an operation ahead of the one that fails."""
    names = ("broadcast", "all_reduce", "reduce_scatter")
    cases = [Case(name, 3, 30, 1, symmetric=kind) for name, kind in zip(names, ("none", "all", "none"), strict=True)]
    total = fail_everywhere(cases, operation)
    assert total["right"] >= (operation - 1) * 3 * total["runs"]


# --- what would be seen if a rule were missing ----------------------------------------------------------


def caught(cases: Sequence[Case]) -> str:
    """What a failure somewhere betrays of a machine that was changed: "written", "value", or "" if nothing."""
    for case in cases:
        try:
            fail_everywhere([case])
        except AssertionError as error:
            return "written" if "has returned with an error" in str(error.__cause__) else "value"
    return ""


def forget(monkeypatch: pytest.MonkeyPatch, name: str, changed: Any) -> None:
    monkeypatch.setattr(interpret_failures._FailingMachine, name, changed)


DIRECT = [Case(name, 3, 40, 1, symmetric="all") for name in (*ROOTED, *UNROOTED)]


def test_a_rank_that_does_not_look_at_its_end(monkeypatch: pytest.MonkeyPatch):
    """It reads what the caller of another one has scribbled, and says that it succeeded."""
    forget(monkeypatch, "is_void", lambda self, rank, seq: False)
    missed = [case.name for case in DIRECT if not caught([case])]
    assert missed == []


def test_a_rank_that_fails_and_does_not_wait_for_writers(monkeypatch: pytest.MonkeyPatch):
    forget(monkeypatch, "is_written", lambda self, rank, seq: False)
    assert caught(PUSHING) == "written"


def test_a_rank_that_writes_without_looking(monkeypatch: pytest.MonkeyPatch):
    look = interpret_failures._FailingMachine.is_void

    def late(self: Any, rank: int, seq: int) -> bool:
        begun = len(self.at[rank]) > 1  # before the first step of the body it has no step
        return begun and look(self, rank, seq)

    forget(monkeypatch, "is_void", late)
    assert caught(PUSHING) == "written"


def test_a_rank_that_tells_nobody(monkeypatch: pytest.MonkeyPatch):
    """Others find out by its silence, or not at all."""
    forget(monkeypatch, "tell", lambda self, peer, seq: None)
    assert caught(DIRECT)


def test_a_rank_whose_caller_scribbles_before_the_others_know(monkeypatch: pytest.MonkeyPatch):
    abandon = interpret_failures._FailingMachine.abandon

    def hasty(self: Any, rank: int, seq: int) -> Iterator[Any]:
        for buffer in self.tensors[seq - 1][rank].all:
            self.scribble(buffer, seq)
        yield None
        yield from abandon(self, rank, seq)

    forget(monkeypatch, "abandon", hasty)
    assert caught(DIRECT) == "value"
