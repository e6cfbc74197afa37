"""Collectives as operations on a stream.

Each rank has a staging area with two halves, used in turn, which all peers have open. The usual step is: copy my part
into my half, barrier, read the peers' halves. It needs no barrier at its end: a half is written again two steps later,
and by then every rank has passed another barrier, after its reads. That matters where processes time-slice one GPU and
a barrier costs 150 us, whatever else an operation does.

If all ranks' tensors are symmetric and large, peers read and write them in place, between two barriers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from symcomm.cuda import kernels
from symcomm.cuda.kernels import PACK
from symcomm.cuda.pool import PoolBuffer, pool_of
from symcomm.cuda.tensor_views import torch_stream
from symcomm.types import DType, RedOpType

GATE_BYTES = 8

# (group, plan, timeout_ns, site, stream, address) -> status: the hosts meet, and the operation goes into the stream.
PreparedAllReduce = Callable[[Any, Any, int, int, int, int], int]


def shard_of(rank: int, world: int, count: int, per_pack: int) -> tuple[int, int]:
    """(first, past the last) element of the part that ``rank`` combines; parts begin at whole packs."""
    part = -(-count // (world * per_pack)) * per_pack
    return min(rank * part, count), min((rank + 1) * part, count)


def after_arrival(put: Callable[[int, int], None]) -> PreparedAllReduce:
    """Runs ``put(stream, address)`` once the hosts have met."""

    def run(handle: Any, plan: Any, timeout_ns: int, site: int, stream: int, address: int) -> int:
        status = handle.run(plan, (), (), timeout_ns, site, ())
        if not status:
            put(stream, address)
        return status

    return run


class StreamBarriers:
    """Barriers among the streams of a group. ``count``: how many this rank has enqueued."""

    def __init__(self, flag_words: Any, driver: Any):
        self.flag_words, self.driver = flag_words, driver
        self.count = 0

    def barrier(
        self, stream: int, copy: tuple[int, ...] = (), kernel: tuple[int, ...] = (), addresses: Any = ()
    ) -> None:
        """All ranks' streams reach this point before any goes on. ``copy`` runs before, ``kernel`` after it."""
        self.count += 1
        self.driver.turn(stream, copy, self.count, self.flag_words.theirs, self.flag_words.mine, kernel, addresses)


class StreamCollectives:
    """The stream operations of one group. The group's lock is held while one is put into a stream."""

    via_host = False  # whether staging areas are host memory

    def __init__(self, rank: int, world: int, device: int, barriers: StreamBarriers):
        self.rank, self.world, self.device = rank, world, device
        self.barriers = barriers
        self.barrier = barriers.barrier
        self.half = 0  # bytes of half a staging area
        self._halves: list[list[int]] = [[], []]  # where each rank's are
        self._turn = 0
        self._kernels: dict[Any, Any] = {}
        self._driver = barriers.driver
        self._gate: PoolBuffer | None = None
        self._gate_turns = 0

    # --- steps ------------------------------------------------------------------------------------------------

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        if nbytes and target != source:
            self._driver.copy(target, source, nbytes, stream)

    def kernel(self, dtype: DType, redop: RedOpType, sources: int, targets: int) -> Any:
        """The kernel that combines so many sources into so many targets, or None if torch has to do it.

        Callers ask for it before the hosts synchronize. Loading a kernel makes the driver wait for all streams of the
        process; if ranks are threads, one of these may wait for us."""
        key = (dtype, redop, sources, targets)
        if key not in self._kernels:
            self._kernels[key] = kernels.kernel(self.device, *key)
        return self._kernels[key]

    def combine(
        self, dtype: DType, redop: RedOpType, sources: Sequence[int], targets: Sequence[int], count: int, stream: int
    ) -> None:
        if not count:
            return
        kernel = self.kernel(dtype, redop, len(sources), len(targets))
        if kernel is not None:
            places = (*sources, *targets)
            gate = self._next_gate(stream) if len(targets) > 1 else ()
            self._driver.turn(stream, (), 0, (), (), kernel.launch(places, count), (*places, *gate))
        else:
            on = torch_stream(stream, self.device)
            kernels.combine(self.device, dtype, redop, sources, targets, count, on)

    def _next_gate(self, stream: int) -> tuple[int, int, int]:
        """Arguments for a kernel that writes to peers: the word that says that the group has failed, and the gate by
        which its blocks tell each other."""
        if self._gate is None:
            self._gate = pool_of(self.device).allocate(GATE_BYTES)
            self._driver.fill32(self._gate.address, 0, GATE_BYTES // 4, stream)
        self._gate_turns += 1
        return self.barriers.flag_words.stop, self._gate.address, self._gate_turns

    def halves(self) -> list[int]:
        """Where every rank's half for the next step is."""
        self._turn ^= 1
        return self._halves[self._turn]

    def use_stage(self, stage: list[int], half: int) -> None:
        """``stage``: where every rank's staging area is; ``half``: bytes of half of one."""
        self.half = half
        self._halves = [list(stage), [address + half for address in stage]]

    def prepare(self, dtype: DType, redop: RedOpType, count: int) -> PreparedAllReduce | None:
        """A function that runs all_reduces of this kind, in place, of tensors whose address is a multiple of PACK. None
        if that would not be faster."""
        kernel = self.kernel(dtype, redop, self.world, 1)
        nbytes = count * dtype.itemsize
        if kernel is None or nbytes > self.half:
            return None
        launch = kernel.launch((), count)

        def put(stream: int, address: int) -> None:
            halves = self.halves()
            self.barrier(stream, (address, halves[self.rank], nbytes), launch, (*halves, address))

        return after_arrival(put)

    def can_capture(self, dtype: DType, redop: RedOpType) -> bool:
        """Whether a CUDA graph may hold an all_reduce. Not here: a replay would repeat the numbers of barriers."""
        return False

    # --- reductions -------------------------------------------------------------------------------------------

    def reduce_small(self, dtype: DType, redop: RedOpType, source: int, target: int, count: int, stream: int) -> None:
        """A small all_reduce."""
        self.reduce_one_shot(dtype, redop, source, target, count, stream)

    def reduce_one_shot(
        self, dtype: DType, redop: RedOpType, source: int, target: int | None, count: int, stream: int
    ) -> None:
        """Every rank that has a target combines all of it."""
        item, most = dtype.itemsize, max(1, self.half // dtype.itemsize)
        for start in range(0, count, most):
            n, at = min(most, count - start), start * item
            halves = self.halves()
            copy = (source + at, halves[self.rank], n * item)
            kernel = self.kernel(dtype, redop, self.world, 1) if target is not None else None
            if target is None:
                self.barrier(stream, copy)
            elif kernel is None:
                self.barrier(stream, copy)
                self.combine(dtype, redop, halves, [target + at], n, stream)
            else:
                addresses = (*halves, target + at)
                self.barrier(stream, copy, kernel.launch(addresses, n), addresses)

    def reduce_two_shot(
        self, dtype: DType, redop: RedOpType, source: int, target: int, count: int, stream: int
    ) -> None:
        """Each rank combines its shard and writes it to all."""
        item, most = dtype.itemsize, max(1, self.half // dtype.itemsize)
        for start in range(0, count, most):
            n, at = min(most, count - start), start * item
            halves = self.halves()
            self.barrier(stream, (source + at, halves[self.rank], n * item))
            self._combine_shard(dtype, redop, halves, n, stream)
            self.barrier(stream)
            self.copy(target + at, halves[self.rank], n * item, stream)

    def reduce_in_place(self, dtype: DType, redop: RedOpType, tensors: Sequence[int], count: int, stream: int) -> None:
        """Two-shot on symmetric tensors."""
        self.barrier(stream)
        self._combine_shard(dtype, redop, tensors, count, stream)
        self.barrier(stream)

    def _combine_shard(self, dtype: DType, redop: RedOpType, addresses: Sequence[int], count: int, stream: int) -> None:
        first, end = shard_of(self.rank, self.world, count, PACK // dtype.itemsize)
        mine = [address + first * dtype.itemsize for address in addresses]
        self.combine(dtype, redop, mine, mine, end - first, stream)

    def reduce_scatter(
        self, dtype: DType, redop: RedOpType, sources: Sequence[int], counts: Sequence[int], target: int, stream: int
    ) -> None:
        """``sources[q]``: this rank's part of rank q's result."""
        item = dtype.itemsize
        room = self.half // self.world // PACK * PACK
        for start in range(0, max(counts), max(1, room // item)):
            halves = self.halves()
            for q, source in enumerate(sources):
                n = min(room // item, max(0, counts[q] - start))
                self.copy(halves[self.rank] + q * room, source + start * item, n * item, stream)
            self.barrier(stream)
            n = min(room // item, max(0, counts[self.rank] - start))
            mine = [half + self.rank * room for half in halves]
            self.combine(dtype, redop, mine, [target + start * item], n, stream)

    def reduce_scatter_direct(
        self, dtype: DType, redop: RedOpType, inputs: Sequence[int], count: int, target: int, stream: int
    ) -> None:
        """Every rank reads its piece from all ranks' symmetric inputs."""
        self.barrier(stream)
        mine = [address + self.rank * count * dtype.itemsize for address in inputs]
        self.combine(dtype, redop, mine, [target], count, stream)
        self.barrier(stream)

    # --- copies -----------------------------------------------------------------------------------------------

    def all_gather(self, source: int, sizes: Sequence[int], targets: Sequence[int | None], stream: int) -> None:
        """Rank q has ``sizes[q]`` bytes for all; ``targets[q]`` is where this rank wants them, None for nowhere."""
        for start in range(0, max(sizes), max(1, self.half)):
            halves = self.halves()
            part = [min(self.half, max(0, size - start)) for size in sizes]
            self.barrier(stream, (source + start, halves[self.rank], part[self.rank]))
            for q, target in enumerate(targets):
                if target is not None:
                    address = source + start if q == self.rank and not self.via_host else halves[q]
                    self.copy(target + start, address, part[q], stream)

    def all_gather_direct(
        self, sources: Sequence[int], sizes: Sequence[int], targets: Sequence[int | None], stream: int
    ) -> None:
        """all_gather from symmetric tensors."""
        self.barrier(stream)
        for q, target in enumerate(targets):
            if target is not None:
                self.copy(target, sources[q], sizes[q], stream)
        self.barrier(stream)

    def all_to_all(
        self, sources: Sequence[int | None], matrix: Sequence[Sequence[int]], targets: Sequence[int | None], stream: int
    ) -> None:
        """Rank i has ``matrix[i][j]`` bytes for rank j; mine are at ``sources[j]`` and go to its ``targets[i]``."""
        me = self.rank
        room = self.half // self.world // PACK * PACK
        for start in range(0, max(map(max, matrix)), max(1, room)):
            halves = self.halves()
            for j, source in enumerate(sources):
                if source is not None:
                    self.copy(halves[me] + j * room, source + start, _chunk_size(matrix[me][j], start, room), stream)
            self.barrier(stream)
            for i, target in enumerate(targets):
                if target is not None:
                    self.copy(target + start, halves[i] + me * room, _chunk_size(matrix[i][me], start, room), stream)


def _chunk_size(size: int, start: int, room: int) -> int:
    return min(room, max(0, size - start))
