"""A thread that ends waits of the GPU when a rank has died, or the time is up.

A stream that waits for a word knows nothing of processes. So while something is outstanding this thread looks, every
10 ms, whether the ranks live and whether deadlines are kept. It reads host memory only: the GPU is never asked.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Outstanding", "Watch"]

LOOK_S = 0.01
IDLE_S = 1.0  # without anything outstanding the thread ends


@dataclass
class Outstanding:
    """Something that a stream of this rank waits for."""

    what: str  # the call, for people
    missing: Callable[[], list[int]]  # ranks that have not done their part yet
    release: Callable[[list[int]], None]  # let the stream go on as if these had
    begun: float
    timeout: float


class Watch:
    """``gone()`` gives the ranks that have died or left; ``fail(item, ranks, died)`` is told once what went wrong."""

    def __init__(self, gone: Callable[[], list[int]], fail: Callable[[Outstanding, list[int], bool], None]):
        self._gone = gone
        self._fail = fail
        self._items: deque[Outstanding] = deque()
        self._lock = threading.Lock()
        self._thread: Any = None
        self._failed: set[int] = set()  # ranks that are not waited for any more

    def add(self, item: Outstanding) -> None:
        self._items.append(item)
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._look, name="symcomm-gpu-watch", daemon=True)
                    self._thread.start()

    def is_idle(self) -> bool:
        self._prune()
        return not self._items

    def _look(self) -> None:
        idle_since = time.monotonic()
        while True:
            time.sleep(LOOK_S)
            self.look()
            now = time.monotonic()
            if self._items:
                idle_since = now
            elif now - idle_since > IDLE_S:
                with self._lock:
                    if not self._items:
                        self._thread = None
                        return

    def _prune(self) -> None:
        """They end in order, but for messages: the oldest that is over makes room."""
        for _ in range(len(self._items)):
            item = self._items[0]
            if item.missing():
                return
            self._items.popleft()

    def look(self) -> None:
        """One look; the thread's, and the tests'."""
        self._prune()
        if not self._items:
            return
        gone = set(self._gone()) | self._failed
        now = time.monotonic()
        for item in list(self._items):
            missing = item.missing()
            lost = [r for r in missing if r in gone]
            late = [] if lost or now - item.begun < item.timeout else missing
            if not lost and not late:
                continue
            if not self._failed:
                self._fail(item, lost or late, bool(lost))
            self._failed.update(lost or late)
            item.release(lost or late)
