"""Facts about a process from ``/proc``; empty if it is gone or we may not inspect it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Any


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the name."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def process_state(pid: int) -> str:
    """The kernel's letter for its state: "T" is stopped, "Z" a zombie; "": there is no such process."""
    return next(iter(_stat(pid)), "")


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    return process_state(pid) not in ("", "Z", "X")


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    items = raw.decode(errors="replace").split("\0")
    return {name: value for name, found, value in (item.partition("=") for item in items) if found}


def _status(pid: int, name: str) -> list[int]:
    """The numbers in a line of ``/proc/PID/status``."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return [int(number) for number in line.split()[1:]]
    return []


def numbers_of(pid: int) -> list[int]:
    """The pid of a process here and in the namespaces of its containers."""
    return _status(pid, "NSpid") or [pid]


def user_of(pid: int) -> int | None:
    """The user id of a process. (The owner of ``/proc/PID`` is root for some processes of other users.)"""
    return next(iter(_status(pid, "Uid")), None)


def open_file(path: str, **where: Any) -> int:
    """A descriptor to read a file, which must be plain: this follows no link, and waits for no pipe or device.

    Links under ``/proc/PID/fd`` lead to the file itself, not to its name, so it may open these."""
    follow = 0 if path.startswith("/proc/") else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | follow, **where)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", path)
    return descriptor


def ancestors_of(pid: int) -> set[int]:
    """The ancestors of ``pid``."""
    found: set[int] = set()
    while pid > 1 and (fields := _stat(pid)):
        pid = int(fields[1])
        found.add(pid)
    return found


def command_of(pid: int) -> str:
    """The script's name, or the program's."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return ""
    if any("multiprocessing" in word for word in words):  # a child of spawn(): its parent has the name
        parent = int(next(iter(_stat(pid)[1:]), 0))
        return command_of(parent) if parent > 1 else "python"
    script = next((w for w in words[1:] if w.endswith(".py")), "")
    module = next((words[i + 1] for i, w in enumerate(words[:-1]) if w == "-m"), "")
    return os.path.basename(script) or module or os.path.basename(words[0])
