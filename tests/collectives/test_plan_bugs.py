"""Plans with a bug put in on purpose: the interpreter must notice, by race, deadlock, overrun or wrong value.

Not every change is a bug: a signal that a later one makes up for, or a wait that the next one implies, changes nothing
but speed. So the survivors are counted, and those that cannot be harmless are listed and must all be caught.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from symcomm.collectives import Plan
from symcomm.collectives.interpret import PlanError, describe, run
from symcomm.collectives.plan import ALL, FIRST_SIGNAL, At, Copy, Loop, Reduce, Signal, Space, Step, Wait
from tests.support.plan_cases import BY_NODE as NODES
from tests.support.plan_cases import ROOTED, TINY, UNROOTED, Case, Operation, combine, on_nodes

pytestmark = pytest.mark.without_torch

SCHEDULES = [1, 2, "slowest 0", "fastest 0"]
SUBJECTS = [
    *(Case(name, 3, 215, 1, symmetric=symmetric) for name in (*ROOTED, *UNROOTED) for symmetric in ("none", "all")),
    *(Case(name, 3, 215, 1, in_place=True, symmetric="none") for name in ("all_reduce", "reduce", "reduce_scatter")),
    Case("all_reduce", 2, 300, limits=replace(TINY, two_rank_variant="one_shot")),
    Case("all_reduce", 2, 300, limits=replace(TINY, two_rank_variant="two_shot"), in_place=True),
    Case("all_gather", 3, 200, uneven=True),
    Case("all_to_all", 3, 200, uneven=True),
]
BY_NODE = [  # in every turn every rank has something to do
    Case(name, 4, 192, 1, symmetric=symmetric, limits=on_nodes(2, 2)) for name in NODES for symmetric in ("none", "all")
]


def caught(case: Case, rank: int | None, change: Callable[[Plan], Plan], schedules: list[Any] = SCHEDULES) -> str:
    """How the changed plan (of one rank, or of all) betrays itself: the error's name, "value", or "" if not at all."""
    for schedule in schedules:
        operation = Operation(case)
        plans = [change(p) if rank in (None, p.rank) else p for p in operation.plans]
        try:
            (results,) = run([plans], [operation.tensors], schedule, case.limits.stage_bytes, combine)
        except PlanError as error:
            return type(error).__name__
        for got, expected in zip(results, operation.expected, strict=True):
            if not all(np.array_equal(g, e) for g, e in zip(got, expected, strict=True)):
                return "value"
    return ""


# --- changes -----------------------------------------------------------------------------------------

Path = tuple[str, int, int | None]  # part, step, step inside a loop


def walk(plan: Plan) -> Iterator[tuple[Path, Step]]:
    for part in ("head", "staged", "direct"):
        for number, step in enumerate(getattr(plan, part) or []):
            if isinstance(step, Loop):
                yield from (((part, number, inner), body) for inner, body in enumerate(step.body))
            else:
                yield (part, number, None), step


def edited(plan: Plan, path: Path, edit: Callable[[list[Any], int], None]) -> Plan:
    """The plan with ``edit(list of steps, index)`` done at the path; the original is cached, so it stays as it is."""
    part, number, inner = path
    steps = list(getattr(plan, part))
    if inner is None:
        edit(steps, number)
    else:
        body = list(steps[number].body)
        edit(body, inner)
        steps[number] = Loop(steps[number].turns, tuple(body))
    return replace(plan, **{part: steps})


def drop(steps: list[Any], index: int) -> None:
    del steps[index]


def swap_with_next(steps: list[Any], index: int) -> None:
    steps[index], steps[index + 1] = steps[index + 1], steps[index]


def earlier(steps: list[Any], index: int) -> None:
    """Wait for one signal less."""
    steps[index] = replace(steps[index], value=steps[index].value - 1)


def drops(kind: type) -> Callable[[Plan], list[tuple[Path, Callable]]]:
    return lambda plan: [(path, drop) for path, step in walk(plan) if isinstance(step, kind)]


def swaps(first: Any, second: Any) -> Callable[[Plan], list[tuple[Path, Callable]]]:
    def find(plan: Plan) -> list[tuple[Path, Callable]]:
        found = []
        steps = list(walk(plan))
        for (path, step), (after, following) in pairwise(steps):
            together = path[0] == after[0] and (path[1] == after[1] or path[2] is after[2] is None)
            if together and isinstance(step, first) and isinstance(following, second):
                found.append((path, swap_with_next))
        return found

    return find


SIGNAL_FIRST = "signal before the copy or reduce it announces"
CHANGES: dict[str, Callable[[Plan], list[tuple[Path, Callable]]]] = {
    "drop a wait": drops(Wait),
    "drop a signal": drops(Signal),
    "drop a copy": drops(Copy),
    "drop a reduce": drops(Reduce),
    SIGNAL_FIRST: swaps(Copy | Reduce, Signal),
    "copy or reduce before the wait that allows it": swaps(Wait, Copy | Reduce),
    "wait for one signal less": lambda plan: [
        (path, earlier)
        for path, step in walk(plan)
        if isinstance(step, Wait) and (step.stride or step.value > FIRST_SIGNAL)
    ],
}


def relevant(case: Case, path: Path) -> bool:
    """Only the half of a plan that runs: direct when all is symmetric, else head and staged."""
    return (path[0] == "direct") == (case.symmetric == "all")


def mutants(case: Case, kind: str) -> Iterator[tuple[Plan, Path, Callable]]:
    for plan in Operation(case).plans:
        for path, edit in CHANGES[kind](plan):
            if relevant(case, path):
                yield plan, path, edit


def test_subjects_are_right_as_they_are():
    for case in SUBJECTS + BY_NODE:
        assert caught(case, None, lambda plan: plan) == ""


def furthest_wait(plan: Plan, part: str, who: int) -> int:
    """The highest signal of rank ``who`` that a plan waits for."""
    found = [0]
    for step in getattr(plan, part) or []:
        turns, body = (step.turns, step.body) if isinstance(step, Loop) else (1, (step,))
        found += [s.value + s.stride * (turns - 1) for s in body if isinstance(s, Wait) and s.who in (ALL, who)]
    return max(found)


def is_harmless(kind: str, case: Case, plan: Plan, path: Path) -> bool:
    """Whether the change may go unnoticed because it costs only time."""
    if kind == SIGNAL_FIRST and case.limits.nodes:  # a turn may end with what only its own rank reads
        step = dict(walk(plan))[path]
        return all(at.space is Space.OUT for at in step.dst) or case.symmetric == "all"
    if kind == "drop a signal":  # whoever waits for it goes on at the next one, or nobody waits for it
        part, number, inner = path
        after = [p for p, step in walk(plan) if isinstance(step, Signal) and p[0] == part and p > path]
        peers = [p for p in Operation(case).plans if p.rank != plan.rank]
        awaited = max((furthest_wait(peer, part, plan.rank) for peer in peers), default=0)
        return bool(after) or (inner is None and getattr(plan, part)[number].value > awaited)
    if "wait" not in kind:
        return False
    if case.name == "scatter" and plan.rank == case.root:  # its last turn only copies its own piece to itself
        return plan.staged[path[1]] == [step for step in plan.staged if isinstance(step, Wait)][-1]
    # some turns move nothing between this rank and its peers; by node those at either end
    return case.uneven or (case.name == "reduce_scatter" and bool(case.limits.nodes))


def unnoticed(kind: str, path: Path, plan: Plan) -> str:
    return f"no rank notices {kind!r} at {path}: can the plan do without? See is_harmless.\n{describe(plan)}"


@pytest.mark.parametrize("kind", CHANGES)
def test_changed_plans_are_caught(kind: str, record_property: Callable[[str, object], None]):
    outcomes: Counter = Counter()
    for case in SUBJECTS:
        for plan, path, edit in mutants(case, kind):
            how = caught(case, plan.rank, lambda p, path=path, edit=edit: edited(p, path, edit))
            outcomes[how or "not caught"] += 1
            assert how or is_harmless(kind, case, plan, path), unnoticed(kind, path, plan)
    record_property(kind, dict(outcomes))
    print(f"{kind}: {dict(outcomes)}")
    assert outcomes.total() - outcomes["not caught"] > 0.7 * outcomes.total()


@pytest.mark.parametrize("kind", CHANGES)
def test_changed_plans_by_node_are_caught(kind: str):
    """Most of their signals are followed by others, so fewer of them are missed."""
    for case in BY_NODE:
        for plan, path, edit in mutants(case, kind):
            how = caught(case, plan.rank, lambda p, path=path, edit=edit: edited(p, path, edit))
            assert how or is_harmless(kind, case, plan, path), unnoticed(kind, path, plan)


@pytest.mark.parametrize("schedule", [*SCHEDULES, "round-robin", "slowest 2", "fastest 2"])
def test_races_are_found_whatever_the_schedule(schedule: int | str):
    """The values may come out right by luck; the missing order is seen all the same."""
    kind = SIGNAL_FIRST
    for case in SUBJECTS[:16:2]:
        for plan, path, edit in mutants(case, kind):
            how = caught(case, plan.rank, lambda p, path=path, edit=edit: edited(p, path, edit), [schedule])
            assert how == "RaceError", f"{path} of\n{describe(plan)}"


# --- wrong numbers of slots --------------------------------------------------------------------------

FAMILIES = (*ROOTED, *UNROOTED)


@pytest.fixture
def fewer_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every algorithm with one slot less than it claims to need."""
    for name in (*FAMILIES, "chunks", "by_node", "nodes"):
        module = sys.modules[f"symcomm.collectives.{name}"]
        for constant in ("SLOTS", "TWO_SHOT_SLOTS", "NODE_SLOTS"):
            if hasattr(module, constant):
                monkeypatch.setattr(module, constant, getattr(module, constant) - 1)


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("variant", ["one_shot", "two_shot"])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_slot_less_is_a_race(name: str, variant: str, world: int, fewer_slots: None):
    case = Case(name, world, 400, root=1, limits=replace(TINY, two_rank_variant=variant))
    for schedule in SCHEDULES:
        assert caught(case, None, lambda plan: plan, [schedule]) == "RaceError"


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("name", NODES)
def test_one_slot_less_is_a_race_by_node_too(name: str, nodes: int, fewer_slots: None):
    case = Case(name, 2 * nodes, 400, 1, limits=on_nodes(nodes, 2))
    for schedule in SCHEDULES:
        assert caught(case, None, lambda plan: plan, [schedule]) == "RaceError"


# --- bugs that people write --------------------------------------------------------------------------


def test_no_final_wait_in_a_direct_plan():
    """The caller gets its tensor back while a peer still reads it."""
    for name in FAMILIES:
        case = Case(name, 3, 215, 1, symmetric="all")
        found = 0
        for plan in Operation(case).plans:
            if plan.direct and isinstance(plan.direct[-1], Wait):
                how = caught(case, plan.rank, lambda p: replace(p, direct=p.direct[:-1]))
                assert how == "RaceError"
                found += 1
        assert found


def test_a_rank_that_stages_after_it_arrived():
    for name in FAMILIES:
        case = Case(name, 3, 215, 1)
        heads = [plan for plan in Operation(case).plans if plan.head]
        assert heads
        for plan in heads:
            late = lambda p: replace(p, head=[], staged=[*p.head, *p.staged])  # noqa: E731
            assert caught(case, plan.rank, late) == "RaceError"


def test_reduction_in_another_order_shows_in_the_values():
    def turned(step: Any) -> Any:
        if isinstance(step, Loop):
            return Loop(step.turns, tuple(map(turned, step.body)))
        return replace(step, src=step.src[::-1]) if isinstance(step, Reduce) else step

    for name in ("all_reduce", "reduce", "reduce_scatter"):
        case = Case(name, 3, 215, 1)
        assert caught(case, 1, lambda p: replace(p, staged=list(map(turned, p.staged)))) == "value"


def test_output_written_before_the_input_it_replaces_was_staged():
    """In place, collecting chunk i+1 before staging it; out of place the same plan would be right."""

    def early(plan: Plan) -> Plan:
        junk = Copy((At(Space.OUT, 0, 512),), At(Space.IN), 64)
        return replace(plan, staged=[junk, *plan.staged])

    assert caught(Case("all_reduce", 3, 215, 1), 0, early) == ""
    assert caught(Case("all_reduce", 3, 215, 1, in_place=True), 0, early) == "value"


def test_one_rank_takes_one_turn_less():
    def shorter(plan: Plan) -> Plan:
        steps = [Loop(s.turns - 1, s.body) if isinstance(s, Loop) else s for s in plan.staged]
        return replace(plan, staged=steps)

    for name in FAMILIES:
        case = Case(name, 3, 400, 1)
        for rank in range(3):
            assert caught(case, rank, shorter), (name, rank)
