"""Operations in torch's profiler.

As with torch's own backends there are two events an operation: ``symcomm:<operation>`` lasts from the call to the end
of the operation and carries the shapes of its inputs, and ``symcomm_comms`` holds the facts in words (group, sizes,
dtype) under the names that NCCL's ``record_param_comms`` has for them. (That name itself cannot be used from Python:
torch's C++ takes it as a sign that its own structures are there.)
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._C._autograd import _record_function_with_args_enter
from torch._C._profiler import _RecordFunctionFast

__all__ = ["Span", "is_profiling"]

is_profiling = torch.autograd._profiler_enabled


@functools.lru_cache(maxsize=1)
def _closer(pid: int) -> ThreadPoolExecutor:
    """A thread of this process (a forked child needs one of its own)."""
    return ThreadPoolExecutor(1, "symcomm-profile")


class Span:
    """One operation, open from now until ``close()``."""

    def __init__(self, operation: str, inputs: Sequence[Any], facts: dict[str, Any]):
        with _RecordFunctionFast("symcomm_comms", list(inputs), {"Collective name": operation, **facts}):
            pass
        record = _record_function_with_args_enter(f"symcomm:{operation}", *inputs)
        self._end: Any = torch.futures.Future()
        # The profiler knows only the thread that opened an event; this lets any other close it.
        self._ended = torch.ops.profiler._call_end_callbacks_on_jit_fut(record, self._end)
        self._lock = threading.Lock()
        self._open = True

    def close(self) -> None:
        """Harmless when called twice; on return the event is complete, whoever closed it."""
        with self._lock:
            if self._open:
                self._open = False
                # An event that ends in another thread is shown as asynchronous, as those of torch's backends are.
                _closer(os.getpid()).submit(self._end.set_result, None).result()
