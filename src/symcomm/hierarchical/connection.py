"""A connection between two ranks of different hosts. It carries frames, and never blocks.

A frame is: length of header and payload, length of the header, header (JSON), payload, MAC. Nothing is parsed before
the MAC is verified. Frames sent before both sides have authenticated (session.py) are queued, as are bytes that the
kernel does not take: the thread that polls the socket pushes them. A payload that arrives in pieces is read straight
into its final buffer.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from symcomm.hierarchical.session import LONG, MAC_SIZE, ConnectionClosed, ProtocolViolation, Session, parse

__all__ = ["ConnectionClosed", "Frame", "FramedConnection", "ProtocolViolation"]

LENGTHS = struct.Struct("<II")
LARGEST_FRAME = 1 << 24
LARGEST_GREETING = 1 << 14  # from an unauthenticated peer
MOST_AT_ONCE = 1 << 16  # bytes read before a header says where they belong
PARTS_AT_ONCE = 64  # parts of frames that the kernel is handed at a time
LOW_WATER_MAX = 128 << 10  # bytes of an incomplete payload that are worth waking the reader for

Frame = tuple[dict[str, Any], "bytes | bytearray"]


class _PartialFrame:
    """A frame that has arrived in part: its header, its payload and MAC, and the hash of what precedes them."""

    def __init__(self, mac: Any, head: bytes, body: bytearray):
        self.mac, self.head, self.body = mac, head, body


class FramedConnection:
    """``peer``: the name of the peer's control channel; None until an incoming connection has authenticated. Only one
    thread reads; any thread may send."""

    def __init__(self, sock: socket.socket, peer: str | None, session: Session):
        self.sock = sock
        self.fd = sock.fileno()
        self.peer = peer
        self.session = session
        self.closed = False
        self._sending = threading.Lock()
        self._held: list[tuple[bytes, bytes]] = []  # frames queued until the session is ready
        self._outbox: deque[memoryview] = deque()
        self._inbox = bytearray()
        self._partial: _PartialFrame | None = None
        self._rest = memoryview(b"")  # the room for the rest of the partial frame
        self._low_water = 1
        if (greeting := session.greeting()) is not None:
            self._send_handshake(greeting)

    # --- sending ----------------------------------------------------------------------------------------------

    def send(self, header: dict[str, Any], payload: bytes = b"") -> bool:
        """Queue a frame, and push. False: the connection is closed, as the reader will find, too."""
        head = json.dumps(header).encode()
        first = LENGTHS.pack(len(head) + len(payload), len(head)) + head
        with self._sending:
            if not self.session.ready:
                self._held.append((first, payload))
                return not self.closed
            return self._post(first, payload)

    def _post(self, first: bytes, payload: bytes) -> bool:
        idle, mac = not self._outbox, self.session.outgoing.sign(first, payload)
        if payload:
            self._outbox += (memoryview(first), memoryview(payload), memoryview(mac))
        else:
            self._outbox.append(memoryview(first + mac))
        return self._push() if idle else not self.closed

    def _send_handshake(self, header: dict[str, Any]) -> None:
        head = json.dumps(header).encode()
        self._outbox.append(memoryview(LENGTHS.pack(len(head), len(head)) + head))
        self._push()

    def push(self) -> None:
        """Give the kernel as much as it takes."""
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
        """Bytes queued for a slow receiver."""
        held = sum(len(first) + len(payload) for first, payload in list(self._held))
        return held + sum(map(len, list(self._outbox)))

    @property
    def has_backlog(self) -> bool:
        return bool(self._outbox or self._held)

    @property
    def wants_to_send(self) -> bool:
        """Whether to poll for writability."""
        return bool(self._outbox)

    def close(self) -> None:
        with self._sending:
            self.closed = True
            self._held.clear()
            self.sock.close()

    # --- receiving --------------------------------------------------------------------------------------------

    def receive(self) -> Iterator[Frame]:
        """Read once, and yield the complete frames; then raise ConnectionClosed if the peer hung up."""
        if not self.session.ready and not self.handshake():
            return
        over = self._read_available()
        while (frame := self._next()) is not None:
            yield frame
        if over is not None:
            raise ConnectionClosed(str(over)) from over

    def handshake(self) -> bool:
        """Read once, and advance the handshake. True when it is done; later frames stay unread."""
        over = self._read_available()
        while not self.session.ready and (message := self._next_handshake_message()) is not None:
            with self._sending:
                if (answer := self.session.answer(message)) is not None:
                    self._send_handshake(answer)
                if self.session.ready:
                    held, self._held = self._held, []
                    for first, payload in held:
                        self._post(first, payload)
        if over is not None and not self.session.ready:
            raise ConnectionClosed(str(over)) from over
        return self.session.ready

    def _next_handshake_message(self) -> dict[str, Any] | None:
        if len(self._inbox) < LENGTHS.size:
            return None
        total, head = LENGTHS.unpack_from(self._inbox)
        if total > LARGEST_GREETING or head != total:
            raise ProtocolViolation(f"sent no greeting (it announces {head} and {total} bytes)")
        end = LENGTHS.size + total
        if len(self._inbox) < end:
            return None
        said = bytes(self._inbox[LENGTHS.size : end])
        del self._inbox[:end]
        return parse(said)

    def _read_available(self) -> Exception | None:
        """Read once. Returns why nothing more will arrive, or None; bytes that came before count."""
        try:
            self._read()
        except BlockingIOError:
            pass
        except (OSError, ConnectionClosed) as error:
            return error
        return None

    def _read(self) -> None:
        if self._partial is not None:
            got = self.sock.recv_into(self._rest)
            self._rest = self._rest[got:]
            self._set_low_water(len(self._rest))
        else:
            data = self.sock.recv(MOST_AT_ONCE)
            got = len(data)
            self._inbox += data
        if not got:
            raise ConnectionClosed("hung up")

    def _next(self) -> Frame | None:
        """The next complete frame."""
        if self._partial is not None:
            return self._complete_partial() if not self._rest else None
        if len(self._inbox) < LENGTHS.size:
            return None
        total, head = LENGTHS.unpack_from(self._inbox)
        if total > LARGEST_FRAME or head > total:
            raise ProtocolViolation(f"sent a frame of {total} bytes with a header of {head}")
        start, end = LENGTHS.size + head, LENGTHS.size + total
        if len(self._inbox) >= end + MAC_SIZE:
            frame = bytes(self._inbox[: end + MAC_SIZE])
            del self._inbox[: end + MAC_SIZE]
            view = memoryview(frame)
            _check(frame[end:], self.session.incoming.sign(view[:start], view[start:end]))
            return parse(view[LENGTHS.size : start]), frame[start:end]
        if len(self._inbox) < start:
            return None
        self._begin_partial(start, total - head)
        return None

    def _begin_partial(self, start: int, nbytes: int) -> None:
        """The header has arrived, and the beginning of a payload of ``nbytes``."""
        first, here = bytes(self._inbox[:start]), bytes(self._inbox[start:])
        self._inbox.clear()
        body = bytearray(nbytes + MAC_SIZE)
        body[: len(here)] = here
        self._partial = _PartialFrame(self.session.incoming.begin(first), first[LENGTHS.size :], body)
        self._rest = memoryview(body)[len(here) :]
        self._set_low_water(len(self._rest))

    def _complete_partial(self) -> Frame:
        assert self._partial is not None
        mac, head, body = self._partial.mac, self._partial.head, self._partial.body
        self._partial, self._rest = None, memoryview(b"")
        with memoryview(body) as view, view[:-MAC_SIZE] as payload:
            mac.update(hashlib.sha256(payload).digest() if len(payload) >= LONG else payload)
            _check(bytes(view[-MAC_SIZE:]), mac.digest())
        del body[-MAC_SIZE:]
        return parse(head), body

    def _set_low_water(self, nbytes: int) -> None:
        """Have poll report the socket as readable once so many bytes are there, or a large part of them."""
        fewest = min(nbytes, LOW_WATER_MAX) or 1
        if fewest != self._low_water:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, fewest)
            self._low_water = fewest


def _check(mac: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(mac, expected):
        raise ProtocolViolation("sent a frame that is not signed with the session's key")
