"""Forked processes that a test starts, stops and kills, and what they say."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any

from symcomm.observe.recorder.processes import process_state
from tests.support.ranks import until

DEADLINE = 30.0


def shared_memory() -> set[str]:
    """Our files in /dev/shm; other processes' tests have theirs in folders."""
    return {name for name in os.listdir("/dev/shm") if "symcomm" in name}


class Child:
    """Runs ``function(say, *args)`` in a fork of this process; ``say`` sends what ``hear`` returns here."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        self._pipe, theirs = Pipe(duplex=False)
        self.is_over = False
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(theirs, function, args)
        theirs.close()

    def _run(self, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                function(pipe.send, *args)
                code = 0
            except BaseException:
                traceback.print_exc()
        os._exit(code)

    def hear(self, timeout: float = DEADLINE) -> Any:
        assert self._pipe.poll(timeout), f"process {self.pid} said nothing"
        try:
            return self._pipe.recv()
        except (EOFError, pickle.UnpicklingError):
            raise AssertionError(f"process {self.pid} ended") from None

    def has_said(self) -> bool:
        """Whether `hear` would return at once. What a killed process was in the middle of saying is not heard."""
        return not self.is_over and self._pipe.poll()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        assert until(lambda: process_state(self.pid) == "T", DEADLINE), f"process {self.pid} did not stop"

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        if not self.is_over:
            os.kill(self.pid, signal.SIGKILL)
            self.end()

    def end(self, timeout: float = DEADLINE) -> int:
        """Its exit code; killed if it does not end."""
        end = time.monotonic() + timeout
        while not self.is_over:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.is_over = True
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.002)
        return 0


@contextlib.contextmanager
def children() -> Iterator[Callable[..., Child]]:
    """``start(function, *args)`` starts one; all are killed at the end."""
    started: list[Child] = []

    def start(function: Callable[..., Any], *args: Any) -> Child:
        started.append(Child(function, *args))
        return started[-1]

    try:
        yield start
    finally:
        for child in started:
            child.kill()
