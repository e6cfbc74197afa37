"""Small all_reduces of ranks that use one GPU at the same time (MPS): one kernel does it all.

Each of its blocks copies its part of the tensor into this rank's staging area, tells the same block of every peer's
kernel, waits until all of those have told it, and combines the part. On an H200 that takes half as long as a meeting of
streams with a kernel behind it. Large symmetric tensors are combined in place: blocks meet, each rank combines its
shard and writes it to all, and blocks meet again. Where processes take turns on a GPU this is not used: a kernel that
waits keeps the others from coming.

Blocks tell each other by flags in GPU memory, ``flags[block * world + rank]``, that only ever grow. Besides, the last
block to tell writes the pads in host memory, where the watch sees who has come; a kernel that waits for a dead rank
looks at the pad's stop word now and then. Behind the flags lie the count of blocks that have
told, and the word by which a kernel's first block tells the others what it found there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from symcomm.cuda import kernels
from symcomm.cuda.stream_collectives import Meetings, Mover
from symcomm.types import DType, RedOpType

__all__ = ["FLAG_BYTES", "MOST_RANKS", "SpinningMover", "flags_bytes", "most_blocks"]

MOST_RANKS = 64
MOST_BLOCKS = 64  # of 512 threads: 4 MiB take 12 us, with half as many 14
FLAG_BYTES = 8

_kept: list[Any] = []  # the flags of all groups: a peer that is late for an operation that failed still writes them


def flags_bytes(world: int) -> int:
    return FLAG_BYTES * (MOST_BLOCKS * world + 2)


def most_blocks(multiprocessors: int, world: int) -> int:
    """So few that all ranks' blocks are on the GPU at the same time, whatever else is."""
    return max(1, min(MOST_BLOCKS, multiprocessors // world))


class SpinningMover(Mover):
    """``flags``: where every rank's are; ``blocks``: at most so many, the same on all ranks."""

    def __init__(
        self, rank: int, world: int, device: int, meetings: Meetings, flags: Sequence[int], blocks: int, keeps: Any
    ):
        super().__init__(rank, world, device, meetings)
        _kept.append(keeps)
        self._blocks = blocks
        pads = meetings.pads
        by_rank = dict(zip((r for r in range(world) if r != rank), pads.theirs, strict=True))
        told = [place + FLAG_BYTES * rank for place in flags]
        count = flags[rank] + FLAG_BYTES * MOST_BLOCKS * world
        gate = count + FLAG_BYTES
        self._where = (*told, flags[rank], *(by_rank.get(r, 0) for r in range(world)), pads.stop, gate, count, rank)
        self._spinning: dict[Any, tuple[int, int] | None] = {}

    def _functions(self, dtype: DType, redop: RedOpType) -> tuple[int, int] | None:
        key = (dtype, redop)
        if key not in self._spinning:
            self._spinning[key] = kernels.spinning(self.device, dtype, redop, self.world)
        return self._spinning[key]

    def kernel(self, dtype: DType, redop: RedOpType, sources: int, targets: int) -> Any:
        if sources == self.world:
            self._functions(dtype, redop)  # loaded along with the others, before the hosts meet
        return super().kernel(dtype, redop, sources, targets)

    def reduce_to_all(self, dtype: DType, redop: RedOpType, source: int, target: int, count: int, stream: int) -> None:
        functions = self._functions(dtype, redop)
        if functions is None:
            return self.reduce_one_shot(dtype, redop, source, target, count, stream)
        function, _ = functions
        item, most = dtype.itemsize, max(1, self.half // dtype.itemsize)
        for start in range(0, count, most):
            n, at = min(most, count - start), start * item
            self._launch(self._shape(function, n * item, source + at, target + at, n), source + at, target + at, stream)
        return None

    def reduce_in_place(self, dtype: DType, redop: RedOpType, tensors: Sequence[int], count: int, stream: int) -> None:
        functions = self._functions(dtype, redop)
        if functions is None or any(address % kernels.PACK for address in tensors):  # which all ranks see alike
            return super().reduce_in_place(dtype, redop, tensors, count, stream)
        shape = self._shape(functions[1], count * dtype.itemsize // self.world, 0, 0, count)
        self.meetings.count += 2
        places = (0, 0, *tensors, *self._where, self.meetings.count - 1)
        self._driver.turn(stream, (), 0, (), (), shape, places)
        return None

    def _shape(self, function: int, nbytes: int, source: int, target: int, count: int) -> tuple[int, ...]:
        """(function, blocks, threads, count, whether packs can be read and written whole)"""
        aligned = not (source | target) % kernels.PACK
        blocks = -(-nbytes // (kernels.PACK * kernels.SPINNING_THREADS))
        return function, max(1, min(self._blocks, blocks)), kernels.SPINNING_THREADS, count, int(aligned)

    def _launch(self, shape: tuple[int, ...], source: int, target: int, stream: int) -> None:
        self.meetings.count += 1
        places = (source, target, *self.halves(), *self._where, self.meetings.count)
        self._driver.turn(stream, (), 0, (), (), shape, places)

    def again(self, dtype: DType, redop: RedOpType, count: int) -> Callable[[int, int], None] | None:
        functions, nbytes = self._functions(dtype, redop), count * dtype.itemsize
        if functions is None or nbytes > self.half:
            return super().again(dtype, redop, count)
        shape = self._shape(functions[0], nbytes, 0, 0, count)
        return lambda stream, address: self._launch(shape, address, address, stream)
