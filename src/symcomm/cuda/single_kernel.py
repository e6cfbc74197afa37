"""Small all_reduces of ranks that share a GPU concurrently (MPS), in a single kernel.

Each block copies its part of the tensor into this rank's staging area, signals the same block of every peer's kernel,
waits for their signals, and combines the part. On an H200 that takes half as long as a barrier of streams followed by a
kernel. It is not used where processes time-slice a GPU: a kernel that spins would keep the others from running.

Blocks signal by flags in GPU memory, ``flags[block * world + rank]``, that only ever grow. The last block to signal
also writes the flag words in host memory, where the watchdog sees which ranks have arrived; a kernel that waits for a
dead rank polls the stop word now and then. Behind the flags lies the count of blocks that have signalled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from symcomm.cuda import kernels
from symcomm.cuda.stream_collectives import StreamBarriers, StreamCollectives
from symcomm.types import DType, RedOpType

__all__ = ["FLAG_BYTES", "MOST_RANKS", "SingleKernelCollectives", "flags_bytes", "most_blocks"]

MOST_RANKS = 64
MOST_BLOCKS = 64  # of 512 threads: 4 MiB take 12 us, with half as many 14
FLAG_BYTES = 8

_kept: list[Any] = []  # the flags of all groups: a peer that is late for an operation that failed still writes them


def flags_bytes(world: int) -> int:
    return FLAG_BYTES * (MOST_BLOCKS * world + 1)


def most_blocks(multiprocessors: int, world: int) -> int:
    """Few enough that all ranks' blocks are resident on the GPU at the same time."""
    return max(1, min(MOST_BLOCKS, multiprocessors // world))


class SingleKernelCollectives(StreamCollectives):
    """``flags``: where every rank's are; ``blocks``: at most so many, the same on all ranks."""

    def __init__(
        self,
        rank: int,
        world: int,
        device: int,
        barriers: StreamBarriers,
        flags: Sequence[int],
        blocks: int,
        keeps: Any,
    ):
        super().__init__(rank, world, device, barriers)
        _kept.append(keeps)
        self._blocks = blocks
        flag_words = barriers.flag_words
        by_rank = dict(zip((r for r in range(world) if r != rank), flag_words.theirs, strict=True))
        signals = [address + FLAG_BYTES * rank for address in flags]
        count = flags[rank] + FLAG_BYTES * MOST_BLOCKS * world
        self._where = (*signals, flags[rank], *(by_rank.get(r, 0) for r in range(world)), flag_words.stop, count, rank)
        self._functions: dict[Any, int | None] = {}

    def _function(self, dtype: DType, redop: RedOpType) -> int | None:
        key = (dtype, redop)
        if key not in self._functions:
            self._functions[key] = kernels.single_kernel(self.device, dtype, redop, self.world)
        return self._functions[key]

    def kernel(self, dtype: DType, redop: RedOpType, sources: int, targets: int) -> Any:
        if sources == self.world:
            self._function(dtype, redop)  # loaded along with the others, before the hosts synchronize
        return super().kernel(dtype, redop, sources, targets)

    def reduce_small(self, dtype: DType, redop: RedOpType, source: int, target: int, count: int, stream: int) -> None:
        function = self._function(dtype, redop)
        if function is None:
            return self.reduce_one_shot(dtype, redop, source, target, count, stream)
        item, most = dtype.itemsize, max(1, self.half // dtype.itemsize)
        for start in range(0, count, most):
            n, at = min(most, count - start), start * item
            self._launch(self._shape(function, n * item, source + at, target + at, n), source + at, target + at, stream)
        return None

    def _shape(self, function: int, nbytes: int, source: int, target: int, count: int) -> tuple[int, ...]:
        """(function, blocks, threads, count, whether packs can be read and written whole)"""
        aligned = not (source | target) % kernels.PACK
        blocks = -(-nbytes // (kernels.PACK * kernels.SINGLE_KERNEL_THREADS))
        return function, max(1, min(self._blocks, blocks)), kernels.SINGLE_KERNEL_THREADS, count, int(aligned)

    def _launch(self, shape: tuple[int, ...], source: int, target: int, stream: int) -> None:
        self.barriers.count += 1
        addresses = (source, target, *self.halves(), *self._where, self.barriers.count)
        self._driver.turn(stream, (), 0, (), (), shape, addresses)

    def prepare(self, dtype: DType, redop: RedOpType, count: int) -> Callable[[int, int], None] | None:
        function, nbytes = self._function(dtype, redop), count * dtype.itemsize
        if function is None or nbytes > self.half:
            return super().prepare(dtype, redop, count)
        shape = self._shape(function, nbytes, 0, 0, count)
        return lambda stream, address: self._launch(shape, address, address, stream)
