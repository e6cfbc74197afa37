"""Flag words: 32-bit words in host memory that GPUs write and wait for.

Every rank has a block of them in its arena, which all peers map and register with their GPU. A stream of rank r signals
"I have reached n" by writing n into k's block, and k's stream waits for it there. Since it is host memory, the host can
read and write it as well: that is how a wait for a dead rank is ended. On an H200 it is as fast as GPU memory (barrier
of two processes: 6.6 us against 6.5 with MPS, 9.3 against 7.5 without).

The words of a block::

    16 * r        where rank r's stream is: how many barriers it has reached
    16 * r + 1    not 0: nothing of rank r reads or writes this rank's memory any more
    16 * world    not 0: the group has failed; no kernel waits any more, or writes into a peer's memory
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from symcomm._core import native
from symcomm.cuda.driver import driver
from symcomm.memory.heap import PAGE

LINE = 16  # words, so that no two GPUs write to one cache line

_registered: dict[tuple[int, int], tuple[int, Any]] = {}  # (host address, bytes) -> GPU's address, the mapping's owner
_lock = threading.Lock()


def register_with_gpu(address: int, nbytes: int, owner: Any) -> int:
    """The GPU's address of host memory, which stays registered and mapped for ever."""
    with _lock:
        key = (address, nbytes)
        if key not in _registered:
            _registered[key] = (driver().register(address, nbytes), owner)
        return _registered[key][0]


def is_behind(word: int, value: int) -> bool:
    """Whether a word has not reached ``value`` yet; both wrap around at 32 bits, as the GPU compares them."""
    return (word - value) & 0x80000000 != 0


def flag_words_bytes(world: int) -> int:
    return -(-4 * LINE * (world + 1) // PAGE) * PAGE


class FlagWords:
    """All ranks' flag words as this rank and its GPU see them."""

    def __init__(self, rank: int, world: int, host: list[int], owners: list[Any]):
        self.rank, self.world = rank, world
        nbytes = flag_words_bytes(world)
        self.words = (ctypes.c_uint32 * (nbytes // 4)).from_address(host[rank])
        gpu = [register_with_gpu(address, nbytes, owner) for address, owner in zip(host, owners, strict=True)]
        peers = [r for r in range(world) if r != rank]
        self.theirs = tuple(gpu[r] + 4 * LINE * rank for r in peers)  # where this rank signals its peers
        self.mine = tuple(gpu[rank] + 4 * LINE * r for r in peers)  # where they signal this rank
        self.stop = gpu[rank] + 4 * LINE * world
        self._host = host

    def arrival_of(self, rank: int) -> int:
        return self.words[LINE * rank]

    def stop_kernels(self) -> None:
        """End the waits of all ranks' kernels, and keep those that have not begun from writing to peers."""
        for address in self._host:
            native.store_word(address + 4 * LINE * self.world, 1)

    def set_arrival(self, rank: int, value: int) -> None:
        """Make the GPU believe that ``rank`` has reached ``value``."""
        native.store_word(self._host[self.rank] + 4 * LINE * rank, value & 0xFFFFFFFF)

    def publish_left(self) -> None:
        """Say that nothing of this rank reads or writes peers' memory any more."""
        for address in self._host:
            native.store_word(address + 4 * (LINE * self.rank + 1), 1)

    def has_left(self, rank: int) -> bool:
        return self.words[LINE * rank + 1] != 0

    def missing(self, value: int) -> list[int]:
        """Ranks whose streams have not reached ``value``."""
        return [r for r in range(self.world) if r != self.rank and is_behind(self.arrival_of(r), value)]
