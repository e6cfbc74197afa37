"""Ranks that give up a work, or whose works raise: what the others get, and who writes afterwards."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from symcomm import errors
from symcomm.group.p2p import Message
from symcomm.group.process_group import ProcessGroup
from tests.support.faults import attempt
from tests.support.halted_calls import CASES, PATTERN, all_to_all, of_rank
from tests.support.page_gate import Words

GIVEN_UP = 0  # words, one for each rank: how many works it gave up
LATE = 1  # the rank for which rank 0 does not wait
QUEUED = [case for case in CASES if case is not all_to_all]  # with lists it first asks all ranks for their sizes


class Asynchronous:
    """A group whose collectives return works."""

    def __init__(self, group: ProcessGroup):
        self._group = group
        self.rank, self.size = group.rank, group.size

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: getattr(self._group, name)(*args, async_op=True)


def _successes(work: Any) -> list[str]:
    """The calls by which a failed work claims success."""
    calls = {"wait": work.wait, "wait with a timeout": lambda: work.wait(0.01), "result": work.result}
    bad = [f"{name} returned" for name, call in calls.items() if not attempt(call)]
    bad += [] if work.is_completed() and not work.is_success() and work.exception() else ["it has not failed"]
    try:
        work.get_future().wait()
    except Exception as error:  # torch's future does not keep the type
        return bad if "cannot be used" in str(error) or "timed out" in str(error) else [*bad, str(error)]
    return [*bad, "its future has values"]


def each_late(g: ProcessGroup, make: Callable, n: int, words: Words, cases: Sequence[Callable]) -> list[str]:
    """Each collective: one rank comes after rank 0 has given up; the others came in time, and wait until the end."""
    bad: list[str] = []
    for number, build in enumerate(cases, 1):
        team = g.new_group(range(g.size), timeout=30)
        assert team is not None
        case, who = build(Asynchronous(team), make, n), f"{build.__name__}, rank {g.rank}"
        case.fill()
        case.run().wait()
        bad += [f"{who}: {case.wrong()} wrong without a fault"] if case.wrong() else []
        case.fill()
        if g.rank == LATE:
            words.reach(GIVEN_UP, number)
        work: Any = None
        with contextlib.suppress(errors.SymcommError):  # across hosts a late rank is told as soon as it calls
            work = case.run()
        if g.rank == 0:
            assert not work.is_completed() and work.exception() is None  # which asks, and gives up nothing
        raised = attempt(lambda w=work: w.wait(0.05 if g.rank == 0 else None)) if work is not None else "at once"
        if not raised:
            bad.append(f"{who}: returned {case.wrong()} wrong elements")
        case.overwrite()
        words[GIVEN_UP + g.rank] = number
        if work is not None:
            bad += [f"{who}: raised {raised}; {text}" for text in _successes(work)]
        bad += [] if attempt(team.barrier) else [f"{who}: the group can be used"]
        g.barrier()
        time.sleep(0.02)
        bad += [f"{who}: {case.touched()} elements written after {raised}"] if case.touched() else []
        if g.rank == 0 and raised != "DeadlineError":
            bad.append(f"{who}: raised {raised}")
        g.barrier()
        team.destroy()
    return bad


def _several(team: ProcessGroup, make: Callable, n: int) -> list[tuple[Any, torch.Tensor, torch.Tensor | None]]:
    """(a work, a tensor of it, what that holds if the work succeeds): messages, and collectives between them."""
    after, before, count = (team.rank + 1) % team.size, (team.rank - 1) % team.size, 5
    sent, got, summed = ([make(n) for _ in range(count)] for _ in range(3))
    for i in range(count):
        sent[i].copy_(of_rank(team.rank, n, i))
        summed[i].copy_(of_rank(team.rank, n, i))
        got[i].fill_(0.5)
    works: list[tuple[Any, torch.Tensor, torch.Tensor | None]] = []
    for i in range(count):
        [send, receive] = team.batch([Message.send(sent[i], after, i), Message.receive(got[i], before, i)])
        works += [(send, sent[i], None), (receive, got[i], of_rank(before, n, i))]
        total = torch.stack([of_rank(r, n, i) for r in range(team.size)]).sum(0)
        works.append((team.all_reduce(summed[i], async_op=True), summed[i], total))
    return works


def one_raises(g: ProcessGroup, make: Callable, n: int, step: float) -> list[str]:
    """Another thread of rank 0 aborts while works are under way, ``step`` seconds later each time. Each rank waits for
    some of them, until one raises."""
    bad: list[str] = []
    for number in range(1, 16):
        team = g.new_group(range(g.size), timeout=30)
        assert team is not None
        g.barrier()
        if g.rank == 0:
            threading.Timer(step * number, team.abort).start()
        try:
            works = _several(team, make, n)
        except errors.GroupUnusableError:
            works = []
        first = number * 7 % 15  # a send, a receive or a collective
        waited = works[first:] + works[:first]
        kept = next((i for i, (work, _, _) in enumerate(waited) if attempt(work.wait)), len(waited))
        for _, tensor, _ in waited[kept:]:
            tensor.fill_(PATTERN)
        g.barrier()
        time.sleep(0.01)
        who = f"round {number}, rank {g.rank}"
        for _, tensor, right in waited[:kept]:
            if right is not None and not torch.equal(tensor, right):
                bad.append(f"{who}: wrong values of a work that returned")
        for _, tensor, _ in waited[kept:]:
            bad += [f"{who}: {count} written afterwards"] if (count := int((tensor != PATTERN).sum())) else []
        g.barrier()
        team.destroy()
    return bad
