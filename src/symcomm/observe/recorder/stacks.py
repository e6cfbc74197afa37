"""The Python stacks of all threads of this process, and the frames worth showing."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import threading
from dataclasses import asdict, dataclass
from typing import Any

from symcomm.errors import notebook_cells
from symcomm.group.failure import PACKAGE

FRAMES = 60  # of a stack, the innermost ones
STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
INSTALLED = re.compile(r"/lib(64)?/python3\.\d+/|/(site|dist)-packages/")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{short_path(self.file)}:{self.line} in {self.function}"


@dataclass(frozen=True)
class ThreadStack:
    """One thread's frames, innermost first. ``is_rank`` marks the thread that made the rank's first group."""

    name: str
    is_rank: bool
    frames: tuple[Frame, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> ThreadStack:
        return cls(facts["name"], facts["is_rank"], tuple(Frame(**frame) for frame in facts["frames"]))


def thread_stacks(rank_thread: int | None = None) -> list[ThreadStack]:
    """The stacks of all threads, the rank's first. ``rank_thread`` is its ident; None: the main thread."""
    if rank_thread is None:
        rank_thread = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks, cells = [], notebook_cells()
    for ident, innermost in sys._current_frames().items():
        frames: list[Frame] = []
        frame: Any = innermost
        while frame is not None and len(frames) < FRAMES:
            file = frame.f_code.co_filename
            frames.append(Frame(cells.get(file, file), frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        stacks.append(ThreadStack(names.get(ident, f"thread {ident}"), ident == rank_thread, tuple(frames)))
    return sorted(stacks, key=lambda stack: not stack.is_rank)


def short_path(file: str) -> str:
    """Relative to the working directory if below it, else only the file's name."""
    try:
        near = os.path.relpath(file)
    except (OSError, ValueError):  # the working directory may be gone
        return os.path.basename(file)
    return os.path.basename(file) if near.startswith("..") else near


def short_site(site: str) -> str:
    file, _, line = site.rpartition(":")
    return f"{short_path(file)}:{line}" if file else site


def where(stacks: list[ThreadStack]) -> Frame | None:
    """The innermost frame of the program itself, in the rank's thread; of a library if there is no such frame."""
    frames = next((stack.frames for stack in stacks if stack.is_rank), ())
    own = (frame for frame in frames if not _is_library(frame.file))
    return next(own, frames[0] if frames else None)


def _is_library(file: str) -> bool:
    """Whether a file is ours, Python's own or installed, even if the dump is from another machine."""
    return file.startswith((PACKAGE, STANDARD, "<frozen")) or INSTALLED.search(file) is not None
