"""Modules run in processes that have torch already, in place of ``subprocess.Popen([python, "-m", module, ...])``.

For benchmarks, whose workers take longer to load torch than to do what a test has them do. The process is forked by the
one that forks the ranks of tests/support/ranks.py, and takes over the environment, the output and the words of its own.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from typing import IO, Any

from tests.support.ranks import become


def _run(module: str, words: Sequence[str], environment: dict[str, str], output: Any) -> None:
    os.setsid()
    os.dup2(output.detach(), 1)
    os.dup2(1, 2)
    become(environment)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Loaded:
    """As much of a Popen as benchmarks use. Commands of other interpreters, such as mpiexec, are started as ever."""

    def __new__(cls, command: Sequence[str], **how: Any) -> Any:
        if list(command[:2]) == [sys.executable, "-m"]:
            return super().__new__(cls)
        return subprocess.Popen(command, **how)

    def __init__(self, command: Sequence[str], *, env: dict[str, str], stdout: IO, **_: Any):
        self.args = command
        context: Any = mp.get_context("forkserver")
        arguments = (command[2], command[3:], env, DupFd(stdout.fileno()))
        self._process = context.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode
