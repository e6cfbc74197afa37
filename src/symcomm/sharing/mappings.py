"""Private mappings of a reader, kept between messages: the next one in the same place finds its pages mapped, which
costs a page fault for every 16 of them otherwise."""

from __future__ import annotations

from symcomm._core import native

MOST_KEPT = 8  # a queue's messages take turns in one place more than its reader holds


class Mappings:
    """Of ``fd``, by where they begin in it. Its calls may come from finalizers, and so take no lock: every change is
    one operation of a dictionary."""

    def __init__(self, fd: int):
        self._fd = fd
        self._kept: dict[int, tuple[int, int]] = {}  # offset -> address and length

    def take(self, offset: int, nbytes: int) -> tuple[int, int]:
        """The address and the length of one that shows at least this range, as the writer has written it.

        Raises: OSError."""
        at, mapped = self._kept.pop(offset, (0, 0))
        if mapped >= nbytes:
            return at, mapped
        if mapped:
            native.unmap(at, mapped)
        try:
            return native.map_private(self._fd, offset, nbytes), nbytes
        except OSError:
            self.forget()  # they may be what it takes
            return native.map_private(self._fd, offset, nbytes), nbytes

    def give_back(self, offset: int, at: int, mapped: int) -> None:
        """Keep it, unless this process has written there: those pages would hide the next message."""
        if native.has_own_pages(at, mapped):
            native.unmap(at, mapped)
            return
        self._drop(offset)
        self._kept[offset] = at, mapped
        for oldest in list(self._kept)[:-MOST_KEPT]:
            self._drop(oldest)

    def forget(self) -> None:
        for offset in list(self._kept):
            self._drop(offset)

    def _drop(self, offset: int) -> None:
        if mapping := self._kept.pop(offset, None):
            native.unmap(*mapping)
