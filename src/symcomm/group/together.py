"""Whether all ranks are at the same call, so that an asynchronous one may run in its caller's thread.

Handing a call to the group's thread and being woken by it costs several times what a small operation costs. When all
other ranks have come to their call too, none of them needs anything of this rank but the operation itself: running it
here and now cannot block for good, whoever runs it there.

Who makes a small asynchronous call says so in a word of its own, and looks for a moment whether the others do. The
words only ever grow, and a rank that wrote one runs its operation whatever it sees: a word seen too late costs time and
nothing else, so plain loads and stores do.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence

__all__ = ["WORD_BYTES", "Together"]

WORD_BYTES = 64  # a cache line at the end of the part of a group's memory that holds its control block
_ARRIVED = (0, 8)  # u64s of a control block: the number of the operation a rank is in, by turns (_core/sync.h)
_LOOKS = 48  # in all; about 15 us, less than being woken takes
MOST_RANKS = 8  # more come too far apart for looking to pay


@functools.cache
def _words_type(count: int) -> type[ctypes.Array]:
    """The same one for all groups: making a type takes longer than all else here, and only the collector drops it."""
    return ctypes.c_uint64 * count


class Together:
    """One group's words. ``starts``: where each rank's control block lies; ``room``: bytes before its staging area."""

    def __init__(self, rank: int, starts: Sequence[int], room: int, own_process: bool):
        self._at = room // 8 - WORD_BYTES // 8
        blocks = [_words_type(room // 8).from_address(start) for start in starts]
        self._mine = blocks[rank]
        self._peers = [block for r, block in enumerate(blocks) if r != rank]
        # Ranks that are threads of this process cannot come while we look, nor can those that need our core.
        patient = own_process and len(starts) <= len(os.sched_getaffinity(0))
        self._looks = max(1, _LOOKS // max(1, len(self._peers))) if patient else 1

    def all_here(self) -> bool:
        """Say that this rank is about to run its next operation; whether all others are there, or soon will be."""
        mine, at, (even, odd) = self._mine, self._at, _ARRIVED
        number = max(mine[even], mine[odd]) + 1
        mine[at] = number
        for _ in range(self._looks):
            for peer in self._peers:
                if peer[at] < number and peer[even] < number and peer[odd] < number:
                    break
            else:
                return True
        return False
