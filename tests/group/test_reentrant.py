"""Signal handlers, finalizers and observers that call us while their own thread is in the middle of a call of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import symcomm
from symcomm import errors
from symcomm.group import hooks, local
from symcomm.group.buffers import Buffer
from symcomm.group.executor import LocalExecutor
from symcomm.group.factory import make_group
from symcomm.group.p2p import MessageWork
from symcomm.group.work import Work
from symcomm.memory import arena as arenas
from symcomm.memory.heap import Heap
from symcomm.store import FileStore, TCPStore, file_formats

pytestmark = pytest.mark.timeout(60, method="thread")


@contextmanager
def on_signal(handler: Callable[[], None], after: float = 0.2) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


# --- stores -----------------------------------------------------------------------------------------


def test_a_signal_handler_calls_the_store_that_its_thread_waits_in() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store.set("value", "1")
    seen = []

    def handler() -> None:
        seen.append(store.get("value"))
        store.wait(["value"])
        store.set("awaited", "2")

    with on_signal(handler):
        assert store.get("awaited") == b"2"
    assert seen == [b"1"] and store.get("value") == b"1"


def test_a_file_store_is_collected_while_its_thread_holds_the_files_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "store")
    one, other = FileStore(path, 2), FileStore(path, 2)
    encode = file_formats.FRAMES.encode
    gone: list[Any] = [other]

    def collecting(*args: Any) -> bytes:
        gone.clear()
        return encode(*args)

    monkeypatch.setattr(file_formats.FRAMES, "encode", collecting)
    del other
    one.set("key", "value")
    assert one.get("key") == b"value" and one._log.table.closed_stores == 1
    del one
    assert not os.path.exists(path)


def test_a_file_store_called_within_its_own_call_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(str(tmp_path / "store"), 1)
    twin = store.clone()
    encode = file_formats.FRAMES.encode

    def calling(*args: Any) -> bytes:
        for one in (store, twin):
            with pytest.raises(errors.CallerError, match="called by a signal handler"):
                one.set("inner", "value")
        return encode(*args)

    monkeypatch.setattr(file_formats.FRAMES, "encode", calling)
    store.set("outer", "value")
    assert store.list_keys() == ["outer"]


# --- groups -----------------------------------------------------------------------------------------


def test_asynchronous_calls_within_asynchronous_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may come while works are looked through; its handler starts works of the same group."""
    inner: list[Any] = []
    mine, is_completed = torch.ones(2), Work.is_completed

    def interrupt(executor: Any) -> None:
        if not inner and vars(executor).get("works"):
            inner.append(None)
            inner[0] = group.all_reduce(mine, async_op=True)

    class Interrupted(LocalExecutor):
        @property
        def pending(self) -> list[Work]:
            interrupt(self)
            return vars(self)["works"]

        @pending.setter
        def pending(self, works: list[Work]) -> None:
            interrupt(self)
            vars(self)["works"] = works

    def interrupted(work: Any) -> bool:
        interrupt(group.executor)
        return is_completed(work)

    monkeypatch.setattr(Work, "is_completed", interrupted)
    monkeypatch.setattr(local, "LocalExecutor", Interrupted)
    group, theirs = make_group(0, 1, lambda item: [item]), torch.ones(2)
    works = [group.all_reduce(theirs, op="avg", async_op=True) for _ in range(2)]
    for work in works + inner:
        work.wait()
    assert inner and (mine + theirs).tolist() == [2.0, 2.0]
    group.destroy()


def test_an_operation_within_the_copying_of_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for its turn behind the core's thread, which must not wait for the copying."""
    group, finish = make_group(0, 1, lambda item: [item]), Buffer.finish
    copying, inner = threading.Event(), []

    def interrupted(buffer: Buffer) -> None:
        if threading.current_thread() is threading.main_thread() and not inner:
            inner.append(True)
            copying.set()
            time.sleep(0.1)
            group.all_reduce(torch.ones(1))
        finish(buffer)

    copy_out = Work.copy_out_in_core

    def late(work: Work, status: int) -> None:
        copying.wait(10)
        copy_out(work, status)

    monkeypatch.setattr(Buffer, "finish", interrupted)
    monkeypatch.setattr(Work, "copy_out_in_core", late)
    group.all_reduce(torch.ones(4)[::2], async_op=True).wait()
    assert inner
    group.destroy()


def test_messages_within_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(group: Any) -> float:
        inner: list[Any] = []
        completed = MessageWork.is_completed

        def interrupted(work: Any) -> bool:
            if not inner and group.messages._keep_lock.locked():
                inner.append(group.isend(torch.full((1,), 7.0), 0, tag=9))
            return completed(work)

        monkeypatch.setattr(MessageWork, "is_completed", interrupted)
        group.messages._sweep_at = 1
        work = group.isend(torch.ones(1), 0)
        t = torch.zeros(1)
        group.recv(t, 0)
        work.wait()
        group.recv(t, 0, tag=9)
        return t.item()

    assert symcomm.spawn(rank, 1, mode="threads", deadline=20) == [7.0]


def test_who_is_told_of_a_failure_may_ask_about_the_work_and_leave() -> None:
    """Observers run where the failure is first seen: with outputs to copy that is the core's own thread."""
    asked: list[Any] = []

    def rank(group: Any) -> str:
        def observer(failed: Any, error: BaseException) -> None:
            if failed is group:
                asked.append(works[0].exception() is not None)
                group.destroy()

        works = []
        if group.rank == 1:
            time.sleep(0.3)
            return "left"
        hooks.on_failure.append(observer)
        try:
            works.append(group.all_reduce(torch.ones(4)[::2], async_op=True))
            with pytest.raises(errors.SymcommError):
                works[0].wait()
        finally:
            hooks.on_failure.remove(observer)
        return "told"

    for _ in range(5):
        assert symcomm.spawn(rank, 2, mode="threads", deadline=20) == ["told", "left"]
    assert asked == [True] * 5


# --- arenas -----------------------------------------------------------------------------------------


def test_a_signal_comes_while_a_thread_looks_for_its_arena() -> None:
    mine = arenas.current_arena()
    with arenas._arena_lock:
        assert arenas.current_arena() is mine


def test_memory_asked_for_while_memory_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = arenas.Arena()
    find = Heap.allocate

    def interrupted(heap: Heap, nbytes: int) -> int | None:
        with pytest.raises(errors.CallerError, match="by a signal handler"):
            arena.allocate(64)
        return find(heap, nbytes)

    monkeypatch.setattr(Heap, "allocate", interrupted)
    arena.free(arena.allocate(64))
    assert arena.used_bytes == 0


def test_a_child_forked_by_a_rank_that_is_a_thread_has_memory_of_its_own() -> None:
    def rank(group: Any) -> int:
        arena = arenas.current_arena()
        pid = os.fork()
        if pid == 0:
            os._exit(arenas.current_arena() is arena)
        return os.waitpid(pid, 0)[1]

    assert symcomm.spawn(rank, 1, mode="threads", deadline=20) == [0]


def test_a_lock_that_another_thread_held_is_free_in_a_forked_child() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with arenas._arena_lock, arenas._peers_lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        arenas.current_arena()
        os._exit(0)
    done.set()
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0


# --- and threads ------------------------------------------------------------------------------------


def test_a_group_is_left_while_other_threads_start_operations() -> None:
    """Whatever was started is done or refused; nothing waits for a thread that has gone."""
    for _ in range(30):
        group = make_group(0, 1, lambda item: [item])
        group.all_reduce(torch.ones(2), async_op=True)
        ends: list[str] = []

        def use(group: Any = group, ends: list[str] = ends) -> None:
            try:
                while True:
                    group.all_reduce(torch.ones(2), async_op=True).wait(10)
            except errors.GroupUnusableError:
                ends.append("refused")

        threads = [threading.Thread(target=use) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.005)
        group.leave()
        for thread in threads:
            thread.join(20)
        assert ends == ["refused"] * 3


# --- when there is nothing left ---------------------------------------------------------------------


def _without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_callbacks_are_called_once_there_are_threads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(group: Any) -> list[str]:
        said: list[str] = []
        if group.rank == 1:
            group.recv(torch.ones(1), 0)
        works = [group.all_reduce(torch.ones(1), async_op=True) for _ in range(2)]
        if group.rank == 0:
            with monkeypatch.context() as patch:
                _without_threads(patch)
                with pytest.raises(errors.ResourceError, match="no thread could be started for callbacks of all_red"):
                    works[0].add_done_callback(lambda: said.append("refused"))
            called = threading.Event()
            works[1].add_done_callback(called.set)
            group.send(torch.ones(1), 1)
            said.append(str(called.wait(10)))
        for work in works:
            work.wait()
        return said

    assert symcomm.spawn(rank, 2, mode="threads", deadline=20) == [["True"], []]


def test_ranks_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_threads(monkeypatch)
    with pytest.raises(errors.ResourceError, match="no thread could be started for 2 ranks .* limit on threads"):
        symcomm.spawn(lambda group: None, 2, mode="threads")


@pytest.mark.parametrize(
    "limit, code",
    [
        ("open files", "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (3, 3))"),
        ("size of files", "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (4096, 4096))"),
        ("SYMCOMM_SHM_DIR", "import os; os.environ.update(SYMCOMM_SHARE='named', SYMCOMM_SHM_DIR='/nowhere')"),
    ],
)
def test_memory_that_cannot_be_made(limit: str, code: str) -> None:
    code = f"from symcomm.memory.arena import current_arena, named_directory\n{code}\ncurrent_arena()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert "ResourceError: symmetric memory: none can be made" in done.stderr and limit in done.stderr
