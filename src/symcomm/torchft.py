"""A process group of ours for torchft, in place of its ``ProcessGroupGloo``.

torchft makes a new group each time its members change. Give this one to its ``Manager`` as
``pg=ProcessGroupSymcomm(timeout=...)``. Its errors also carry the words that programs look for in Gloo's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import Work
from torchft.process_group import ProcessGroupWrapper

from symcomm import errors
from symcomm.torch_backend.wrapped import torch_process_group

__all__ = ["ProcessGroupSymcomm"]


@contextlib.contextmanager
def _with_gloos_words(timeout: timedelta) -> Iterator[None]:
    """An error that leaves this has them, too."""
    try:
        yield
    except (errors.RankFailedError, errors.DeadlineError) as error:
        milliseconds = int(timeout.total_seconds() * 1000)
        gone = isinstance(error, errors.RankFailedError)
        words = "Connection closed by peer" if gone else f"timeout after {milliseconds}ms"
        if words not in str(error):
            error.args = (f"{error} ({words})", *error.args[1:])
        raise


class _Work(Work):
    """One of ours, whose errors carry Gloo's words."""

    def __init__(self, work: Any, timeout: timedelta):
        super().__init__()
        self._work, self._timeout = work, timeout

    def wait(self, *timeout: timedelta) -> bool:
        with _with_gloos_words(self._timeout):
            return self._work.wait(*timeout)

    def synchronize(self) -> None:
        with _with_gloos_words(self._timeout):
            self._work.synchronize()

    def get_future(self) -> Any:
        return self._work.get_future()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> Any:
        return self._work.result()


class ProcessGroupSymcomm(ProcessGroupWrapper):
    """As torchft's other groups that run in their own process: ``configure()`` makes the next group."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        with _with_gloos_words(self._timeout):
            return torch_process_group(store, rank, world_size, self._timeout)

    def _run_context(self) -> Any:
        return _with_gloos_words(self._timeout)

    def _wrap_work(self, work: Any, opts: object) -> Work:
        return _Work(work, self._timeout)

    def getBackendName(self) -> str:
        return "torchft-symcomm"
