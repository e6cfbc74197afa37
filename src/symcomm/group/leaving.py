"""How a rank leaves a group: two verbs, and what becomes of the memory.

``destroy()``    the orderly end, which programs call: asynchronous operations end first; a rank that serves the others'
                 store gives them a moment to leave, too; then it leaves.
``leave(why)``   at once: pending operations fail here, and say ``why``; peers that wait for this rank are told. For a
                 group that failed, was never used, or was replaced by another one.

Either may be called again later. Neither gives the memory back: peers may still look at this rank's part of the group,
to see that it left, or write into its windows. The part is *retired*, and ``free_retired`` frees it once all ranks have
left. It is called when a group is made or left, and when a program asks for it."""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Any

from symcomm.memory.arena import Arena

_retired: deque[tuple[Any, Arena, int, dict[int, Any]]] = deque()
_retirements = itertools.count(1)
_last_retirement = 0


def retire(handle: Any, arena: Arena, offset: int, exposed: dict[int, Any]) -> None:
    """Leave a group in the core. ``exposed``: its windows, which live on as long as peers may write to them."""
    global _last_retirement
    handle.leave()
    _retired.append((handle, arena, offset, exposed))
    _last_retirement = next(_retirements)
    free_retired()


def free_retired() -> None:
    """Free the memory of groups that all ranks have left. No lock: the garbage collector may call this within itself.

    A thread that retires a group meanwhile misses the entry that this one holds: then look again."""
    seen = 0
    while seen != _last_retirement:
        seen = _last_retirement
        for _ in range(len(_retired)):
            try:
                handle, arena, offset, exposed = _retired.popleft()
            except IndexError:  # another thread took it
                break
            if handle.is_left_by_all():
                arena.free(offset)
            else:
                _retired.append((handle, arena, offset, exposed))


def retired_count() -> int:
    """How many groups this process has left whose memory peers may still look at."""
    return len(_retired)


def await_others(handle: Any, seconds: float) -> None:
    """Return once all ranks have left a group that this one has left, or when the time is over."""
    end = time.monotonic() + seconds
    while any(left is handle for left, *_ in list(_retired)) and time.monotonic() < end:
        time.sleep(0.001)
        free_retired()
