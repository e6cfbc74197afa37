"""How a reduction is split into one within each host and one between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from symcomm._core import native
from symcomm.hierarchical.operation import Operation
from symcomm.hierarchical.topology import Layout
from symcomm.types import DType, RedOpType, kept_dtype

LARGE = {DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128}


class Levels(NamedTuple):
    """``inner`` reduces on each host, ``outer`` between hosts. AVG divides by ``divide`` (1: by the number of hosts).
    Partial results are of type ``kept``."""

    inner: RedOpType
    outer: RedOpType
    divide: int
    dtype: DType
    kept: DType

    @classmethod
    def of(cls, redop: RedOpType, dtype: DType, layout: Layout) -> Levels:
        kept = kept_dtype(dtype, redop) if layout.wide_sums else dtype
        if redop is RedOpType.PREMUL_SUM:  # inputs are multiplied already
            return cls(RedOpType.SUM, RedOpType.SUM, 1, dtype, kept)
        if redop is not RedOpType.AVG:
            return cls(redop, redop, 1, dtype, kept)
        if layout.is_even and kept in (DType.FLOAT16, DType.BFLOAT16):  # no sum that could overflow a small type
            return cls(RedOpType.AVG, RedOpType.AVG, 1, dtype, kept)
        return cls(RedOpType.SUM, RedOpType.AVG, layout.size, dtype, kept)

    def begin(self, op: Operation, source: int, count: int) -> int:
        """The address of the values at ``source``, in the type ``kept``."""
        if self.kept is self.dtype:
            return source
        wide = op.borrow(count * self.kept.itemsize)
        native.widen(self.dtype, wide, source, count)
        return wide

    def room(self, op: Operation, kept: int, count: int) -> int:
        """The address where the result of the values at ``kept`` may go."""
        return kept if self.kept is self.dtype else op.borrow(count * self.dtype.itemsize)

    def done(self, op: Operation, *borrowed: tuple[int, int]) -> None:
        """Give memory back. Each pair: what ``begin`` or ``room`` returned, and the address it was given."""
        for address, given in borrowed:
            if address != given:
                op.give_back(address)

    def combine(self, op: Operation, target: int, sources: Sequence[int], count: int) -> None:
        """Combine the hosts' values, in the order of hosts, into ``target``. It may be one of ``sources`` if values are
        kept in their own type."""
        if not count:
            return
        if self.kept is self.dtype:
            native.reduce(self.dtype, self.outer, target, list(sources), count, float(self.divide))
            return
        total = op.borrow(count * self.kept.itemsize)
        native.reduce(self.kept, self.outer, total, list(sources), count, float(self.divide))
        native.narrow(self.dtype, target, total, count)
        op.give_back(total)
