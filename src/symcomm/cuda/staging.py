"""Where a group's operations on a GPU stage tensors, and where peers' symmetric tensors are.

Staging areas grow with the operations that need them. Hosts tell each other of both by a MemoryInfo."""

from __future__ import annotations

from symcomm.cuda.driver import HANDLE_BYTES, driver
from symcomm.cuda.memory_infos import INFO, MemoryInfos
from symcomm.cuda.pool import PoolBuffer, find_block, opened, pool_of
from symcomm.cuda.recipes import CudaLimits
from symcomm.cuda.stream_collectives import StreamCollectives
from symcomm.cuda.tensor_views import TensorView

NOTHING = bytes(HANDLE_BYTES)  # a handle of zeros: the tensor is not symmetric, or there is no new staging area


class Staging:
    """The staging memory of one group."""

    def __init__(self, rank: int, size: int, device: int, limits: CudaLimits, collectives: StreamCollectives):
        self._rank, self._size, self._device, self._limits = rank, size, device, limits
        self._collectives = collectives
        self.promised = 0  # bytes of half an area once all operations so far have met: the same on all ranks
        self.stages: list[PoolBuffer] = []
        self._spare: list[MemoryInfos] = []
        self._places: dict[bytes, list[int] | None] = {}  # where symmetric tensors are, by the ranks' infos

    def infos(self) -> MemoryInfos:
        try:
            return self._spare.pop()
        except IndexError:
            return MemoryInfos(self._size)

    def give_back(self, infos: MemoryInfos) -> None:
        self._spare.append(infos)

    def fill(self, infos: MemoryInfos, need: int, symmetric: TensorView | None) -> PoolBuffer | None:
        """Write this rank's info; with ``need``, about a new staging area with halves of so many bytes."""
        stage = pool_of(self._device).allocate(2 * self.grown(need)) if need else None
        tensor = self.block_of(symmetric.address) if symmetric is not None else (NOTHING, 0)
        at = (stage.block.handle, stage.offset) if stage is not None else (NOTHING, 0)
        INFO.pack_into(infos.mine, 0, *tensor, *at)
        return stage

    def block_of(self, address: int) -> tuple[bytes, int]:
        found = find_block(self._device, address)
        return (NOTHING, 0) if found is None else (found[0].handle, found[1])

    def use(self, infos: MemoryInfos, stage: PoolBuffer | None, last_stream: int | None) -> None:
        """Use all ranks' new staging areas from here on."""
        assert stage is not None
        addresses = [
            stage.address if r == self._rank else self._open(r, handle) + offset
            for r, (_, _, handle, offset) in enumerate(INFO.iter_unpack(infos.all))
        ]
        self._collectives.use_stage(addresses, stage.nbytes // 2)
        if last_stream is not None:
            stage.streams.add(last_stream)
        self.stages.append(stage)  # the old ones live on, since peers may be reading them; each is twice the last

    def grown(self, need: int) -> int:
        """Bytes of half a staging area with room for ``need``, or as much as one may grow."""
        half = self._limits.first_half
        while half < min(need, self._limits.most_half):
            half *= 2
        return half

    def symmetric(self, infos: MemoryInfos) -> list[int] | None:
        """Where all ranks' tensors are, when all of them are symmetric."""
        said = bytes(infos.all)
        if said not in self._places:
            if len(self._places) > 1024:
                self._places.clear()
            blocks = [(handle, offset) for handle, offset, _, _ in INFO.iter_unpack(said)]
            is_whole = all(handle != NOTHING for handle, _ in blocks)
            found = [self._open(r, handle) + offset for r, (handle, offset) in enumerate(blocks)] if is_whole else None
            self._places[said] = found
        return self._places[said]

    def _open(self, rank: int, handle: bytes) -> int:
        driver().enter(self._device)
        return opened(handle, f"rank {rank}")
