"""A thread that ends waits of the GPU when a rank has died, or the time is up.

A stream that waits for a word knows nothing of processes. So while something is outstanding this thread looks, every
10 ms, whether the ranks live and whether deadlines are kept. It never waits for the GPU.
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


@dataclass(eq=False)
class Outstanding:
    """Something that a stream of this rank waits for."""

    what: str  # the call, for people
    missing: Callable[[], list[int]]  # ranks that have not done their part yet
    release: Callable[[list[int]], None]  # let the stream go on as if these had
    begun: float
    timeout: float


class Lane:
    """The collectives of a group: one after another, so that how far the peers' words are says it all.

    Its deadline counts from the last time that a word moved."""

    def __init__(self, pads: Any, meetings: Any):
        self._pads = pads
        self._meetings = meetings
        self._seen: list[int] = []
        self.what = ""
        self.timeout = 0.0
        self.begun = 0.0

    def missing(self) -> list[int]:
        return self._pads.missing(self._meetings.count)

    def release(self, ranks: list[int]) -> None:
        self._pads.stop_waiting()
        for rank in ranks:
            self._pads.set_arrival(rank, self._meetings.count)

    def note_progress(self, now: float) -> None:
        """Called at every look while something is missing."""
        words = [self._pads.arrival_of(r) for r in range(self._pads.world)]
        if words != self._seen:
            self._seen, self.begun = words, now

    def rest(self) -> None:
        """Nothing is missing: the next wait begins anew."""
        self._seen = []


def _missing(item: Any) -> list[int]:
    """For whom it waits. A GPU that is broken says so to whoever uses it: others are looked after all the same."""
    try:
        return item.missing()
    except Exception:
        return []


class Watch:
    """``gone()`` gives the ranks that have died or left; ``fail(item, ranks, died)`` is told once what went wrong."""

    def __init__(self, gone: Callable[[], list[int]], fail: Callable[[Any, list[int], bool], None]):
        self._gone = gone
        self._fail = fail
        self.lane: Lane | None = None
        self._items: deque[Outstanding] = deque()
        self._lock = threading.Lock()
        self.thread: Any = None
        self._failed: set[int] = set()  # ranks that are not waited for any more

    def add(self, item: Outstanding) -> None:
        self._items.append(item)
        self.wake()

    def wake(self) -> None:
        """Look after what is outstanding from now on."""
        with self._lock:
            if self.thread is None:
                self.thread = threading.Thread(target=self._look, name="symcomm-gpu-watch", daemon=True)
                self.thread.start()

    def _look(self) -> None:
        idle_since = time.monotonic()
        while True:
            time.sleep(LOOK_S)
            now = time.monotonic()
            if self.look(now):
                idle_since = now
            elif now - idle_since > IDLE_S:
                self.thread = None  # whoever adds something from here on starts a new thread
                if not self.look(now):
                    return
                with self._lock:
                    if self.thread is not None:
                        return
                    self.thread = threading.current_thread()

    def look(self, now: float) -> bool:
        """Whether anything is outstanding; ends the waits for ranks that will not come."""
        waiting: list[Any] = [item for item in list(self._items) if _missing(item)]
        for item in [item for item in list(self._items) if item not in waiting]:
            self._items.remove(item)
        lane = self.lane
        if lane is not None and lane.missing():
            lane.note_progress(now)
            waiting.insert(0, lane)
        elif lane is not None:
            lane.rest()
        gone = set(self._gone()) | self._failed if waiting else set()
        for item in waiting:
            missing = _missing(item)
            lost = [r for r in missing if r in gone]
            late = [] if lost or now - item.begun < item.timeout else missing
            if not lost and not late:
                continue
            if not self._failed:
                self._fail(item, lost or late, bool(lost))
            self._failed.update(lost or late)
            item.release(lost or late)
        return bool(waiting)
