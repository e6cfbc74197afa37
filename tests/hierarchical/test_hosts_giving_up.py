"""Works across hosts that were given up, or of which one has raised: as on one host (tests/group/test_giving_up.py)."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from tests.support.faults import attempt
from tests.support.given_up import GIVEN_UP, LATE, Asynchronous, each_late, one_raises
from tests.support.halted_calls import all_gather, all_gather_single, all_reduce, broadcast, reduce_scatter_single
from tests.support.host_ranks import run_on_hosts
from tests.support.page_gate import Words, ordinary, symmetric
from tests.support.ranks import returned

EAGER, PIPELINED = 1000, 1 << 19  # elements
CASES = [all_reduce, all_gather, all_gather_single, broadcast, reduce_scatter_single]


@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 1, 1]], ids=["late on the same host", "late on another"])
def test_a_late_rank_gets_no_values_of_a_work_that_was_given_up(hosts: list[int]):
    trials = [(make, n, Words()) for make in (ordinary, symmetric) for n in (EAGER, PIPELINED)]
    ends = run_on_hosts(lambda g, trial: each_late(g, *trial, CASES), hosts, trials, timeout=30)
    bad = [text for outcomes in ends for value in returned(outcomes) for text in value]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("n", [EAGER, PIPELINED])
def test_no_tensor_is_written_once_one_of_several_works_has_raised(n: int):
    ends = run_on_hosts(lambda g, make: one_raises(g, make, n, 0.003), [0, 0, 1], [ordinary, symmetric], timeout=30)
    bad = [text for outcomes in ends for value in returned(outcomes) for text in value]
    assert not bad, "\n".join(bad)


def _behind(g: Any, _: Any) -> list[Any]:
    """Rank 0 gives up the last of three works; then all go on in a smaller group."""
    words = ""
    if g.rank == LATE:
        time.sleep(0.5)
    works = [g.all_reduce(torch.ones(8), async_op=True) for _ in range(3)] if not attempt(g.check_usable) else []
    if g.rank == 0:
        try:
            works[-1].wait(0.1)
        except Exception as error:
            words = str(error)
    raised = [attempt(work.wait) for work in works]
    smaller, t = g.shrink(), torch.ones(8)
    smaller.all_reduce(t, async_op=True).wait(30)
    return [words, "" in raised, smaller.size, t[0].item()]


def test_a_work_that_waits_for_works_before_it():
    [outcomes] = run_on_hosts(_behind, [0, 1, 1], [None])
    ours, *others = returned(outcomes)
    assert "did not come: 1; arrived: 0, 2" in ours[0] and "group.shrink()" in ours[0]
    assert ours[1:] == [False, 3, 3.0] and others == [["", False, 3, 3.0]] * 2


def _interrupted(g: Any, words: Words) -> list[Any]:
    case = all_gather(Asynchronous(g), ordinary, PIPELINED)
    case.fill()
    if g.rank == LATE:
        words.reach(GIVEN_UP, 1)
        return [attempt(lambda: case.run().wait()), 0]
    work = case.run()
    if g.rank:
        return [attempt(work.wait), 0]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        work.wait()
    except KeyboardInterrupt:
        case.overwrite()
    words[GIVEN_UP] = 1
    time.sleep(0.3)
    return [attempt(work.wait), case.touched()]


def test_a_wait_that_ctrl_c_ended():
    [outcomes] = run_on_hosts(_interrupted, [0, 0, 1], [Words()])
    assert returned(outcomes) == [["GroupUnusableError", 0]] * 3
