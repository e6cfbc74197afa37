"""Works as torch wants them.

torch's C++ side is particular: ``wait`` must take a timeout, a future must hold a list of tensors and be completed by
somebody else than its waiter, and an exception must come out of a ``then`` callback to survive the way through C++.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

__all__ = ["AllOf", "DoneWork", "TorchWork", "done"]


def _future_of(result: list[Any]) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return future


class DoneWork(Work):
    """An operation that ended before its call returned."""

    def __init__(self, result: list[Any] | None = None, source: int = -1):
        super().__init__()
        self._tensors = result or []
        self._source = source

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Any:
        return None

    def synchronize(self) -> None:
        return None

    def block_current_stream(self) -> None:
        return None

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def result(self) -> list[Any]:
        return self._tensors

    def get_future(self) -> Any:
        return _future_of(self._tensors)

    getFuture = get_future

    def get_future_result(self) -> Any:
        return _future_of([0])

    def profiled(self, span: Any) -> DoneWork:
        span.close()
        return self


done = DoneWork()


class TorchWork(Work):
    """An operation on its way; ``inner`` is one of our works."""

    def __init__(self, inner: Any, result: list[Any]):
        super().__init__()
        self._inner = inner
        self._tensors = result
        self._future: Any = None
        self._span: Any = None

    def profiled(self, span: Any) -> TorchWork:
        """Let the profiler's event end when the operation does."""
        self._span = span
        self._inner.add_done_callback(span.close)
        return self

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        try:
            return self._inner.wait(timeout if timeout > timedelta(0) else None)
        finally:
            if self._span is not None:
                self._span.close()

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return getattr(self._inner, "source", -1)

    _source_rank = source_rank

    def result(self) -> list[Any]:
        self.wait()
        return self._tensors

    def get_future(self) -> Any:
        if self._future is None:
            ended: Any = torch.futures.Future()
            self._future = ended.then(self._outcome)
            self._inner.add_done_callback(lambda: ended.set_result(None))
        return self._future

    getFuture = get_future

    def get_future_result(self) -> Any:
        return self.get_future().then(lambda _: 0)

    def _outcome(self, _: Any) -> list[Any]:
        error = self._inner.exception()
        if error is not None:
            raise error
        return self._tensors


class AllOf(Work):
    """Several works as one: what a coalescing manager gives."""

    def __init__(self, works: Sequence[Any]):
        super().__init__()
        self._works = works
        self._tensors = [t for w in works for t in w._tensors]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((e for work in self._works if (e := work.exception()) is not None), None)

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return -1

    _source_rank = source_rank

    def result(self) -> list[Any]:
        self.wait()
        return self._tensors

    def get_future(self) -> Any:
        def outcome(ended: Any) -> list[Any]:
            for future in ended.wait():
                future.wait()  # raises what that work raised
            return self._tensors

        return torch.futures.collect_all(work.get_future() for work in self._works).then(outcome)

    getFuture = get_future

    def get_future_result(self) -> Any:
        return self.get_future().then(lambda _: 0)
