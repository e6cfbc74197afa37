"""Symmetric tensors in a GPU's memory: the same calls as on the CPU, in the order of streams.

Signals are words in GPU memory, so that users' own kernels may use them, too. A stream puts a signal by writing 1 once
the word is 0, and takes it by waiting for 1 and writing 0.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from symcomm.cuda import devices
from symcomm.cuda.driver import WAIT_EQUAL, driver
from symcomm.cuda.failure import CudaFailures, explain_cuda_errors
from symcomm.cuda.group import CudaGroup, device_group
from symcomm.cuda.pool import PoolBuffer, RawMemory, find_block, opened_pieces, pool_of, storage_over
from symcomm.group.process_group import ProcessGroup
from symcomm.memory.arena import current_arena
from symcomm.symm_mem.place import Allocation, PeerMemory, Place, persistent

if TYPE_CHECKING:
    import torch


class PoolAllocation(Allocation):
    def __init__(self, piece: PoolBuffer, device: int, nbytes: int):
        super().__init__(piece.address, nbytes)
        self.device = device


_pieces: weakref.WeakValueDictionary[int, PoolBuffer] = weakref.WeakValueDictionary()  # by address
_facts: weakref.WeakKeyDictionary[PoolBuffer, PoolAllocation] = weakref.WeakKeyDictionary()
_Id = tuple[bytes, int, int]  # the rank's arena (ranks may be threads), device, alloc_id
_kept: dict[_Id, tuple[PoolBuffer, int]] = {}  # for ever, with their sizes
_lent: weakref.WeakValueDictionary[_Id, RawMemory] = weakref.WeakValueDictionary()  # while a tensor lives


@contextlib.contextmanager
def using(device: torch.device) -> Iterator[None]:
    """Make the driver's calls go to ``device``. Stream 0 is then its default stream, as it is every other GPU's."""
    import torch

    with torch.cuda.device(device):
        driver().enter(device.index)
        yield


def _allocate(device: int, nbytes: int) -> PoolBuffer:
    piece = pool_of(device).allocate(nbytes)
    _pieces[piece.address] = piece
    _facts[piece] = PoolAllocation(piece, device, nbytes)
    return piece


def _persistent(key: _Id, nbytes: int) -> PoolBuffer:
    _, device, alloc_id = key
    return persistent(_kept, key, key in _lent, alloc_id, nbytes, partial(_allocate, device, nbytes))


def find_piece(tensor: torch.Tensor) -> PoolBuffer | None:
    """The symmetric memory in which a CUDA tensor lies, or None."""
    address = tensor.untyped_storage().data_ptr()
    piece = _pieces.get(address)
    if piece is not None or find_block(tensor.get_device(), address) is None:
        return piece
    # get_buffer() with an offset makes tensors inside a piece.
    return next((p for start, p in list(_pieces.items()) if start <= address < start + p.nbytes), None)


# --- rendezvous --------------------------------------------------------------------------------------------------


class PoolPeers(PeerMemory):
    """Memory on ranks' GPUs. Signals and barriers run in the order of the current stream."""

    def __init__(self, gpu: CudaGroup, piece: PoolBuffer, nbytes: int):
        import torch

        super().__init__(nbytes)
        self.device = torch.device("cuda", gpu.device)
        self._gpu = gpu
        self._pad = pool_of(gpu.device).allocate(self.pad_bytes)
        torch.as_tensor(self._pad, device=self.device).zero_()
        torch.cuda.current_stream(self.device).synchronize()  # no rank may signal before the pad is clear
        infos = self.exchange(
            gpu.core, handle=piece.block.handle.hex(), offset=piece.offset,
            pad_handle=self._pad.block.handle.hex(), pad=self._pad.offset,
        )  # fmt: skip
        driver().enter(gpu.device)
        self.buffers, self.pad_addresses = opened_pieces(infos), opened_pieces(infos, "pad_handle", "pad")
        self._arrays = torch.tensor([self.buffers, self.pad_addresses], dtype=torch.int64, device=self.device)

    @property
    def arrays(self) -> tuple[int, int]:
        return self._arrays[0].data_ptr(), self._arrays[1].data_ptr()

    def storage(self, address: int, nbytes: int, keeps: Any) -> torch.UntypedStorage:
        return storage_over(RawMemory(address, nbytes, keeps), self._gpu.device)

    def barrier(self, group: ProcessGroup, what: str, channel: int, timeout_ns: int) -> None:
        others = [r for r in range(group.size) if r != group.rank]
        steps = [self._put(group, r, channel) for r in others] + [self._take(group, r, channel) for r in others]
        self._enqueue(what, steps, others, timeout_ns)

    def put(self, group: ProcessGroup, what: str, rank: int, channel: int, timeout_ns: int) -> None:
        self._enqueue(what, [self._put(group, rank, channel)], [rank], timeout_ns)

    def take(self, group: ProcessGroup, what: str, rank: int, channel: int, timeout_ns: int) -> None:
        self._enqueue(what, [self._take(group, rank, channel)], [rank], timeout_ns)

    def _put(self, group: ProcessGroup, rank: int, channel: int) -> tuple[int, int, int]:
        """(address, the value to wait for, the value to write)"""
        return self.pad_addresses[rank] + 4 * (channel * group.size + group.rank), 0, 1

    def _take(self, group: ProcessGroup, rank: int, channel: int) -> tuple[int, int, int]:
        return self.pad_addresses[group.rank] + 4 * (channel * group.size + rank), 1, 0

    @property
    def failures(self) -> CudaFailures:
        return self._gpu.failures

    @explain_cuda_errors
    def _enqueue(self, what: str, steps: Sequence[tuple[int, int, int]], peers: list[int], timeout_ns: int) -> None:
        import torch

        self.failures.check_usable(what)
        stream = torch.cuda.current_stream(self.device)
        with using(self.device):
            for address, awaited, written in steps:
                driver().wait(stream.cuda_stream, address, awaited, WAIT_EQUAL)
                driver().write(stream.cuda_stream, address, written)
            passed = torch.cuda.Event()
            passed.record(stream)
        words = [(address, awaited) for address, awaited, _ in steps]
        self._gpu.watch_wait(what, passed, peers, words, timeout_ns / 1e9)


class OnGPU(Place):
    how = "allocate it with symm_mem.empty(..., device='cuda')"

    def new(
        self, nbytes: int, device: torch.device, group_name: Any, alloc_id: int | None
    ) -> tuple[torch.UntypedStorage, torch.device]:
        import torch

        devices.need_cuda("symm_mem.empty")
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda._lazy_init()
        source: Any
        if alloc_id is None:
            source = piece = _allocate(index, nbytes)
        else:
            key = (current_arena().nonce, index, alloc_id)
            piece = _persistent(key, nbytes)
            source = _lent[key] = RawMemory(piece.address, piece.nbytes, piece)
        _facts[piece].group_name = group_name
        return storage_over(source, index), torch.device("cuda", index)

    def find(self, tensor: torch.Tensor) -> tuple[PoolBuffer, Allocation] | None:
        piece = find_piece(tensor)
        return None if piece is None else (piece, _facts[piece])

    def meet(self, memory: PoolBuffer, group: ProcessGroup) -> PeerMemory:
        group.check_usable()
        allocation = _facts[memory]
        return PoolPeers(device_group(group, allocation.device), memory, allocation.nbytes)

    def write_words(self, tensor: torch.Tensor, offset: int, value: int, count: int | None) -> None:
        import torch

        address, stream = tensor.data_ptr() + 4 * offset, torch.cuda.current_stream(tensor.device).cuda_stream
        with using(tensor.device):
            if count is None:  # a rank that sees the word sees all earlier work in the stream
                driver().write(stream, address, value)
            else:
                driver().fill32(address, value, count, stream)
