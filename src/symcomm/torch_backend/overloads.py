"""The arguments that a group's calls take, as PyTorch's binding declares them. All others are refused.

A call has several forms: lists of tensors with an options object, or a tensor with plain arguments. An argument is
known by its *slot*, the name of the parameter in TorchGroup's method. ``opts`` is one slot for all forms, so it may
hold a form's own parameter at that place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import ReduceOp

from symcomm.errors import WrongTypeError, wrong_type
from symcomm.types import ReduceOp as OwnReduceOp

_PLAIN = ("opts", "root", "op", "timeout")
# Names of a call's tensors in its forms: first those that it writes, or its only ones, then those that it reads.
FIRST = ("tensors", "tensor", "output_tensors", "output_tensor", "outputs", "output", "outputTensor", "output_lists")
SECOND = ("input_tensors", "input_tensor", "inputs", "input", "inputTensor", "input_list")


class _Parameter(NamedTuple):
    name: str
    kind: str  # a key of _WORDS, or the name of a class of options
    is_required: bool


_Form = tuple[_Parameter, ...]


def _forms(*texts: str) -> tuple[_Form, ...]:
    """``"tensors:list opts:AllreduceOptions?"``: names and kinds; a question mark marks an optional argument."""
    return tuple(tuple(map(_parameter, text.split())) for text in texts)


def _parameter(word: str) -> _Parameter:
    name, _, kind = word.rstrip("?").partition(":")
    return _Parameter(name, kind, not word.endswith("?"))


_TIMEOUT = "timeout:timeout?"
_SPLITS = "output:tensor input:tensor output_split_sizes:sizes input_split_sizes:sizes"
_PAIR, _LISTS = "output:tensor input:tensor", "outputs:list inputs:list"

CALLS = {
    "allreduce": _forms(
        "tensors:list opts:AllreduceOptions?", f"tensors:list op:op? {_TIMEOUT}", f"tensors:tensor op:op? {_TIMEOUT}"
    ),
    "allreduce_coalesced": _forms("tensors:list opts:AllreduceCoalescedOptions?"),
    "reduce": _forms("tensors:list opts:ReduceOptions?", f"tensors:tensor root:int op:op? {_TIMEOUT}"),
    "reduce_scatter": _forms(
        "output_tensors:list input_tensors:lists opts:ReduceScatterOptions?",
        f"output_tensors:tensor input_tensors:list op:op? {_TIMEOUT}",
    ),
    "reduce_scatter_single": _forms(f"{_PAIR} opts:ReduceScatterOptions?"),
    "reduce_scatter_single_coalesced": _forms(f"{_LISTS} opts:ReduceScatterOptions?"),
    "broadcast": _forms("tensors:list opts:BroadcastOptions?", f"tensors:tensor root:int {_TIMEOUT}"),
    "allgather": _forms(
        "output_tensors:lists input_tensors:list opts:AllgatherOptions?",
        f"output_tensors:list input_tensors:tensor {_TIMEOUT}",
    ),
    "all_gather_single": _forms(f"{_PAIR} opts:AllgatherOptions?"),
    "all_gather_single_coalesced": _forms(f"{_LISTS} opts:AllgatherOptions?"),
    "allgather_coalesced": _forms("output_lists:lists input_list:list opts:AllgatherOptions?"),
    "gather": _forms(
        "output_tensors:lists input_tensors:list opts:GatherOptions?",
        f"output_tensors:list input_tensors:tensor root:int {_TIMEOUT}",
    ),
    "gather_single": _forms(f"{_PAIR} opts:GatherOptions?", f"{_PAIR} root:int {_TIMEOUT}"),
    "scatter": _forms(
        "output_tensors:list input_tensors:lists opts:ScatterOptions?",
        f"output_tensors:tensor input_tensors:list root:int {_TIMEOUT}",
    ),
    "alltoall": _forms("output_tensors:list input_tensors:list opts:AllToAllOptions?"),
    "all_to_all_single": _forms(f"{_SPLITS} opts:AllToAllOptions?", f"{_SPLITS} {_TIMEOUT}"),
    "send": _forms("tensors:list dstRank:int tag:int"),
    "recv": _forms("tensors:list srcRank:int tag:int"),
    "recv_anysource": _forms("tensors:list tag:int"),
    "barrier": _forms("opts:BarrierOptions?", _TIMEOUT),
}

_WORDS = {
    "tensor": "a tensor",
    "list": "a list of tensors",
    "lists": "a list of lists of tensors",
    "int": "an int",
    "op": "a ReduceOp",
    "timeout": "a timedelta",
    "sizes": "a list of int",
}


def _words(kind: str) -> str:
    return _WORDS.get(kind) or f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, torch.Tensor) for item in value)


def _is_index(value: Any) -> bool:
    return hasattr(type(value), "__index__")


_IS = {
    "tensor": lambda value: isinstance(value, torch.Tensor),
    "list": _is_list,
    "lists": lambda value: isinstance(value, (list, tuple)) and all(map(_is_list, value)),
    "int": _is_index,
    "op": lambda value: isinstance(value, (ReduceOp, OwnReduceOp)),
    "timeout": lambda value: value is None or isinstance(value, (timedelta, float)),
    "sizes": lambda value: isinstance(value, (list, tuple)) and all(map(_is_index, value)),
}


def _is(kind: str, value: Any) -> bool:
    """Whether ``value`` is of that kind. Options may be PyTorch's or ours: both have these names."""
    known = _IS.get(kind)
    return known(value) if known else any(base.__name__ == kind for base in type(value).__mro__)


@functools.cache
def slots_of(call: str) -> tuple[str, ...]:
    """The parameters of TorchGroup's method."""
    names = dict.fromkeys(parameter.name for form in CALLS[call] for parameter in form)
    return tuple(name for name in names if name not in _PLAIN) + tuple(name for name in _PLAIN if name in names)


@functools.cache
def options_of(call: str) -> str:
    """The name of the class of options that the call takes, ours or PyTorch's; none for messages."""
    return next((p.kind for form in CALLS[call] for p in form if p.name == "opts"), "")


@functools.cache
def _tensor_kinds(call: str) -> tuple[tuple[str, ...], ...]:
    """The kinds that some form takes, for each slot before the options."""
    return tuple(
        tuple({p.kind for form in CALLS[call] for p in form if p.name == slot})
        for slot in slots_of(call)
        if slot not in _PLAIN
    )


def has_options(call: str, given: Sequence[Any], opts: Any) -> bool:
    """Whether this is a call with options, as torch's functions make it. ``check`` would accept it too, but is slower.

    This also accepts a tensor that is not in a list, since the core does."""
    if type(opts).__name__ != options_of(call):
        return False
    values = zip(_tensor_kinds(call), given, strict=True)
    return all(any(_is(kind, value) for kind in kinds) for kinds, value in values)


class _Mismatch(NamedTuple):
    """The first argument that a form does not take: its place, its parameter and its value."""

    place: int
    parameter: _Parameter | None
    got: Any


def _misfit(call: str, form: _Form, given: Mapping[str, Any], by_place: int | None) -> _Mismatch | None:
    slots, filled = slots_of(call), set()
    named = {parameter.name: parameter for parameter in form}
    for slot, value in given.items():
        place = slots.index(slot)
        at_place = form[place] if place < len(form) else None
        if by_place is not None:
            own = at_place if place < by_place else named.get(slot)
        else:
            own = named[slot] if slot in named and slot not in filled else at_place
        if own is None or own.name in filled or not _is(own.kind, value):
            return _Mismatch(place, own, value)
        filled.add(own.name)
    missing = next((p for p in form if p.is_required and p.name not in filled), None)
    return _Mismatch(slots.index(missing.name), missing, _NOTHING) if missing else None


class _Nothing:
    def __repr__(self) -> str:
        return "none"


_NOTHING = _Nothing()


def check(call: str, given: Mapping[str, Any], by_place: int | None = None) -> None:
    """Raise unless one of the call's forms takes what is ``given``: values by their slot, in the order of slots.

    ``by_place``: how many of them were given without a name, if known."""
    misfits = []
    for form in CALLS[call]:
        misfit = _misfit(call, form, given, by_place)
        if misfit is None:
            return
        misfits.append(misfit)
    farthest = max(misfit.place for misfit in misfits)  # the intended form accepted everything before this
    best = [m for m in misfits if m.place == farthest]
    wanted = dict.fromkeys((m.parameter.name, m.parameter.kind) for m in best if m.parameter is not None)
    if not wanted:
        raise wrong_type(call, slots_of(call)[farthest], best[0].got, "left out with these tensors")
    names = " or ".join(dict.fromkeys(name for name, _ in wanted))
    raise wrong_type(call, names, best[0].got, " or ".join(_words(kind) for _, kind in wanted))


def bind(call: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments, as the caller wrote them, by slot."""
    slots = slots_of(call)
    if len(args) > len(slots):
        raise WrongTypeError(f"{call}: takes at most {len(slots)} arguments, got {len(args)}.")
    given = dict(zip(slots, args, strict=False))
    for name, value in named.items():
        slot = slots[0] if name in FIRST else slots[1] if name in SECOND and len(slots) > 1 else name
        if slot not in slots or given.get(slot) is not None:
            raise WrongTypeError(f"{call}: has no argument {name!r}, or has it twice.")
        given[slot] = value
    return given


def fit(call: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Raise unless one of the call's forms takes the arguments, as the caller wrote them."""
    given = bind(call, args, named)
    check(call, {slot: given[slot] for slot in slots_of(call) if slot in given}, len(args))


@functools.cache
def signature_of(call: str) -> inspect.Signature:
    """The signature of TorchGroup's method: its slots and, by name only, the tensors' names in other forms."""
    slots = slots_of(call)
    tensors = sum(slot in FIRST or slot in SECOND for slot in slots)
    names = [name for names in (FIRST, SECOND)[:tensors] for name in names if name not in slots]
    place, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(slot, place, default=None, annotation=Any) for slot in slots]
    parameters += [inspect.Parameter(name, keyword, default=None, annotation=Any) for name in names]
    return inspect.Signature([inspect.Parameter("self", place), *parameters], return_annotation=Any)


def positional(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """``args`` with the tensors that the caller passed by any form's names, which are removed from ``named``."""
    return (*args, *[named.pop(name) for name in (*FIRST, *SECOND) if name in named])
