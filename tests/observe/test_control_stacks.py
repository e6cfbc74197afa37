"""Asking another user's processes for their stacks, as root: nothing that user prepared is followed or trusted."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from symcomm.observe.recorder import dump
from symcomm.observe.recorder.stacks import Frame, ThreadStack
from symcomm.observe.recorder.trace import RankTrace
from symcomm.observe.top import ask, jobs

pytestmark = pytest.mark.without_torch

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")
STACKS = [ThreadStack("MainThread", True, (Frame("train.py", 7, "step"),))]


@pytest.fixture
def user(tmp_path: Path) -> Iterator[int]:
    """The pid of a process of user "nobody"."""
    pid = os.fork()
    if pid == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That user's folder of dumps, which the environment of its process names."""
    path = tmp_path / "dumps"
    monkeypatch.setattr(ask, "environment_of", lambda pid: {"SYMCOMM_TRACE_DIR": str(path)})
    return path


def own(path: Path, uid: int = NOBODY) -> Path:
    os.chown(path, uid, uid, follow_symlinks=False)
    return path


def asked(user: int, seconds: float = 0.3) -> dict:
    begun = time.monotonic()
    found = ask.ask_stacks({3: user}, seconds)
    assert time.monotonic() - begun < seconds + 30  # it does not wait for ever
    return found


@as_root
def test_an_honest_process_of_another_user_is_asked(user, folder):
    folder.mkdir()
    own(folder)
    question = folder / dump.ask_name(user)

    def answer() -> None:
        while not question.exists():
            time.sleep(0.005)
        path = dump.write(RankTrace(3, user, stacks=STACKS), str(folder / dump.answer_name(user, 3)))
        own(Path(path))
        question.unlink()

    thread = threading.Thread(target=answer)
    thread.start()
    assert asked(user, 10.0) == {3: STACKS}
    thread.join(10)
    assert list(folder.iterdir()) == [], "nothing of it stays"


@as_root
def test_a_question_is_not_written_through_a_link(user, folder, tmp_path):
    folder.mkdir()
    victim = tmp_path / "victim"
    (folder / dump.ask_name(user)).symlink_to(victim)
    own(folder / dump.ask_name(user))
    own(folder)
    assert asked(user) == {3: []}
    assert not victim.exists()


@as_root
@pytest.mark.parametrize("way", ["link", "plain", "missing"])
def test_nothing_is_made_in_folders_of_others(user, folder, tmp_path, way):
    ours = tmp_path / "ours"
    ours.mkdir()
    if way == "link":
        folder.symlink_to(ours)
        own(folder)
    elif way == "plain":
        folder.mkdir()
    assert asked(user) == {3: []}
    assert list(ours.iterdir()) == []
    assert way != "missing" or not folder.exists()
    assert way != "plain" or list(folder.iterdir()) == []


@as_root
@pytest.mark.parametrize("kind", ["link", "hard link", "fifo", "folder", "huge"])
def test_an_answer_must_be_a_file_of_the_process_itself(user, folder, tmp_path, kind):
    folder.mkdir()
    answer, secret = folder / dump.answer_name(user, 3), tmp_path / "secret"
    dump.write(RankTrace(3, user, stacks=STACKS), str(secret))
    if kind == "link":
        answer.symlink_to(secret)
    elif kind == "hard link":
        os.link(secret, answer)
    elif kind == "fifo":
        os.mkfifo(answer)
    elif kind == "folder":
        answer.mkdir()
    else:
        answer.touch()
        os.truncate(answer, 1 << 40)
    if kind != "hard link":
        own(answer)
    own(folder)
    assert asked(user) == {3: []}
    assert secret.exists() and os.stat(secret).st_uid == 0


def test_only_files_are_opened_as_arenas(tmp_path):
    """What a descriptor of another process is may change between two looks at it."""
    name = f"symcomm-{'0' * 32}"
    os.mkfifo(tmp_path / name)
    holder = os.open(tmp_path / name, os.O_RDWR)
    try:
        begun = time.monotonic()
        assert jobs.arenas_of(os.getpid()).count(f"/proc/{os.getpid()}/fd/{holder}") == 0
        assert time.monotonic() - begun < 30  # it does not wait for ever
    finally:
        os.close(holder)
