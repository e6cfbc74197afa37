"""Operations on the GPU that run while the caller goes on."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.cuda.failure import CudaFailures
from symcomm.group.work import Outcome, raise_late, to_ns

POLL_S = 0.0005


class StreamWork(Outcome):
    """An operation in a stream. Once a rank has failed, peers' memory may be overwritten. So a work is valid if nobody
    had failed when that was checked after the GPU was done with it."""

    stream: Any = None  # the stream that it is in
    _event: Any = None  # follows it in the stream
    _error: BaseException | None = None
    _is_valid = False

    def __init__(self, failures: CudaFailures):
        self._failures = failures

    def is_queued(self) -> bool:
        """Whether it is in a stream."""
        return self._event is not None

    @property
    def error(self) -> BaseException | None:
        """Why it has no result, if that is known already; ``exception()`` looks."""
        return self._error

    def has_passed(self) -> bool:
        """Whether the GPU is done with it."""
        return self._event is not None and self._event.query()

    def succeed(self) -> None:
        """Called if nobody had failed when it had passed."""
        self._is_valid = True

    def fail(self, error: BaseException) -> None:
        """Called when the group has failed: a work that was not known to be valid has no result."""
        if self._error is None and not self._is_valid:
            self._error = error

    def _check_outcome(self) -> None:
        """Called once it has passed."""
        if not self._is_valid and self._error is None:
            error = self._failures.found()
            if error is None:
                self.succeed()
            else:
                self.fail(error)

    def _raise(self) -> None:
        error = self._error
        if error is not None:
            raise error

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """``callback()`` runs in a thread of ours once the GPU has done it, or it has failed."""
        self._when(self.is_completed, callback)

    def _when(self, is_over: Callable[[], bool], callback: Callable[[], None]) -> None:
        def attend() -> None:
            self._await_queued()
            while not is_over():
                time.sleep(POLL_S)
            callback()

        if is_over():
            callback()
        else:
            threading.Thread(target=attend, name="symcomm-gpu-future", daemon=True).start()

    @abstractmethod
    def _await_queued(self) -> None:
        """Return once it is in a stream, or has failed."""


class CudaWork(StreamWork):
    """What ``async_op=True`` returns. ``wait()`` makes the current stream wait for the result, not the host."""

    def __init__(self, group: Any, call: str, result: Sequence[Any], keep: Any):
        super().__init__(group.failures)
        self._group = group
        self._call = call
        self.results = list(result)
        self.kept = keep  # tensors and plans in use
        self._started = time.monotonic()
        self.seconds: float | None = None
        self.request = native.Request()  # the hosts' meeting; not queued where there is none
        self._lock = threading.Lock()
        self._queued = threading.Event()  # everything is in the stream, or it failed
        self.callbacks: list[Callable[[], None]] = []

    def settle(self, error: BaseException | None, event: Any = None, stream: Any = None) -> None:
        """Called once, when the operation is in ``stream``, followed by ``event``, or has failed before."""
        with self._lock:
            self._error, self._event, self.stream = error, event, stream
            self._queued.set()
            callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()

    def when_queued(self, callback: Callable[[], None]) -> None:
        """``callback()`` runs once the operation is in its stream, at once if it is."""
        with self._lock:
            if not self._queued.is_set():
                self.callbacks.append(callback)
                return
        callback()

    def await_queued(self, seconds: float | None) -> bool:
        if self.request.number is not None and not self._queued.is_set():
            status = self.request.wait_for(0 if seconds is None else max(1, int(seconds * 1e9)), False)
            if status is None:
                return self._queued.is_set()
        return self._queued.wait(seconds)

    def _await_queued(self) -> None:
        self.await_queued(None)

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Have the current stream wait for the result. With a ``timeout`` the host waits; when that passes, the
        operation fails on all ranks, and the group with it."""
        try:
            return self._wait(timeout)
        except RuntimeError as error:
            self._failures.raise_cause(error, self._call)

    def _wait(self, timeout: float | timedelta | None) -> bool:
        import torch

        given = to_ns("wait", timeout) / 1e9 if timeout else None
        end = None if given is None else time.monotonic() + given
        if not self.await_queued(given):
            self._give_up_meeting(given or 0.0)
        self._raise()
        if not self._is_valid:
            self._failures.raise_if_failed()
        if end is not None:
            while not self._event.query():
                if time.monotonic() > end:
                    self._failures.give_up(self, self._call, self._started)
                    break
                time.sleep(POLL_S)
            self._check_outcome()
            self._raise()
        torch.cuda.current_stream(self._group.device).wait_event(self._event)
        self.kept = None
        return True

    def _give_up_meeting(self, seconds: float) -> None:
        """End the hosts' meeting, which has not ended in time, as if the call's own deadline had passed."""
        if self.request.give_up() is None:
            raise errors.deadline(f"waiting for {self._call} on group {self._group.name!r}", seconds)
        self._queued.wait()
        raise_late(self._error)

    def is_completed(self) -> bool:
        if not self._queued.is_set():
            return False
        if self._error is not None or self._event is None or self._event.query():
            if self._error is None and self._event is not None:
                self._check_outcome()
            if self.seconds is None:
                self.seconds = time.monotonic() - self._started
            return True
        return False

    def synchronize(self) -> None:
        """Have the host wait until the result is there."""
        try:
            self._wait(None)
            while not self.is_completed():
                time.sleep(POLL_S)
            self._raise()
        except RuntimeError as error:
            self._failures.raise_cause(error, self._call)

    def result(self) -> list[Any]:
        self.wait()
        return list(self.results)

    def get_future(self) -> Any:
        """A future of the output tensors, in the order of streams: a waiter's stream waits, not the host."""
        import torch

        future: Any = torch.futures.Future(devices=[torch.device("cuda", self._group.device)])

        def complete() -> None:
            if self._error is not None:
                future.set_exception(self._error)
                return
            with torch.cuda.stream(self.stream):
                future.set_result(list(self.results))

        self.when_queued(complete)
        return future
