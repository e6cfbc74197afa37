"""Scratch memory for operations: in the rank's arena, so that the host's other ranks can read it in place."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from symcomm.memory.arena import Arena

Piece = ctypes.Array[Any]
KEEP_BYTES = 64 << 20  # kept for the next operations, at most


class Scratch:
    """Buffers by their size, a power of two."""

    def __init__(self, arena: Arena):
        self.arena = arena
        self._free: dict[int, list[Piece]] = {}
        self._kept = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Piece:
        size = 1 << max(12, (nbytes - 1).bit_length())
        with self._lock:
            if pieces := self._free.get(size):
                self._kept -= size
                return pieces.pop()
        return self.arena.buffer(size)

    def give(self, piece: Piece) -> None:
        with self._lock:
            if self._kept + len(piece) <= KEEP_BYTES:
                self._free.setdefault(len(piece), []).append(piece)
                self._kept += len(piece)
