"""spawn(): results, errors, deadlines; processes and threads alike. And nothing left when it returns."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import symcomm
from symcomm import errors
from symcomm.group.process_group import ProcessGroup
from symcomm.memory import arena

MODES = ["threads", "processes"]


def leftovers() -> set[str]:
    mine = {p.name for p in Path("/tmp").glob("symcomm-*")} | {n for n in os.listdir("/dev/shm") if "symcomm" in n}
    return {name for name in mine if not name.startswith(("symcomm-test-", "symcomm-sanitize-"))}


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = leftovers()
    yield
    assert leftovers() <= before
    assert multiprocessing.active_children() == []


def add_up(g: ProcessGroup, start: float, step: float) -> tuple[int, float]:
    t = torch.tensor([start + step * g.rank])
    symcomm.all_reduce(t)  # the group is the default one
    assert symcomm.default_group() is g and (symcomm.rank(), symcomm.world_size()) == (g.rank, g.size)
    return g.rank, t.item()


@pytest.mark.parametrize("mode", MODES)
def test_results_come_in_rank_order(mode: str):
    assert symcomm.spawn(add_up, 3, (1.0, 2.0), mode=mode, deadline=60) == [(0, 9.0), (1, 9.0), (2, 9.0)]
    assert not symcomm.is_initialized()


def fail_on_one(g: ProcessGroup, how: str) -> None:
    if g.rank == 1:
        if how == "raise":
            raise LookupError("nothing there")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(4)
        return
    g.barrier()


@pytest.mark.parametrize("mode", MODES)
def test_the_first_error_is_raised(mode: str):
    with pytest.raises(LookupError, match="nothing there") as caught:
        symcomm.spawn(fail_on_one, 3, ("raise",), mode=mode, deadline=60)
    notes = getattr(caught.value, "__notes__", ["(raised on rank 1)"])
    assert notes[0].startswith("(raised on rank 1)")


@pytest.mark.parametrize(("how", "words"), [("kill", "died with SIGKILL"), ("exit", "exited with code 4")])
def test_a_process_that_dies(how: str, words: str):
    with pytest.raises(errors.RankFailedError, match=words) as caught:
        symcomm.spawn(fail_on_one, 3, (how,), deadline=60)
    assert caught.value.ranks[0] == 1


def wait_for_nothing(g: ProcessGroup) -> None:
    if g.rank == 0:
        time.sleep(30)
    g.barrier()


def test_a_deadline_ends_processes():
    started = time.monotonic()
    with pytest.raises(errors.DeadlineError, match="spawn timed out"):
        symcomm.spawn(wait_for_nothing, 2, deadline=12)
    assert time.monotonic() - started < 28


def unpicklable(g: ProcessGroup) -> object:
    return threading.Lock() if g.rank == 0 else 1


def test_a_result_that_cannot_travel_is_named():
    with pytest.raises(errors.SymcommError, match="rank 0: .*lock.* cannot be pickled"):
        symcomm.spawn(unpicklable, 2, deadline=60)


@pytest.mark.parametrize("n", [0, -1, "2", 1.5])
def test_bad_number_of_ranks(n: object):
    with pytest.raises(errors.BadArgumentError, match="spawn: n must be a positive number of ranks"):
        symcomm.spawn(add_up, n)  # type: ignore[arg-type]


def test_bad_mode():
    with pytest.raises(errors.BadArgumentError, match="spawn: mode must be 'processes' or 'threads', got 'fibers'"):
        symcomm.spawn(add_up, 2, mode="fibers")


def test_threads_see_the_callers_variables():
    seen = []
    symcomm.spawn(lambda g: seen.append(g.rank), 3, mode="threads", deadline=20)
    assert sorted(seen) == [0, 1, 2]


def test_a_thread_rank_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object) -> None:
        raise errors.ResourceError("symmetric memory: none left.")

    monkeypatch.setattr(arena.native, "life_start", refuse)
    with pytest.raises(errors.ResourceError, match="none left"):
        symcomm.spawn(lambda g: None, 2, mode="threads", deadline=20)
