"""The links between the leaders of one group's hosts.

Only the thread that runs an operation reads them, while it has nothing else to do. Frames that arrive earlier wait in
the kernel, and wake no other thread. (Control channels have a thread that reads at once.) Of two ranks the lower one
connects; frames of the other are queued until then.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from symcomm.hierarchical.connection import ConnectionClosed, Frame, FramedConnection, ProtocolViolation
from symcomm.hierarchical.frames import check

MOST_ARRIVALS = 10_000  # kept, at operations that this host has not reached; other hosts are at most a few ahead


class _Wakeup:
    """Wakes the thread in ``listen``."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def __del__(self) -> None:
        os.close(self.fd)


class LeaderLinks:
    """``dial(rank)`` connects to a rank, or returns None. ``on_frame(rank, frame)`` gets each frame, and may raise
    ProtocolViolation. ``on_refused(rank, why)`` is called when a link is closed for what its rank sent."""

    def __init__(
        self,
        rank: int,
        dial: Callable[[int], FramedConnection | None],
        on_frame: Callable[[int, Frame], None],
        on_refused: Callable[[int, str], None] = lambda rank, why: None,
    ):
        self._rank, self._dial, self._on_frame, self._on_refused = rank, dial, on_frame, on_refused
        self._wakeup = _Wakeup()
        self._listener = 0  # the thread that listens
        self._links: dict[int, FramedConnection] = {}
        self._unsent: dict[int, list[tuple[dict[str, Any], bytes]]] = {}  # for ranks that have not connected yet
        self._closed = False
        self.refused: dict[int, str] = {}  # rank -> why its link was closed for what it sent

    def add(self, rank: int, conn: FramedConnection) -> None:
        """A lower rank has connected, which it does once."""
        if rank in self._links or rank >= self._rank:
            conn.close()
            self._on_refused(rank, "connected a second time, or though it has to wait for a connection")
            return
        self._links[rank] = conn
        if self._closed:
            conn.close()
        self.wake()

    def wake(self) -> None:
        """Make ``listen`` look again."""
        if self._listener not in (0, threading.get_ident()):
            self._wakeup.set()

    def send(self, rank: int, header: dict[str, Any], payload: bytes = b"") -> None:
        """Send a frame. If the kernel does not take it, or there is no link yet, a thread in ``listen`` sends it."""
        if rank not in self._links and rank > self._rank and (conn := self._dial(rank)) is not None:
            self._links[rank] = conn
        if rank in self._links:
            self._links[rank].send(header, payload)
        else:
            self._unsent.setdefault(rank, []).append((header, payload))

    def has_backlog(self, rank: int) -> bool:
        return rank in self._unsent or (rank in self._links and self._links[rank].has_backlog)

    def is_closed(self, rank: int) -> bool:
        """Whether there was a link, and it is closed."""
        return rank in self._links and self._links[rank].closed

    def listen(self, ranks: Sequence[int], left: Callable[[], float]) -> None:
        """Read what these ranks send until ``left()`` returns 0; else it returns the seconds until the next look."""
        self._listener = threading.get_ident()
        try:
            ready, poll = list(ranks), select.poll()
            poll.register(self._wakeup.fd, select.POLLIN)
            while True:
                for rank in ready:
                    self._on_ready(rank)
                if not (seconds := left()):
                    return
                ready = self._wait(poll, ranks, seconds)
        finally:
            self._listener = 0

    def _wait(self, poll: Any, ranks: Sequence[int], seconds: float) -> list[int]:
        """The ranks whose links are ready, or new."""
        by_fd = {}
        for rank in ranks:
            conn = self._links.get(rank)
            if conn is not None and not conn.closed:
                by_fd[conn.fd] = rank
                poll.register(conn.fd, select.POLLIN | (select.POLLOUT if conn.wants_to_send else 0))
        found = [fd for fd, _ in poll.poll(max(1, int(seconds * 1000)))]
        for fd in found:
            if fd == self._wakeup.fd:
                self._wakeup.clear()
                return list(ranks)
            if fd not in by_fd:  # closed meanwhile
                poll.unregister(fd)
        return [by_fd[fd] for fd in found if fd in by_fd]

    def _on_ready(self, rank: int) -> None:
        conn = self._links.get(rank)
        if conn is None or conn.closed:
            return
        for header, payload in self._unsent.pop(rank, ()):
            conn.send(header, payload)
        if conn.wants_to_send:
            conn.push()
        try:
            for frame in conn.receive():
                self._on_frame(rank, frame)
        except ProtocolViolation as error:
            self.drop(rank, str(error))
        except ConnectionClosed:
            conn.close()

    def drop(self, rank: int, why: str) -> None:
        """Close a link for what its rank sent."""
        self.refused[rank] = why
        self._on_refused(rank, why)
        self._links[rank].close()

    def forget(self) -> None:
        """In a forked child: close its copies of the sockets, without the locks, which the parent may have held."""
        for conn in list(self._links.values()):
            conn.sock.close()

    def close(self) -> None:
        self._closed = True
        for conn in list(self._links.values()):
            conn.close()


def links_of(group: Any) -> LeaderLinks:
    """The links of a group. Frames go into the group's ``arrivals``; the links do not keep the group alive."""
    arrivals, ref = group.arrivals, weakref.ref(group)

    def dial(rank: int) -> FramedConnection | None:
        found = ref()
        return found.dial(rank) if found is not None else None

    def on_frame(rank: int, frame: Frame) -> None:
        header, payload = frame
        check("arrival", header, payload, 0)
        if len(arrivals) >= MOST_ARRIVALS or (header["seq"], rank) in arrivals:
            raise ProtocolViolation(f"sent arrival {header['seq']} twice, or is far ahead")
        arrivals[header["seq"], rank] = (header["signature"], payload)

    def on_refused(rank: int, why: str) -> None:
        if (found := ref()) is not None:
            found.control.refusals.note(f"rank {rank}", why)

    return LeaderLinks(group.rank, dial, on_frame, on_refused)
