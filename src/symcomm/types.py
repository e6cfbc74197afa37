"""The vocabulary every layer shares: element types and reduce operations.

The numbers are shared with the C core (``_core/types.h``); a test compares the two.
"""

from __future__ import annotations

import enum

__all__ = ["DType", "RedOpType", "ReduceOp"]


class DType(enum.IntEnum):
    """Element types. ``itemsize`` is in bytes."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    UINT64 = 6
    INT64 = 7
    BOOL = 8
    FLOAT16 = 9
    BFLOAT16 = 10
    FLOAT32 = 11
    FLOAT64 = 12
    COMPLEX64 = 13
    COMPLEX128 = 14
    FLOAT8_E4M3FN = 15
    FLOAT8_E5M2 = 16
    FLOAT8_E4M3FNUZ = 17
    FLOAT8_E5M2FNUZ = 18

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self]

    @property
    def label(self) -> str:
        """The name as torch spells it."""
        return self.name.lower()


ITEMSIZE: dict[int, int] = dict(
    zip(DType, (1, 1, 2, 2, 4, 4, 8, 8, 1, 2, 2, 4, 8, 8, 16, 1, 1, 1, 1), strict=True)
)


class RedOpType(enum.IntEnum):
    """Reduce operations, numbered as in PyTorch."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8
