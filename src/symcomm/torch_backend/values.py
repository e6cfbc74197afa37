"""Type checks of arguments, as strict as C++'s.

Each function takes the argument's name, for the message, and the value; it returns what C++ would convert it to.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from symcomm.arguments import as_flag, as_int, as_list, as_text
from symcomm.errors import bad_argument, wrong_type
from symcomm.types import RedOpType


def duration(name: str, value: Any) -> timedelta:
    """A timedelta, or seconds as a float."""
    if isinstance(value, float):
        try:
            return timedelta(seconds=value)
        except (OverflowError, ValueError):  # PyTorch would make another time of it
            raise bad_argument(name, "value", value, "a time that a timedelta can hold") from None
    if not isinstance(value, timedelta):
        raise wrong_type(name, "value", value, "a timedelta", "write timedelta(seconds=...)")
    return value


def timeout_of(name: str, value: Any) -> timedelta:
    """A duration in whole milliseconds."""
    return timedelta(milliseconds=int(duration(name, value) / timedelta(milliseconds=1)))


def flag(name: str, value: Any) -> bool:
    found = None if isinstance(value, RedOpType) else as_flag(value)  # PyTorch's operations are no bools
    if found is None:
        raise wrong_type(name, "value", value, "True or False")
    return found


def integer(name: str, value: Any, bits: int = 64) -> int:
    if (number := as_int(value)) is None:
        raise wrong_type(name, "value", value, "an int")
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise wrong_type(name, "value", value, f"an int that fits in {bits} bits")
    return number


def short(name: str, value: Any) -> int:
    """Ranks and sizes of groups, which C++ holds in 32 bits."""
    return integer(name, value, 32)


def size(name: str, value: Any) -> int:
    """A number of bytes, or an index: 64 bits without a sign."""
    if (number := as_int(value)) is None:
        raise wrong_type(name, "value", value, "an int")
    if not 0 <= number < 2**64:
        raise wrong_type(name, "value", value, "an int from 0 to 2**64 - 1")
    return number


def text(name: str, value: Any) -> str:
    found = as_text(value)
    if found is None:
        raise wrong_type(name, "value", value, "a str")
    return found


def device(name: str, value: Any) -> torch.device:
    if not isinstance(value, torch.device):
        raise wrong_type(name, "value", value, "a torch.device", "write torch.device(...)")
    return value


def optional(kind: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    """None, or a value of that kind."""
    return None if value is None else kind(name, value)


def tensor(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise wrong_type(name, "value", value, "a tensor")
    return value


def _list_of(name: str, value: Any, kind: Callable[[str, Any], Any], words: str) -> list[Any]:
    items = None if isinstance(value, torch.Tensor) else as_list(value)
    if items is None:
        raise wrong_type(name, "value", value, f"a list of {words}")
    return [kind(name, item) for item in items]


def tensors(name: str, value: Any) -> list[torch.Tensor]:
    return _list_of(name, value, tensor, "tensors")


def flags(name: str, value: Any) -> list[bool]:
    return _list_of(name, value, flag, "bools")


def ranks(name: str, value: Any) -> list[int]:
    return _list_of(name, value, integer, "int")


def sizes(name: str, value: Any) -> list[int]:
    return _list_of(name, value, size, "int")


def lists_of_sizes(name: str, value: Any) -> list[list[int]]:
    return _list_of(name, value, sizes, "lists of int")


def mapping(
    name: str, value: Any, key: Callable[[str, Any], Any], item: Callable[[str, Any], Any], words: str
) -> dict[Any, Any]:
    """A dict whose keys are of one kind and whose values are of another."""
    if not isinstance(value, dict):
        raise wrong_type(name, "value", value, f"a dict of {words}")
    return {key(name, k): item(name, v) for k, v in value.items()}
