"""The options objects that collectives take.

Each attribute checks and converts what it is given, as PyTorch's do; an attribute that does not exist cannot be set.
``for_torch()`` makes PyTorch's object of the same name, for engines that only know those.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as torch_c10d

from symcomm.backend.values import duration, flag, integer, ranks, short, text, timeout_of
from symcomm.errors import wrong_type
from symcomm.group.arguments import to_redop
from symcomm.types import RedOpType, ReduceOp

__all__ = [
    "DEFAULT_TIMEOUT",
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "GatherOptions",
    "Options",
    "PutOptions",
    "ReconfigureOptions",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    "SignalOptions",
    "WaitSignalOptions",
    "_DistributedBackendOptions",
    "duration",
    "flag",
    "for_torch",
    "integer",
    "ranks",
    "short",
    "text",
    "timeout_of",
]

NO_TIMEOUT = timedelta(milliseconds=-1)  # "the group's own"
DEFAULT_TIMEOUT = timedelta(seconds=1800)


class Option:
    """One attribute: its default, and how a value given to it is checked and converted; None: it cannot be set."""

    def __init__(self, default: Any, convert: Callable[[str, Any], Any] | None):
        self._default = default
        self._convert = convert

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = instance._values.get(self._name, self._default)
        return value.copy() if isinstance(value, (list, set, dict)) else value  # who changes a copy changes no default

    def __set__(self, instance: Any, value: Any) -> None:
        if self._convert is None:
            raise AttributeError(f"{type(instance).__name__}.{self._name} is set when the object is made.")
        instance._values[self._name] = self._convert(f"{type(instance).__name__}.{self._name}", value)


class Options:
    """Base of all options objects."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def __copy__(self) -> Options:
        other = type(self)()
        other._values.update(self._values)
        return other

    def __repr__(self) -> str:
        names = [name for kind in reversed(type(self).__mro__) for name, v in vars(kind).items() if type(v) is Option]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def for_torch(self) -> Any:
        """PyTorch's object of the same name, with the same values."""
        theirs = getattr(torch_c10d, type(self).__name__)()
        for name, value in self._values.items():
            setattr(theirs, name, redop_for_torch(value) if isinstance(value, ReduceOp) else value)
        return theirs


def for_torch(item: Any) -> Any:
    """Options and reduce operations of ours as PyTorch's; anything else as it is."""
    if isinstance(item, Options):
        return item.for_torch()
    return redop_for_torch(item) if isinstance(item, ReduceOp) else item


def redop_for_torch(op: Any) -> Any:
    redop, factor = to_redop("ReduceOp", op)
    if factor is not None:
        return torch_c10d._make_nccl_premul_sum(float(factor) if isinstance(factor, int) else factor)
    return torch_c10d.ReduceOp(torch_c10d.ReduceOp.RedOpType(int(redop)))


# --- kinds of values ----------------------------------------------------------------------------------------------


def hints(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong_type(name, "value", value, "a dict of str to str")
    return {text(name, key): text(name, item) for key, item in value.items()}


def _handles(name: str, value: Any) -> Any:
    """A list gives ranks by position, a set lets the backend choose them."""
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise wrong_type(name, "value", value, "a list or a set of str")
    checked = [text(name, item) for item in value]
    return set(checked) if isinstance(value, (set, frozenset)) else checked


def _timeout_or_none(name: str, value: Any) -> timedelta | None:
    return None if value is None else timeout_of(name, value)


def _redop(name: str, value: Any) -> ReduceOp:
    if not isinstance(value, (ReduceOp, torch_c10d.ReduceOp)):
        raise wrong_type(name, "value", value, "a ReduceOp")
    redop, factor = to_redop(name, value)
    return ReduceOp(redop, factor=factor)


def _device(name: str, value: Any) -> torch.device | None:
    if value is not None and not isinstance(value, torch.device):
        raise wrong_type(name, "value", value, "a torch.device or None", "write torch.device(...)")
    return value


def _store(name: str, value: Any) -> Any:
    if value is not None and not callable(getattr(value, "compare_set", None)):
        raise wrong_type(name, "value", value, "a Store")
    return value


# --- the options --------------------------------------------------------------------------------------------------


class _CallOptions(Options):
    __slots__ = ()
    asyncOp = Option(True, flag)
    timeout = Option(NO_TIMEOUT, timeout_of)


class AllreduceOptions(_CallOptions):
    __slots__ = ()
    reduceOp = Option(ReduceOp(RedOpType.SUM), _redop)


class AllreduceCoalescedOptions(AllreduceOptions):
    __slots__ = ()


class ReduceScatterOptions(_CallOptions):
    __slots__ = ()
    reduceOp = Option(ReduceOp(RedOpType.SUM), _redop)


class ReduceOptions(_CallOptions):
    __slots__ = ()
    reduceOp = Option(ReduceOp(RedOpType.SUM), _redop)
    rootRank = Option(0, integer)
    rootTensor = Option(0, integer)


class BroadcastOptions(_CallOptions):
    __slots__ = ()
    rootRank = Option(0, integer)
    rootTensor = Option(0, integer)


class AllgatherOptions(_CallOptions):
    __slots__ = ()


class GatherOptions(_CallOptions):
    __slots__ = ()
    rootRank = Option(0, integer)


class ScatterOptions(_CallOptions):
    __slots__ = ()
    rootRank = Option(0, integer)


class AllToAllOptions(_CallOptions):
    __slots__ = ()


class BarrierOptions(_CallOptions):
    __slots__ = ()
    device_ids = Option([], ranks)
    device = Option(None, _device)


class ReconfigureOptions(Options):
    """Who forms a group from now on; see docs/reconfigure.md."""

    __slots__ = ()
    uuid = Option(0, integer)
    handles = Option(set(), _handles)
    timeout = Option(None, _timeout_or_none)
    hints = Option({}, hints)


class PutOptions(Options):
    """For ``Window.put``, as the two below for its other calls. Before torch 2.15 there is none of torch's."""

    __slots__ = ()
    timeout = Option(NO_TIMEOUT, timeout_of)
    hints = Option({}, hints)


class SignalOptions(PutOptions):
    __slots__ = ()


class WaitSignalOptions(PutOptions):
    __slots__ = ()


def _group(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, torch_c10d.ProcessGroup):
        raise wrong_type(name, "value", value, "a ProcessGroup or None")
    return value


def _backend(name: str, value: Any) -> Any:
    if value is not None and not callable(getattr(value, "allreduce", None)):
        raise wrong_type(name, "value", value, "a Backend or None")
    return value


class _DistributedBackendOptions(Options):
    """What a backend's creator is given."""

    __slots__ = ()
    store = Option(None, _store)
    group_rank = Option(0, short)
    group_size = Option(0, short)
    timeout = Option(timedelta(0), duration)
    group_id = Option("", text)
    global_ranks_in_group = Option([], ranks)
    process_group = Option(None, _group)
    split_from = Option(None, _backend)
    enable_reconfigure = Option(False, flag)
