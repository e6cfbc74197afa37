"""Scratch memory for operations: in the rank's arena, so that the host's other ranks can read it in place."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from symcomm.memory.arena import Arena

KEEP_BYTES = 64 << 20  # what is kept for the next operation


class ScratchBuffer:
    def __init__(self, memory: ctypes.Array[Any]):
        self.memory = memory
        self.address = ctypes.addressof(memory)
        self.nbytes = len(memory)


class Scratch:
    """Buffers by their size, a power of two."""

    def __init__(self, arena: Arena):
        self.arena = arena
        self._free: dict[int, list[ScratchBuffer]] = {}
        self._kept = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> ScratchBuffer:
        size = 1 << max(12, (nbytes - 1).bit_length())
        with self._lock:
            if pieces := self._free.get(size):
                self._kept -= size
                return pieces.pop()
        return ScratchBuffer(self.arena.buffer(size))

    def give(self, piece: ScratchBuffer) -> None:
        with self._lock:
            if self._kept + piece.nbytes <= KEEP_BYTES:
                self._free.setdefault(piece.nbytes, []).append(piece)
                self._kept += piece.nbytes
