"""Enumerations that behave like those of PyTorch's binding, and refusals of wrong types.

Members compare by kind and number, also with PyTorch's member of the same name, and never with a plain number; they
hash, convert to int and index lists like the numbers they stand for. PyTorch's binding raises TypeError for an argument
of a wrong type; so do we, with our words.
"""

from __future__ import annotations

import enum
from typing import Any

from symcomm import errors

__all__ = ["Numbered", "WrongTypeError", "wrong_type"]


class WrongTypeError(errors.BadArgumentError, TypeError):
    """An argument is of a type that the call does not take."""


def wrong_type(call: str, argument: str, got: object, allowed: str, fix: str = "") -> WrongTypeError:
    """One sentence: the call, the argument, what it was, what is allowed, what to do."""
    return WrongTypeError(str(errors.bad_argument(call, argument, got, allowed, fix)))


class Numbered(enum.Enum):
    @classmethod
    def _missing_(cls, value: object) -> Any:
        if not isinstance(value, int):
            raise wrong_type(cls.__name__, "value", value, f"a number of {cls.__name__}")
        return None

    def __eq__(self, other: object) -> bool:
        if type(other) is type(self):
            return self is other
        theirs = type(other)
        if theirs.__name__ == type(self).__name__ and theirs.__module__.startswith("torch."):
            return self.value == getattr(other, "value", None)
        return False

    def __hash__(self) -> int:
        return self.value

    def __int__(self) -> int:
        return self.value

    __index__ = __int__
