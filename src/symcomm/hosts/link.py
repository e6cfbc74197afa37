"""A connection between two ranks of different hosts: frames, and nothing that blocks.

A frame is: length of all that follows, length of the header, header (JSON), payload. Sending never waits: what the
kernel does not take is pushed on by whoever watches the socket. A payload that comes in pieces is read where it stays.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

__all__ = ["Broken", "Frame", "Link"]

LENGTHS = struct.Struct("<II")
LARGEST_FRAME = 1 << 24
LARGEST_GREETING = 4096  # of somebody who has not shown the token yet
MOST_AT_ONCE = 1 << 16  # bytes read before it is known where they belong
PARTS_AT_ONCE = 64  # of frames that the kernel is handed at a time
WORTH_WAKING = 128 << 10  # bytes of a payload for which whoever reads is woken before it is whole

Frame = tuple[dict[str, Any], "bytes | bytearray"]


class Broken(Exception):
    """The other side hung up, or is not one of us."""


class Link:
    """``peer``: the other office's name; None until an incoming connection has said who it is. One thread reads it, any
    may send."""

    def __init__(self, sock: socket.socket, peer: str | None):
        self.sock = sock
        self.fd = sock.fileno()
        self.peer = peer
        self.closed = False
        self._sending = threading.Lock()
        self._outbox: deque[memoryview] = deque()
        self._inbox = bytearray()
        self._awaited: tuple[dict[str, Any], bytearray] | None = None  # a frame of which a part is there
        self._rest = memoryview(b"")  # where the others go
        self._fewest = 1

    # --- sending ----------------------------------------------------------------------------------------------

    def send(self, header: dict[str, Any], payload: bytes = b"") -> bool:
        """False: the connection is broken, as whoever reads will find. ``backlog`` says what is left to push."""
        head = json.dumps(header).encode()
        first = LENGTHS.pack(len(head) + len(payload), len(head)) + head
        with self._sending:
            idle = not self._outbox
            self._outbox.append(memoryview(first))
            if payload:
                self._outbox.append(memoryview(payload))
            return self._push() if idle else not self.closed

    def push(self) -> None:
        """Hand the kernel what it takes."""
        with self._sending:
            self._push()

    def _push(self) -> bool:
        while self._outbox and not self.closed:
            try:
                sent = self.sock.sendmsg(list(islice(self._outbox, PARTS_AT_ONCE)))
            except BlockingIOError:
                return True
            except OSError:
                return False
            while self._outbox and sent >= len(self._outbox[0]):
                sent -= len(self._outbox.popleft())
            if sent:
                self._outbox[0] = self._outbox[0][sent:]
        return not self.closed

    @property
    def backlog(self) -> int:
        """Bytes that wait for a slow receiver."""
        return sum(map(len, list(self._outbox)))

    @property
    def has_backlog(self) -> bool:
        return bool(self._outbox)

    def close(self) -> None:
        with self._sending:
            self.closed = True
            self.sock.close()

    # --- receiving --------------------------------------------------------------------------------------------

    def receive(self) -> Iterator[Frame]:
        """Read what is there, once, and give the frames that are whole by now; then raise Broken, if it is over."""
        over: Exception | None = None
        try:
            self._read()
        except BlockingIOError:
            pass
        except (OSError, Broken) as error:
            over = error
        while (frame := self._next()) is not None:
            yield frame
        if over is not None:
            raise Broken from over

    def _read(self) -> None:
        if self._awaited is not None:
            got = self.sock.recv_into(self._rest)
            self._rest = self._rest[got:]
            self._wake_for(len(self._rest))
        else:
            data = self.sock.recv(MOST_AT_ONCE)
            got = len(data)
            self._inbox += data
        if not got:
            raise Broken

    def _next(self) -> Frame | None:
        """The next whole frame."""
        if self._awaited is not None:
            if self._rest:
                return None
            frame, self._awaited = self._awaited, None
            return frame
        if len(self._inbox) < LENGTHS.size:
            return None
        total, head = LENGTHS.unpack_from(self._inbox)
        if total > (LARGEST_FRAME if self.peer is not None else LARGEST_GREETING) or head > total:
            raise Broken
        start, end = LENGTHS.size + head, LENGTHS.size + total
        if len(self._inbox) < start:
            return None
        try:
            header = json.loads(bytes(self._inbox[LENGTHS.size : start]))
        except ValueError:
            raise Broken from None
        if not isinstance(header, dict):
            raise Broken
        here = bytes(self._inbox[start:end])
        del self._inbox[:end]
        if len(here) == total - head:
            return header, here
        payload = bytearray(total - head)
        payload[: len(here)] = here
        self._awaited, self._rest = (header, payload), memoryview(payload)[len(here) :]
        self._wake_for(len(self._rest))
        return None

    def _wake_for(self, nbytes: int) -> None:
        """Whoever waits for this socket is woken when so much is there, or a large part of it."""
        fewest = min(nbytes, WORTH_WAKING) or 1
        if fewest != self._fewest:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, fewest)
            self._fewest = fewest
