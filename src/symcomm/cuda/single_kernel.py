"""All_reduces of ranks that share a GPU concurrently (MPS), in a single kernel.

Each block copies its part of the tensor into this rank's staging area, signals the same block of every peer's kernel,
waits for their signals, and combines the part. On an H200 that takes half as long as a barrier of streams followed by a
kernel. Of a large tensor, each rank combines a shard, and the others copy it after a second barrier of blocks.
Symmetric tensors need no staging area. Where processes time-slice a GPU this is not used: a kernel that spins would
keep the others from running.

Blocks signal by flags in GPU memory, ``flags[block * world + rank]``, that only ever grow. The last block to signal
also writes the flag words in host memory, where the watchdog sees which ranks have arrived; a kernel that waits for a
dead rank polls the stop word now and then. Behind the flags lie the counts of blocks that have signalled, and the word
by which a kernel's first block tells the others what it read in the stop word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from symcomm._core import native
from symcomm.cuda import kernels
from symcomm.cuda.stream_collectives import PreparedAllReduce, StreamBarriers, StreamCollectives
from symcomm.types import DType, RedOpType

MOST_RANKS = 64
MOST_BLOCKS = 64  # of 512 threads: 4 MiB take 12 us, with half as many 14
FLAG_BYTES = 8
ONE_SHOT_BYTES = 16 << 20  # tensor x ranks: larger ones are combined shard by shard (16 MiB, 2 ranks: 38 us, not 43)

CAPTURED_BYTES = 4 << 20  # of the staging area that CUDA graphs use

_kept: list[Any] = []  # the flags of all groups: a peer that is late for an operation that failed still writes them


def _region_bytes(world: int) -> int:
    """Bytes of the flags and counters of eager operations; those of captured ones follow, then their staging area."""
    return FLAG_BYTES * (MOST_BLOCKS * world + 4)


def flags_bytes(world: int) -> int:
    return 2 * _region_bytes(world) + CAPTURED_BYTES


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
        self._where = self._places_in(flags, [by_rank.get(r, 0) for r in range(world)])
        region = _region_bytes(world)
        nowhere = [0] * world  # a captured operation tells the host nothing
        self._where_captured = self._places_in([address + region for address in flags], nowhere)
        self._captured_stages = [address + 2 * region for address in flags]
        self._functions_of: dict[Any, kernels.SingleKernels | None] = {}

    def _places_in(self, flags: Sequence[int], arrivals: Sequence[int]) -> tuple[int, ...]:
        """A kernel's arguments about flags: they follow the staging areas and precede the barrier's number."""
        rank, world = self.rank, self.world
        signals = [address + FLAG_BYTES * rank for address in flags]
        count = flags[rank] + FLAG_BYTES * MOST_BLOCKS * world
        return (*signals, flags[rank], *arrivals, self.barriers.flag_words.stop, count + FLAG_BYTES, count, rank)

    def _functions(self, dtype: DType, redop: RedOpType) -> kernels.SingleKernels | None:
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
            reduce = self.reduce_one_shot if self.world <= 3 else self.reduce_two_shot
            return reduce(dtype, redop, source, target, count, stream)
        item, most = dtype.itemsize, max(1, self.half // dtype.itemsize)
        for start in range(0, count, most):
            n, at = min(most, count - start), start * item
            shape, barriers = self._staged(functions, n, item, source + at, target + at)
            addresses = (source + at, target + at, *self.halves(), *self._where, self.barriers.count + 1)
            self.barriers.count += barriers
            self._driver.turn(stream, (), 0, (), (), shape, addresses)
        return None

    def reduce_in_place(self, dtype: DType, redop: RedOpType, tensors: Sequence[int], count: int, stream: int) -> None:
        functions = self._functions(dtype, redop)
        if functions is None or any(address % kernels.PACK for address in tensors):  # which all ranks see alike
            return super().reduce_in_place(dtype, redop, tensors, count, stream)
        shape = self._shape(functions.direct, count * dtype.itemsize // self.world, 0, 0, count)
        self.barriers.count += 2
        places = (0, 0, *tensors, *self._where, self.barriers.count - 1)
        self._driver.turn(stream, (), 0, (), (), shape, places)
        return None

    def can_capture(self, dtype: DType, redop: RedOpType) -> bool:
        """Whether a CUDA graph may hold such an all_reduce: one was made before, as loading a kernel ends a capture."""
        return self._functions_of.get((dtype, redop)) is not None

    def reduce_captured(
        self, dtype: DType, redop: RedOpType, source: int, target: int, count: int, stream: int
    ) -> None:
        """An all_reduce that a CUDA graph may replay."""
        functions = self._functions_of[dtype, redop]
        assert functions is not None
        item, most = dtype.itemsize, CAPTURED_BYTES // dtype.itemsize
        for start in range(0, count, most):
            n, at = min(most, count - start), start * item
            shape = self._shape(functions.captured, n * item, source + at, target + at, n)
            places = (source + at, target + at, *self._captured_stages, *self._where_captured, 0)
            self._driver.turn(stream, (), 0, (), (), shape, places)

    def _shape(self, function: int, nbytes: int, source: int, target: int, count: int) -> tuple[int, ...]:
        """(function, blocks, threads, count, whether packs can be read and written whole)"""
        aligned = not (source | target) % kernels.PACK
        blocks = -(-nbytes // (kernels.PACK * kernels.SINGLE_KERNEL_THREADS))
        return function, max(1, min(self._blocks, blocks)), kernels.SINGLE_KERNEL_THREADS, count, int(aligned)

    def _staged(
        self, functions: kernels.SingleKernels, count: int, item: int, source: int, target: int
    ) -> tuple[tuple[int, ...], int]:
        """(the kernel's shape, the barriers in it)"""
        nbytes = count * item
        if nbytes * self.world <= ONE_SHOT_BYTES:
            return self._shape(functions.one_shot, nbytes, source, target, count), 1
        return self._shape(functions.two_shot, nbytes // self.world, source, target, count), 2

    def prepare(self, dtype: DType, redop: RedOpType, count: int) -> PreparedAllReduce | None:
        functions, nbytes = self._functions(dtype, redop), count * dtype.itemsize
        if functions is None or nbytes > self.half:
            return super().prepare(dtype, redop, count)
        shape, barriers = self._staged(functions, count, dtype.itemsize, 0, 0)
        places = [(0, 0, *half, *self._where, 0) for half in self._halves]
        prepared = native.prepare_kernel(self._driver.launch_address, shape, *places)

        def run(handle: Any, plan: Any, timeout_ns: int, site: int, stream: int, address: int) -> int:
            half, value = self._turn ^ 1, self.barriers.count + 1
            status = native.run_prepared(handle, plan, timeout_ns, site, prepared, half, stream, address, value)
            if status <= 0:
                self._turn = half
                self.barriers.count += barriers
                self._driver.check_turn(-status)
            return status

        return run
