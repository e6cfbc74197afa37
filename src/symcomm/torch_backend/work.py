"""Works as torch expects them.

torch's C++ is particular: ``wait`` must take a timeout, a future must hold a list of tensors and be completed by
another thread than its waiter's, and only an exception raised in a ``then`` callback passes through C++.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar

import torch
import torch._C._distributed_c10d as torch_c10d
from torch._C._distributed_c10d import Work

from symcomm import errors
from symcomm.ops import OPS
from symcomm.torch_backend import versions
from symcomm.torch_backend.frames import wants_stacked
from symcomm.torch_backend.values import duration

WorkClass = TypeVar("WorkClass", bound=type)
OpType: Any = vars(torch_c10d)["OpType"]  # torch's own stubs do not list it
# torch's OpType for our calls; two of them have another name there.
_OP_TYPES = {op.name: versions.op_type(op.op_type, "COALESCED") for op in OPS}
_OP_TYPES |= {"all_gather_coalesced": OpType.ALLGATHER_COALESCED, "recvAnySource": OpType.RECVANYSOURCE}
_OP_TYPES["coalesced"] = OpType.COALESCED
NO_LIMIT = timedelta(0)  # of a wait: the operation's own time-out holds


def op_type_of(call: str) -> Any:
    return _OP_TYPES.get(call, OpType.UNKNOWN)


@dataclass(frozen=True)
class WorkInfo:
    """What a completion hook receives about an operation."""

    op_type: Any
    seq: int
    time_started: datetime
    time_finished: datetime
    active_duration: timedelta


def late(error: errors.SymcommError, limit: float, took: float) -> errors.SymcommError:
    """The error of an operation that had ``limit`` seconds and took ``took``. If it was late, even because a rank is
    gone, the error begins with words that scripts written for Gloo look for."""
    text = f"Timed out waiting {limit * 1e3:.0f}ms: {error}"
    if isinstance(error, errors.DeadlineError) and error.is_own:
        return errors.DeadlineError(text, error.missing)
    if isinstance(error, errors.RankFailedError) and took >= limit:
        return errors.RankFailedError(text, error.ranks)
    return error


def cuda_devices(result: Any) -> list[torch.device]:
    """The GPUs of the tensors in a result; a future must know them."""
    flat = [t for item in result for t in (item if isinstance(item, (list, tuple)) else [item])]
    return sorted({t.device for t in flat if isinstance(t, torch.Tensor) and t.is_cuda}, key=str)


def _future_of(result: list[Any], error: BaseException | None = None) -> Any:
    future: Any = torch.futures.Future(devices=cuda_devices(result))
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
    return future


# Methods of works that PyTorch is about to drop -> what to do instead.
_OLD_CALLS = {
    "is_success": "wait() raises what went wrong",
    "exception": "wait() raises it",
    "source_rank": "torch.distributed.recv() returns it",
    "result": "look at the tensors that the call was given, or at get_future().value()",
    "synchronize": "call wait()",
}


def warns_of_old_calls(kind: WorkClass) -> WorkClass:
    """Make old methods of the class warn, each once in a process, as those of PyTorch's works do."""
    for name, instead in _OLD_CALLS.items():
        if name in vars(kind):
            setattr(kind, name, _warning(name, vars(kind)[name], instead))
    return kind


@functools.cache  # once each
def _warn_of(name: str, instead: str) -> None:
    warnings.warn(f"Work.{name} is deprecated, as PyTorch's is: {instead}.", stacklevel=3)


def _warning(name: str, method: Callable[[Any], Any], instead: str) -> Callable[[Any], Any]:
    @functools.wraps(method)
    def call(self: Any) -> Any:
        _warn_of(name, instead)
        return method(self)

    return call


@warns_of_old_calls
class _OwnWork(Work):
    """The base of all works."""

    _call = ""
    _tensors: list[Any]

    @property
    def outputs(self) -> list[Any]:
        """The operation's tensors, whether or not it has ended; ``result()`` waits."""
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        raise errors.CallerError("source_rank: only works of recv have a source.")

    _source_rank = source_rank

    def _get_op_type(self) -> int:
        return op_type_of(self._call).value

    def result(self) -> list[Any]:
        self.wait()
        return self._tensors

    def get_future_result(self) -> Any:
        return self.get_future().then(lambda _: 0)


@warns_of_old_calls
class DoneWork(_OwnWork):
    """An operation that ended before its call returned."""

    def __init__(self, result: list[Any] | None = None, call: str = "", seconds: float = -1.0):
        super().__init__()
        self._tensors = result or []
        self._call = call
        self._seconds = seconds

    _error: BaseException | None = None
    timeout = timedelta(0)  # it has ended already

    def _get_sequence_number(self) -> int:
        raise errors.CallerError("_get_sequence_number: the operation ended within its call, which took no number.")

    def wait(self, timeout: timedelta | float = NO_LIMIT) -> bool:
        if timeout is not NO_LIMIT:
            duration("wait: timeout", timeout)
        if self._error is not None:
            raise self._error
        return True

    def add_done_callback(self, callback: Any) -> None:
        """As TorchWork's, but the operation has already ended."""
        callback()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self._error is None

    def exception(self) -> Any:
        return self._error

    def _get_duration(self) -> float:
        """Milliseconds."""
        if self._seconds < 0:
            raise errors.CallerError("_get_duration: times of this work were not taken.")
        return self._seconds * 1e3

    def get_future(self) -> Any:
        if self._call == "all_gather" and wants_stacked():
            return _future_of([torch.stack(self._tensors)])
        return _future_of(self._tensors, self._error)

    getFuture = get_future

    def get_future_result(self) -> Any:
        return _future_of([0], self._error)

    def profiled(self, span: Any) -> DoneWork:
        span.close()
        return self


done = DoneWork()


@warns_of_old_calls
class Received(DoneWork):
    """A receive from any rank that ended before its call returned."""

    def __init__(self, source: int):
        super().__init__(call="recvAnySource")
        self._source = source

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank


@warns_of_old_calls
class TorchWork(_OwnWork):
    """An operation in flight; ``inner`` is one of our works, ``limit`` its time-out in seconds."""

    def __init__(self, inner: Any, result: list[Any], call: str = "", limit: float = 0.0):
        super().__init__()
        self.inner = inner
        self._limit = limit
        self._call = call
        self._tensors = result
        self._future: Any = None
        self._span: Any = None

    numbers_from = 0  # operations of the core that torch did not request

    def _get_sequence_number(self) -> int:
        """The operation's number, as ``_get_sequence_number_for_group`` counts. Messages have none."""
        number = getattr(self.inner, "sequence_number", None)
        if number is None:
            raise errors.CallerError(f"_get_sequence_number: {self._call} has no number; collectives have.")
        return number - self.numbers_from

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._limit)

    def add_done_callback(self, callback: Any) -> None:
        """``callback()`` runs once the operation has ended."""
        self.inner.add_done_callback(callback)

    def profiled(self, span: Any) -> TorchWork:
        """Let the profiler's event end when the operation does."""
        self._span = span
        self.inner.add_done_callback(span.close)
        return self

    def wait(self, timeout: timedelta | float = NO_LIMIT) -> bool:
        given = NO_LIMIT if timeout is NO_LIMIT else duration("wait: timeout", timeout)
        try:
            return self.inner.wait(given if given > NO_LIMIT else None)
        except (errors.DeadlineError, errors.RankFailedError) as error:
            limit = given.total_seconds() or self._limit
            raise late(error, limit, getattr(self.inner, "seconds", None) or 0.0) from error.__cause__
        finally:
            if self._span is not None:
                self._span.close()

    def is_completed(self) -> bool:
        return self.inner.is_completed()

    def is_success(self) -> bool:
        return self.inner.is_success()

    def exception(self) -> Any:
        return self.inner.exception()

    def source_rank(self) -> int:
        return self.inner.source if self._call.startswith("recv") else super()._source_rank()

    _source_rank = source_rank

    def _get_duration(self) -> float:
        """Milliseconds from the call to its end."""
        seconds = getattr(self.inner, "seconds", None)
        if seconds is None:
            raise errors.CallerError("_get_duration: the operation has not ended, or its times are not taken.")
        return seconds * 1e3

    def get_future(self) -> Any:
        if self._call == "all_gather" and wants_stacked():
            # torch's quantization hooks assume NCCL's form, all outputs in one tensor; others want a list.
            return self.get_future().then(lambda future: [torch.stack(future.value())])
        if self._future is None:
            devices = cuda_devices(self._tensors)
            ended: Any = torch.futures.Future(devices=devices)
            self._future = ended.then(self._outcome)
            if devices:
                self.inner.when_queued(lambda: self._complete_in_stream(ended))
            else:
                self.inner.add_done_callback(lambda: ended.set_result(None))
        return self._future

    def _complete_in_stream(self, ended: Any) -> None:
        """Complete the future so that its waiters' streams wait for the operation's."""
        with torch.cuda.stream(self.inner.stream):
            ended.set_result([] if self.inner.error is not None else self._tensors)

    getFuture = get_future

    def _outcome(self, _: Any) -> list[Any]:
        error = self.inner.exception()
        if error is not None:
            raise error
        return self._tensors


class QueuedWork(TorchWork):
    """A call that the core queued without Python. It looks facts up only when they are asked for."""

    def __init__(self, inner: Any, limit_ns: int, numbers_from: int):
        Work.__init__(self)
        self.inner, self._limit_ns, self.numbers_from = inner, limit_ns, numbers_from

    _future = _span = None

    @property
    def _limit(self) -> float:  # type: ignore[override]
        return self._limit_ns / 1e9

    @property
    def _call(self) -> str:  # type: ignore[override]
        return self.inner.call

    @property
    def _tensors(self) -> list[Any]:  # type: ignore[override]
        return list(self.inner.results)


@warns_of_old_calls
class AllOf(_OwnWork):
    """Several works as one, for a coalescing manager."""

    _call = "coalesced"

    def __init__(self, works: Sequence[Any]):
        super().__init__()
        self._works = works
        self._tensors = [t for w in works for t in w.outputs]

    @property
    def timeout(self) -> timedelta:
        return max(work.timeout for work in self._works)

    def _get_sequence_number(self) -> int:
        return max(work._get_sequence_number() for work in self._works)

    def wait(self, timeout: timedelta | float = NO_LIMIT) -> bool:
        timeout = duration("wait: timeout", timeout)
        end = time.monotonic() + timeout.total_seconds()
        for work in self._works:  # the first late work ends the wait
            left = timedelta(seconds=max(end - time.monotonic(), 1e-6)) if timeout > NO_LIMIT else timeout
            work.wait(left)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((e for work in self._works if (e := work.exception()) is not None), None)

    def get_future(self) -> Any:
        def outcome(ended: Any) -> list[Any]:
            for future in ended.wait():
                future.wait()  # raises what that work raised
            return self._tensors

        return torch.futures.collect_all(work.get_future() for work in self._works).then(outcome)

    getFuture = get_future
