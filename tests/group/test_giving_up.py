"""What holds for tensors once somebody has given up: a wait whose time is over, or one work of several that has raised.

Rank 0 does not wait for a late rank any longer, uses its tensors for something else at once, and tells the late rank to
come. Nobody may get values of after that, nobody may write into what was given back.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import symcomm
from symcomm import errors
from symcomm.group.process_group import ProcessGroup
from tests.support.faults import attempt, run_group
from tests.support.given_up import GIVEN_UP, LATE, QUEUED, Asynchronous, each_late, one_raises
from tests.support.halted_calls import all_gather, all_reduce
from tests.support.page_gate import Gate, Words, ordinary, stop, symmetric
from tests.support.ranks import returned, until

OVER = 8  # a word, behind those of ranks: the test is over
SMALL, LARGE = 1000, 1 << 20


@pytest.mark.parametrize("n", [SMALL, LARGE])
@pytest.mark.parametrize("make", [ordinary, symmetric], ids=lambda make: make.__name__)
def test_a_late_rank_gets_no_values_of_a_work_that_was_given_up(make: Callable, n: int):
    outcomes = run_group(each_late, 3, make, n, Words(), QUEUED, timeout=30, deadline=60)
    bad = [text for value in returned(outcomes) for text in value]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("make", [ordinary, symmetric], ids=lambda make: make.__name__)
def test_works_of_threads_that_were_given_up(make: Callable):
    bad = symcomm.spawn(each_late, 3, mode="threads", args=(make, SMALL, Words(), QUEUED), timeout=30)
    assert bad == [[], [], []]


# --- works before and behind it -----------------------------------------------------------------------------------


def _one_of_several(g: ProcessGroup, make: Callable, words: Words) -> list[Any]:
    """Rank 0 gives up the second of four, of which rank 1 has made one."""
    team = g.new_group(range(g.size), timeout=30)
    assert team is not None
    first, *others = [all_reduce(Asynchronous(team), make, SMALL) for _ in range(4)]
    for case in (first, *others):
        case.fill()
    works = [first.run()]
    if g.rank == 0:
        works += [case.run() for case in others]
        raised = [attempt(lambda: works[1].wait(0.1))]
    else:
        raised = [attempt(works[0].wait)]
        words.reach(GIVEN_UP, 1)
        works += [case.run() for case in others if not attempt(team.check_usable)]
    for case in others:  # waited for or not
        case.overwrite()
    words[GIVEN_UP + g.rank] = 1
    raised += [attempt(work.wait) for work in works]
    g.barrier()
    time.sleep(0.02)
    return [raised, first.wrong(), sum(case.touched() for case in others)]


@pytest.mark.parametrize("make", [ordinary, symmetric], ids=lambda make: make.__name__)
def test_works_before_one_that_was_given_up_keep_their_results(make: Callable):
    ours, theirs = returned(run_group(_one_of_several, 2, make, Words()))
    assert ours[0][:3] == ["DeadlineError", "", "DeadlineError"] and "" not in ours[0][3:]
    assert theirs[0][:2] == ["", ""] and "" not in theirs[0][2:]
    assert ours[1:] == theirs[1:] == [0, 0]


def _behind_a_late_one(g: ProcessGroup) -> list[Any]:
    """Rank 0 gives up the third of three, while the first waits for rank 1."""
    works = [g.all_reduce(torch.ones(10), async_op=True) for _ in range(3)] if g.rank == 0 else []
    if g.rank == 0:
        with pytest.raises(errors.DeadlineError) as error:
            works[2].wait(timedelta(milliseconds=100))
        return [error.value.missing, str(error.value), *(attempt(work.wait) for work in works)]
    time.sleep(0.5)
    return [attempt(lambda: g.all_reduce(torch.ones(10)))]


def test_a_work_that_waits_for_works_before_it():
    ours, theirs = returned(run_group(_behind_a_late_one, 2))
    missing, text, *raised = ours
    assert missing == [1] and "did not come: 1" in text and "group.shrink()" in text
    assert "" not in raised and theirs == ["DeadlineError"]


def _behind_a_blocking_one(g: ProcessGroup) -> list[str]:
    """Another thread of rank 0 waits in a blocking call, behind which the work stands."""
    if g.rank == 1:
        time.sleep(0.5)
        return [attempt(g.barrier)]
    blocked: list[str] = []
    thread = threading.Thread(target=lambda: blocked.append(attempt(g.barrier)))
    thread.start()
    assert until(lambda: g.sequence_number == 1)
    t = torch.ones(10)
    work = g.all_reduce(t, async_op=True)
    raised = attempt(lambda: work.wait(0.1))
    thread.join(10)
    return [raised, *blocked]


def test_a_work_behind_a_blocking_call_of_another_thread():
    [raised, blocked], late = returned(run_group(_behind_a_blocking_one, 2))
    assert raised == "DeadlineError" and blocked and late == ["DeadlineError"]


def _go_on(g: ProcessGroup) -> list[Any]:
    """After a work was given up by rank 0, all ranks go on in another group."""
    if g.rank == LATE:
        time.sleep(0.3)
    raised = attempt(lambda: g.all_reduce(torch.ones(4), async_op=True).wait(0.1 if g.rank == 0 else None))
    smaller = g.shrink()
    t = torch.ones(4)
    smaller.all_reduce(t, async_op=True).wait(20)
    return [raised, smaller.size, t[0].item()]


def test_going_on_after_a_work_was_given_up():
    assert returned(run_group(_go_on, 3)) == [["DeadlineError", 3, 3.0]] * 3


def _in_time(g: ProcessGroup) -> float:
    """Waits with a time that is enough leave everything as it is, however often the work is looked at."""
    t = torch.ones(100)
    for _ in range(50):
        works = [g.all_reduce(t, async_op=True), g.broadcast(t, 0, async_op=True)]
        while not all(work.is_completed() for work in works[: g.rank]):
            pass
        assert all(work.wait(30) for work in reversed(works))
        t /= g.size
    return t[0].item()


def test_waits_that_end_in_time():
    assert returned(run_group(_in_time, 3, timeout=60)) == [1.0] * 3


# --- a rank that is stopped while it writes into the tensors ------------------------------------------------------


def _stopped_writer(g: ProcessGroup, gate: Gate, words: Words) -> list[Any]:
    case = all_reduce(g if g.rank == LATE else Asynchronous(g), symmetric, LARGE)
    case.fill()
    g.barrier()
    if g.rank == LATE:
        gate.close(case.address)
    g.barrier()
    raised = attempt(lambda: case.run() if g.rank == LATE else case.run().wait(0.5 if g.rank == 0 else None))
    wrong = 0 if raised else case.wrong()
    case.overwrite()
    words[GIVEN_UP + g.rank] = 1
    words.reach(OVER, 1)
    return [raised, wrong, case.touched()]


def test_a_work_whose_peer_is_stopped_while_it_writes():
    gate, words = Gate(), Words()
    hits: list[bool] = []

    def during(pids: list[int]) -> None:
        hits.append(gate.await_hit())
        stop(pids[LATE])
        words.reach(GIVEN_UP, 1, 15.0)
        words.reach(GIVEN_UP + 2, 1, 15.0)
        os.kill(pids[LATE], signal.SIGCONT)
        gate.open()
        words.reach(GIVEN_UP + LATE, 1, 15.0)
        time.sleep(0.05)
        words[OVER] = 1

    outcomes = run_group(_stopped_writer, 3, gate, words, timeout=20, deadline=40, during=during)
    gate.discard()
    ours, stopped, other = returned(outcomes)
    assert hits == [True]
    assert ours == ["DeadlineError", 0, 0] and other[0] and other[1:] == [0, 0] and stopped[1] == 0


# --- Ctrl-C -------------------------------------------------------------------------------------------------------


def _interrupted(g: ProcessGroup, words: Words) -> list[Any]:
    case = all_gather(Asynchronous(g), ordinary, LARGE)
    case.fill()
    if g.rank == 1:
        words.reach(GIVEN_UP, 1)
        raised = attempt(lambda: case.run().wait())
        return [raised, 0]
    work = case.run()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        work.wait()
    except KeyboardInterrupt:
        case.overwrite()
    words[GIVEN_UP] = 1
    g_raised = attempt(work.wait)
    time.sleep(0.3)
    return [g_raised, case.touched()]


def test_a_wait_that_ctrl_c_ended():
    assert returned(run_group(_interrupted, 2, Words())) == [["GroupUnusableError", 0]] * 2


# --- one of several works has raised ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [SMALL, 60_000, LARGE])
@pytest.mark.parametrize("make", [ordinary, symmetric], ids=lambda make: make.__name__)
def test_no_tensor_is_written_once_one_of_several_works_has_raised(make: Callable, n: int):
    bad = [text for value in returned(run_group(one_raises, 2, make, n, 0.0004, deadline=60)) for text in value]
    assert not bad, "\n".join(bad)
