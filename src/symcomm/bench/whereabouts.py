"""Where the ranks of a benchmark are that do not answer: their Python stacks, or what the kernel says of them.

Ranks register ASK with faulthandler, which writes to the rank's log whatever the rank is doing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

ASK = signal.SIGUSR1
SLOW = 15.0  # seconds of silence before we mention it
ANSWER_S = 2.0  # for one rank to write its stack
MOST_LINES = 12  # the innermost frames of a stack


def where_are(pids: Mapping[str, int], log: Path) -> str:
    """One paragraph for each rank of ``pids`` (by its name), whose logs are all in ``log``."""
    return "\n".join(f"{name} (pid {pid}) {_where_is(pid, log)}" for name, pid in pids.items())


def family_of(pids: Iterable[int]) -> list[int]:
    """These processes and their children: ranks of an MPI are those of its launcher."""
    found: list[int] = []
    for pid in pids:
        children: list[int] = []
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(word) for word in file.read().split()]
        found += [pid, *family_of(children)]
    return found


def _where_is(pid: int, log: Path) -> str:
    facts = _facts(pid)
    state = facts.get("State", "").split()
    if not state or state[0] in "ZX":
        return "is gone"
    if state[0] in "Tt":
        return "is stopped (SIGSTOP, or a debugger)"
    if not int(facts.get("SigCgt", "0"), 16) >> (ASK - 1) & 1:
        return f"has not begun: {_command(pid)}"
    before = _size(log)
    with contextlib.suppress(OSError):
        os.kill(pid, ASK)
    stack = _await_stack(log, before)
    return f"is in\n{stack}" if stack else "does not say where it is"


def _await_stack(log: Path, start: int) -> str:
    """What was written since ``start``, once no more comes."""
    end, size = time.monotonic() + ANSWER_S, start
    while time.monotonic() < end:
        time.sleep(0.1)
        if size == _size(log) > start:
            break
        size = _size(log)
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in lines if line.lstrip().startswith("File ")][:MOST_LINES])
    return ""


def _facts(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    return {}


def _command(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    return "a process that ended"


def _size(log: Path) -> int:
    with contextlib.suppress(OSError):
        return log.stat().st_size
    return 0
