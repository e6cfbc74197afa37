"""Memory on a GPU that other processes can open.

A block is one allocation of the driver, cut into pieces. Blocks are never given back to the driver, since a peer may
have them open. Freed pieces are used again, once the streams that used them have passed that point. Peers open a block
once and keep it open. ``hold`` keeps memory that a group shares with peers until they are done with it.
"""

from __future__ import annotations

import bisect
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from symcomm.cuda.driver import driver
from symcomm.cuda.tensor_views import torch_stream
from symcomm.memory.heap import Heap

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 32 << 20  # of blocks that small pieces share
ALIGN = 512  # bytes: as torch's own allocations


class Block:
    """One allocation of the driver. ``number`` is its name in this process."""

    def __init__(self, device: int, number: int, nbytes: int):
        driver().enter(device)
        self.device = device
        self.number = number
        self.nbytes = nbytes
        self.address = driver().allocate(nbytes)
        self.heap = Heap(0, nbytes)

    @functools.cached_property
    def handle(self) -> bytes:
        """The handle by which peers open the block; ranks that are threads of this process find it by this, too."""
        driver().enter(self.device)
        handle = driver().handle_of(self.address)
        _opened[handle] = self.address
        return handle


class PoolBuffer:
    """Some bytes of a block; they return to it when the last tensor over them is gone.

    By its ``__cuda_array_interface__`` torch makes tensors of it, which keep it alive. As with torch's own memory, it
    belongs to the stream in which it was allocated and to the one in which it is dropped. ``streams`` has these; code
    that uses it in another stream adds that."""

    def __init__(self, pool: Pool, block: Block, offset: int, nbytes: int):
        self.block = block
        self.streams = {_current_stream(block.device)}
        self.offset = offset
        self.address = block.address + offset
        self.nbytes = nbytes
        self.__cuda_array_interface__ = _interface(self.address, nbytes)
        weakref.finalize(self, pool._drop, block, offset, self.streams).atexit = False


def _current_stream(device: int) -> int:
    import torch

    return torch._C._cuda_getCurrentRawStream(device)


class RawMemory:
    """Bytes at an address that ``keeps`` keeps alive, for torch to make a tensor of."""

    def __init__(self, address: int, nbytes: int, keeps: Any = None):
        self.__cuda_array_interface__ = _interface(address, nbytes)
        self.keeps = keeps


def _interface(address: int, nbytes: int) -> dict[str, Any]:
    return {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None}


def storage_over(source: Any, device: int) -> torch.UntypedStorage:
    """A torch storage over a PoolBuffer or RawMemory, which it keeps alive."""
    import torch

    return torch.as_tensor(source, device=torch.device("cuda", device)).untyped_storage()


class Pool:
    """The blocks of one GPU in this process."""

    def __init__(self, device: int):
        self.device = device
        self._blocks: list[Block] = []
        self._starts: list[tuple[int, int]] = []  # (address, number), sorted
        self._lock = threading.Lock()
        self._dropped: deque[_Dropped] = deque()  # pieces that nobody uses; finalizers may run anywhere
        # With the events after which they are free.
        self._waiting_for_streams: deque[tuple[list[Any], list[_Dropped]]] = deque()

    def allocate(self, nbytes: int) -> PoolBuffer:
        """Fresh memory; its content is whatever was there before."""
        nbytes = max(nbytes, 1)
        _release_held()
        with self._lock:
            self._reclaim()
            for block in self._blocks:
                offset = block.heap.allocate(nbytes, ALIGN)
                if offset is not None:
                    return PoolBuffer(self, block, offset, nbytes)
            size = -(-max(nbytes, BLOCK_BYTES) // (2 << 20)) * (2 << 20)
            block = Block(self.device, len(self._blocks), size)
            self._blocks.append(block)
            bisect.insort(self._starts, (block.address, block.number))
            offset = block.heap.allocate(nbytes, ALIGN)
            assert offset is not None
            return PoolBuffer(self, block, offset, nbytes)

    def _drop(self, block: Block, offset: int, streams: set[int]) -> None:
        """Called when a piece is gone, by the garbage collector, in any place."""
        streams.add(_current_stream(self.device))
        self._dropped.append((block, offset, streams))

    def _reclaim(self) -> None:
        """With the lock held: take back freed pieces. Queued work may still use them, so they are given out again once
        the streams that used them have passed this point."""
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        if dropped:
            used = sorted({stream for _, _, streams in dropped for stream in streams})
            self._waiting_for_streams.append(([self._mark(stream) for stream in used], dropped))
        for _ in range(len(self._waiting_for_streams)):
            events, pieces = self._waiting_for_streams.popleft()
            if not all(event.query() for event in events):
                self._waiting_for_streams.append((events, pieces))
                continue
            for block, offset, _streams in pieces:
                block.heap.free(offset)

    def _mark(self, stream: int) -> Any:
        """An event behind all that a stream has queued."""
        import torch

        event = torch.cuda.Event()
        try:
            event.record(torch_stream(stream, self.device))
        except RuntimeError:  # somebody else's stream, and it is gone: wait for all
            torch.cuda.synchronize(self.device)
        return event

    def find(self, address: int) -> tuple[Block, int] | None:
        """(block, offset) of an address in this pool, or None."""
        i = bisect.bisect(self._starts, (address, 1 << 62)) - 1
        if i < 0:
            return None
        block = self._blocks[self._starts[i][1]]
        offset = address - block.address
        return (block, offset) if offset < block.nbytes else None

    @property
    def used_bytes(self) -> int:
        return sum(block.heap.used_bytes for block in self._blocks)

    @property
    def reserved_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)


_Dropped = tuple[Block, int, "set[int]"]  # where it was, and the streams that used it
_held: deque[tuple[Any, Callable[[], bool]]] = deque()
_pools: dict[tuple[int, int], Pool] = {}
_opened: dict[bytes, int] = {}
_lock = threading.Lock()


def pool_of(device: int) -> Pool:
    """This process's pool on a GPU. Ranks that are threads share it."""
    key = (os.getpid(), device)
    with _lock:
        if key not in _pools:
            _pools[key] = Pool(device)
        return _pools[key]


def hold(what: Any, is_free: Callable[[], bool]) -> None:
    """Keep memory that peers may still use, until ``is_free()``, which is called at each allocation. Takes no lock: the
    garbage collector may call this."""
    _held.append((what, is_free))


def _release_held() -> None:
    for _ in range(len(_held)):
        try:
            item = _held.popleft()
        except IndexError:  # another thread took it
            return
        free = False
        try:
            free = item[1]()
        finally:
            if not free:
                _held.append(item)


def find_block(device: int, address: int) -> tuple[Block, int] | None:
    """(block, offset) of an address that lies in symmetric memory of this process, or None."""
    pool = _pools.get((os.getpid(), device))
    return pool.find(address) if pool is not None else None


def opened(handle: bytes, owner: str) -> int:
    """Where a peer's block is mapped here; it is opened once."""
    with _lock:
        if handle not in _opened:
            _opened[handle] = driver().open(handle, owner)
        return _opened[handle]


def opened_pieces(infos: Sequence[dict[str, Any]], handle: str = "handle", offset: str = "offset") -> list[int]:
    """Where every rank's piece is mapped here; ``infos``: what the ranks told each other of their pieces."""
    return [opened(bytes.fromhex(info[handle]), f"rank {rank}") + info[offset] for rank, info in enumerate(infos)]
