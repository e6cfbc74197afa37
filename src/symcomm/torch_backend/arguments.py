"""Converts what torch passes to a group into what ours takes.

Every collective can be called with an options object or, directly on the group, with plain arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch._C._distributed_c10d import ReduceOp

from symcomm import errors
from symcomm.group.buffers import arrived
from symcomm.torch_backend.overloads import bind, check, has_options, slots_of
from symcomm.types import RedOpType
from symcomm.types import ReduceOp as OwnReduceOp


class Given(NamedTuple):
    """A call's arguments besides tensors: an options object, or plain arguments, which override it."""

    options: Any = None
    plain_root: Any = None
    plain_op: Any = None
    timeout: Any = None

    @property
    def root(self) -> int:
        return root_of(self.options, self.plain_root)

    @property
    def redop(self) -> Any:
        return redop_of(self.options, self.plain_op)

    @property
    def seconds(self) -> float | None:
        return seconds_of(self.options, self.timeout)


def read_arguments(call: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Sequence[Any], Given]:
    """(tensors and splits, all else) of a call as the caller wrote it. Raises if torch would not take it."""
    slots = slots_of(call)
    count = slots.index("opts")
    if len(args) == count + 1 and not named and has_options(call, args[:count], args[count]):
        return args[:count], Given(args[count])  # as torch's functions call
    by_slot = bind(call, args, named)
    plain = {slot: by_slot.get(slot) for slot in slots[count + 1 :]}
    tensors = [by_slot.get(slot) for slot in slots[:count]]
    return tensors, _sort_out(call, tensors, by_slot.get("opts"), plain)


def _sort_out(call: str, given: Sequence[Any], opts: Any, plain: Mapping[str, Any]) -> Given:
    """``given``: the arguments before the options. A plain argument may stand in the options' place, and shift those
    after it."""
    by_slot = dict(zip(slots_of(call), given, strict=False))
    check(call, {**by_slot, **{name: value for name, value in {"opts": opts, **plain}.items() if value is not None}})
    options = root = op = timeout = None
    for item in (opts, *plain.values()):
        if item is None:
            continue
        if isinstance(item, (timedelta, float)):
            timeout = item
        elif isinstance(item, (ReduceOp, OwnReduceOp)):
            op = item
        elif hasattr(type(item), "__index__"):
            root = operator.index(item)
        else:
            options = item
    return Given(options, root, op, timeout)


def seconds_of(options: Any, timeout: Any = None) -> float | None:
    """The call's own time-out in seconds; None if the group's applies (-1 ms in torch's options)."""
    given = timeout if timeout is not None else getattr(options, "timeout", None)
    if isinstance(given, timedelta):
        given = given.total_seconds()
    return given if given is not None and given > 0 else None


_REDOPS = {hash(getattr(ReduceOp, op.name)): op for op in RedOpType if op is not RedOpType.PREMUL_SUM}


def redop_of(options: Any, op: Any = None) -> Any:
    """The reduce operation from ``options`` (which may itself be the operation), as ours; PREMUL_SUM as it is."""
    if op is None:
        op = getattr(options, "reduceOp", options)  # checking its type first would cost more than the rest
        if op is None:
            return RedOpType.SUM
    return _REDOPS.get(hash(op), op)  # torch's operations hash as their kind; reading the kind costs twice as much


def root_of(options: Any, root: Any = None) -> int:
    given = root if root is not None else getattr(options, "rootRank", options)
    return 0 if given is None else int(given)


def is_async(options: Any) -> bool:
    """Whether the caller goes on. If it waits at once (asyncOp is False), the call may run in its thread."""
    return getattr(options, "asyncOp", True)


def once_each(tensors: Any) -> list[Any]:
    """Drop repeated tensors: one that is listed twice is reduced once, as if all were reduced in one step."""
    seen: set[Any] = set()
    places = [(arrived(t).data_ptr(), t.shape, t.stride()) if t.numel() else object() for t in tensors]
    return [t for t, place in zip(tensors, places, strict=True) if not (place in seen or seen.add(place))]  # type: ignore[func-returns-value]


def one_list(call: str, name: str, lists: Any) -> list[Any]:
    """The list of tensors, one per rank, that torch wraps in a list of one; empty if a rank passes none."""
    if lists is not None and not isinstance(lists, (list, tuple)):
        raise errors.wrong_type(call, name, lists, "one list of tensors")
    if lists and isinstance(lists[0], (list, tuple)):
        if len(lists) != 1:
            raise errors.bad_argument(call, name, f"{len(lists)} lists", "one list of tensors")
        return list(lists[0])
    return list(lists or [])
