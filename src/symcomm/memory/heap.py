"""Keeps account of which parts of an arena are in use, as offsets. It touches no memory."""

from __future__ import annotations

import bisect
import mmap

PAGE = 4096
GRAIN = max(PAGE, mmap.PAGESIZE)  # no two allocations share a page: one may lose it (_core/memory/isolate.h)


def _length_for(nbytes: int, align: int) -> int:
    return max(nbytes, 1) + (-max(nbytes, 1)) % align


class Heap:
    """First fit over sorted free ranges; neighbours merge when freed. A freed range can also be kept whole, for the
    next allocation of the same length."""

    def __init__(self, start: int, end: int):
        self._free: list[tuple[int, int]] = [(start, end - start)]
        self._used: dict[int, int] = {}
        self._kept: dict[int, list[int]] = {}  # length -> offsets
        self.used_bytes = 0
        self.peak_bytes = 0

    @property
    def free_ranges(self) -> list[tuple[int, int]]:
        """(offset, length) of everything that is not in use, in order."""
        return list(self._free)

    def length_of(self, offset: int) -> int:
        """How long the range in use at ``offset`` is."""
        return self._used[offset]

    def allocate(self, nbytes: int, align: int = GRAIN) -> int | None:
        """The offset of a free range of at least ``nbytes``, or None when there is none."""
        need = _length_for(nbytes, align)
        for i, (start, length) in enumerate(self._free):
            pad = -start % align
            if length < pad + need:
                continue
            pieces = [(start, pad), (start + pad + need, length - pad - need)]
            self._free[i : i + 1] = [piece for piece in pieces if piece[1]]
            self._take(start + pad, need)
            return start + pad
        return None

    def _take(self, offset: int, length: int) -> None:
        self._used[offset] = length
        self.used_bytes += length
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def keep(self, offset: int) -> None:
        """Give a range back, but keep it whole."""
        length = self._used.pop(offset)
        self.used_bytes -= length
        self._kept.setdefault(length, []).append(offset)

    def take_kept(self, nbytes: int) -> int | None:
        """The offset of the last kept range of just this length, or None."""
        length = _length_for(nbytes, GRAIN)
        if not (offsets := self._kept.get(length)):
            return None
        offset = offsets.pop()
        self._take(offset, length)
        return offset

    def merge_kept(self) -> None:
        """Free what was kept, for allocations of any length."""
        kept, self._kept = self._kept, {}
        for length, offsets in kept.items():
            for offset in offsets:
                self._merge(offset, length)

    def free(self, offset: int) -> tuple[int, int]:
        """Give a range back; returns (offset, length) of what was freed."""
        length = self._used.pop(offset)
        self.used_bytes -= length
        self._merge(offset, length)
        return offset, length

    def _merge(self, offset: int, length: int) -> None:
        i = bisect.bisect(self._free, (offset, 0))
        start, end = offset, offset + length
        if i < len(self._free) and self._free[i][0] == end:
            end += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == start:
            start = self._free.pop(i - 1)[0]
            i -= 1
        self._free.insert(i, (start, end - start))
