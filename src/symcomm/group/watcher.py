"""Threads that run the callbacks of works."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Protocol

from symcomm.errors import no_thread


class Watched(Protocol):
    """A work."""

    call: str

    def await_end(self) -> None:
        """Return once it has ended; its callbacks have yet to run."""
        ...

    def wait_until(self, deadline_ns: int | None) -> bool:
        """Return once it has ended and its callbacks have run."""
        ...


class Watcher:
    """Threads of a group that wait for works and run their callbacks.

    One thread at a time is the leader and waits for the oldest work. Before it runs that work's callbacks it hands the
    lead on, since a callback may itself wait for a later work.
    """

    IDLE = 1.0  # seconds an idle thread stays alive; a training step takes less, so threads are rarely started

    def __init__(self) -> None:
        self._works: deque[Watched] = deque()
        self._change = threading.Condition()
        self._led = False  # a thread waits for a work, or is about to
        self._idle = 0
        self._called = 0  # idle threads that were notified to lead and have not woken up yet

    def watch(self, work: Watched) -> None:
        with self._change:
            self._works.append(work)
            try:
                self._find_leader()
            except RuntimeError as error:
                self._works.remove(work)
                raise no_thread(f"callbacks of {work.call}", error) from None

    def _find_leader(self) -> None:
        if self._led or not self._works:
            return
        self._led = True
        if self._idle > self._called:
            self._called += 1
            self._change.notify()
        else:
            try:
                threading.Thread(target=self._attend, name="symcomm-futures", daemon=True).start()
            except RuntimeError:
                self._led = False
                raise

    def _attend(self) -> None:
        """Starts as the leader, and leads again each time it is notified."""
        while True:
            with self._change:
                work = self._works.popleft()
            work.await_end()
            with self._change:
                self._led = False
                with contextlib.suppress(RuntimeError):  # no thread could be started: lead again, after these callbacks
                    self._find_leader()
            work.wait_until(None)
            with self._change:
                if not self._led and self._works:
                    self._led = True
                    continue
                self._idle += 1
                self._change.wait(self.IDLE)
                self._idle -= 1
                if not self._called:  # wait()'s result would miss a notification at the moment it times out
                    return
                self._called -= 1
