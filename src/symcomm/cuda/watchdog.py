"""A thread that ends GPU waits when a rank has died, or a deadline has passed.

A stream that waits for a word knows nothing of processes. So while something is outstanding, this thread looks every
10 ms whether the ranks are alive, deadlines are kept, or the group has failed elsewhere. It never waits for the GPU.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from symcomm import errors
from symcomm.cuda.driver import driver

POLL_S = 0.01
IDLE_S = 1.0  # without anything outstanding the thread ends


@dataclass(eq=False)
class Outstanding:
    """Something that a stream of this rank waits for."""

    what: str  # the call, for people
    missing: Callable[[], list[int]]  # ranks that have not done their part yet
    release: Callable[[list[int]], None]  # let the stream go on as if they had
    begun: float
    timeout: float
    lasts: bool = False  # whether to keep it although nothing is missing now


class CollectiveSequence:
    """The collectives of a group, which run one after another: the peers' flag words tell which have arrived.

    Its deadline counts from the last time that a word moved."""

    def __init__(self, flag_words: Any, barriers: Any):
        self._flag_words = flag_words
        self._barriers = barriers
        self._seen: list[int] = []
        self.last_in_place = 0  # the barrier that ends the last operation on this rank's tensors in place
        self.what = ""
        self.timeout = 0.0
        self.begun = 0.0

    def missing(self) -> list[int]:
        return self._flag_words.missing(self._barriers.count)

    def users(self) -> list[int]:
        """Ranks that may still be using this rank's tensors. Only valid before waits are released."""
        return self._flag_words.missing(self.last_in_place)

    def release(self, ranks: list[int]) -> None:
        for rank in ranks:
            self._flag_words.set_arrival(rank, self._barriers.count)

    def note_progress(self, now: float) -> None:
        """Called at every poll while something is missing."""
        words = [self._flag_words.arrival_of(r) for r in range(self._flag_words.world)]
        if words != self._seen:
            self._seen, self.begun = words, now

    def rest(self) -> None:
        """Called when nothing is missing: the next wait begins anew."""
        self._seen = []


def _missing(item: Any) -> list[int]:
    """The ranks that ``item`` waits for. A broken GPU raises to its users; other waits still need the watchdog."""
    try:
        return item.missing()
    except Exception:
        return []


class FailureHandler(Protocol):
    """Handles what the watchdog detects."""

    def gone(self) -> list[int]:
        """Ranks that have died or left."""
        ...

    def has_failed(self) -> bool:
        """Whether the group has failed, on whichever rank and for whatever reason."""
        ...

    def fail(self, item: Any, ranks: list[int], died: bool) -> None:
        """``ranks`` will not arrive. When this returns all ranks know of it, and waits are released."""
        ...

    def learn(self) -> None:
        """The group failed elsewhere. When this returns waits are released."""
        ...

    def settle(self, now: float) -> bool:
        """Called at every poll after a failure, until it returns True: nothing is left to do."""
        ...

    def is_busy(self) -> bool:
        """Whether to go on looking though nothing waits."""
        ...


class Watchdog:
    """Watches what a group has outstanding on one GPU."""

    def __init__(self, handler: FailureHandler):
        self._handler = handler
        self.sequence: CollectiveSequence | None = None
        self._items: deque[Outstanding] = deque()
        self._lock = threading.Lock()
        self.thread: Any = None
        self._failed = False
        self._settled = False

    def add(self, item: Outstanding) -> None:
        self._items.append(item)
        self.wake()

    def wake(self) -> None:
        """Start the thread, if it is not running."""
        with self._lock:
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="symcomm-gpu-watch", daemon=True)
                self.thread.start()

    def _run(self) -> None:
        with contextlib.suppress(errors.SymcommError):  # in tests there may be no driver
            driver().allow_in_captures()
        idle_since = time.monotonic()
        while True:
            time.sleep(POLL_S)
            now = time.monotonic()
            if self.poll(now):
                idle_since = now
            elif now - idle_since > IDLE_S:
                self.thread = None  # an item added from here on starts a new thread
                if not self.poll(now):
                    return
                with self._lock:
                    if self.thread is not None:
                        return
                    self.thread = threading.current_thread()

    def poll(self, now: float) -> bool:
        """Whether anything is outstanding; ends all waits once the group has failed."""
        waiting = self._waiting(now)
        self._failed = self._failed or self._detect_failure(waiting, now)
        if self._failed:
            for item in waiting:
                with contextlib.suppress(Exception):  # the GPU may be broken, see _missing
                    item.release(_missing(item))
            self._settled = self._settled or self._handler.settle(now)
        return bool(waiting) or (self._failed and not self._settled) or self._handler.is_busy()

    def _waiting(self, now: float) -> list[Any]:
        """The items, and the sequence, that wait for a rank."""
        waiting: list[Any] = [item for item in list(self._items) if _missing(item)]
        for item in [item for item in list(self._items) if item not in waiting and not item.lasts]:
            self._items.remove(item)
        sequence = self.sequence
        if sequence is not None and sequence.missing():
            sequence.note_progress(now)
            waiting.insert(0, sequence)
        elif sequence is not None:
            sequence.rest()
        return waiting

    def _detect_failure(self, waiting: list[Any], now: float) -> bool:
        if self._handler.has_failed():
            self._handler.learn()
            return True
        gone = set(self._handler.gone()) if waiting else set()
        for item in waiting:
            missing = _missing(item)
            lost = [r for r in missing if r in gone]
            if lost or (missing and now - item.begun >= item.timeout):
                self._handler.fail(item, lost or missing, bool(lost))
                return True
        return False
