"""How a reduction is split into one within each host and one between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from symcomm.hierarchical.operation import Operation
from symcomm.hierarchical.topology import Layout
from symcomm.types import DType, RedOpType

FLOATS = {DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128}


class Levels(NamedTuple):
    """An operation as one on each host, one between hosts, and a division at the end (1: none)."""

    inner: RedOpType
    outer: RedOpType
    divide: int = 1

    @classmethod
    def of(cls, redop: RedOpType, dtype: DType, layout: Layout) -> Levels:
        if redop is RedOpType.PREMUL_SUM:  # inputs are multiplied already
            return cls(RedOpType.SUM, RedOpType.SUM)
        if redop is not RedOpType.AVG:
            return cls(redop, redop)
        if layout.is_even and dtype in FLOATS:  # averages of averages: no sum that could overflow a small type
            return cls(RedOpType.AVG, RedOpType.AVG)
        return cls(RedOpType.SUM, RedOpType.SUM, layout.size)

    def combine(self, op: Operation, target: int, sources: Sequence[int], count: int, dtype: DType) -> None:
        """The hosts' results, in the order of hosts, into ``target``."""
        op.combine(target, sources, count, dtype, self.outer)
        if self.divide > 1 and count:  # the average of a sum and of as many zeros as there are other ranks
            zeros = op.zeros(count * dtype.itemsize)
            op.combine(target, [target] + [zeros] * (self.divide - 1), count, dtype, RedOpType.AVG)
