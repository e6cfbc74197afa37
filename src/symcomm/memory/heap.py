"""Which parts of an arena are in use. This only keeps a list of offsets; it touches no memory."""

from __future__ import annotations

import bisect
import mmap

PAGE = 4096
GRAIN = max(PAGE, mmap.PAGESIZE)  # no two allocations share a page: one may lose it (_core/memory/isolate.h)


class Heap:
    """First fit over sorted free ranges; neighbours merge when freed."""

    def __init__(self, start: int, end: int):
        self._free: list[tuple[int, int]] = [(start, end - start)]
        self._used: dict[int, int] = {}
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
        need = max(nbytes, 1) + (-max(nbytes, 1)) % align
        for i, (start, length) in enumerate(self._free):
            pad = -start % align
            if length < pad + need:
                continue
            pieces = [(start, pad), (start + pad + need, length - pad - need)]
            self._free[i : i + 1] = [piece for piece in pieces if piece[1]]
            self._used[start + pad] = need
            self.used_bytes += need
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            return start + pad
        return None

    def free(self, offset: int) -> tuple[int, int]:
        """Give a range back; returns (offset, length) of what was freed."""
        length = self._used.pop(offset)
        self.used_bytes -= length
        i = bisect.bisect(self._free, (offset, 0))
        start, end = offset, offset + length
        if i < len(self._free) and self._free[i][0] == end:
            end += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == start:
            start = self._free.pop(i - 1)[0]
            i -= 1
        self._free.insert(i, (start, end - start))
        return offset, length
