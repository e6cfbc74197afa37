"""Memory on a GPU that other processes can open.

A block is one allocation of the driver, cut into pieces. Blocks are never given back to the driver, since a peer may
have them open; pieces that are freed are used again. Peers open a block once and keep it open.
"""

from __future__ import annotations

import bisect
import functools
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from symcomm.gpu.driver import driver
from symcomm.memory.heap import Heap

if TYPE_CHECKING:
    import torch

__all__ = ["Block", "Piece", "Pool", "opened", "pool_of"]

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
        """By which peers open it. Ranks that are threads of this process find it by its handle too."""
        driver().enter(self.device)
        handle = driver().handle_of(self.address)
        _opened[handle] = self.address
        return handle


class Piece:
    """Some bytes of a block; they return to it when the last tensor over them is gone.

    torch makes tensors of it, which keep it alive, by its ``__cuda_array_interface__``."""

    def __init__(self, pool: Pool, block: Block, offset: int, nbytes: int):
        self.block = block
        self.offset = offset
        self.address = block.address + offset
        self.nbytes = nbytes
        self.__cuda_array_interface__ = _interface(self.address, nbytes)
        weakref.finalize(self, pool._dropped.append, (block, offset)).atexit = False


class Raw:
    """Bytes at an address that ``keeps`` keeps alive, for torch to make a tensor of."""

    def __init__(self, address: int, nbytes: int, keeps: Any = None):
        self.__cuda_array_interface__ = _interface(address, nbytes)
        self.keeps = keeps


def _interface(address: int, nbytes: int) -> dict[str, Any]:
    return {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None}


def storage_over(source: Any, device: int) -> torch.UntypedStorage:
    """A torch storage over a Piece or Raw, which it keeps alive."""
    import torch

    return torch.as_tensor(source, device=torch.device("cuda", device)).untyped_storage()


class Pool:
    """The blocks of one GPU in this process."""

    def __init__(self, device: int):
        self.device = device
        self._blocks: list[Block] = []
        self._starts: list[tuple[int, int]] = []  # (address, number), sorted
        self._lock = threading.Lock()
        self._dropped: deque[tuple[Block, int]] = deque()  # pieces that nobody uses; finalizers may run anywhere
        self._cooling: deque[tuple[Any, list[tuple[Block, int]]]] = deque()  # with the event after which they are free

    def allocate(self, nbytes: int) -> Piece:
        """Fresh memory; its content is whatever was there before."""
        nbytes = max(nbytes, 1)
        with self._lock:
            self._take_back()
            for block in self._blocks:
                offset = block.heap.allocate(nbytes, ALIGN)
                if offset is not None:
                    return Piece(self, block, offset, nbytes)
            size = -(-max(nbytes, BLOCK_BYTES) // (2 << 20)) * (2 << 20)
            block = Block(self.device, len(self._blocks), size)
            self._blocks.append(block)
            bisect.insort(self._starts, (block.address, block.number))
            offset = block.heap.allocate(nbytes, ALIGN)
            assert offset is not None
            return Piece(self, block, offset, nbytes)

    def _take_back(self) -> None:
        """With the lock held. What a freed piece's last user has in the current stream may still read it, so others
        get it once the GPU has come past this point."""
        import torch

        if self._dropped:
            cool = torch.cuda.Event()
            cool.record(torch.cuda.current_stream(self.device))
            self._cooling.append((cool, [self._dropped.popleft() for _ in range(len(self._dropped))]))
        while self._cooling and self._cooling[0][0].query():
            for block, offset in self._cooling.popleft()[1]:
                block.heap.free(offset)

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
