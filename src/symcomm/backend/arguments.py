"""What torch passes to a group -> what ours takes.

Every collective can be called with an options object, or (by people who hold the group) with plain arguments.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import ReduceOp

from symcomm import errors
from symcomm.group.buffers import arrived
from symcomm.types import RedOpType
from symcomm.types import ReduceOp as OwnReduceOp

__all__ = ["is_async", "once_each", "one_list", "redop_of", "root_of", "seconds_of", "sort_out"]


def sort_out(*given: Any) -> tuple[Any, Any, Any, Any]:
    """(options, root, operation, time-out) from arguments in any of the orders that the overloads allow."""
    options = root = op = timeout = None
    for item in given:
        if item is None:
            continue
        if isinstance(item, (timedelta, float)):
            timeout = item
        elif isinstance(item, (ReduceOp, OwnReduceOp)):
            op = item
        elif isinstance(item, int):
            root = item
        else:
            options = item
    return options, root, op, timeout


def seconds_of(options: Any, timeout: Any = None) -> float | None:
    """The call's own time-out in seconds; None when the group's applies (torch says so with -1 ms)."""
    given = timeout if timeout is not None else getattr(options, "timeout", None)
    if isinstance(given, timedelta):
        given = given.total_seconds()
    return given if given is not None and given > 0 else None


_REDOPS = {hash(getattr(ReduceOp, op.name)): op for op in RedOpType if op is not RedOpType.PREMUL_SUM}


def redop_of(options: Any, op: Any = None) -> Any:
    """The reduce operation from ``options`` (which may itself be the operation), as ours; PREMUL_SUM as it is."""
    if op is None:
        op = getattr(options, "reduceOp", options)  # asking for its kind first would cost more than the operation
        if op is None:
            return RedOpType.SUM
    return _REDOPS.get(hash(op), op)  # torch's operations hash as their kind; asking for that costs twice as much


def root_of(options: Any, root: Any = None) -> int:
    given = root if root is not None else getattr(options, "rootRank", options)
    return 0 if given is None else int(given)


def is_async(options: Any) -> bool:
    """torch sets asyncOp to False when the caller waits at once; then the call may run in the caller's thread."""
    return getattr(options, "asyncOp", True)


def once_each(tensors: Any) -> list[Any]:
    """A tensor that is in the list twice is reduced once, as if all were reduced in one step."""
    seen: set[Any] = set()
    places = [(arrived(t).data_ptr(), t.shape, t.stride()) if t.numel() else object() for t in tensors]
    return [t for t, place in zip(tensors, places, strict=True) if not (place in seen or seen.add(place))]  # type: ignore[func-returns-value]


def one_list(call: str, name: str, lists: Any) -> list[Any]:
    """The list of tensors, one per rank, that torch wraps in a list of one; empty where a rank passes none."""
    if lists and isinstance(lists[0], (list, tuple)):
        if len(lists) != 1:
            raise errors.bad_argument(call, name, f"{len(lists)} lists", "one list of tensors")
        return list(lists[0])
    return list(lists or [])
