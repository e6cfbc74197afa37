"""The options objects that collectives take, and the reduce operation that some of them hold.

Each attribute checks and converts its value, as PyTorch's do; an attribute that does not exist cannot be set. If
PyTorch has a class of the same name, ours derives from it too and keeps its C++ half up to date, so engines written in
C++ take our options as they are.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch._C._distributed_c10d as torch_c10d

from symcomm.errors import bad_argument, wrong_type
from symcomm.group.request import to_redop
from symcomm.store import Store
from symcomm.torch_backend.reduce_ops import redop_for_torch
from symcomm.torch_backend.stores import as_torch_store
from symcomm.torch_backend.values import duration, flag, integer, optional, ranks, short, sizes, text, timeout_of
from symcomm.types import RedOpType, ReduceOp, make_premul_sum

__all__ = [
    "DEFAULT_TIMEOUT", "AllToAllOptions", "AllgatherOptions", "AllreduceCoalescedOptions", "AllreduceOptions",
    "BarrierOptions", "BroadcastOptions", "GatherOptions", "Options", "PutOptions", "ReconfigureOptions",
    "ReduceOptions", "ReduceScatterOptions", "ScatterOptions", "SignalOptions", "WaitSignalOptions",
    "_DistributedBackendOptions", "_make_nccl_premul_sum", "duration", "flag", "for_torch", "integer", "ranks", "short",
    "sizes", "text", "timeout_of", "with_half",
]  # fmt: skip

NO_TIMEOUT = timedelta(milliseconds=-1)  # "the group's own"
DEFAULT_TIMEOUT = timedelta(seconds=1800)


class Option:
    """One attribute: its default, and the function that checks and converts values; None: it cannot be set."""

    def __init__(self, default: Any, convert: Callable[[str, Any], Any] | None):
        self._default = default
        self._convert = convert

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Options | None, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = instance._values.get(self._name, self._default)
        return (
            value.copy() if isinstance(value, (list, set, dict)) else value
        )  # so that callers cannot change the default

    def __set__(self, instance: Options, value: Any) -> None:
        if self._convert is None:
            raise AttributeError(f"{type(instance).__name__}.{self._name} is set when the object is made.")
        value = self._convert(f"{type(instance).__name__}.{self._name}", value)
        half = getattr(instance._half, self._name, None)  # an older torch may lack this one
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
    """``kind`` as a class that also derives from PyTorch's of the same name, if PyTorch has one."""
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


def _redop(name: str, value: Any) -> ReduceOp:
    if not isinstance(value, (ReduceOp, torch_c10d.ReduceOp)):
        raise wrong_type(name, "value", value, "a ReduceOp")
    redop, factor = to_redop(name, value)
    return ReduceOp(redop, factor=factor)


def _or_none(words: str, is_right: Callable[[Any], bool], fix: str = "") -> Callable[[str, Any], Any]:
    """Takes None, and values of which ``is_right`` holds."""

    def check(name: str, value: Any) -> Any:
        if value is not None and not is_right(value):
            raise wrong_type(name, "value", value, words, fix)
        return value

    return check


def _with_method(name: str) -> Callable[[Any], bool]:
    return lambda value: callable(getattr(value, name, None))


_device = _or_none("a torch.device or None", lambda value: isinstance(value, torch.device), "write torch.device(...)")
_store = _or_none("a Store", _with_method("compare_set"))
_group = _or_none("a ProcessGroup or None", lambda value: isinstance(value, torch_c10d.ProcessGroup))
_backend = _or_none("a Backend or None", _with_method("allreduce"))


def _make_nccl_premul_sum(factor: Any) -> ReduceOp:
    """SUM of the inputs, each multiplied first by ``factor``: a number, or a tensor that broadcasts.

    Raises: WrongTypeError, BadArgumentError for a tensor without elements."""
    if not (isinstance(factor, (int, float)) or hasattr(factor, "numel")):
        raise wrong_type("_make_nccl_premul_sum", "factor", factor, "a number or a tensor")
    if hasattr(factor, "numel") and factor.numel() == 0:
        raise bad_argument("_make_nccl_premul_sum", "factor", factor, "a number or a tensor with at least one element")
    return make_premul_sum(factor)


# --- the options --------------------------------------------------------------------------------------------------


class _CallOptions(Options):
    __slots__ = ()
    asyncOp = Option(True, flag)
    timeout = Option(NO_TIMEOUT, timeout_of)


def _options(name: str, about: str, options: dict[str, Option], base: type = _CallOptions) -> Any:
    doc = f"Of {about}. Raises: WrongTypeError."
    return with_half(type(name, (base,), {"__slots__": (), "__module__": __name__, "__doc__": doc, **options}))


_REDUCES = {"reduceOp": Option(ReduceOp(RedOpType.SUM), _redop)}
_ROOT, _ROOT_TENSOR = {"rootRank": Option(0, integer)}, {"rootTensor": Option(0, integer)}
_BARRIER = {"device_ids": Option([], ranks), "device": Option(None, _device)}
_LIKE = "as AllreduceOptions"
_ALL_REDUCE = "``allreduce``: the operation (SUM), whether to return at once, the timeout"
_REDUCE = f"``reduce``: {_LIKE}, and who receives the result (rank 0)"
_STREAMS = "``barrier``; ``device_ids`` and ``device`` say whose stream waits, on GPUs"

AllreduceOptions = _options("AllreduceOptions", _ALL_REDUCE, _REDUCES)
AllreduceCoalescedOptions = _options("AllreduceCoalescedOptions", f"``allreduce_coalesced``, {_LIKE}", _REDUCES)
ReduceScatterOptions = _options("ReduceScatterOptions", f"``reduce_scatter`` and its kin, {_LIKE}", _REDUCES)
ReduceOptions = _options("ReduceOptions", _REDUCE, _REDUCES | _ROOT | _ROOT_TENSOR)
BroadcastOptions = _options("BroadcastOptions", "``broadcast``: whose tensor is sent (rank 0's)", _ROOT | _ROOT_TENSOR)
AllgatherOptions = _options("AllgatherOptions", "``allgather`` and its kin", {})
GatherOptions = _options("GatherOptions", "``gather``: who receives (rank 0)", _ROOT)
ScatterOptions = _options("ScatterOptions", "``scatter``: who sends (rank 0)", _ROOT)
AllToAllOptions = _options("AllToAllOptions", "``alltoall`` and ``alltoall_base``", {})
BarrierOptions = _options("BarrierOptions", _STREAMS, _BARRIER)


@with_half
class ReconfigureOptions(Options):
    """Which processes form a group from now on; see docs/how-to/reconfigure.md. Raises: WrongTypeError."""

    __slots__ = ()
    uuid = Option(0, integer)
    handles = Option(set(), _handles)
    timeout = Option(None, partial(optional, timeout_of))
    hints = Option({}, hints)


class _WindowOptions(Options):
    __slots__ = ()
    timeout = Option(NO_TIMEOUT, timeout_of)
    hints = Option({}, hints)


# Torch has them since 2.15.
PutOptions = _options("PutOptions", "``Window.put``: timeout and hints", {}, _WindowOptions)
SignalOptions = _options("SignalOptions", "``Window.signal``, as PutOptions", {}, _WindowOptions)
WaitSignalOptions = _options("WaitSignalOptions", "``Window.wait_signal``, as PutOptions", {}, _WindowOptions)


class _DistributedBackendOptions(Options):
    """What the function that creates a backend is given. Raises: WrongTypeError."""

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
