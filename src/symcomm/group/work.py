"""An operation that runs while the caller goes on."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.group.buffers import Buffer
from symcomm.group.failure import Site, explain

__all__ = ["Timeout", "Watcher", "Work", "to_ns"]

Timeout = float | timedelta | None


def to_ns(call: str, timeout: float | timedelta) -> int:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        raise errors.bad_argument(call, "timeout", timeout, "a positive number of seconds or a timedelta")
    return max(1, int(min(seconds * 1e9, 1 << 61)))


def _new_future() -> Any:
    if "torch" in sys.modules:
        return sys.modules["torch"].futures.Future()
    from concurrent.futures import Future

    return Future()


class Watcher:
    """A group's thread that waits for works with callbacks, in the order of their calls, that is of their ends."""

    IDLE = 1.0  # seconds the thread stays without work; a training step takes less, so it is started once

    def __init__(self) -> None:
        self._works: deque[Work] = deque()
        self._more = threading.Condition()
        self._running = False

    def watch(self, work: Work) -> None:
        with self._more:
            self._works.append(work)
            if not self._running:
                self._running = True
                threading.Thread(target=self._attend, name="symcomm-futures", daemon=True).start()
            self._more.notify()

    def _attend(self) -> None:
        while True:
            with self._more:
                if not self._works and not self._more.wait_for(lambda: self._works, self.IDLE):
                    self._running = False
                    return
                work = self._works.popleft()
            work._poll(0)


class Work:
    """What ``async_op=True`` returns. ``wait()`` blocks until the operation is done and raises if it failed."""

    def __init__(self, group: Any, call: str, site: Site, outputs: Sequence[Buffer], result: Sequence[Any], keep: Any):
        self._group = group
        self._call = call
        self._site = site
        self._outputs = outputs
        self._result = list(result)
        self._keep = keep  # tensors the core still reads or writes
        self._started = time.monotonic()
        self.seconds: float | None = None  # from the call to its end, once that is known
        self._request: Any = None
        self._lock = threading.Lock()
        self._settled = False
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def _settle(self, status: int) -> None:
        """Runs once, in whichever thread first learns that the operation has ended."""
        with self._lock:
            if self._settled:
                return
            if status:
                seconds = time.monotonic() - self._started
                self._error = self._group._failed(status, self._call, self._site, seconds, explain)
            else:
                for buffer in self._outputs:
                    buffer.finish()
            self._settled = True
            self.seconds = time.monotonic() - self._started
            self._keep = None
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def _poll(self, timeout_ns: int) -> bool:
        if self._settled:
            return True
        status = native.request_wait(self._request, timeout_ns)
        if status is None:
            return False
        self._settle(status)
        return True

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Block until done. True, or the operation's exception; DeadlineError when ``timeout`` passes first."""
        if timeout:
            given = to_ns("wait", timeout)
            if not self._poll(given):
                raise errors.deadline(f"waiting for {self._call} on group {self._group.name!r}", given / 1e9)
        else:
            self._poll(0)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._poll(-1)

    def is_success(self) -> bool:
        return self._poll(-1) and self._error is None

    def exception(self) -> BaseException | None:
        self._poll(-1)
        return self._error

    def result(self) -> list[Any]:
        """The output tensors; waits for them."""
        self.wait()
        return list(self._result)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """``callback()`` runs once the operation has ended, at once if it has already."""
        with self._lock:
            ended = self._settled
            if not ended:
                self._callbacks.append(callback)
            first = len(self._callbacks) == 1
        if ended:
            callback()
        elif first:
            self._group._watcher.watch(self)

    def get_future(self) -> Any:
        """A future of the output tensors (torch's kind where torch is loaded)."""
        future = _new_future()

        def complete() -> None:
            if self._error is not None:
                future.set_exception(self._error)
            else:
                future.set_result(list(self._result))

        self.add_done_callback(complete)
        return future
