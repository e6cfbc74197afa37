"""scatter and gather of what functions take and return: tuples, lists, dicts and namedtuples that hold tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from symcomm import errors
from symcomm.device import copies
from symcomm.device.devices import as_device, as_devices
from symcomm.device.functions import Gather, Scatter


def is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


# --- scatter -------------------------------------------------------------------------------------------------


def scatter_nested(value: Any, devices: Any, dim: int = 0) -> list[Any]:
    """``value`` once per device, its tensors split along ``dim``, everything else shared.

    There are as many as the shortest tensor gives pieces.
    """
    return _scatter(value, as_devices("scatter_nested", "devices", devices), dim)


def _scatter(value: Any, devices: Sequence[torch.device], dim: int) -> list[Any]:
    if isinstance(value, torch.Tensor):
        if all(d == value.device for d in devices):  # views, each of which may be changed in place
            return list(copies.scatter(value, devices, dim=dim))
        return list(Scatter.apply(devices, None, dim, value))
    if isinstance(value, (tuple, list)) and value:
        rows = zip(*(_scatter(item, devices, dim) for item in value), strict=False)
        if is_namedtuple(value):
            return [type(value)(*row) for row in rows]
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
    """Positional and keyword arguments for each device; as many as both of them have pieces."""
    rows = scatter_nested(tuple(inputs), devices, dim) if inputs else []
    named = scatter_nested(dict(kwargs), devices, dim) if kwargs else []
    if rows and named:
        count = min(len(rows), len(named))
    else:
        count = max(len(rows), len(named))
    rows += [()] * (count - len(rows))
    named += [{} for _ in range(count - len(named))]
    return tuple(rows[:count]), tuple(named[:count])


# --- gather --------------------------------------------------------------------------------------------------


def gather_nested(outputs: Sequence[Any], destination: Any, dim: int = 0) -> Any:
    """One value from those of all devices: tensors joined along ``dim`` on ``destination``.

    The values must have one structure. What is not a tensor must be the same in all.
    """
    if not outputs:
        raise errors.bad_argument("gather_nested", "outputs", outputs, "at least one output")
    device = as_device("gather_nested", "destination", destination, minus_one_is_cpu=True)
    return _gather(list(outputs), device, dim, "outputs[{}]")


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
        return type(first)(*items) if is_namedtuple(first) else type(first)(items)
    return _same(values, where)


def _braced(key: Any) -> str:
    return repr(key).replace("{", "{{").replace("}", "}}")


def _same(values: list[Any], where: str) -> Any:
    """What is no tensor and no container: the value that all devices agree on."""
    for i, value in enumerate(values):
        if value is not values[0] and value != values[0]:
            allowed = f"a tensor, or the same as {where.format(0)}, which is {values[0]!r}"
            raise errors.bad_argument("gather_nested", where.format(i), value, allowed)
    return values[0]
