"""The order in which ranks came to their calls: recorded in memory that they share, and played again."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

from symcomm import errors

MOST = 100_000  # calls of all ranks together
LOOK = 0.0005  # seconds between two looks whether it is a rank's turn
PATIENCE = 10.0  # seconds that a rank waits for its turn
HOOK = (1 << 40) + 1


class Schedule:
    """Plays the order ``ranks``, call by call. Without it, records who came when as ``order``."""

    def __init__(self, ranks: Sequence[int] = ()):
        self.wanted = tuple(ranks)
        self._memory = mmap.mmap(-1, 4 * (MOST + 1))
        self._words: Any = (ctypes.c_uint32 * (MOST + 1)).from_buffer(self._memory)
        self._lock = multiprocessing.get_context("fork").Lock()

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(self._words[1 : self._words[0] + 1])

    def again(self) -> Schedule:
        """One that plays what this one has recorded."""
        return Schedule(self.order)

    def attach(self, group: Any, rank: int) -> None:
        group.register_pre_hook(HOOK, lambda call: self._come(rank))

    def _come(self, rank: int) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            with self._lock:
                count = self._words[0]
                if count == MOST or count >= len(self.wanted) > 0:
                    return
                if not self.wanted or self.wanted[count] == rank:
                    self._words[count + 1] = rank
                    self._words[0] = count + 1
                    return
            if time.monotonic() > end:
                what = f"rank {rank} waits for its turn; rank {self.wanted[count]} is to make call {count + 1} of all"
                raise errors.deadline(what, PATIENCE, missing=[self.wanted[count]])
            time.sleep(LOOK)
