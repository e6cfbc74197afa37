"""Work: an operation that runs while the caller goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.group.buffers import Buffer, write_buffer
from symcomm.group.chains import Continuation, continued
from symcomm.group.failure import Site
from symcomm.group.state import GroupState

Timeout = float | timedelta | None
FOREVER, LOOK = 0, -1  # the core's time-outs for a wait without one, and for one that only looks
LONGEST = 1 << 31  # seconds, 68 years: practically for ever, and in nanoseconds it fits in 64 bits


class Batch:
    """Ties the asynchronous operations of one call together; each gets it as its ``async_op``. After one that is
    refused the rest does not run, on any rank."""

    def __init__(self) -> None:
        self.handle = native.make_batch()
        self.refused: errors.CallRefusedError | None = None  # across hosts, where the core does not queue them


def batch_of(async_op: Any) -> Any:
    """The core's handle of the batch that an operation belongs to, or None."""
    return async_op.handle if isinstance(async_op, Batch) else None


def to_ns(call: str, timeout: float | timedelta) -> int:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        raise errors.bad_argument(call, "timeout", timeout, "a positive number of seconds or a timedelta")
    return max(1, int(min(seconds, LONGEST) * 1e9))


def raise_late(error: BaseException | None) -> None:
    """After a wait gave up: raise a DeadlineError also if an earlier operation was late first, and ended the group."""
    late = error.__cause__ if isinstance(error, errors.GroupUnusableError) else None
    if isinstance(late, errors.DeadlineError):
        raise errors.DeadlineError(str(error), late.missing) from late


def _new_future() -> Any:
    if "torch" in sys.modules:
        return sys.modules["torch"].futures.Future()
    from concurrent.futures import Future

    return Future()


class Outcome:
    """How a work has ended that knows its error."""

    _error: BaseException | None
    is_completed: Callable[[], bool]

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        self.is_completed()
        return self._error


class Work(native.Request, Outcome):
    """What ``async_op=True`` returns. ``wait()`` blocks until the operation is done and raises if it failed.

    The core keeps the operation that it stands for, and what it holds until that has ended.

    Raises: what the operation failed with; DeadlineError from ``wait(timeout)``."""

    __slots__ = ()

    def __init__(self, state: GroupState, call: str, site: Site, result: Sequence[Any]):
        super().__init__(state, state.whole(), call, site, result)

    def _copy_out(self, status: int) -> None:
        """Runs once, in the thread that first learns that the operation has ended: the core's own, where outputs have
        to be copied. That thread must not run callbacks, which may wait for operations that it has yet to run."""
        with self._lock:
            if self.settled:
                return
            if status:
                self._error = self._failure(status)
            else:
                try:
                    for buffer in self.outputs or ():
                        buffer.finish()
                except Exception as error:  # of this rank alone: its output cannot hold what came
                    self._error = error
            if self._error is not None:
                self.is_plain = False
            self._end()

    def _failure(self, status: int) -> BaseException:
        state: GroupState = self._state
        return state.fail_with_status(status, self.call, self._site, self.age)

    def forget(self) -> None:
        """It was never queued."""
        self._end()

    def copy_out_in_core(self, status: int) -> None:
        """Runs in the core's own thread, which never waits for a thread that is already copying: a signal handler or a
        finalizer may have interrupted that one with an operation that this thread has yet to run."""
        if self._lock.acquire(blocking=False):
            try:
                self._copy_out(status)
            finally:
                self._lock.release()

    def writes(self, copied: Buffer) -> bool:
        """Whether the operation may change the tensor that ``copied`` is a copy of."""
        outputs = self.outputs
        if outputs is None:  # the core queued it alone, and looked at the tensors itself
            outputs = [write_buffer(self.call, "output", tensor) for tensor in self.results]
        return any(copied.touches(output) for output in outputs)

    def settle(self, status: int) -> None:
        self._copy_out(status)
        if self.callbacks:  # no more of them come
            with self._lock:
                callbacks, self.callbacks = self.callbacks or (), None
            for callback in callbacks:
                callback()

    @property
    def sequence_number(self) -> int:
        """Which operation of its group this is; see ``ProcessGroup.sequence_number``."""
        return self.number or 0

    def await_end(self) -> None:
        """Return once it has ended; its callbacks have yet to run."""
        if not self.settled:
            self.wait_for(FOREVER, False)

    def wait_until(self, deadline_ns: int | None) -> bool:
        """Return when it is done, or when ``time.monotonic_ns()`` has reached the deadline; None: there is none."""
        return self._settle_within(FOREVER if deadline_ns is None else max(1, deadline_ns - time.monotonic_ns()))

    def _settle_within(self, timeout_ns: int) -> bool:
        """``timeout_ns``: as the core has it."""
        if self.settled and not self.callbacks:
            return True
        status = self.wait_for(timeout_ns, True)
        if status is None:
            return False  # not yet, or an interrupt came before it was queued
        if status < 0:
            raise errors.nested(self.call, self._state.name)
        self.settle(status)
        return True

    def _wait(self, timeout: Timeout) -> bool:
        """``wait(timeout)``, where its end needs more than the core, or the wait has a time of its own."""
        given = to_ns("wait", timeout) if timeout else None
        if not self.wait_until(given and time.monotonic_ns() + given):
            self._give_up((given or 0) / 1e9)
            raise_late(self._error)
        if self._error is not None:
            raise self._error
        return True

    def _give_up(self, seconds: float) -> None:
        """The time of a wait is over. Returns once no rank uses the tensors any more."""
        status = self.give_up()
        if status is None:  # it was never queued
            raise errors.deadline(f"waiting for {self.call} on group {self._state.name!r}", seconds)
        self.settle(status)

    def is_completed(self) -> bool:
        """Whether it has ended. Callbacks that have not run yet run here."""
        return self._settle_within(LOOK)

    def result(self) -> list[Any]:
        """The output tensors; waits for them."""
        self.wait()
        return list(self.results)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """``callback()`` runs once the operation has ended, at once if it has already."""
        with self._lock:
            ended, state = self.settled, self._state
            if not ended:
                callback = continued(callback)
                self.callbacks = [*(self.callbacks or ()), callback]
                self.is_plain = False
            first = self.callbacks is not None and len(self.callbacks) == 1
        if ended:
            callback()
        elif first:
            try:
                state.watcher.watch(self)
            except errors.ResourceError:
                self.callbacks = [c for c in self.callbacks or () if c is not callback]
                if isinstance(callback, Continuation):
                    callback.cancel()
                raise

    def get_future(self) -> Any:
        """A future of the output tensors (torch's kind where torch is loaded)."""
        future = _new_future()

        def complete() -> None:
            if self._error is not None:
                future.set_exception(self._error)
            else:
                future.set_result(list(self.results))

        self.add_done_callback(complete)
        return future


class FollowingWork(Work):
    """The second operation of a call, which runs as the first one says, if that succeeds."""

    first: Work
    _refusal: BaseException | None = None

    def refuse(self, error: BaseException) -> None:
        """The operation does not take place; ``error`` says why."""
        self._refusal = error

    def _copy_out(self, status: int) -> None:
        super()._copy_out(status or (self._refusal is not None))

    def _failure(self, status: int) -> BaseException:
        return self.first.exception() or self._refusal or super()._failure(status)
