"""Failures on a GPU, where there is none: the watchdog, what ranks tell each other, memory that peers may still use."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from symcomm import errors
from symcomm.cuda import failure as failure_module
from symcomm.cuda import flag_words as flag_words_module
from symcomm.cuda import pool as pool_module
from symcomm.cuda.failure import CudaFailures, explain_cuda_errors
from symcomm.cuda.flag_words import FlagWords, flag_words_bytes, is_behind
from symcomm.cuda.pool import Pool, hold
from symcomm.cuda.watchdog import CollectiveSequence, Outstanding, Watchdog
from symcomm.cuda.work import CudaWork

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch_versions

# --- the watchdog -------------------------------------------------------------------------------------------------


class FakeFlagWords:
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


class FakeBarriers:
    count = 0


class FakeHandler:
    """Whoever is told: every rank knows of a failure before a wait is released."""

    def __init__(self, gone: list[int], flag_words: FakeFlagWords):
        self.gone_ranks, self._flag_words = gone, flag_words
        self.told: list[Any] = []
        self.failed_elsewhere = self.settles = self.busy = False

    def gone(self) -> list[int]:
        return self.gone_ranks

    def has_failed(self) -> bool:
        return self.failed_elsewhere

    def fail(self, item: Any, ranks: list[int], died: bool) -> None:
        self.told.append((item.what, ranks, died))
        self._flag_words.stopped = True

    def learn(self) -> None:
        self.told.append("learned")
        self._flag_words.stopped = True

    def settle(self, now: float) -> bool:
        return self.settles

    def is_busy(self) -> bool:
        return self.busy


def make_watchdog(gone: list[int]) -> tuple[Watchdog, FakeHandler, FakeFlagWords, FakeBarriers, list[Any]]:
    flag_words, barriers = FakeFlagWords(), FakeBarriers()
    handler = FakeHandler(gone, flag_words)
    watchdog = Watchdog(handler)
    sequence = watchdog.sequence = CollectiveSequence(flag_words, barriers)
    told = handler.told
    sequence.what, sequence.timeout = "all_reduce", 5.0
    return watchdog, handler, flag_words, barriers, told


def test_the_watch_ends_a_wait_for_a_dead_rank():
    gone: list[int] = []
    watchdog, _, flag_words, barriers, told = make_watchdog(gone)
    assert not watchdog.poll(0.0)
    barriers.count = 4
    flag_words.words = [0, 4, 3]
    assert watchdog.poll(1.0) and not told and not flag_words.stopped
    gone.append(2)
    watchdog.poll(1.1)
    assert told == [("all_reduce", [2], True)] and flag_words.words == [0, 4, 4] and flag_words.stopped
    barriers.count = 6  # what was already on its way: nobody is waited for any more
    watchdog.poll(1.2)
    assert flag_words.words == [0, 6, 6] and len(told) == 1


def test_the_watch_counts_from_the_last_progress():
    watchdog, _, flag_words, barriers, told = make_watchdog([])
    barriers.count = 2
    watchdog.poll(0.0)
    watchdog.poll(4.0)
    flag_words.words = [0, 1, 1]
    watchdog.poll(6.0)
    watchdog.poll(10.0)
    assert not told
    watchdog.poll(11.5)
    assert told == [("all_reduce", [1, 2], False)] and flag_words.words == [0, 2, 2]


def test_the_watch_looks_after_single_waits_too():
    watchdog, _, _, _, told = make_watchdog([1])
    missing, released = [1], []
    watchdog._items.append(Outstanding("receive", lambda: missing, lambda ranks: released.append(ranks), 0.0, 9.0))
    assert watchdog.poll(0.1) and told == [("receive", [1], True)] and released == [[1]]
    missing.clear()
    assert watchdog.poll(0.2) and not watchdog._items  # until tensors are their owners' again
    watchdog._handler.settles = True
    assert not watchdog.poll(0.3)


def test_the_watch_learns_of_failures_elsewhere():
    watchdog, handler, flag_words, barriers, told = make_watchdog([])
    barriers.count, handler.failed_elsewhere = 3, True
    assert watchdog.poll(0.0) and told == ["learned"] and flag_words.words == [0, 3, 3]
    handler.settles = True
    assert not watchdog.poll(0.1) and told == ["learned"]
    watchdog, handler, *_ = make_watchdog([])
    handler.busy = True
    assert watchdog.poll(0.0)  # it goes on looking while this rank uses the memory of others


# --- what ranks tell each other when one has failed -------------------------------------------------------------------


class Event:
    """Of a stream: ``passed`` when the GPU has come so far."""

    passed = False

    def query(self) -> bool:
        return self.passed


def make_flag_words(group: Any, words: Any, monkeypatch: pytest.MonkeyPatch) -> FlagWords:
    monkeypatch.setattr(flag_words_module, "register_with_gpu", lambda address, nbytes, owner: address)
    starts = [ctypes.addressof(words) + r * flag_words_bytes(group.size) for r in range(group.size)]
    return FlagWords(group.rank, group.size, starts, [None] * group.size)


def run_troubled(rank_main: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Three ranks, threads, each with a CudaFailures over flag words in host memory; ``rank_main(group, failures,
    sync)``."""
    import symcomm

    words = ctypes.create_string_buffer(3 * flag_words_bytes(3))
    meeting = threading.Barrier(3)

    def rank_of(group: Any) -> Any:
        failures = CudaFailures(group, 0)
        failures.departure.flag_words = make_flag_words(group, words, monkeypatch)
        barriers = FakeBarriers()
        failures.watchdog.sequence = CollectiveSequence(failures.departure.flag_words, barriers)
        failures.watchdog.sequence.what = "all_reduce"
        return rank_main(group, failures, lambda: meeting.wait(20))

    return symcomm.spawn(rank_of, 3, mode="threads", timeout=20, deadline=60)


def work_behind(failures: CudaFailures, event: Event) -> CudaWork:
    work = CudaWork(SimpleNamespace(failures=failures, name="g", device=0), "all_reduce", [], None)
    work.settle(None, event, None)
    failures.add(work)
    return work


@pytest.mark.parametrize("died", [False, True], ids=["late", "left"])
def test_what_the_gpu_ends_after_a_failure_is_no_result(monkeypatch: pytest.MonkeyPatch, died: bool):
    """Rank 0 fails. Rank 1's GPU is done with one work before that, with another one after it."""

    def rank_main(group: Any, failures: CudaFailures, sync: Any) -> Any:
        early, late = Event(), Event()
        works = [work_behind(failures, event) for event in (early, late)]
        early.passed = True
        if group.rank == 1:
            assert works[0].is_success() and not works[1].is_completed()
        sync()
        if group.rank == 2 and died:
            group.destroy()
        sync()
        if group.rank == 0:
            failures.fail(failures.watchdog.sequence, [2], died)
            assert failures.departure.flag_words.words[16 * 3] == 1, "kernels do not know"
        sync()
        if group.rank != 1:
            return None
        assert failures.departure.flag_words.words[16 * 3] == 1
        late.passed = True
        assert not works[1].is_success() and works[0].is_success()
        for ask in (works[1].synchronize, failures.raise_if_failed):
            with pytest.raises(errors.RankFailedError if died else errors.DeadlineError, match="rank 2") as caught:
                ask()
        with pytest.raises(errors.SymcommError):  # also later
            failures.raise_if_failed()
        return str(caught.value)

    said = run_troubled(rank_main, monkeypatch)[1]
    assert ("left the group" in said) if died else ("rank 0's deadline passed while it waited for rank 2" in said)


def test_a_caller_is_told_once_peers_have_left_its_tensors(monkeypatch: pytest.MonkeyPatch):
    """Rank 0 fails while rank 1 uses its tensor; rank 2 is past that."""
    monkeypatch.setattr(failure_module, "LEAVE_S", 1000.0)

    def rank_main(group: Any, failures: CudaFailures, sync: Any) -> None:
        sequence, event, look = failures.watchdog.sequence, Event(), failures.watchdog.poll
        sequence.last_in_place = sequence._barriers.count = 4
        sequence.timeout = 1.0
        if group.rank == 0:
            failures.departure.flag_words.words[16 * 2] = 4
        elif group.rank == 1:
            failures.departure.touch(event)
        sync()
        if group.rank == 0:
            assert look(0.0) and look(2.0)
            assert failures.error is None and failures._users == [1]
            assert failures.departure.flag_words.missing(4) == [], "its streams go on"
        sync()
        if group.rank == 1:
            assert look(0.0) and not failures.departure.has_left
            event.passed = True
            look(0.1)
            assert failures.departure.has_left
        sync()
        if group.rank == 0:
            assert not look(3.0)
            assert isinstance(failures.error, errors.DeadlineError) and str(group.failure) == str(failures.error)
            with pytest.raises(errors.DeadlineError):
                failures.raise_if_failed()
            with pytest.raises(errors.GroupUnusableError):
                failures.raise_if_failed()
        sync()

    run_troubled(rank_main, monkeypatch)


def test_a_caller_is_told_once_its_own_works_have_ended(monkeypatch: pytest.MonkeyPatch):
    """They have a stream of their own, behind which nothing of the caller's is."""
    monkeypatch.setattr(failure_module, "LEAVE_S", 1000.0)

    def rank_main(group: Any, failures: CudaFailures, sync: Any) -> None:
        event = Event()
        work = work_behind(failures, event)
        sync()
        if group.rank == 0:
            group.abort()
            assert failures.watchdog.poll(0.0) and failures.error is None
            event.passed = True
            failures.watchdog.poll(0.1)
            assert isinstance(failures.error, errors.GroupUnusableError) and work.exception() is failures.error
        sync()

    run_troubled(rank_main, monkeypatch)


class Waiting:
    """An event behind a wait for peers: it passes once none is missing."""

    def __init__(self, sequence: CollectiveSequence):
        self._sequence = sequence

    def query(self) -> bool:
        return not self._sequence.missing()


@pytest.mark.parametrize("missing", [2, 0], ids=["a peer's", "its own"])
def test_a_wait_that_gives_up_ends_what_the_gpu_waits_for(monkeypatch: pytest.MonkeyPatch, missing: int):
    """Rank 0 waits no longer for rank 2's GPU, or for its own."""
    monkeypatch.setattr(failure_module, "LEAVE_S", 0.3)

    def rank_main(group: Any, failures: CudaFailures, sync: Any) -> str:
        sequence = failures.watchdog.sequence
        sequence.timeout = 1000.0
        sequence._barriers.count = 4 if missing else 0
        failures.departure.flag_words.words[16 * 1] = 4
        work = work_behind(failures, Waiting(sequence) if missing else Event())
        behind = work_behind(failures, Event())
        sync()
        if group.rank == 0:
            with pytest.raises(errors.DeadlineError, match=f"GPU work of rank {missing} did not come") as caught:
                work.wait(0.05)
            assert caught.value.missing == [missing] and "group.shrink()" in str(caught.value)
            assert not work.is_success() and isinstance(behind.exception(), errors.DeadlineError)
        sync()
        said = str(failures.found())
        with pytest.raises(errors.SymcommError):  # the CPU's calls as well
            group.barrier()
        sync()
        return said

    ours, *others = run_troubled(rank_main, monkeypatch)
    assert "timed out on rank 0" in ours
    assert all(f"rank 0's deadline passed while it waited for rank {missing}" in said for said in others)


def test_a_wait_that_gives_up_before_the_hosts_have_met(monkeypatch: pytest.MonkeyPatch):
    def rank_main(group: Any, failures: CudaFailures, sync: Any) -> list[str]:
        if group.rank == 2:
            sync()
        met = group.barrier(async_op=True)
        work = CudaWork(SimpleNamespace(failures=failures, name="g", device=0), "all_reduce", [], None)
        work.request = met
        met.add_done_callback(lambda: work.settle(met.exception()))
        with pytest.raises(errors.SymcommError) as caught:
            work.wait(0.05 if group.rank == 0 else 20.0)
        if group.rank < 2:
            sync()
        return [type(caught.value).__name__, type(work.exception()).__name__]

    ours, *others = run_troubled(rank_main, monkeypatch)
    assert ours[0] == "DeadlineError" and all("Error" in name for names in others for name in names)


def test_an_error_of_the_cpu_waits_for_the_gpu_too(monkeypatch: pytest.MonkeyPatch):
    """Whatever raises, no tensor of the group's works is used any more."""
    monkeypatch.setattr(failure_module, "LEAVE_S", 1000.0)

    def rank_main(group: Any, failures: CudaFailures, sync: Any) -> None:
        event = Event()
        work = work_behind(failures, event)
        raised: list[BaseException] = []

        def call() -> None:
            try:
                group.barrier()
            except errors.SymcommError as error:
                raised.append(error)

        sync()
        if group.rank == 0:
            thread = threading.Thread(target=call)
            thread.start()
            time.sleep(0.1)
            group.abort()
            time.sleep(0.3)
            assert not raised
            event.passed = True
            thread.join(10)
            assert isinstance(raised[0], errors.GroupUnusableError) and work.exception() is not None
        event.passed = True
        sync()

    run_troubled(rank_main, monkeypatch)


def test_a_caller_does_not_wait_for_ever_for_its_tensors(monkeypatch: pytest.MonkeyPatch):
    def rank_main(group: Any, failures: CudaFailures, sync: Any) -> None:
        sequence = failures.watchdog.sequence
        sequence.last_in_place = sequence._barriers.count = 4
        sequence.timeout = 1.0
        if group.rank == 0:
            failures.watchdog.poll(0.0)
            failures.watchdog.poll(2.0)
            assert failures.error is None
            failures.watchdog.poll(2.0 + failure_module.LEAVE_S)
            assert isinstance(failures.error, errors.DeadlineError)
        sync()

    run_troubled(rank_main, monkeypatch)


def test_a_gpu_that_broke_because_a_rank_is_gone_says_so(monkeypatch: pytest.MonkeyPatch):
    class Broken(Event):
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def rank_main(group: Any, failures: CudaFailures, sync: Any) -> None:
        if group.rank == 0:
            work = work_behind(failures, Broken())
            with pytest.raises(RuntimeError, match="illegal memory access"):  # nobody is gone: it is CUDA's own
                work.wait(5.0)
        sync()
        if group.rank == 2:
            group.destroy()
        sync()
        if group.rank == 0:
            failures.watchdog.sequence._barriers.count = 1  # rank 2 is waited for
            with pytest.raises(errors.RankFailedError, match=r"rank 2 .pid \d+. left the group while the GPU waited"):
                work.wait(5.0)
        sync()

    run_troubled(rank_main, monkeypatch)


def test_a_gpu_that_breaks_in_a_call_names_the_dead_rank_though_nothing_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    class Caller:
        def __init__(self, failures: CudaFailures):
            self.failures = failures
            self.calls = 0

        @explain_cuda_errors
        def all_reduce(self) -> None:
            self.calls += 1
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def rank_main(group: Any, failures: CudaFailures, sync: Any) -> None:
        caller = Caller(failures)
        if group.rank == 0:
            with pytest.raises(RuntimeError, match="illegal memory access"):  # nobody is gone: it is CUDA's own
                caller.all_reduce()
        sync()
        if group.rank == 2:
            group.destroy()
        sync()
        if group.rank == 0:
            monkeypatch.setattr(failures.departure, "dead", lambda: {2})  # ranks that are threads can only leave
            with pytest.raises(errors.RankFailedError, match=r"all_reduce on cuda:0 .* rank 2 .* left the group"):
                caller.all_reduce()
            with pytest.raises(errors.GroupUnusableError, match="rank 2"):
                caller.all_reduce()
            assert caller.calls == 2  # a group that has failed is refused before CUDA is asked
        sync()

    run_troubled(rank_main, monkeypatch)


def test_a_failure_that_nobody_can_word_is_no_success(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(failure_module, "VERDICT_S", 0.05)
    monkeypatch.setattr(Watchdog, "wake", lambda watchdog: None)

    def rank_main(group: Any, failures: CudaFailures, sync: Any) -> None:
        event = Event()
        work = work_behind(failures, event)
        sync()
        if group.rank == 0:
            group.abort()
        sync()
        event.passed = True
        assert not work.is_success() and isinstance(work.exception(), errors.GroupUnusableError)

    run_troubled(rank_main, monkeypatch)


def test_a_wait_that_cannot_be_released_does_not_end_the_watch():
    watchdog, handler, flag_words, barriers, _ = make_watchdog([1])
    barriers.count = 1
    missing: list[int] = [1]

    def broken(ranks: list[int]) -> None:
        raise RuntimeError("CUDA error")

    watchdog._items.append(Outstanding("receive", lambda: missing, broken, 0.0, 9.0))
    handler.settles = True
    assert watchdog.poll(0.1) and flag_words.words == [0, 1, 1]


def test_a_rank_that_left_in_peace_is_no_failure(monkeypatch: pytest.MonkeyPatch):
    def rank_main(group: Any, failures: CudaFailures, sync: Any) -> None:
        event = Event()
        work = work_behind(failures, event)
        sync()
        group.destroy()
        sync()
        event.passed = True
        assert work.is_success() and failures.found() is None

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
