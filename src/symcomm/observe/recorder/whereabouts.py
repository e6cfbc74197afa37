"""Where ranks are in their programs, asked through their arenas: without a server, a folder, or leave to trace them.

Whoever has mapped a rank's arena asks by raising a number in it. A thread of the C core notices that, whatever the
program does, and calls ``answer`` as soon as it gets the interpreter lock (``_core/observe/whereabouts.c``).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import stat
import struct
import time
from collections.abc import Mapping
from typing import Any

from symcomm._core import native
from symcomm.memory.arena import own_arena_at, whereabouts_at
from symcomm.memory.heap import PAGE
from symcomm.observe.recorder.processes import user_of
from symcomm.observe.recorder.stacks import ThreadStack, thread_stacks, where

LOOK = 0.002  # seconds between two looks for answers
_HEAD, _NUMBER = struct.Struct("<4I"), struct.Struct("<I")  # struct whereabouts, and its first word
FEWEST_FRAMES = 8  # of a thread, where there is no room for all


def answer(place: int) -> bytes:
    """The stacks of this process, those of the asked rank's thread first; as many frames as there is room for."""
    arena = own_arena_at(place)
    if arena is None:
        return b"[]"
    told = [stack.to_dict() for stack in thread_stacks(arena.thread)]
    frames = max((len(stack["frames"]) for stack in told), default=0)
    while True:
        text = json.dumps(told, separators=(",", ":")).encode()
        if len(text) <= native.WHEREABOUTS_TEXT:
            return text
        if frames > FEWEST_FRAMES:
            frames = max(FEWEST_FRAMES, frames // 2)
            told = [{**stack, "frames": stack["frames"][:frames]} for stack in told]
        else:
            told.pop()


def place_of(thread: int) -> str:
    """The innermost frame of the program in a thread of this process."""
    frame = where(thread_stacks(thread))
    return "" if frame is None else str(frame)


class Question:
    """To one rank, whose owner is asked at ``place``."""

    def __init__(self, place: int):
        self._place, self._number = place, native.ask_whereabouts(place)

    def answer(self) -> list[ThreadStack] | None:
        """Its stacks; None: it has not answered yet."""
        text = native.read_whereabouts(self._place, self._number)
        return None if text is None else _parsed(text)


def _parsed(text: bytes) -> list[ThreadStack]:
    """Another process wrote it, maybe another user's, so anything malformed counts as no answer."""
    try:
        facts: Any = json.loads(text)
        stacks = [ThreadStack.from_dict(one) for one in facts]
        known = all(type(f.line) is int and type(f.file) is type(f.function) is str for s in stacks for f in s.frames)
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return stacks if known else []


class QuestionThroughFile:
    """To the rank whose arena is open in process ``pid`` as ``path``, by a process that is no rank.

    Its memory is touched by system calls only: whoever owns the file may shorten it at any time."""

    def __init__(self, path: str, pid: int):
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            facts = os.fstat(self._file)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != user_of(pid):
                raise PermissionError(errno.EPERM, "not an arena of that process's user", path)
            self._start = whereabouts_at(os.pread(self._file, 16, PAGE))
            if facts.st_size < self._start + native.WHEREABOUTS_BYTES:
                raise OSError(errno.EINVAL, "not an arena", path)
            self._number = (_HEAD.unpack(self._read(0, _HEAD.size))[0] + 1) & 0xFFFFFFFF
            os.pwrite(self._file, _NUMBER.pack(self._number), self._start)
            offset = self._start % mmap.ALLOCATIONGRANULARITY
            with contextlib.closing(mmap.mmap(self._file, offset + _HEAD.size, offset=self._start - offset)) as mapped:
                view: Any = ctypes.c_char.from_buffer(mapped, offset)
                native.wake_whereabouts(ctypes.addressof(view))
                del view
        except BaseException:
            os.close(self._file)
            raise

    def _read(self, place: int, length: int) -> bytes:
        return os.pread(self._file, length, self._start + place).ljust(length, b"\0")

    def answer(self) -> list[ThreadStack] | None:
        _, answered, version, length = _HEAD.unpack(head := self._read(0, _HEAD.size))
        late = (answered - self._number) & 0x80000000
        if late or version & 1 or length > native.WHEREABOUTS_TEXT:
            return None
        text = self._read(_HEAD.size, length)
        return _parsed(text) if self._read(4, 12) == head[4:] else None

    def close(self) -> None:
        os.close(self._file)


def await_answers(questions: Mapping[int, QuestionThroughFile], seconds: float) -> dict[int, list[ThreadStack]]:
    """The answers, by rank; ``[]``: none came."""
    found: dict[int, list[ThreadStack]] = {rank: [] for rank in questions}
    waiting = list(questions)
    end = time.monotonic() + seconds
    while waiting and time.monotonic() < end:
        found |= {rank: questions[rank].answer() or [] for rank in waiting}
        waiting = [rank for rank in waiting if not found[rank]]
        if waiting:
            time.sleep(LOOK)
    return found
