"""What PyTorch's binding takes for an int, a bool, text or a list: more than Python's own types, less than Python can
convert. Each function returns None for what is none."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Generator, Mapping, Set, ValuesView
from typing import Any


def _defines(method: str, value: Any) -> bool:
    """``hasattr`` of a class would find what its metaclass has, too, such as that of enumerations."""
    return any(method in vars(base) for base in type(value).__mro__)


def as_int(value: Any) -> int | None:
    """Whatever can be one (of NumPy, a tensor), but for floats and text."""
    if isinstance(value, float | str | bytes | bytearray):
        return None
    for convert in (operator.index, int):  # a tensor of floats refuses the first
        with contextlib.suppress(Exception):
            return convert(value)
    return None


def as_flag(value: Any) -> bool | None:
    """Numbers and None, too, but no text (not of NumPy's either), and nothing that merely has a length."""
    if value is None or (_defines("__bool__", value) and not isinstance(value, str | bytes)):
        with contextlib.suppress(Exception):  # an array of several
            return bool(value)
    return None


def as_text(value: Any) -> str | None:
    """Bytes, too, that are UTF-8."""
    with contextlib.suppress(UnicodeError):
        if isinstance(value, str):
            return value.encode().decode()
        if isinstance(value, bytes | bytearray):
            return value.decode()
    return None


def as_list(value: Any) -> list[Any] | None:
    """Sequences, sets and generators, but no dictionary."""
    if isinstance(value, str | bytes | Mapping):
        return None
    if _defines("__getitem__", value) or isinstance(value, Set | Generator | ValuesView | map | zip):
        return list(value)
    return None
