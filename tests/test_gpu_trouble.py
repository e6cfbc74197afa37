"""Failures on a GPU, where there is none: the watch, what ranks tell each other, memory that peers may still use."""

from __future__ import annotations

import ctypes
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from symcomm import errors
from symcomm.cuda import failure as trouble_module
from symcomm.cuda import flag_words as pads_module
from symcomm.cuda import pool as pool_module
from symcomm.cuda.failure import Trouble
from symcomm.cuda.flag_words import Pads, is_behind, pad_bytes
from symcomm.cuda.pool import Pool, hold
from symcomm.cuda.watchdog import Lane, Outstanding, Watch
from symcomm.cuda.work import DeviceWork

torch = pytest.importorskip("torch")

# --- the watch ----------------------------------------------------------------------------------------------------


class FakePads:
    world = 3

    def __init__(self) -> None:
        self.words = [0, 0, 0]

    def arrival_of(self, rank: int) -> int:
        return self.words[rank]

    def missing(self, value: int) -> list[int]:
        return [r for r in (1, 2) if is_behind(self.words[r], value)]

    def set_arrival(self, rank: int, value: int) -> None:
        assert self.stopped, "a stream goes on before all ranks know"
        self.words[rank] = value

    stopped = False


class FakeMeetings:
    count = 0


class FakeJudge:
    """Whoever is told: every rank knows of a failure before a wait is released."""

    def __init__(self, gone: list[int], pads: FakePads):
        self._gone, self._pads = gone, pads
        self.told: list[Any] = []
        self.failed_elsewhere = self.settles = self.busy = False

    def gone(self) -> list[int]:
        return self._gone

    def has_failed(self) -> bool:
        return self.failed_elsewhere

    def fail(self, item: Any, ranks: list[int], died: bool) -> None:
        self.told.append((item.what, ranks, died))
        self._pads.stopped = True

    def learn(self) -> None:
        self.told.append("learned")
        self._pads.stopped = True

    def settle(self, now: float) -> bool:
        return self.settles

    def is_busy(self) -> bool:
        return self.busy


def make_watch(gone: list[int]) -> tuple[Watch, FakeJudge, FakePads, FakeMeetings, list[Any]]:
    pads, meetings = FakePads(), FakeMeetings()
    judge = FakeJudge(gone, pads)
    watch = Watch(judge)
    lane = watch.lane = Lane(pads, meetings)
    told = judge.told
    lane.what, lane.timeout = "all_reduce", 5.0
    return watch, judge, pads, meetings, told


def test_the_watch_ends_a_wait_for_a_dead_rank():
    gone: list[int] = []
    watch, _, pads, meetings, told = make_watch(gone)
    assert not watch.look(0.0)
    meetings.count = 4
    pads.words = [0, 4, 3]
    assert watch.look(1.0) and not told and not pads.stopped
    gone.append(2)
    watch.look(1.1)
    assert told == [("all_reduce", [2], True)] and pads.words == [0, 4, 4] and pads.stopped
    meetings.count = 6  # what was already on its way: nobody is waited for any more
    watch.look(1.2)
    assert pads.words == [0, 6, 6] and len(told) == 1


def test_the_watch_counts_from_the_last_progress():
    watch, _, pads, meetings, told = make_watch([])
    meetings.count = 2
    watch.look(0.0)
    watch.look(4.0)
    pads.words = [0, 1, 1]
    watch.look(6.0)
    watch.look(10.0)
    assert not told
    watch.look(11.5)
    assert told == [("all_reduce", [1, 2], False)] and pads.words == [0, 2, 2]


def test_the_watch_looks_after_single_waits_too():
    watch, _, _, _, told = make_watch([1])
    missing, released = [1], []
    watch._items.append(Outstanding("receive", lambda: missing, lambda ranks: released.append(ranks), 0.0, 9.0))
    assert watch.look(0.1) and told == [("receive", [1], True)] and released == [[1]]
    missing.clear()
    assert watch.look(0.2) and not watch._items  # until tensors are their owners' again
    watch._judge.settles = True
    assert not watch.look(0.3)


def test_the_watch_learns_of_failures_elsewhere():
    watch, judge, pads, meetings, told = make_watch([])
    meetings.count, judge.failed_elsewhere = 3, True
    assert watch.look(0.0) and told == ["learned"] and pads.words == [0, 3, 3]
    judge.settles = True
    assert not watch.look(0.1) and told == ["learned"]
    watch, judge, *_ = make_watch([])
    judge.busy = True
    assert watch.look(0.0)  # it goes on looking while this rank uses the memory of others


# --- what ranks tell each other when one has failed -------------------------------------------------------------------


class Event:
    """Of a stream: ``passed`` when the GPU has come so far."""

    passed = False

    def query(self) -> bool:
        return self.passed


def make_pads(group: Any, words: Any, monkeypatch: pytest.MonkeyPatch) -> Pads:
    monkeypatch.setattr(pads_module, "show", lambda address, nbytes, owner: address)
    starts = [ctypes.addressof(words) + r * pad_bytes(group.size) for r in range(group.size)]
    return Pads(group.rank, group.size, starts, [None] * group.size)


def run_troubled(rank_main: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Three ranks, threads, each with a Trouble over pads in host memory; ``rank_main(group, trouble, sync)``."""
    import symcomm

    words = ctypes.create_string_buffer(3 * pad_bytes(3))
    meeting = threading.Barrier(3)

    def rank_of(group: Any) -> Any:
        trouble = Trouble(group, 0)
        trouble.departure.pads = make_pads(group, words, monkeypatch)
        meetings = FakeMeetings()
        trouble.watch.lane = Lane(trouble.departure.pads, meetings)
        trouble.watch.lane.what = "all_reduce"
        return rank_main(group, trouble, lambda: meeting.wait(20))

    return symcomm.spawn(rank_of, 3, mode="threads", timeout=20, deadline=60)


def work_behind(trouble: Trouble, event: Event) -> DeviceWork:
    work = DeviceWork(SimpleNamespace(trouble=trouble, name="g", device=0), "all_reduce", [], None)
    work.queued(event, None)
    trouble.add(work)
    return work


@pytest.mark.parametrize("died", [False, True], ids=["late", "left"])
def test_what_the_gpu_ends_after_a_failure_is_no_result(monkeypatch: pytest.MonkeyPatch, died: bool):
    """Rank 0 fails. Rank 1's GPU is done with one work before that, with another one after it."""

    def rank_main(group: Any, trouble: Trouble, sync: Any) -> Any:
        early, late = Event(), Event()
        works = [work_behind(trouble, event) for event in (early, late)]
        early.passed = True
        if group.rank == 1:
            assert works[0].is_success() and not works[1].is_completed()
        sync()
        if group.rank == 2 and died:
            group.destroy()
        sync()
        if group.rank == 0:
            trouble.fail(trouble.watch.lane, [2], died)
            assert trouble.departure.pads.words[16 * 3] == 1, "kernels do not know"
        sync()
        if group.rank != 1:
            return None
        assert trouble.departure.pads.words[16 * 3] == 1
        late.passed = True
        assert not works[1].is_success() and works[0].is_success()
        for ask in (works[1].synchronize, trouble.look):
            with pytest.raises(errors.RankFailedError if died else errors.DeadlineError, match="rank 2") as caught:
                ask()
        with pytest.raises(errors.SymcommError):  # also later
            trouble.look()
        return str(caught.value)

    said = run_troubled(rank_main, monkeypatch)[1]
    assert ("left the group" in said) if died else ("rank 0's deadline passed while it waited for rank 2" in said)


def test_a_caller_is_told_once_peers_have_left_its_tensors(monkeypatch: pytest.MonkeyPatch):
    """Rank 0 fails while rank 1 uses its tensor; rank 2 is past that."""
    monkeypatch.setattr(trouble_module, "LEAVE_S", 1000.0)

    def rank_main(group: Any, trouble: Trouble, sync: Any) -> None:
        lane, event, look = trouble.watch.lane, Event(), trouble.watch.look
        lane.shown = lane._meetings.count = 4
        lane.timeout = 1.0
        if group.rank == 0:
            trouble.departure.pads.words[16 * 2] = 4
        elif group.rank == 1:
            trouble.departure.touch(event)
        sync()
        if group.rank == 0:
            assert look(0.0) and look(2.0)
            assert trouble.error is None and trouble._users == [1]
            assert trouble.departure.pads.missing(4) == [], "its streams go on"
        sync()
        if group.rank == 1:
            assert look(0.0) and not trouble.departure.has_left
            event.passed = True
            look(0.1)
            assert trouble.departure.has_left
        sync()
        if group.rank == 0:
            assert not look(3.0)
            assert isinstance(trouble.error, errors.DeadlineError) and group.failure is trouble.error
            with pytest.raises(errors.DeadlineError):
                trouble.look()
            with pytest.raises(errors.GroupUnusableError):
                trouble.look()
        sync()

    run_troubled(rank_main, monkeypatch)


def test_a_caller_is_told_once_its_own_works_have_ended(monkeypatch: pytest.MonkeyPatch):
    """They have a stream of their own, behind which nothing of the caller's is."""
    monkeypatch.setattr(trouble_module, "LEAVE_S", 1000.0)

    def rank_main(group: Any, trouble: Trouble, sync: Any) -> None:
        event = Event()
        work = work_behind(trouble, event)
        sync()
        if group.rank == 0:
            group.abort()
            assert trouble.watch.look(0.0) and trouble.error is None
            event.passed = True
            trouble.watch.look(0.1)
            assert isinstance(trouble.error, errors.GroupUnusableError) and work.exception() is trouble.error
        sync()

    run_troubled(rank_main, monkeypatch)


def test_a_caller_does_not_wait_for_ever_for_its_tensors(monkeypatch: pytest.MonkeyPatch):
    def rank_main(group: Any, trouble: Trouble, sync: Any) -> None:
        lane = trouble.watch.lane
        lane.shown = lane._meetings.count = 4
        lane.timeout = 1.0
        if group.rank == 0:
            trouble.watch.look(0.0)
            trouble.watch.look(2.0)
            assert trouble.error is None
            trouble.watch.look(2.0 + trouble_module.LEAVE_S)
            assert isinstance(trouble.error, errors.DeadlineError)
        sync()

    run_troubled(rank_main, monkeypatch)


def test_a_failure_that_nobody_can_word_is_no_success(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trouble_module, "TOLD_S", 0.05)
    monkeypatch.setattr(Watch, "wake", lambda watch: None)

    def rank_main(group: Any, trouble: Trouble, sync: Any) -> None:
        event = Event()
        work = work_behind(trouble, event)
        sync()
        if group.rank == 0:
            group.abort()
        sync()
        event.passed = True
        assert not work.is_success() and isinstance(work.exception(), errors.GroupUnusableError)

    run_troubled(rank_main, monkeypatch)


def test_a_wait_that_cannot_be_released_does_not_end_the_watch():
    watch, judge, pads, meetings, _ = make_watch([1])
    meetings.count = 1
    missing: list[int] = [1]

    def broken(ranks: list[int]) -> None:
        raise RuntimeError("CUDA error")

    watch._items.append(Outstanding("receive", lambda: missing, broken, 0.0, 9.0))
    judge.settles = True
    assert watch.look(0.1) and pads.words == [0, 1, 1]


def test_a_rank_that_left_in_peace_is_no_failure(monkeypatch: pytest.MonkeyPatch):
    def rank_main(group: Any, trouble: Trouble, sync: Any) -> None:
        event = Event()
        work = work_behind(trouble, event)
        sync()
        group.destroy()
        sync()
        event.passed = True
        assert work.is_success() and trouble.found() is None

    run_troubled(rank_main, monkeypatch)


# --- memory that peers can open -----------------------------------------------------------------------------------


class Streams:
    """Streams that come as far as ``passed`` says; events are marks in them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.current, self.passed, self._addresses = 0, {0: True, 1: True, 2: True}, itertools.count(1 << 30, 1 << 30)
        monkeypatch.setattr(pool_module, "_current_stream", lambda device: self.current)
        monkeypatch.setattr(pool_module, "driver", lambda: self)
        monkeypatch.setattr(Pool, "_mark", lambda pool, stream: SimpleNamespace(query=lambda: self.passed[stream]))

    def enter(self, device: int) -> None:
        pass

    def allocate(self, nbytes: int) -> int:
        return next(self._addresses)


@pytest.mark.parametrize("used", ["allocated", "dropped", "added"])
def test_a_freed_piece_cools_on_the_streams_that_used_it(monkeypatch: pytest.MonkeyPatch, used: str):
    streams = Streams(monkeypatch)
    pool = Pool(0)
    streams.current = 1 if used == "allocated" else 0
    piece = pool.allocate(1000)
    address = piece.address
    if used == "added":
        piece.streams.add(1)
    streams.current, streams.passed[1] = 1 if used == "dropped" else 0, False
    del piece
    streams.current = 2
    others = [pool.allocate(1000) for _ in range(3)]
    assert address not in [other.address for other in others]
    del others[0]
    streams.passed[1] = True
    assert pool.allocate(1000).address == address


def test_a_stream_that_is_stuck_keeps_back_only_what_it_used(monkeypatch: pytest.MonkeyPatch):
    streams = Streams(monkeypatch)
    pool = Pool(0)
    stuck, other = pool.allocate(1000), pool.allocate(1000)
    stuck.streams.add(1)
    address, streams.passed[1] = other.address, False
    del stuck
    kept = [pool.allocate(1000)]
    del other
    kept += [pool.allocate(1000)]
    assert address in [piece.address for piece in kept]


def test_memory_that_peers_use_is_held(monkeypatch: pytest.MonkeyPatch):
    Streams(monkeypatch)
    pool, free = Pool(0), [False]
    pieces = [pool.allocate(1000)]
    address = pieces[0].address
    hold(pieces, lambda: free[0])
    del pieces
    assert pool.allocate(1000).address != address
    free[0] = True
    assert pool.allocate(1000).address == address
