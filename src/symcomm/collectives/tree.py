"""The order in which values of ranks are combined: a balanced binary tree over ranks.

Its left side is the largest power of two below their number, its right side the rest. So every aligned power of two of
ranks is a subtree. ``TREE`` in _core/reduce/vectors.h is the same for the core's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Value = TypeVar("Value")


def combine(join: Callable[[Value, Value], Value], values: Sequence[Value]) -> Value:
    """``values`` as a tree of ``join(left, right)``."""
    if len(values) == 1:
        return values[0]
    left = 1 << (len(values) - 1).bit_length() - 1
    return join(combine(join, values[:left]), combine(join, values[left:]))
