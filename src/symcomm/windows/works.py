"""The works that put, signal and wait_signal return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from symcomm import errors
from symcomm.group.failure import Status
from symcomm.group.p2p import wait_in_thread
from symcomm.group.work import Outcome, to_ns


class _Done(Outcome):
    """An operation that ended before its call returned."""

    seconds = 0.0
    _error = None

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[Any]:
        return []

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        callback()


DONE = _Done()


class Counts(Protocol):
    """Counts signals."""

    def take(self, peer: int, timeout_ns: int) -> int:
        """Take one signal of ``peer``: a Status. A negative timeout only looks."""
        ...

    def explain(self, what: str, status: int, peer: int, seconds: float) -> errors.SymcommError: ...


class SignalWork(Outcome):
    """A wait for one signal of a rank. Waits for the same rank end in the order in which they were started."""

    def __init__(self, counts: Counts, what: str, peer: int, seconds: float, before: SignalWork | None):
        self._counts = counts
        self._what = what
        self._peer = peer
        self._limit = seconds
        self._started = time.monotonic()
        self._before = before  # the previous wait for the same rank
        self._lock = threading.Lock()
        self._ended = False
        self._error: errors.SymcommError | None = None
        self.seconds: float | None = None

    def _advance(self, seconds: float | None) -> bool:
        """Wait for at most ``seconds`` (None: until the deadline; 0: not at all). Returns whether it has ended."""
        chain = [self]
        while (before := chain[-1]._before) is not None:
            chain.append(before)
        end = None if seconds is None else time.monotonic() + seconds
        return all(work._take(None if end is None else end - time.monotonic()) for work in reversed(chain))

    def _take(self, seconds: float | None) -> bool:
        """Wait for this work alone, once those before it have ended."""
        if self._ended:
            return True
        left = self._started + self._limit - time.monotonic()
        left = left if seconds is None else min(left, seconds)
        if not self._lock.acquire(timeout=max(left, 0.0)):
            return False
        try:
            if not self._ended:
                self.settle(self._counts.take(self._peer, int(left * 1e9) if left > 1e-9 else -1))
        finally:
            self._lock.release()
        return self._ended

    def settle(self, status: int) -> None:
        took = time.monotonic() - self._started
        if status == Status.TIMEOUT and took < self._limit:
            return  # another caller waited for a shorter time
        if status:
            self._error = self._counts.explain(self._what, status, self._peer, self._limit)
        self._before, self._ended, self.seconds = None, True, took

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Block until the signal was taken. Raises DeadlineError if ``timeout`` passes first; the wait then goes on."""
        given = to_ns("wait", timeout) / 1e9 if timeout else None
        end = None if given is None else time.monotonic() + given
        while not self._advance(None if end is None else end - time.monotonic()):
            if end is not None and time.monotonic() >= end:
                raise errors.deadline(f"waiting for {self._what}", given or 0.0, missing=[self._peer])
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._advance(0)

    def result(self) -> list[Any]:
        self.wait()
        return []

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Run ``callback()`` once the signal was taken or the wait has failed."""
        wait_in_thread(self, callback)
