"""spawn(): results, errors, deadlines; processes and threads alike. And nothing left when it returns."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import symcomm
from symcomm import errors
from symcomm.group import spawn as spawn_module
from symcomm.group.process_group import ProcessGroup
from symcomm.memory import arena
from symcomm.observe.recorder.processes import is_running
from symcomm.store import FileStore
from tests.support.ranks import until

pytestmark = pytest.mark.long

MODES = ["threads", "processes"]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.glob("symcomm-*")) == []
    assert os.listdir(os.environ["SYMCOMM_SHM_DIR"]) == []
    assert multiprocessing.active_children() == []


def add_up(g: ProcessGroup, start: float, step: float) -> tuple[int, float]:
    t = np.array([start + step * g.rank])
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


def test_threads_give_back_what_they_took():
    def held() -> tuple[int, int, int]:
        gc.collect()
        pages = sum(os.stat(path).st_blocks for path in memory_files())
        return len(os.listdir("/proc/self/fd")), pages, len(os.listdir("/proc/self/task"))

    def memory_files() -> list[str]:
        paths = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
        return [p for p in paths if os.path.lexists(p) and "memfd" in os.readlink(p)]

    def work(g: ProcessGroup) -> None:
        team = g.split(0)
        team.all_reduce(np.ones(100_000), async_op=True).wait()
        team.isend(np.ones(3), g.rank)
        team.recv(np.ones(3), g.rank)

    symcomm.spawn(work, 3, mode="threads", deadline=20)
    before = held()
    for _ in range(5):
        symcomm.spawn(work, 3, mode="threads", deadline=20)
    assert held()[:2] == before[:2]
    assert until(lambda: held()[2] <= before[2])  # one that was joined is there for a moment longer


def test_a_symmetric_tensor_outlives_its_threads():
    def make(g: ProcessGroup) -> np.ndarray:
        t = np.frombuffer(g.arena.buffer(4000), dtype=np.float32)
        t.fill(1.0)
        g.all_reduce(t)
        return t

    kept = symcomm.spawn(make, 2, mode="threads", deadline=20)
    symcomm.spawn(make, 2, mode="threads", deadline=20)
    assert all(set(t.tolist()) == {2.0} for t in kept)


def test_a_group_that_outlives_its_threads_refuses():
    groups = symcomm.spawn(lambda g: g, 2, mode="threads", deadline=20)
    for group in groups:
        with pytest.raises(errors.GroupUnusableError, match="was destroyed"):
            group.barrier()
        with pytest.raises(errors.GroupUnusableError, match="was destroyed"):
            group.send(np.ones(1), 0)


def test_a_thread_rank_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object) -> None:
        raise errors.ResourceError("symmetric memory: none left.")

    monkeypatch.setattr(arena.native, "life_start", refuse)
    with pytest.raises(errors.ResourceError, match="none left"):
        symcomm.spawn(lambda g: None, 2, mode="threads", deadline=20)


def test_a_script_that_calls_spawn_when_it_is_imported(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import symcomm\ndef work(group): return 1\nsymcomm.spawn(work, 2, deadline=50)\n")
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert "put it under `if __name__ == '__main__':`, or use mode='threads'." in out.stderr
    assert re.search(r"RankFailedError: rank [01] exited with code 1; what it printed says why", out.stderr), out.stderr


ORPHANS = """
import os, sys, threading, time
import symcomm

def work(group, folder):
    group.barrier()
    with open(os.path.join(folder, f"pid-{group.rank}.part"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, file.name.removesuffix(".part"))
    time.sleep(300)

def start():
    symcomm.spawn(work, 2, (sys.argv[1],))

if __name__ == "__main__":
    if sys.argv[2] == "main":
        start()
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
"""


def pids_of_ranks(folder: Path) -> list[int]:
    paths = [folder / f"pid-{rank}" for rank in range(2)]
    end = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, "the ranks did not start"
        time.sleep(0.02)
    return [int(path.read_text()) for path in paths]


@pytest.mark.parametrize("thread", ["main", "other"])
def test_ranks_end_with_a_parent_that_was_killed(tmp_path: Path, thread: str):
    """And nothing of theirs stays in the file system."""
    script, temporary, told = tmp_path / "script.py", tmp_path / "tmp", tmp_path / "told"
    temporary.mkdir()
    told.mkdir()
    script.write_text(ORPHANS)
    environment = {**os.environ, "TMPDIR": str(temporary)}
    parent = subprocess.Popen([sys.executable, str(script), str(told), thread], env=environment)
    try:
        pids = pids_of_ranks(told)
        assert all(is_running(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
    end = time.monotonic() + 20
    while any(is_running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert [pid for pid in pids if is_running(pid)] == []
    assert [path for path in temporary.rglob("*") if "symcomm" in str(path.relative_to(temporary))] == []


@pytest.mark.parametrize("refused", [False, True])
def test_ranks_meet_in_a_file_without_a_name(monkeypatch: pytest.MonkeyPatch, refused: bool):
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if refused:
        monkeypatch.setattr(os, "memfd_create", refuse)
    file = spawn_module._SharedFile(spawn_module._nameless_file())
    one, other = FileStore(file.path, 2), FileStore(file.path, 2).clone()
    one.set("key", "value")
    assert other.get("key") == b"value" and os.fstat(file.descriptor).st_nlink == 0
    os.close(file.descriptor)
    other.set("key", "changed")
    assert one.get("key") == b"changed"
