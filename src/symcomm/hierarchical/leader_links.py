"""Lines: connections of one group by which hosts meet.

Only the thread that performs an operation reads them, while it has nothing else to do: what arrives sooner waits in the
kernel, and no other thread is woken for it. (Offices' connections have a thread that reads them at once.) Of two
ranks the lower one calls; the other has its line when it is called, and what it has to say waits until then.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any

from symcomm.hierarchical.connection import Broken, Frame, Link, Refused

__all__ = ["Lines"]


class _Bell:
    """Wakes the thread that listens."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def __del__(self) -> None:
        os.close(self.fd)


class Lines:
    """``call(rank)`` makes a line to a rank, or None; ``hear(rank, frame)`` is told what came, and may raise Refused;
    ``complain(rank, why)`` is told of lines that were closed for what came."""

    def __init__(
        self,
        rank: int,
        call: Callable[[int], Link | None],
        hear: Callable[[int, Frame], None],
        complain: Callable[[int, str], None] = lambda rank, why: None,
    ):
        self._rank, self._call, self._hear, self._complain = rank, call, hear, complain
        self._bell = _Bell()
        self._listener = 0  # the thread that listens
        self._lines: dict[int, Link] = {}
        self._waiting: dict[int, list[tuple[dict[str, Any], bytes]]] = {}  # for those who have not called yet
        self._closed = False
        self.refused: dict[int, str] = {}  # why a rank's line was closed for what came over it

    def add(self, rank: int, link: Link) -> None:
        """A rank has called, which a lower one does once."""
        if rank in self._lines or rank >= self._rank:
            link.close()
            self._complain(rank, "called a second time, or though it is called itself")
            return
        self._lines[rank] = link
        if self._closed:
            link.close()
        self.ring()

    def ring(self) -> None:
        """Whoever listens is to look again."""
        if self._listener not in (0, threading.get_ident()):
            self._bell.ring()

    def send(self, rank: int, header: dict[str, Any], payload: bytes = b"") -> None:
        """What the kernel does not take, or has no line yet, goes on its way while somebody listens."""
        if rank not in self._lines and rank > self._rank and (link := self._call(rank)) is not None:
            self._lines[rank] = link
        if rank in self._lines:
            self._lines[rank].send(header, payload)
        else:
            self._waiting.setdefault(rank, []).append((header, payload))

    def has_backlog(self, rank: int) -> bool:
        return rank in self._waiting or (rank in self._lines and self._lines[rank].has_backlog)

    def is_over(self, rank: int) -> bool:
        """Whether there was a line, and nothing can come from there any more."""
        return rank in self._lines and self._lines[rank].closed

    def listen(self, ranks: Sequence[int], left: Callable[[], float]) -> None:
        """Read what these ranks send until ``left()`` is 0: the seconds until it is to be asked again."""
        self._listener = threading.get_ident()
        try:
            ready, poll = list(ranks), select.poll()
            poll.register(self._bell.fd, select.POLLIN)
            while True:
                for rank in ready:
                    self._attend(rank)
                if not (seconds := left()):
                    return
                ready = self._wait(poll, ranks, seconds)
        finally:
            self._listener = 0

    def _wait(self, poll: Any, ranks: Sequence[int], seconds: float) -> list[int]:
        """Ranks whose lines are ready, or new."""
        by_fd = {}
        for rank in ranks:
            link = self._lines.get(rank)
            if link is not None and not link.closed:
                by_fd[link.fd] = rank
                poll.register(link.fd, select.POLLIN | (select.POLLOUT if link.wants_to_send else 0))
        found = [fd for fd, _ in poll.poll(max(1, int(seconds * 1000)))]
        for fd in found:
            if fd == self._bell.fd:
                self._bell.hush()
                return list(ranks)
            if fd not in by_fd:  # closed meanwhile
                poll.unregister(fd)
        return [by_fd[fd] for fd in found if fd in by_fd]

    def _attend(self, rank: int) -> None:
        link = self._lines.get(rank)
        if link is None or link.closed:
            return
        for header, payload in self._waiting.pop(rank, ()):
            link.send(header, payload)
        if link.wants_to_send:
            link.push()
        try:
            for frame in link.receive():
                self._hear(rank, frame)
        except Refused as error:
            self.hang_up(rank, str(error))
        except Broken:
            link.close()

    def hang_up(self, rank: int, why: str) -> None:
        """Close a line for what came over it."""
        self.refused[rank] = why
        self._complain(rank, why)
        self._lines[rank].close()

    def forget(self) -> None:
        """In a child that was forked: the connections are the parent's, and locks may be held by threads it has not."""
        for link in list(self._lines.values()):
            link.sock.close()

    def close(self) -> None:
        self._closed = True
        for link in list(self._lines.values()):
            link.close()
