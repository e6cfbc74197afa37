"""Segments: a piece of each rank's memory that other ranks of the host write to, with counted signals. For windows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from symcomm._core import native

Shortcut = Callable[..., int | None]  # returns a Status; None: nothing was done, Python has to check the arguments
TensorRef = Callable[[], Any]  # returns a tensor, or None: it is gone
LINE = 64
WORD = 4  # bytes of a signal count; each rank has one for every sender


def no_tensor() -> None:
    """The TensorRef of a segment that autograd need not know of."""


def owner_of(group: Any, address: int) -> int | None:
    """The rank of ``group`` in whose symmetric memory an address lies, or None."""
    for rank, peer in enumerate(group.peers):
        if peer.base <= address < peer.base + peer.nbytes:
            return rank
    return None


class Segment:
    """This rank's piece, and ways into the others'. Ranks exchange their ``info`` before they ``connect``."""

    def __init__(self, group: Any, address: int, count: int, dtype: int):
        """``count`` elements at ``address``, which lies in this rank's arena unless there are none."""
        self._group = group
        arena = group.arena
        self._words_bytes = -(-WORD * group.size // LINE) * LINE  # then one line that counts who sleeps
        self.words = arena.buffer(self._words_bytes + LINE)  # kept as long as peers may signal
        ctypes.memset(self.words, 0, len(self.words))
        self.info = {
            "offset": arena.offset_of(address, 1) if count else 0,
            "count": count,
            "dtype": dtype,
            "words": ctypes.addressof(self.words) - arena.base,
        }
        self._addresses: list[int] = []
        self._window: native.Window  # once they are connected

    def connect(self, infos: Sequence[dict[str, Any]], tensor: TensorRef = no_tensor) -> None:
        """``infos``: of all ranks of the group, in order. ``tensor``: this rank's, whose version goes up when it takes
        a signal, since others have written to it."""
        self._addresses = [p.base + c["offset"] for p, c in zip(self._group.peers, infos, strict=True)]
        parts = tuple(
            (address, info["count"], info["dtype"], peer.base + info["words"])
            for address, info, peer in zip(self._addresses, infos, self._group.peers, strict=True)
        )
        self._window = native.make_window(self._group.handle, parts, self._words_bytes, tensor)

    def address_of(self, rank: int) -> int:
        """Where this process has mapped a rank's piece."""
        return self._addresses[rank]

    def shortcuts(self) -> tuple[Shortcut, Shortcut, Shortcut]:
        """put(tensor, rank, offset), signal(rank) and wait_signal(rank), each a call of the core. The last one only
        takes a signal that comes within microseconds."""
        calls = (native.window_put, native.window_signal, native.window_wait)
        return tuple(partial(call, self._window) for call in calls)  # type: ignore[return-value]

    # Each of these returns a Status.

    def write(self, rank: int, start: int, address: int, nbytes: int) -> int:
        """Copy bytes to byte ``start`` of a rank's piece."""
        return native.window_write(self._window, rank, start, address, nbytes)

    def signal(self, rank: int) -> int:
        """Give ``rank`` one more signal to take. When it takes it, it sees all that was put before."""
        return native.window_signal(self._window, rank)

    def wait_signal(self, rank: int, timeout_ns: int) -> int:
        """Take one of ``rank``'s signals. A negative timeout only looks: TIMEOUT means that there is none."""
        return native.window_wait(self._window, rank, timeout_ns)
