"""An operation that runs while the caller goes on."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.group.buffers import Buffer
from symcomm.group.failure import explain

__all__ = ["Work"]


def _new_future() -> Any:
    if "torch" in sys.modules:
        return sys.modules["torch"].futures.Future()
    from concurrent.futures import Future

    return Future()


class Work:
    """What ``async_op=True`` returns. ``wait()`` blocks until the operation is done and raises if it failed."""

    def __init__(self, group: Any, call: str, site: str, outputs: Sequence[Buffer], result: Sequence[Any], keep: Any):
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
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if seconds is not None and seconds > 0:
            if not self._poll(max(1, int(seconds * 1e9))):
                raise errors.deadline(f"waiting for {self._call} on group {self._group.name!r}", seconds)
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
            threading.Thread(target=self._poll, args=(0,), name="symcomm-future", daemon=True).start()

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
