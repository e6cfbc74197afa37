"""Finds and kills the processes of a job, even after the launcher has died.

A process belongs to a job if it is in the process group of one of its ranks, or if the environment that it was started
with carries the job's mark. The first finds children that cleaned their environment, the second those that moved to
another session. Only a process that did both escapes.

Run as a program, this file is the *reaper*: a tiny process beside the launcher. It reads from its standard input which
process groups to watch (``+17``) and to forget (``-17``), and kills what is left of the job when that input ends.
Standard library only, since it runs without site-packages.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection

MARK = "SYMCOMM_LAUNCH_ID"  # set in every rank's environment, different for every launcher
KILL_DEADLINE_S = 10.0  # a process that survives SIGKILL this long is stuck in the kernel


def find_processes(groups: Collection[int], mark: str) -> list[int]:
    """Pids of the job's processes that still run, zombies left out."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # "pid (name) state ppid pgrp ...": the name may hold anything, even a closing bracket
                state, _, group = file.read().rpartition(b")")[2].split()[:3]
            if state in (b"Z", b"X"):
                continue
            if int(group) in groups or needle in _environment(entry):
                found.append(int(entry))
        except (OSError, ValueError):
            continue  # it ended while we looked
    return found


def _environment(pid: str) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except PermissionError:
        return []  # another user's process


def signal_processes(pids: Collection[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def kill_processes(groups: Collection[int], mark: str) -> list[int]:
    """Sends SIGKILL until nothing is found; returns the pids that did not end before the deadline."""
    end = time.monotonic() + KILL_DEADLINE_S
    while pids := [pid for pid in find_processes(groups, mark) if pid != os.getpid()]:
        if time.monotonic() > end:
            return pids
        signal_processes(pids, signal.SIGKILL)
        time.sleep(0.01)
    return []


class Reaper:
    """The launcher's handle on its reaper."""

    def __init__(self, mark: str):
        # Not marked itself, so that the reaper of a job inside a job outlives its launcher and does its work.
        env = {key: value for key, value in os.environ.items() if key != MARK}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=env,
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        self._send(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Once a rank is reaped, its number may be reused."""
        self._send(f"-{group}\n")

    def dismiss(self) -> None:
        """The job is over: the reaper finds nothing to kill and exits."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=KILL_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the reaper was killed; ranks still die with their parent
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:  # ends when the launcher closes its end, or dies
        change = groups.add if line.startswith("+") else groups.discard
        change(abs(int(line)))
    kill_processes(groups, mark=sys.argv[1])


if __name__ == "__main__":
    main()
