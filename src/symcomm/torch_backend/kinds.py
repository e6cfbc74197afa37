"""Enumerations that behave like those of PyTorch's binding.

Members compare by kind and number, also with PyTorch's member of the same name, and never with a plain number; they
hash, convert to int and index lists like the numbers they stand for.
"""

from __future__ import annotations

import enum
from typing import Any

from symcomm.errors import wrong_type

__all__ = ["Numbered"]


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
