"""Shows operations in torch's profiler.

As with torch's own backends, each operation has two events: ``symcomm:<operation>`` lasts from the call to the end
of the operation and carries the shapes of its inputs, and ``symcomm_comms`` holds the facts in words (group, sizes,
dtype) under the names that NCCL's ``record_param_comms`` has for them. (That name itself cannot be used from Python:
torch's C++ takes it as a sign that its own structures are there.)
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._C._autograd import _record_function_with_args_enter
from torch._C._profiler import _RecordFunctionFast

is_profiling = torch.autograd._profiler_enabled


@functools.lru_cache(maxsize=1)
def _closer(pid: int) -> ThreadPoolExecutor:
    """A thread of this process (a forked child needs one of its own)."""
    return ThreadPoolExecutor(1, "symcomm-profile")


def describe(
    core: Any,
    names: tuple[str, str],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    splits: tuple[Sequence[int], Sequence[int]] = ((), ()),
    message: tuple[int, int] | None = None,
    is_async: bool = False,
) -> dict[str, Any]:
    """The facts that Kineto writes about a collective, under its names. ``names``: the group's name and description;
    ``splits``: the sizes passed to all_to_all (in, out); ``message``: a message's sender and receiver."""
    ranks = core.global_ranks
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    return {
        "dtype": _dtype_words(inputs[0].dtype) if inputs else "Byte",  # a barrier moves nothing
        "In msg nelems": sum(t.numel() for t in inputs),
        "Out msg nelems": sum(t.numel() for t in outputs),
        "In split size": str(list(splits[0])),
        "Out split size": str(list(splits[1])),
        "Global rank start": ranks[0],
        "Global rank stride": steps.pop() if len(steps) == 1 else 0,
        "Group size": core.size,
        "Rank": core.rank,
        "Process Group Name": names[0],
        "Process Group Description": names[1],
        "Process Group Ranks": str(ranks),
        "Seq": core.sequence_number + (message is None),  # messages have no number in the group
        "Is asynchronized op": is_async,
        **({} if message is None else {"Src Rank": _world(ranks, message[0]), "Dst Rank": _world(ranks, message[1])}),
    }


def _world(ranks: Sequence[int], rank: int) -> int:
    return ranks[rank] if 0 <= rank < len(ranks) else -1  # -1: from anybody


@functools.lru_cache(maxsize=64)
def _dtype_words(dtype: Any) -> str:
    """The dtype's name in C++: ``Float``, ``BFloat16``, ``Long``."""
    try:
        return torch.empty(0, dtype=dtype).type().removeprefix("torch.").removesuffix("Tensor")
    except (RuntimeError, ValueError):  # a dtype that has no such name
        return str(dtype).removeprefix("torch.")


class Span:
    """One operation, open from now until ``close()``."""

    def __init__(self, operation: str, inputs: Sequence[Any], facts: dict[str, Any]):
        with _RecordFunctionFast("symcomm_comms", list(inputs), {"Collective name": operation, **facts}):
            pass
        record = _record_function_with_args_enter(f"symcomm:{operation}", *inputs)
        self._end: Any = torch.futures.Future()
        # The profiler knows only the thread that opened an event; this lets any thread close it.
        self._ended = torch.ops.profiler._call_end_callbacks_on_jit_fut(record, self._end)
        self._lock = threading.Lock()
        self._open = True

    def close(self) -> None:
        """May be called again. When it returns the event is complete, whichever thread closed it."""
        with self._lock:
            if self._open:
                self._open = False
                # An event that ends in another thread is shown as asynchronous, like those of torch's backends.
                _closer(os.getpid()).submit(self._end.set_result, None).result()
