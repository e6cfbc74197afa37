"""Works: handles of operations on their way, as PyTorch's C++ takes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as torch_c10d

from symcomm import errors
from symcomm.c10d.enums import OpType
from symcomm.c10d.options import DEFAULT_TIMEOUT, duration
from symcomm.errors import wrong_type
from symcomm.torch_backend.work import WorkInfo, warns_of_old_calls

__all__ = ["FakeWork", "PythonCallbackWork", "Work", "WorkInfo", "_create_work_from_future"]

_NO_TIMEOUT = timedelta(0)


class _AnyWork(type(torch_c10d.Work)):  # type: ignore[misc]
    """``isinstance(w, Work)`` holds for every work that torch would take, whoever made it."""

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or (cls is Work and isinstance(instance, torch_c10d.Work))


@warns_of_old_calls
class Work(torch_c10d.Work, metaclass=_AnyWork):
    """An operation under way, which ``_finish()`` completes; the base of all works here.

    Raises: DeadlineError from ``wait`` or what the operation failed with, CallerError for what this kind lacks."""

    _op_type = OpType.UNKNOWN

    def __init__(self) -> None:
        super().__init__()
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def _finish(self, error: BaseException | None = None) -> None:
        """The operation has ended, or failed with ``error``."""
        self._error = error
        self._ended.set()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until the operation ended, and raise if it failed. Timeout 0: the default of groups."""
        timeout = duration("Work.wait: timeout", timeout)
        limit = (timeout if timeout > _NO_TIMEOUT else DEFAULT_TIMEOUT).total_seconds()
        if not self._ended.wait(limit):
            raise errors.deadline("Work.wait", limit)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        """Nothing to do: these works do not run on a device's stream."""

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[Any]:
        raise errors.CallerError(f"{type(self).__name__}.result: this work has no tensors; keep those you passed in.")

    def _source_rank(self) -> int:
        raise errors.CallerError(f"{type(self).__name__}.source_rank: only works of recv have a source.")

    def source_rank(self) -> int:
        return self._source_rank()

    def get_future(self) -> Any:
        raise errors.CallerError(f"{type(self).__name__}.get_future: this work has no future; call wait().")

    def get_future_result(self) -> Any:
        raise errors.CallerError(f"{type(self).__name__}.get_future_result: this work has no future; call wait().")

    def _get_op_type(self) -> int:
        return int(self._op_type)

    @property
    def timeout(self) -> timedelta:
        raise errors.CallerError(f"{type(self).__name__}.timeout: this work knows of none; give wait() one.")

    def _get_sequence_number(self) -> int:
        raise errors.CallerError(f"{type(self).__name__}: operations of this kind are not numbered.")

    def _get_duration(self) -> float:
        raise errors.CallerError(f"{type(self).__name__}: times of this work were not taken.")


class FakeWork(Work):
    """What the fake group returns: an operation that did nothing, and has ended. Raises: as Work."""

    seq_id: int = -1

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        duration("FakeWork.wait: timeout", timeout)
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future

    getFuture = get_future


class PythonCallbackWork(Work):
    """``wait(timeout)`` calls ``callback(timeout)``; when that returns something true, the work is done.

    Raises: WrongTypeError, and from ``wait`` what ``callback`` raises."""

    def __init__(self, callback: Callable[[timedelta], Any]):
        if not callable(callback):
            raise wrong_type("PythonCallbackWork", "callback", callback, "a function of one argument")
        super().__init__()
        self._callback = callback
        self._future: Any = torch.futures.Future()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        timeout = duration("PythonCallbackWork.wait: timeout", timeout)
        try:
            done = bool(self._callback(timeout))
        except BaseException as error:
            self._settle(error)
            raise
        if done:
            self._settle(None)
        return done

    def _settle(self, error: BaseException | None) -> None:
        if self._ended.is_set():
            return
        self._finish(error)
        if error is None:
            self._future.set_result([])
        elif isinstance(error, Exception):
            self._future.set_exception(error)
        else:
            self._future.set_exception(RuntimeError(repr(error)))

    def get_future(self) -> Any:
        return self._future


@warns_of_old_calls
class _FutureWork(Work):
    """A work that ends when a ``torch.futures.Future`` does."""

    def __init__(self, future: Any):
        super().__init__()
        self._future = future
        future.add_done_callback(self._see)

    def _see(self, future: Any) -> None:
        try:
            future.value()
        except Exception as error:
            self._finish(error)
        else:
            self._finish()

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and super().is_success()

    def result(self) -> list[Any]:
        self.wait()
        return self._future.value()

    def get_future(self) -> Any:
        return self._future


def _create_work_from_future(future: Any) -> Work:
    """A work that ends when ``future`` does, and fails when it does. Raises: WrongTypeError."""
    if not isinstance(future, torch.futures.Future):
        raise wrong_type("_create_work_from_future", "future", future, "a torch.futures.Future")
    return _FutureWork(future)
