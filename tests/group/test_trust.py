"""What a call that returned says is true, and what a call that raised has let go of: values and memory under failure.

Rank 1 is stopped in the middle of a step (see page_gate.py), rank 0 gives up on it, or sees rank 2 die, and uses its
tensor for something else at once. Then rank 1 goes on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from symcomm.group.process_group import ProcessGroup
from tests.support.faults import attempt, run_group
from tests.support.halted_calls import APART, CASES, HALTED, MUTUAL, PATTERN, of_rank, total
from tests.support.page_gate import Gate, Words, ordinary, state_of, stop, symmetric
from tests.support.ranks import returned, until

RAISED, OVER = 0, 8  # words: ranks that gave up and overwrote their tensors, from RAISED on; rounds that are over
SMALL, MEDIUM, LARGE = 1000, 16_384, 1 << 20  # elements: less than a page; direct, or one turn; many turns
PLANS = {  # which ranks' tensors are symmetric
    "symmetric": (symmetric,) * 3,
    "ordinary": (ordinary,) * 3,
    "mixed, rank 0 symmetric": (symmetric, ordinary, symmetric),
    "mixed, rank 1 symmetric": (ordinary, symmetric, ordinary),
}


pytestmark = [pytest.mark.long, pytest.mark.usefixtures("nothing_is_left")]


def await_first(team: ProcessGroup) -> None:
    """Rank 1 comes first. Once it sleeps it has given up the interpreter lock, which opening its gate needs; one that
    is stopped before it arrives is in a long call, and never has it."""

    def sleeps() -> bool:
        there = team.handle.report()["ranks"][HALTED]["seq"] == 2
        return there and state_of(team.peers[HALTED].pid) == "S"

    until(sleeps, 0.5)


# --- a deadline passes while a rank is in the middle of a copy ---------------------------------------------------


def _give_up_on(g: ProcessGroup, make: tuple, n: int, cases: list, gate: Gate, words: Words) -> list[str]:
    bad: list[str] = []
    for number, build in enumerate(cases, 1):
        team = g.new_group(range(g.size), timeout=30)
        assert team is not None
        case = build(team, make[g.rank], n)
        case.fill()
        case.run()  # the second call of a kind takes the core's fast path
        who = f"{build.__name__}, rank {g.rank}"
        bad += [f"{who}: {case.wrong()} wrong without a fault"] if case.wrong() else []
        case.fill()
        g.barrier()
        if g.rank == HALTED:
            gate.close(case.address)
        g.barrier()
        if g.rank != HALTED:
            await_first(team)
        if g.rank == 0:
            team.set_timeout(0.15)
        started = time.monotonic()
        raised = attempt(case.run)
        if not raised and case.wrong():
            bad.append(f"{who}: returned {case.wrong()} wrong elements")
        case.overwrite()  # either way the tensors are the caller's again
        words[RAISED + g.rank] = number
        bad += [f"{who}: raised {raised} late"] if g.rank == 0 and time.monotonic() - started > 5 else []
        if g.rank == 0 and not raised and n > SMALL and set(make) == {symmetric}:
            bad.append(f"{who}: returned though rank 1 still reads its tensor")
        g.barrier()
        if case.touched():
            bad.append(f"{who}: {case.touched()} elements written after {raised or 'it returned'}")
        g.barrier()
        team.destroy()
        words[OVER] = number
    return bad


def give_up_on(make: tuple, n: int, cases: list) -> None:
    gate, words = Gate(), Words()
    hits: list[bool] = []

    def during(pids: list[int]) -> None:
        for number in range(1, len(cases) + 1):
            hits.append(gate.await_hit())
            if not hits[-1]:
                return
            stop(pids[HALTED])
            for rank in (0, 2):
                words.reach(RAISED + rank, number, 8.0)
            os.kill(pids[HALTED], signal.SIGCONT)
            gate.open()
            words.reach(OVER, number)

    outcomes = run_group(_give_up_on, 3, make, n, cases, gate, words, timeout=30, deadline=60, during=during)
    gate.discard()
    bad = [text for value in returned(outcomes) for text in value]
    assert not bad, "\n".join(bad)
    assert hits == [True] * len(cases), f"not stopped in the middle: {hits}"


@pytest.mark.parametrize("plan", PLANS)
def test_values_and_tensors_after_a_deadline(plan: str):
    give_up_on(PLANS[plan], MEDIUM, list(CASES))


@pytest.mark.parametrize("plan", ["symmetric", "ordinary"])
def test_values_and_large_tensors_after_a_deadline(plan: str):
    give_up_on(PLANS[plan], LARGE, list(CASES))


def test_values_and_small_tensors_after_a_deadline():
    give_up_on(PLANS["symmetric"], SMALL, list(APART))


# --- a rank dies while another is in the middle of a copy --------------------------------------------------------


def _see_one_die(g: ProcessGroup, build: Callable, gates: tuple, words: Words) -> list[Any]:
    case = build(g, symmetric, MEDIUM)
    case.fill()
    case.run()
    case.fill()
    g.barrier()
    if g.rank:
        gates[g.rank - 1].close(case.address)
    g.barrier()
    raised = attempt(case.run)
    wrong = 0 if raised else case.wrong()
    case.overwrite()
    words[RAISED + g.rank] = 1
    words.reach(OVER, 1)
    return [raised, wrong, case.touched()]


@pytest.mark.parametrize("build", MUTUAL, ids=lambda build: build.__name__)
def test_values_and_tensors_after_a_death(build: Callable):
    gates, words = (Gate(), Gate()), Words()
    hits: list[bool] = []

    def during(pids: list[int]) -> None:
        hits.extend(gate.await_hit() for gate in gates)
        stop(pids[1])
        os.kill(pids[2], signal.SIGKILL)
        words.reach(RAISED, 1)
        os.kill(pids[1], signal.SIGCONT)
        gates[0].open()
        words.reach(RAISED + 1, 1)
        words[OVER] = 1

    outcomes = run_group(_see_one_die, 3, build, gates, words, timeout=20, during=during)
    for gate in gates:
        gate.discard()
    assert hits == [True, True]
    assert [o.kind for o in outcomes] == ["returned", "returned", "died"], "\n".join(map(str, outcomes))
    (raised, _, touched), (halted, wrong, _), _ = (o.value for o in outcomes)
    assert raised == "RankFailedError"
    assert touched == 0, f"{touched} elements of rank 0's tensors were written after it raised"
    assert wrong == 0, f"rank 1 {halted or 'returned'} with {wrong} wrong elements"


# --- messages ----------------------------------------------------------------------------------------------------


def _send_in_vain(g: ProcessGroup, how: str, n: int, words: Words) -> Any:
    """Rank 0 gives up a send that rank 1 has not received, and uses its tensor again."""
    g.barrier()
    if g.rank == 1:
        words.reach(RAISED, 1)
        x = torch.zeros(n)
        raised = attempt(lambda: g.recv(x, 0))
        return [raised, 0 if raised else int((x != of_rank(0, n)).sum())]
    x = symmetric(n)
    x.copy_(of_rank(0, n))
    if how == "isend":
        work = g.isend(x, 1)
        raised = attempt(lambda: work.wait(0.1))
    else:
        raised = attempt(lambda: g.send(x, 1, timeout=0.1))
    x.fill_(PATTERN)
    words[RAISED] = 1
    return [raised, int((x != PATTERN).sum())]


@pytest.mark.parametrize("how", ["send", "isend"])
@pytest.mark.parametrize("n", [MEDIUM, LARGE])
def test_a_message_that_was_given_up_is_not_received(how: str, n: int):
    outcomes = run_group(_send_in_vain, 2, how, n, Words(), timeout=5)
    (sent, _), (received, wrong) = returned(outcomes)
    assert sent == "DeadlineError"
    assert wrong == 0, f"the receive {received or 'returned'} with {wrong} wrong elements"


def _send_to_halted(g: ProcessGroup, make: Callable, gate: Gate, words: Words) -> Any:
    """Rank 0's deadline passes while rank 1 copies its tensor."""
    x = symmetric(MEDIUM) if g.rank == 0 else make(MEDIUM)
    x.copy_(of_rank(g.rank, MEDIUM))
    g.barrier()
    if g.rank == 1:
        gate.close(x.data_ptr() + 2 * MEDIUM)
        raised = attempt(lambda: g.recv(x, 0))
        return [raised, 0 if raised else int((x != of_rank(0, MEDIUM)).sum())]
    raised = attempt(lambda: g.send(x, 1, timeout=0.3))
    x.fill_(PATTERN)
    words[RAISED] = 1
    return [raised, 0]


@pytest.mark.parametrize("make", [ordinary, symmetric], ids=lambda make: make.__name__)
def test_a_message_whose_sender_gave_up_while_it_was_copied(make: Callable):
    gate, words = Gate(), Words()
    hits: list[bool] = []

    def during(pids: list[int]) -> None:
        hits.append(gate.await_hit())
        stop(pids[1])
        words.reach(RAISED, 1)
        os.kill(pids[1], signal.SIGCONT)
        gate.open()

    outcomes = run_group(_send_to_halted, 2, make, gate, words, timeout=5, during=during)
    gate.discard()
    (sent, _), (received, wrong) = returned(outcomes)
    assert hits == [True] and sent == "DeadlineError"
    assert wrong == 0, f"the receive {received or 'returned'} with {wrong} wrong elements"


# --- a rank that the others went on without ----------------------------------------------------------------------


def _fenced(g: ProcessGroup, what: str, gate: Gate, words: Words) -> Any:
    """Rank 1 stands in the middle of writing to the others; they go on without it and use their memory again."""
    window = g.new_window(shared := symmetric(MEDIUM))
    t, source = symmetric(MEDIUM), ordinary(MEDIUM)
    t.copy_(of_rank(g.rank, MEDIUM))
    source.fill_(1.0)
    g.barrier()
    if g.rank == 1:
        gate.close((source if what == "put" else t).data_ptr() + 2 * MEDIUM)
    g.barrier()
    if g.rank == 1:
        first = attempt(lambda: window.put(source, 0) if what == "put" else g.all_reduce(t))
        return [first, *_misbehave(g, window), words.__setitem__(OVER, 1)]
    g.set_timeout(0.3)
    raised = attempt(lambda: g.barrier() if what == "put" else g.all_reduce(t))
    g.set_timeout(10.0)  # which the smaller group takes over, and has to keep on a busy machine, too
    smaller = g.shrink(timeout=3.0)
    wrong = _gather_unevenly(smaller, t)
    shared.fill_(PATTERN)
    t.fill_(PATTERN)
    place = t.data_ptr()
    fresh = []
    if what == "new tensors":  # what the old ones occupied is given to others
        del window, shared, t
        g.exposed.clear()
        g.destroy()
        fresh = [symmetric(MEDIUM) for _ in range(64)]
        for x in fresh:
            x.fill_(PATTERN)
    kept = fresh or [shared, t]
    reused = place in [x.data_ptr() for x in kept]
    words[RAISED + g.rank] = 1
    turns = 0
    x = symmetric(MEDIUM)
    while not words[OVER] or turns < 10:  # under fire: while it goes on
        x.copy_(of_rank(smaller.rank, MEDIUM))
        smaller.all_reduce(x)
        wrong += int((x != total(MEDIUM, 2)).sum())
        smaller.broadcast(over := torch.tensor([words[OVER]]), 0)
        turns = 10 if over.item() else turns
        if over.item():
            break
    touched = sum(int((x != PATTERN).sum()) for x in kept)
    return [raised, smaller.size, reused, wrong, touched]


def _gather_unevenly(g: ProcessGroup, t: torch.Tensor) -> int:
    """Wrong elements, where ranks give different parts of what may not be shared any more."""
    wrong = 0
    for less in range(1, 20):
        sizes = [MEDIUM - 64 * less * rank for rank in range(g.size)]
        t.copy_(of_rank(g.rank, MEDIUM) + less)
        outs = [torch.empty(size) for size in sizes]
        g.all_gather(outs, t[: sizes[g.rank]])
        wrong += sum(int((out != of_rank(rank, MEDIUM)[: sizes[rank]] + less).sum()) for rank, out in enumerate(outs))
    return wrong


def _misbehave(g: ProcessGroup, window: Any) -> list[str]:
    """Everything that could reach the others' memory."""
    x = torch.ones(MEDIUM)
    return [
        attempt(lambda: window.put(x, 0)),
        attempt(lambda: window.put(x, 2)),
        attempt(lambda: g.all_reduce(symmetric(MEDIUM).fill_(3.0))),
        attempt(lambda: g.send(x, 0)),
        attempt(lambda: g.isend(x, 2).wait(0.1)),
        attempt(g.abort) or "abort",
        attempt(g.destroy) or "destroy",
    ]


@pytest.mark.parametrize("what", ["old tensors", "new tensors", "put"])
def test_a_rank_left_behind_does_not_reach_the_others(what: str):
    gate, words = Gate(), Words()
    hits: list[bool] = []

    def during(pids: list[int]) -> None:
        hits.append(gate.await_hit())
        stop(pids[1])
        words.reach(RAISED, 1, 15.0)
        words.reach(RAISED + 2, 1, 15.0)
        os.kill(pids[1], signal.SIGCONT)
        gate.open()

    outcomes = run_group(_fenced, 3, what, gate, words, timeout=10, deadline=40, during=during)
    gate.discard()
    first, left, third = returned(outcomes)
    assert hits == [True]
    for raised, size, reused, wrong, touched in (first, third):
        assert raised == "DeadlineError" and size == 2
        assert not (what == "new tensors" and reused), "a stopped rank has it mapped, and may write to it for ever"
        assert wrong == 0, f"{wrong} wrong elements in the smaller group"
        assert touched == 0, f"{touched} elements were written by the rank that was left behind"
    assert left[0] or what == "put", "its own call cannot have succeeded"
    assert all(left[1:-1]), f"not refused: {left}"
