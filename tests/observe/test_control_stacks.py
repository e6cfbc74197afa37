"""Asking another user's processes for their stacks, as root: what that user prepared is not trusted."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from symcomm._core import native
from symcomm.memory.arena import Arena, use_arena
from symcomm.memory.flight import flight_bytes
from symcomm.memory.heap import PAGE
from symcomm.observe.recorder import whereabouts
from symcomm.observe.recorder.stacks import Frame, ThreadStack, where
from symcomm.observe.recorder.whereabouts import Question, answer
from symcomm.observe.top import ask, jobs

pytestmark = pytest.mark.without_torch

NOBODY = 65534
PLACE = PAGE + flight_bytes(0)
HEAD = struct.Struct("<4I")  # struct whereabouts: asked, answered, version, length
STACKS = [ThreadStack("MainThread", True, (Frame("train.py", 7, "step"),))]
as_root = pytest.mark.skipif(os.getuid() != 0, reason="giving a file away needs root")


@pytest.fixture
def arena(tmp_path: Path) -> Path:
    """What looks like an arena of this process, whose recorder has no entries."""
    path = tmp_path / f"symcomm-{'0' * 32}"
    path.write_bytes(b"")
    os.truncate(path, PLACE + native.WHEREABOUTS_BYTES)
    return path


def asked(arena: Path, seconds: float = 0.3) -> list[ThreadStack]:
    begun = time.monotonic()
    found = ask.ask_stacks({3: (os.getpid(), str(arena))}, seconds)
    assert time.monotonic() - begun < seconds + 30  # it does not wait for ever
    assert list(found) == [3]
    return found[3]


def write(arena: Path, text: bytes, answered: int = 1, version: int = 2, length: int | None = None) -> None:
    with open(arena, "r+b") as file:
        file.seek(PLACE)
        file.write(HEAD.pack(0, answered, version, len(text) if length is None else length) + text)


SAID = json.dumps([stack.to_dict() for stack in STACKS]).encode()


def test_an_answer(arena):
    write(arena, SAID)
    assert asked(arena) == STACKS
    assert HEAD.unpack(arena.read_bytes()[PLACE : PLACE + 16])[0] == 1, "the question was raised by one"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'[{"name": 1}]',
        b"[" * 5000,
        SAID.replace(b"7", b'"7"'),
        SAID.replace(b'"step"', b"{}"),
    ],
)
def test_an_answer_that_is_none(arena, text):
    write(arena, text)
    assert asked(arena) == []


def test_an_answer_to_an_earlier_question_does_not_count(arena):
    write(arena, SAID, answered=0)
    assert asked(arena) == []


def test_an_answer_that_is_being_written_does_not_count(arena):
    write(arena, SAID, version=3)
    assert asked(arena) == []
    write(arena, SAID, length=native.WHEREABOUTS_TEXT + 1)
    assert asked(arena) == []


def test_a_file_that_becomes_shorter_kills_nobody(arena, monkeypatch):
    real = native.wake_whereabouts

    def shorten(place: int) -> None:
        os.truncate(arena, 0)
        real(place)

    monkeypatch.setattr(native, "wake_whereabouts", shorten)
    assert asked(arena) == []


@as_root
@pytest.mark.parametrize("kind", ["other's", "short", "fifo", "missing"])
def test_nothing_is_written_into_what_is_no_arena_of_that_user(arena, kind):
    if kind == "other's":
        os.chown(arena, NOBODY, NOBODY)
    elif kind == "short":
        os.truncate(arena, PLACE)
    else:
        arena.unlink()
        if kind == "fifo":
            os.mkfifo(arena)
    before = arena.read_bytes() if kind in ("other's", "short") else b""
    assert asked(arena) == []
    assert before == (arena.read_bytes() if before else b"")


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


# --- the other end ---------------------------------------------------------------------------------------------------


@pytest.fixture
def rank() -> Iterator[Arena]:
    """The arena of a rank that is a thread."""
    arenas: list[Arena] = []
    ready, done = threading.Event(), threading.Event()

    def live_and_wait() -> None:
        use_arena(Arena())
        arenas.append(Arena())
        use_arena(arenas[0])
        ready.set()
        done.wait(60)

    thread = threading.Thread(target=live_and_wait, name="the-rank")
    thread.start()
    ready.wait(60)
    yield arenas.pop()
    done.set()
    thread.join(60)


def answered(question: Question) -> list[ThreadStack]:
    end = time.monotonic() + 30
    while (found := question.answer()) is None:
        assert time.monotonic() < end
        time.sleep(0.002)
    return found


def test_a_rank_answers_through_its_arena(rank):
    """Also many who ask at once; each gets a whole answer."""
    first = answered(Question(rank.peer.whereabouts))
    assert first[0].is_rank and first[0].name == "the-rank"
    assert where(first).function == "live_and_wait"
    wrong: list[object] = []

    def ask_often() -> None:
        for _ in range(50):
            if not (found := answered(Question(rank.peer.whereabouts))) or found[0].name != "the-rank":
                wrong.append(found)

    threads = [threading.Thread(target=ask_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_a_deep_stack_is_told_as_far_as_there_is_room(rank, monkeypatch):
    frames = tuple(Frame(f"{'x' * 200}.py", n, "f") for n in range(60))
    stacks = [ThreadStack(str(n), n == 0, frames) for n in range(9)]
    monkeypatch.setattr(whereabouts, "thread_stacks", lambda thread: stacks)
    text = answer(rank.peer.whereabouts)
    assert len(text) <= native.WHEREABOUTS_TEXT
    told = json.loads(text)
    assert told[0]["is_rank"] and [f["line"] for f in told[0]["frames"]] == list(range(len(told[0]["frames"])))
    assert len(told[0]["frames"]) >= whereabouts.FEWEST_FRAMES and len(told) >= 5


def test_nobody_is_asked_at_a_place_that_is_no_ranks():
    assert answer(ctypes.addressof(ctypes.c_int())) == b"[]"


def test_arenas_that_end_while_they_are_asked():
    """Each is asked and dropped at once: the answer finds nothing to write to, and nothing is kept."""
    before = threading.active_count()
    for _ in range(100):
        arena = Arena()
        native.ask_whereabouts(arena.peer.whereabouts)
        del arena
    end = time.monotonic() + 30
    while len(list(Path("/proc/self/task").iterdir())) > 40 and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before
