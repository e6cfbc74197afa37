"""The options objects that collectives take.

Each attribute checks and converts what it is given, as PyTorch's do; an attribute that does not exist cannot be set.
Where PyTorch has a class of the same name, ours is one of these too, and keeps its C++ half up to date: engines that
are written in C++ take them as they are.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch._C._distributed_c10d as torch_c10d

from symcomm.errors import wrong_type
from symcomm.group.request import to_redop
from symcomm.store import Store
from symcomm.torch_backend.reduce_ops import redop_for_torch
from symcomm.torch_backend.stores import as_torch_store
from symcomm.torch_backend.values import duration, flag, integer, ranks, short, text, timeout_of
from symcomm.types import RedOpType, ReduceOp

__all__ = [
    "DEFAULT_TIMEOUT", "AllToAllOptions", "AllgatherOptions", "AllreduceCoalescedOptions", "AllreduceOptions",
    "BarrierOptions", "BroadcastOptions", "GatherOptions", "Options", "PutOptions", "ReconfigureOptions",
    "ReduceOptions", "ReduceScatterOptions", "ScatterOptions", "SignalOptions", "WaitSignalOptions",
    "_DistributedBackendOptions", "duration", "flag", "for_torch", "integer", "ranks", "short", "text", "timeout_of",
    "with_half",
]  # fmt: skip

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
        value = self._convert(f"{type(instance).__name__}.{self._name}", value)
        half = getattr(type(instance)._half, self._name, None)  # of newer torch there may be more than this one has
        if half is not None:
            half.__set__(instance, for_torch(value))
        instance._values[self._name] = value


class Options:
    """Base of all options objects; a subclass has the slot ``_values``, and with ``half`` one of PyTorch's classes."""

    __slots__ = ()
    _half: Any = None
    _values: dict[str, Any]

    def __init__(self) -> None:
        if self._half is not None:
            self._half.__init__(self)
        self._values = {}  # type: ignore[misc]  # the subclass's slot

    def __copy__(self) -> Options:
        other = type(self)()
        for name, value in self._values.items():
            setattr(other, name, value)
        return other

    def __repr__(self) -> str:
        names = [name for kind in reversed(type(self).__mro__) for name, v in vars(kind).items() if type(v) is Option]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def for_torch(item: Any) -> Any:
    """Reduce operations and stores of ours as PyTorch's; anything else as it is."""
    if isinstance(item, ReduceOp):
        return redop_for_torch(item)
    return as_torch_store(item) if isinstance(item, Store) else item


Kind = TypeVar("Kind", bound=type)


def with_half(kind: Kind, half: Any = None) -> Kind:
    """``kind`` as a class that is PyTorch's of the same name, too, where PyTorch has one."""
    half = half or getattr(torch_c10d, kind.__name__.lstrip("_"), None)
    facts = {"__slots__": ("_values",), "_half": half, "__module__": kind.__module__, "__doc__": kind.__doc__}
    bases = (kind,) if half is None else (kind, half)
    return types.new_class(kind.__name__.lstrip("_"), bases, exec_body=lambda body: body.update(facts))  # type: ignore[return-value]


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


def _for_call(name: str, **options: Option) -> Any:
    return with_half(type(name, (_CallOptions,), {"__slots__": (), "__module__": __name__, **options}))


_REDUCES = {"reduceOp": Option(ReduceOp(RedOpType.SUM), _redop)}
_ROOT, _ROOT_TENSOR = {"rootRank": Option(0, integer)}, {"rootTensor": Option(0, integer)}

AllreduceOptions = _for_call("AllreduceOptions", **_REDUCES)
AllreduceCoalescedOptions = _for_call("AllreduceCoalescedOptions", **_REDUCES)
ReduceScatterOptions = _for_call("ReduceScatterOptions", **_REDUCES)
ReduceOptions = _for_call("ReduceOptions", **_REDUCES, **_ROOT, **_ROOT_TENSOR)
BroadcastOptions = _for_call("BroadcastOptions", **_ROOT, **_ROOT_TENSOR)
AllgatherOptions = _for_call("AllgatherOptions")
GatherOptions = _for_call("GatherOptions", **_ROOT)
ScatterOptions = _for_call("ScatterOptions", **_ROOT)
AllToAllOptions = _for_call("AllToAllOptions")
BarrierOptions = _for_call("BarrierOptions", device_ids=Option([], ranks), device=Option(None, _device))


@with_half
class ReconfigureOptions(Options):
    """Who forms a group from now on; see docs/how-to/reconfigure.md."""

    __slots__ = ()
    uuid = Option(0, integer)
    handles = Option(set(), _handles)
    timeout = Option(None, _timeout_or_none)
    hints = Option({}, hints)


class _WindowOptions(Options):
    __slots__ = ()
    timeout = Option(NO_TIMEOUT, timeout_of)
    hints = Option({}, hints)


# For the calls of a Window. Before torch 2.15 there are none of torch's.
PutOptions, SignalOptions, WaitSignalOptions = [
    with_half(type(name, (_WindowOptions,), {"__slots__": (), "__module__": __name__}))
    for name in ("PutOptions", "SignalOptions", "WaitSignalOptions")
]


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

    __slots__ = ("_values",)
    store = Option(None, _store)
    group_rank = Option(0, short)
    group_size = Option(0, short)
    timeout = Option(timedelta(0), duration)
    group_id = Option("", text)
    global_ranks_in_group = Option([], ranks)
    process_group = Option(None, _group)
    split_from = Option(None, _backend)
    enable_reconfigure = Option(False, flag)
