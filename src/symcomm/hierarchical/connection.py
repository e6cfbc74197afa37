"""A connection between two ranks of different hosts: frames, and nothing that blocks.

A frame is: length of header and payload, length of the header, header (JSON), payload, MAC. Nobody looks at it before
the MAC was checked. What is sent before both sides have proved who they are (session.py) is held back. Sending never
waits: what the kernel does not take is pushed on by whoever watches the socket. A payload that comes in pieces is read
where it stays.
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

from symcomm.hierarchical.session import LONG, MAC_SIZE, Broken, Refused, Session, parse

__all__ = ["Broken", "Frame", "Link", "Refused"]

LENGTHS = struct.Struct("<II")
LARGEST_FRAME = 1 << 24
LARGEST_GREETING = 1 << 14  # of somebody who has proved nothing yet
MOST_AT_ONCE = 1 << 16  # bytes read before it is known where they belong
PARTS_AT_ONCE = 64  # of frames that the kernel is handed at a time
WORTH_WAKING = 128 << 10  # bytes of a payload for which whoever reads is woken before it is whole

Frame = tuple[dict[str, Any], "bytes | bytearray"]


class _Awaited:
    """A frame of which a part is there: its header, its payload and the MAC, and the hash of what comes before them."""

    def __init__(self, mac: Any, head: bytes, body: bytearray):
        self.mac, self.head, self.body = mac, head, body


class Link:
    """``peer``: the other office's name; None until an incoming connection has proved who it is. One thread reads it,
    any may send."""

    def __init__(self, sock: socket.socket, peer: str | None, session: Session):
        self.sock = sock
        self.fd = sock.fileno()
        self.peer = peer
        self.session = session
        self.closed = False
        self._sending = threading.Lock()
        self._held: list[tuple[bytes, bytes]] = []  # frames that wait for the session
        self._outbox: deque[memoryview] = deque()
        self._inbox = bytearray()
        self._awaited: _Awaited | None = None
        self._rest = memoryview(b"")  # where the rest of it goes
        self._fewest = 1
        if (greeting := session.greeting()) is not None:
            self._say(greeting)

    # --- sending ----------------------------------------------------------------------------------------------

    def send(self, header: dict[str, Any], payload: bytes = b"") -> bool:
        """False: the connection is broken, as whoever reads will find. ``backlog`` says what is left to push."""
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

    def _say(self, header: dict[str, Any]) -> None:
        """A word of the handshake."""
        head = json.dumps(header).encode()
        self._outbox.append(memoryview(LENGTHS.pack(len(head), len(head)) + head))
        self._push()

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
        held = sum(len(first) + len(payload) for first, payload in list(self._held))
        return held + sum(map(len, list(self._outbox)))

    @property
    def has_backlog(self) -> bool:
        return bool(self._outbox or self._held)

    @property
    def wants_to_send(self) -> bool:
        """Whether there is something for the kernel, as soon as it has room."""
        return bool(self._outbox)

    def close(self) -> None:
        with self._sending:
            self.closed = True
            self._held.clear()
            self.sock.close()

    # --- receiving --------------------------------------------------------------------------------------------

    def receive(self) -> Iterator[Frame]:
        """Read what is there, once, and give the frames that are whole by now; then raise Broken, if it is over."""
        if not self.session.ready and not self.shake_hands():
            return
        over = self._read_what_is_there()
        while (frame := self._next()) is not None:
            yield frame
        if over is not None:
            raise Broken(str(over)) from over

    def shake_hands(self) -> bool:
        """Read what is there, once, and go on with the handshake. True when it is done; later frames stay unread."""
        over = self._read_what_is_there()
        while not self.session.ready and (word := self._word()) is not None:
            with self._sending:
                if (answer := self.session.answer(word)) is not None:
                    self._say(answer)
                if self.session.ready:
                    held, self._held = self._held, []
                    for first, payload in held:
                        self._post(first, payload)
        if over is not None and not self.session.ready:
            raise Broken(str(over)) from over
        return self.session.ready

    def _word(self) -> dict[str, Any] | None:
        """The next word of the handshake."""
        if len(self._inbox) < LENGTHS.size:
            return None
        total, head = LENGTHS.unpack_from(self._inbox)
        if total > LARGEST_GREETING or head != total:
            raise Refused(f"sent no greeting (it announces {head} and {total} bytes)")
        end = LENGTHS.size + total
        if len(self._inbox) < end:
            return None
        said = bytes(self._inbox[LENGTHS.size : end])
        del self._inbox[:end]
        return parse(said)

    def _read_what_is_there(self) -> Exception | None:
        """Once. Why nothing more will come, or None; what came before that counts."""
        try:
            self._read()
        except BlockingIOError:
            pass
        except (OSError, Broken) as error:
            return error
        return None

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
            raise Broken("hung up")

    def _next(self) -> Frame | None:
        """The next whole frame."""
        if self._awaited is not None:
            return self._complete() if not self._rest else None
        if len(self._inbox) < LENGTHS.size:
            return None
        total, head = LENGTHS.unpack_from(self._inbox)
        if total > LARGEST_FRAME or head > total:
            raise Refused(f"sent a frame of {total} bytes with a header of {head}")
        start, end = LENGTHS.size + head, LENGTHS.size + total
        if len(self._inbox) >= end + MAC_SIZE:
            frame = bytes(self._inbox[: end + MAC_SIZE])
            del self._inbox[: end + MAC_SIZE]
            view = memoryview(frame)
            _check(frame[end:], self.session.incoming.sign(view[:start], view[start:end]))
            return parse(view[LENGTHS.size : start]), frame[start:end]
        if len(self._inbox) < start:
            return None
        self._await(start, total - head)
        return None

    def _await(self, start: int, nbytes: int) -> None:
        """The header is there, and the beginning of a payload of ``nbytes``."""
        first, here = bytes(self._inbox[:start]), bytes(self._inbox[start:])
        self._inbox.clear()
        body = bytearray(nbytes + MAC_SIZE)
        body[: len(here)] = here
        self._awaited = _Awaited(self.session.incoming.begin(first), first[LENGTHS.size :], body)
        self._rest = memoryview(body)[len(here) :]
        self._wake_for(len(self._rest))

    def _complete(self) -> Frame:
        assert self._awaited is not None
        mac, head, body = self._awaited.mac, self._awaited.head, self._awaited.body
        self._awaited, self._rest = None, memoryview(b"")
        with memoryview(body) as view, view[:-MAC_SIZE] as payload:
            mac.update(hashlib.sha256(payload).digest() if len(payload) >= LONG else payload)
            _check(bytes(view[-MAC_SIZE:]), mac.digest())
        del body[-MAC_SIZE:]
        return parse(head), body

    def _wake_for(self, nbytes: int) -> None:
        """Whoever waits for this socket is woken when so much is there, or a large part of it."""
        fewest = min(nbytes, WORTH_WAKING) or 1
        if fewest != self._fewest:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, fewest)
            self._fewest = fewest


def _check(mac: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(mac, expected):
        raise Refused("sent a frame that is not signed with the session's key")
