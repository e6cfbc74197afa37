"""scatter and gather of what functions take and return: tuples, lists, dicts and namedtuples that hold tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from symcomm import errors
from symcomm.device import copies
from symcomm.device.devices import as_device, as_devices, wrap_dim
from symcomm.device.functions import Gather, Scatter


def is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _made_like(template: Any, items: Iterable[Any]) -> Any:
    """A namedtuple of the template's type, whatever its constructor takes."""
    return type(template)._make(items)


# --- scatter -------------------------------------------------------------------------------------------------


def scatter_nested(value: Any, devices: Any, dim: int = 0) -> list[Any]:
    """``value`` once per device, its tensors split along ``dim``, everything else shared.

    The tensors decide the number of pieces, and must all give the same number, or rows would be lost.

    Raises: BadArgumentError.
    """
    targets = as_devices("scatter_nested", "devices", devices)
    _check_pieces("scatter_nested", _tensors_in(value, "value"), len(targets), dim)
    return _scatter(value, targets, dim)


def _tensors_in(value: Any, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield where, value
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _tensors_in(item, f"{where}[{i}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_in(item, f"{where}[{key!r}]")


def _check_pieces(call: str, tensors: Iterable[tuple[str, torch.Tensor]], parts: int, dim: int) -> None:
    """Refuse tensors if some split into fewer pieces than others. Empty ones have no rows to lose."""
    first = None
    for where, tensor in tensors:
        if tensor.dim() == 0:
            fix = "pass a number, which all devices get"
            raise errors.bad_argument(call, where, "a tensor without dimensions", "a tensor that can be split", fix)
        size = tensor.size(wrap_dim(call, dim, tensor.dim(), of=where))
        pieces = len(copies.equal_sizes(size, parts))
        if first is None and size:
            first = where, size, pieces
        elif first is not None and size and pieces != first[2]:
            other, its_size, its_pieces = first
            allowed = f"of a size in dimension {dim} that splits into {its_pieces} as {other}, of size {its_size}, does"
            fix = "pass what is not to be split as another type than a tensor, or expand it"
            raise errors.bad_argument(call, where, f"size {size}, which splits into {pieces}", allowed, fix)


def _scatter(value: Any, devices: Sequence[torch.device], dim: int) -> list[Any]:
    if isinstance(value, torch.Tensor):
        if all(d == value.device for d in devices):  # views, each of which may be changed in place
            return list(copies.scatter(value, devices, dim=dim))
        return list(Scatter.apply(devices, None, dim, value))
    if isinstance(value, (tuple, list)) and value:
        rows = zip(*(_scatter(item, devices, dim) for item in value), strict=False)
        if is_namedtuple(value):
            return [_made_like(value, row) for row in rows]
        return [tuple(row) if isinstance(value, tuple) else list(row) for row in rows]
    if isinstance(value, dict) and value:
        rows = zip(*(_scatter(item, devices, dim) for item in value.values()), strict=False)
        return [_like(value, dict(zip(value, row, strict=True))) for row in rows]
    return [value for _ in devices]


def _like(template: dict[Any, Any], items: dict[Any, Any]) -> Any:
    """A dict of the template's type with these items."""
    if isinstance(template, defaultdict):
        return type(template)(template.default_factory, items)
    return items if type(template) is dict else type(template)(items)


def scatter_kwargs(
    inputs: Sequence[Any], kwargs: dict[str, Any] | None, devices: Any, dim: int = 0
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Positional and keyword arguments for each device; as many as the pieces of both.

    Raises: BadArgumentError."""
    targets = as_devices("scatter_kwargs", "devices", devices)
    tensors = chain(_tensors_in(inputs, "inputs"), _tensors_in(kwargs, "kwargs"))
    _check_pieces("scatter_kwargs", tensors, len(targets), dim)
    rows = _scatter(tuple(inputs), targets, dim) if inputs else []
    named = _scatter(dict(kwargs), targets, dim) if kwargs else []
    if rows and named:
        count = min(len(rows), len(named))
    else:
        count = max(len(rows), len(named))
    rows += [()] * (count - len(rows))
    named += [{} for _ in range(count - len(named))]
    return tuple(rows[:count]), tuple(named[:count])


# --- gather --------------------------------------------------------------------------------------------------


def gather_nested(outputs: Iterable[Any], destination: Any, dim: int = 0) -> Any:
    """One value from those of all devices: tensors joined along ``dim`` on ``destination``.

    All values must have the same structure. Values that are not tensors must be equal in all.

    Raises: BadArgumentError.
    """
    if isinstance(outputs, torch.Tensor) or not isinstance(outputs, Iterable):
        raise errors.bad_argument("gather_nested", "outputs", type(outputs), "a list, one output for each device")
    outputs = list(outputs)
    if not outputs:
        raise errors.bad_argument("gather_nested", "outputs", outputs, "at least one output")
    device = as_device("gather_nested", "destination", destination, minus_one_is_cpu=True)
    return _gather(outputs, device, dim, "outputs[{}]")


def _gather(values: list[Any], device: torch.device, dim: int, where: str) -> Any:
    first = values[0]
    for i, value in enumerate(values):
        both_tensors = isinstance(first, torch.Tensor) and isinstance(value, torch.Tensor)
        if type(value) is not type(first) and not both_tensors:
            allowed = f"a {type(first).__name__} as {where.format(0)} is"
            raise errors.bad_argument("gather_nested", where.format(i), value, allowed)
    if isinstance(first, torch.Tensor):
        return Gather.apply(device, dim, *values)
    if isinstance(first, dict):
        for i, value in enumerate(values):
            if value.keys() != first.keys():
                allowed = f"a dict with the keys {list(first)} of {where.format(0)}"
                raise errors.bad_argument("gather_nested", where.format(i), list(value), allowed)
        joined = {key: _gather([v[key] for v in values], device, dim, f"{where}[{_braced(key)}]") for key in first}
        return _like(first, joined)
    if isinstance(first, (tuple, list)):
        for i, value in enumerate(values):
            if len(value) != len(first):
                allowed = f"of length {len(first)} as {where.format(0)} is"
                raise errors.bad_argument("gather_nested", where.format(i), value, allowed)
        items = [_gather(list(v), device, dim, f"{where}[{k}]") for k, v in enumerate(zip(*values, strict=True))]
        return _made_like(first, items) if is_namedtuple(first) else type(first)(items)
    return _same(values, where)


def _braced(key: Any) -> str:
    return repr(key).replace("{", "{{").replace("}", "}}")


def _same(values: list[Any], where: str) -> Any:
    """The value, neither tensor nor container, that all devices agree on."""
    for i, value in enumerate(values):
        if not _is_same(value, values[0]):
            allowed = f"a tensor, or the same as {where.format(0)}, which is {values[0]!r}"
            raise errors.bad_argument("gather_nested", where.format(i), value, allowed)
    return values[0]


def _is_same(a: Any, b: Any) -> bool:
    """Whether two values are equal: arrays in all elements; NaN equals NaN; incomparable values equal themselves."""
    if a is b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)):
        return True
    try:
        alike = a == b
        return bool(alike.all() if hasattr(alike, "all") else alike)
    except (RuntimeError, TypeError, ValueError):  # arrays of different shapes, tensors in objects of one's own
        return False
