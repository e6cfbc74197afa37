"""Collectives of our groups as torch's operators: eager code and compiled graphs call the same, without a graph break.

``torch.ops.symcomm.all_reduce(x, name)`` and its like give new tensors; ``all_reduce_`` works in place, which Inductor
turns into no copy where nobody reads the old value. A group has to be made known by ``announce`` first.
"""

from __future__ import annotations

from typing import Any

import torch

from symcomm import errors

__all__ = ["announce", "withdraw"]

_groups: dict[str, Any] = {}
_library = torch.library.Library("symcomm", "DEF")


def announce(name: str, group: Any) -> None:
    """Operators of that name run on ``group``, one of ours."""
    _groups[name] = group


def withdraw(name: str) -> None:
    _groups.pop(name, None)


def _find(call: str, name: str) -> Any:
    group = _groups.get(name)
    if group is None:
        raise errors.bad_argument(f"symcomm::{call}", "group", name, f"one of {', '.join(_groups) or 'none yet'}")
    return group


def _all_reduce_(x: torch.Tensor, group: str) -> None:
    _find("all_reduce_", group).all_reduce(x)


def _all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    _find("all_reduce", group).all_reduce(out)
    return out


def _all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    out = _many(x, size)
    _find("all_gather", group).all_gather_single(out, x.contiguous())
    return out


def _many(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.new_empty((size * x.shape[0], *x.shape[1:]))


def _reduce_scatter(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    out = _piece(x, size)
    _find("reduce_scatter", group).reduce_scatter_single(out, x.contiguous())
    return out


def _piece(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.new_empty((x.shape[0] // size, *x.shape[1:]))


def _all_to_all(x: torch.Tensor, group: str) -> torch.Tensor:
    out = _alike(x)
    _find("all_to_all", group).all_to_all_single(out, x.contiguous())
    return out


def _alike(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


# schema -> what runs it, and what traces it
_OPERATORS = {
    "all_reduce_(Tensor(a!) x, str group) -> ()": (_all_reduce_, lambda x, group: None),
    "all_reduce(Tensor x, str group) -> Tensor": (_all_reduce, lambda x, group: _alike(x)),
    "all_gather(Tensor x, int size, str group) -> Tensor": (_all_gather, lambda x, size, group: _many(x, size)),
    "reduce_scatter(Tensor x, int size, str group) -> Tensor": (
        _reduce_scatter,
        lambda x, size, group: _piece(x, size),
    ),
    "all_to_all(Tensor x, str group) -> Tensor": (_all_to_all, lambda x, group: _alike(x)),
}


def _define() -> None:
    for schema, (run, trace) in _OPERATORS.items():
        name = schema.partition("(")[0]
        _library.define(schema)
        _library.impl(name, run, "CPU")
        torch.library.register_fake(f"symcomm::{name}", trace, lib=_library)


_define()
