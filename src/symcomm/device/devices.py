"""Converts what callers write (0, "cuda:1", "cpu", -1) to ``torch.device``; errors name the entry and its value."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from symcomm import errors

ALLOWED = 'a device: an index of 0 or more, a torch.device, or a name such as "cuda:1" or "cpu"'


@functools.cache
def accelerator() -> str | None:
    """The kind of this machine's accelerator, if any; a torch built for one may run without. Slow to find out."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


@functools.cache
def accelerators() -> tuple[torch.device, ...]:
    kind = accelerator()
    return () if kind is None else tuple(torch.device(kind, i) for i in range(torch.accelerator.device_count()))


def as_device(call: str, argument: str, value: Any, *, minus_one_is_cpu: bool = False) -> torch.device:
    """One device, with its index filled in (the current one unless given), known to exist."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value == -1 and minus_one_is_cpu:
            return torch.device("cpu")
        if value < 0:
            raise errors.bad_argument(call, argument, value, ALLOWED)
        if (kind := accelerator()) is None:
            fix = 'this machine has no accelerator, so name a device, such as "cpu"'
            raise errors.bad_argument(call, argument, value, "a device of this machine", fix)
        device = torch.device(kind, value)
    elif isinstance(value, (str, torch.device)):
        try:
            device = torch.device(value)
        except RuntimeError:
            raise errors.bad_argument(call, argument, value, ALLOWED) from None
    else:
        raise errors.bad_argument(call, argument, value, ALLOWED)
    return _complete(call, argument, value, device)


def _complete(call: str, argument: str, value: Any, device: torch.device) -> torch.device:
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    kind = accelerator()
    if kind != device.type:
        here = f"a device of this machine, which has {kind or 'no accelerator'}"
        raise errors.bad_argument(call, argument, value, here, 'name one it has, such as "cpu"')
    if device.index is None:
        return torch.device(device.type, torch.accelerator.current_device_index())
    count = len(accelerators())
    if device.index >= count:
        raise errors.bad_argument(call, argument, value, f"one of this machine's {count} {device.type} devices")
    return device


def as_devices(call: str, argument: str, values: Any, *, allow_none: bool = False) -> list[torch.device]:
    """A list of devices; errors name an entry by its index."""
    if isinstance(values, (str, torch.device, int)) or not isinstance(values, Iterable):
        raise errors.bad_argument(call, argument, values, "a list of devices", "put a single device in a list")
    devices = [as_device(call, f"{argument}[{i}]", value) for i, value in enumerate(values)]
    if not devices and not allow_none:
        raise errors.bad_argument(call, argument, values, "at least one device")
    return devices


def as_destination(call: str, value: Any, tensors: Sequence[torch.Tensor]) -> torch.device:
    """Where a result goes; by default the current accelerator if a tensor is on one, else the first tensor's device."""
    if value is not None:
        return as_device(call, "destination", value, minus_one_is_cpu=True)
    on_accelerator = next((t.device for t in tensors if t.device.type not in ("cpu", "meta")), None)
    if on_accelerator is None:
        return tensors[0].device
    return torch.device(on_accelerator.type, torch.accelerator.current_device_index())


def as_tensors(call: str, argument: str, values: Any) -> list[torch.Tensor]:
    """A list of tensors; errors name anything else in it by its index."""
    if isinstance(values, torch.Tensor) or not isinstance(values, Iterable):
        raise errors.bad_argument(call, argument, type(values), "a list of tensors", "put a single tensor in a list")
    tensors = list(values)
    if any(type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter for t in tensors):
        for i, tensor in enumerate(tensors):
            check_tensor(call, f"{argument}[{i}]", tensor)
    return tensors


def check_tensor(call: str, argument: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise errors.bad_argument(call, argument, type(value), "a tensor")
    if isinstance(value, torch.nn.parameter.UninitializedTensorMixin):
        fix = "run the module once so that it learns its shape"
        raise errors.bad_argument(call, argument, type(value), "a tensor with a shape", fix)


def check_has_data(call: str, argument: str, tensor: torch.Tensor, device: torch.device) -> None:
    """A meta tensor can only go to meta."""
    if tensor.device.type == "meta" and device.type != "meta":
        allowed = f"a tensor with data, since it goes to {device}"
        raise errors.bad_argument(call, argument, tensor.device, allowed, "a meta tensor has none to copy")


def as_integer(value: Any) -> int | None:
    """An int of Python's, NumPy's or torch's as Python's; None for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def wrap_dim(call: str, dim: Any, dims: int, of: str = "") -> int:
    """``dim`` counted from the front, for a tensor of ``dims`` dimensions, which ``of`` names."""
    number = as_integer(dim)
    if number is None or not -dims <= number < dims:
        whose = f" for {of}" if of else ""
        allowed = f"from {-dims} to {dims - 1}{whose}" if dims else "of a tensor that has dimensions"
        raise errors.bad_argument(call, "dim", dim, allowed)
    return number % dims
