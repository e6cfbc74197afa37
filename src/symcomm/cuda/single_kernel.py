"""Small all_reduces of ranks that share a GPU concurrently (MPS), in a single kernel.

Each block copies its part of the tensor into this rank's staging area, signals the same block of every peer's kernel,
waits for their signals, and combines the part. On an H200 that takes half as long as a barrier of streams followed by a
kernel. Large symmetric tensors are combined in place: after a barrier of blocks each rank combines its shard and writes
it to all, then comes another barrier. It is not used where processes time-slice a GPU: a kernel that spins would keep
the others from running.

Blocks signal by flags in GPU memory, ``flags[block * world + rank]``, that only ever grow. The last block to signal
also writes the flag words in host memory, where the watchdog sees which ranks have arrived; a kernel that waits for a
dead rank polls the stop word now and then. Behind the flags lie the count of blocks that have signalled, and the word
by which a kernel's first block tells the others what it read in the stop word.
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
    return FLAG_BYTES * (MOST_BLOCKS * world + 2)


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
        gate = count + FLAG_BYTES
        self._where = (
            *signals,
            flags[rank],
            *(by_rank.get(r, 0) for r in range(world)),
            flag_words.stop,
            gate,
            count,
            rank,
        )
        self._functions_of: dict[Any, tuple[int, int] | None] = {}

    def _functions(self, dtype: DType, redop: RedOpType) -> tuple[int, int] | None:
        key = (dtype, redop)
        if key not in self._functions_of:
            self._functions_of[key] = kernels.single_kernel(self.device, dtype, redop, self.world)
        return self._functions_of[key]

    def kernel(self, dtype: DType, redop: RedOpType, sources: int, targets: int) -> Any:
        if sources == self.world:
            self._functions(dtype, redop)  # loaded along with the others, before the hosts synchronize
        return super().kernel(dtype, redop, sources, targets)

    def reduce_small(self, dtype: DType, redop: RedOpType, source: int, target: int, count: int, stream: int) -> None:
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
        self.barriers.count += 2
        places = (0, 0, *tensors, *self._where, self.barriers.count - 1)
        self._driver.turn(stream, (), 0, (), (), shape, places)
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
        functions, nbytes = self._functions(dtype, redop), count * dtype.itemsize
        if functions is None or nbytes > self.half:
            return super().prepare(dtype, redop, count)
        shape = self._shape(functions[0], nbytes, 0, 0, count)
        return lambda stream, address: self._launch(shape, address, address, stream)
