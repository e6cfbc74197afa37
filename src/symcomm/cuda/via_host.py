"""Small operations of ranks that time-slice one GPU go through host memory.

A kernel, or a copy within the GPU, has to wait until the GPU switches to its process, which takes 150 us. The copy
engines serve all processes at once, and they do copies to and from host memory, and a stream's writes and waits. An
all_reduce of 4 KiB by two ranks on an H200 takes 70 us this way, and 156 us by a kernel.

Staging areas are in the ranks' arenas. Instead of kernels the CPU combines, in the order of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence

from symcomm.cuda.stream_collectives import PreparedAllReduce, StreamBarriers, StreamCollectives, after_arrival
from symcomm.types import DType, RedOpType

HALF_BYTES = 256 << 10  # the largest operation that goes this way: it takes 136 us, and kernels take 157
STAGE_BYTES = 3 * HALF_BYTES  # of each rank: two halves that peers read, and what this rank has combined


class ViaHostCollectives(StreamCollectives):
    """``stages``: where the ranks' staging areas are in this process; the GPU reads and writes them there."""

    via_host = True

    def __init__(self, rank: int, world: int, device: int, barriers: StreamBarriers, stages: Sequence[int]):
        super().__init__(rank, world, device, barriers)
        self.use_stage(list(stages), HALF_BYTES)
        self._combined = stages[rank] + 2 * HALF_BYTES

    def kernel(self, dtype: DType, redop: RedOpType, sources: int, targets: int) -> None:
        """The CPU combines everything."""

    def combine(
        self, dtype: DType, redop: RedOpType, sources: Sequence[int], targets: Sequence[int], count: int, stream: int
    ) -> None:
        if count:
            self._driver.combine_on_host(stream, dtype, redop, tuple(sources), self._combined, count)
            for target in targets:
                self.copy(target, self._combined, count * dtype.itemsize, stream)

    def prepare(self, dtype: DType, redop: RedOpType, count: int) -> PreparedAllReduce | None:
        return after_arrival(
            lambda stream, address: self.reduce_one_shot(dtype, redop, address, address, count, stream)
        )
