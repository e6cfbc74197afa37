"""Launches scripts in real processes, and leaves none behind (fixture jobs of tests/launcher)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from symcomm.observe.recorder.processes import is_running

DEADLINE = 60  # of any one launch; a busy machine is slow, a hang is longer


def environ(**more: str) -> dict[str, str]:
    """Ours, without what a launcher around this test might have set."""
    hidden = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED", "NO_COLOR", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    return {**env, **more}


# Put before every script. pid_file tells that a process is there: it writes the pid to a file, in one step.
PRELUDE = """
import json, os, signal, socket, subprocess, sys, time
rank = int(os.environ["RANK"])
def pid_file(name, pid):
    open(name + ".new", "w").write(str(pid)); os.rename(name + ".new", "pid-" + name)
"""


class Jobs:
    """Starts launchers in a directory of their own, and ends those that a failing test left running."""

    def __init__(self, path: Path):
        self.path = path
        self.started: list[subprocess.Popen] = []

    def write(self, script: str, name: str = "script.py") -> str:
        (self.path / name).write_text(PRELUDE + textwrap.dedent(script))
        return name

    def start(
        self, *arguments: str, prefix: tuple[str, ...] = ("-m", "symcomm", "run"), **env: str
    ) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, *prefix, *arguments],
            cwd=self.path,
            env=environ(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen) -> subprocess.CompletedProcess:
        out, err = process.communicate(timeout=DEADLINE)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run(self, script: str, *options: str, args: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess:
        return self.finish(self.start(*options, self.write(script), *args, **env))

    def wait_for(self, *names: str) -> None:
        """Until ranks have written these files."""
        end = time.monotonic() + DEADLINE
        while missing := [name for name in names if not (self.path / name).exists()]:
            assert time.monotonic() < end, f"{missing} did not come"
            assert all(process.poll() is None for process in self.started), "a launcher ended early"
            time.sleep(0.01)

    def pids(self) -> list[int]:
        return [int(path.read_text()) for path in self.path.glob("pid-*")]

    def assert_all_gone(self) -> None:
        pids = self.pids()
        assert pids
        end = time.monotonic() + DEADLINE
        while alive := [pid for pid in pids if is_running(pid)]:
            assert time.monotonic() < end, f"still running: {alive}"
            time.sleep(0.01)
