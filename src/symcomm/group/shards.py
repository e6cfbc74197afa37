"""Reductions over logical shards: however many ranks there are, the same numbers are added in the same order.

A job has a number of logical shards. Each rank holds equally many, a power of two, one after the other. So a rank's
shards are a subtree of the tree over all shards (collectives/tree.py), and the tree over ranks combines these subtrees.
Partial results, also those that ranks exchange, stay in the type in which values are combined (float32 for floats of 8
and 16 bits) and are rounded once, at the end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sized
from typing import Any, Protocol

from symcomm import errors
from symcomm._core import native
from symcomm.group.buffers import Buffer
from symcomm.group.request import Caller, Request, reduction_of, to_redop
from symcomm.types import DType, RedOpType, kept_dtype


def share_of(call: str, name: str, shards: Any, rank: int, size: int) -> range:
    """The shards of one rank."""
    if type(shards) is not int:
        raise errors.wrong_type(call, name, shards, "a number of shards")
    per = shards // size
    if shards < 1 or shards % size or (size > 1 and per & (per - 1)):
        allowed = f"{size} (the group's ranks) times a power of two" if size > 1 else "1 or more"
        raise errors.bad_argument(call, name, shards, allowed)
    return range(rank * per, (rank + 1) * per)


def _memory(count: int, dtype: DType) -> Any:
    return ctypes.create_string_buffer(max(count * dtype.itemsize, 1))


class PairwiseReduction:
    """Combines tensors that come one after the other, as a tree. Keeps one buffer per power of two in their number."""

    def __init__(self, dtype: DType, op: RedOpType, count: int):
        self.dtype, self.count = dtype, count
        self.kept = kept_dtype(dtype, op)
        self._op = op
        self._waiting: list[tuple[int, Any]] = []  # (how many are combined in it, buffer)
        self._free: list[Any] = []

    def _put(self, to: int, source: int) -> None:
        """Copy ``source``, into the type in which values are combined."""
        if self.kept is not self.dtype:
            native.widen(self.dtype, to, source, self.count)
        elif to != source:
            ctypes.memmove(to, source, self.count * self.dtype.itemsize)

    def add(self, source: int) -> None:
        """Take one that is not the last. ``source``: its address; the memory may change afterwards."""
        number = 1
        if self._waiting and self._waiting[-1][0] == 1 and self.kept is self.dtype:  # no need to copy it first
            number, buffer = 2, self._waiting.pop()[1]
            self._combine(ctypes.addressof(buffer), ctypes.addressof(buffer), source)
        else:
            buffer = self._free.pop() if self._free else _memory(self.count, self.kept)
            self._put(ctypes.addressof(buffer), source)
        while self._waiting and self._waiting[-1][0] == number:
            left = self._waiting.pop()[1]
            self._combine(ctypes.addressof(left), ctypes.addressof(left), ctypes.addressof(buffer))
            self._free.append(buffer)
            number, buffer = 2 * number, left
        self._waiting.append((number, buffer))

    def end(self, source: int, to: int) -> None:
        """Take the last one, and write the result to ``to``, which may be the same address."""
        if self.kept is not self.dtype or not self._waiting:
            self._put(to, source)
            source = to
        while self._waiting:
            left = self._waiting.pop()[1]
            self._combine(to, ctypes.addressof(left), source)
            self._free.append(left)
            source = to

    def _combine(self, to: int, left: int, right: int) -> None:
        native.reduce(self.kept, self._op, to, [left, right], self.count)


class Total(Buffer):
    """What ranks combine, in the type in which they do; ``finish()`` turns it into the output."""

    __slots__ = ("divide_by", "out")

    def __init__(self, out: Buffer, dtype: DType, divide_by: int):
        memory = out.owner if dtype is out.dtype else _memory(out.count, dtype)
        address = out.address if dtype is out.dtype else ctypes.addressof(memory)
        super().__init__(address, out.count, dtype, memory, target=out.written)
        self.out, self.divide_by = out, divide_by

    def extent(self) -> tuple[int, int]:
        return self.out.extent()

    def finish(self) -> None:
        if self.divide_by > 1:
            native.reduce(self.dtype, RedOpType.AVG, self.address, [self.address], self.count, float(self.divide_by))
        if self.dtype is not self.out.dtype:
            native.narrow(self.out.dtype, self.out.address, self.address, self.count)
        self.out.finish()


class ShardCaller(Caller, Protocol):
    """What these checks need of a group."""

    pending: Any


class _Call:
    """One call, on the way to a request: what its inputs must be, and where they are combined."""

    def __init__(self, group: ShardCaller, call: str, output: Any, shards: Any, op: Any):
        self._group, self._call, self._op = group, call, op
        self._expected = len(share_of(call, "shards", shards, group.rank, group.size))
        out = self._out = group.views.write(call, "output", output)
        redop, _ = to_redop(call, op)
        # between ranks: factors have been applied, and finish() divides
        self.sums = RedOpType.SUM if redop in (RedOpType.AVG, RedOpType.PREMUL_SUM) else redop
        self.total = Total(out, kept_dtype(out.dtype, redop), shards if redop is RedOpType.AVG else 1)

    def combine(self, inputs: Any, into: Buffer) -> None:
        """Combine this rank's shards."""
        if not isinstance(inputs, Iterable) or hasattr(inputs, "shape"):
            raise errors.wrong_type(self._call, "inputs", inputs, "a list or an iterator of tensors")
        if isinstance(inputs, Sized):
            self._check_number(len(inputs), len(inputs))
        reduction = PairwiseReduction(self._out.dtype, self.sums, into.count)
        number = 0
        for number, tensor in enumerate(inputs, 1):
            if number > self._expected:
                self._check_number(number, f"more than {self._expected}")
            view = self._source(f"inputs[{number - 1}]", tensor, into.count)
            if number < self._expected:
                reduction.add(view.address)
            else:
                if view.address != into.address and view.touches(into):
                    view = view.copy()
                reduction.end(view.address, into.address)
        self._check_number(number, number)

    def _check_number(self, number: int, got: Any) -> None:
        if number != self._expected:
            allowed = f"as many as this rank has shards, {self._expected}"
            raise errors.bad_argument(self._call, "inputs", got, allowed)

    def _source(self, name: str, tensor: Any, count: int) -> Buffer:
        view = self._group.views.read(self._call, name, tensor)
        if view.dtype is not self._out.dtype or view.count != count:
            got, allowed = (f"{dtype.label} x {n}" for dtype, n in ((view.dtype, view.count), (self._out.dtype, count)))
            raise errors.bad_argument(self._call, name, got, f"{allowed}, as output says")
        for work in [w for w in list(self._group.pending) if w.writes(view)]:
            work.wait_until(None)
            view.refresh()
        _, source = reduction_of(self._group, self._call, self._op, view)
        return source


def all_reduce_shards(group: ShardCaller, output: Any, inputs: Any, shards: Any, op: Any) -> Request:
    call = _Call(group, "all_reduce_shards", output, shards, op)
    total = call.total
    call.combine(inputs, total)
    return Request(
        "all_reduce", [total], [total], [output], total.count, total.dtype, call.sums, shards, call="all_reduce_shards"
    )


def reduce_scatter_shards(group: ShardCaller, output: Any, inputs: Any, shards: Any, op: Any) -> Request:
    call = _Call(group, "reduce_scatter_shards", output, shards, op)
    total = call.total
    count = total.count * group.size
    memory = _memory(count, total.dtype)
    whole = Buffer(ctypes.addressof(memory), count, total.dtype, memory)
    call.combine(inputs, whole)
    name, sizes = "reduce_scatter_single", (total.count,) * group.size
    return Request(
        name, [whole], [total], [output], sizes, total.dtype, call.sums, shards, call="reduce_scatter_shards"
    )
