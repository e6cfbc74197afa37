"""Small messages between ranks of different hosts, and the news of who is gone.

Every rank has one office: a listening socket, a thread, and a connection to each rank it has spoken to. It carries what
groups have to say to each other (arrivals, envelopes of messages, failures), never their data. A process that dies
closes its connections, which the others read at once; a host that vanishes is noticed by the kernel's keep-alive
probes, which a stopped or busy process still answers.

A frame is: length of all that follows, length of the header, header (JSON), payload. The first frame of a connection
carries the token of the office that is called; it travelled through the store, so only the job's ranks know it.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from symcomm import errors
from symcomm.memory.arena import Arena

__all__ = ["Card", "Office", "host_patience", "office_of"]

LENGTHS = struct.Struct("<II")
LARGEST_FRAME = 1 << 24
LARGEST_GREETING = 4096  # of somebody who has not shown the token yet
EARLY_FRAMES = 100_000  # kept for a group that is not made here yet
PAST_GROUPS = 1000  # remembered, so that nothing is kept for them
DEFAULT_PATIENCE = 5.0


def host_patience() -> float:
    """Seconds of silence after which a host counts as gone (SYMCOMM_HOST_TIMEOUT)."""
    said = os.environ.get("SYMCOMM_HOST_TIMEOUT", "")
    try:
        seconds = float(said) if said else DEFAULT_PATIENCE
    except ValueError:
        seconds = 0.0
    if seconds < 1:
        raise errors.bad_argument("groups across hosts", "SYMCOMM_HOST_TIMEOUT", said, "1 second or more")
    return seconds


class Card(NamedTuple):
    """Where an office is, and what opens its door."""

    nonce: str
    address: str
    port: int
    token: str


class Member(Protocol):
    """A group, as its rank's office knows it. Both are called in the office's thread and must not block."""

    def on_message(self, sender: str, header: dict[str, Any], payload: bytes) -> None: ...

    def on_lost(self, nonce: str) -> None: ...


class _Link:
    """A connection. Sending never blocks: what the kernel does not take waits in ``outbox``."""

    def __init__(self, sock: socket.socket, peer: str | None):
        self.sock = sock
        self.peer = peer  # nonce; None until an incoming connection has said who it is
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.lock = threading.Lock()
        self.closed = False


_offices: weakref.WeakValueDictionary[bytes, Office] = weakref.WeakValueDictionary()
_offices_lock = threading.Lock()


def _after_fork_in_child() -> None:
    """A child must not keep connections open after its parent is gone, whose end they are to tell."""
    for office in list(_offices.values()):
        office.closed = True
        office.close_sockets()


os.register_at_fork(after_in_child=_after_fork_in_child)


def office_of(arena: Arena, key: str, member: Member) -> Office:
    """The one office of the rank that owns ``arena``, joined; it lives as long as a group has joined it."""
    with _offices_lock:
        office = _offices.get(arena.nonce)
        if office is None or office.pid != os.getpid() or not office.join(key, member):
            # A name of its own: those that lost the rank's last office must not take this one for lost as well.
            office = _offices[arena.nonce] = Office(f"{arena.nonce.hex()}.{secrets.token_hex(4)}")
            office.join(key, member)
        return office


@atexit.register
def _close_all() -> None:
    """A thread must not be at work when the interpreter ends: inside the engine, that would take the process down."""
    for office in list(_offices.values()):
        if office.pid == os.getpid():
            office.close()


class Office:
    def __init__(self, nonce: str):
        self.nonce = nonce
        self.pid = os.getpid()
        self.token = secrets.token_hex(16)
        self.closed = False
        self._deserted = False  # the last group has left: nobody may join any more
        self._patience = host_patience()
        self._listener = socket.create_server(("", 0), backlog=1024)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._alarm, self._ring = socket.socketpair()
        self._links: dict[str, _Link] = {}
        self._lost: set[str] = set()
        self._members: dict[str, weakref.ref[Any]] = {}  # a group that was forgotten goes away
        self._early: dict[str, list[tuple[str, dict[str, Any], bytes]]] = {}
        self._past: dict[str, None] = {}  # groups that were left, whose messages come too late
        self._farewells: deque[tuple[str, str]] = deque()  # (to whom, from which group)
        self._lock = threading.RLock()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._alarm, selectors.EVENT_READ, None)
        self._changes: list[_Link] = []  # links to be looked at anew by the thread
        self._thread = threading.Thread(target=self._serve, name="symcomm-office", daemon=True)
        self._thread.start()

    def card(self, address: str) -> Card:
        return Card(self.nonce, address, self.port, self.token)

    # --- groups -----------------------------------------------------------------------------------------------

    def join(self, key: str, member: Member) -> bool:
        """From now on ``member`` gets the messages that carry ``key``, those that came early first.

        False: this office is about to close."""
        with self._lock:
            if self.closed or self._deserted:
                return False
            for item in self._early.pop(key, []):
                member.on_message(*item)
            self._members[key] = weakref.ref(member)
            return True

    def leave(self, key: str, peers: Iterable[str] = ()) -> None:
        """The last group to leave closes the office. ``peers`` are told, by the office's thread: the garbage collector
        may call this while this one sends something else."""
        self._farewells.extend((nonce, key) for nonce in peers)
        if self._farewells:
            self._wake()
        with self._lock:
            self._members.pop(key, None)
            self._past[key] = None
            if len(self._past) > PAST_GROUPS:
                del self._past[next(iter(self._past))]
            last = self._deserted = not self._members
        if last:
            self.close()

    # --- sending ----------------------------------------------------------------------------------------------

    def send(self, to: Card, header: dict[str, Any], payload: bytes = b"", timeout: float = 10.0) -> bool:
        """Hand a message to ``to``'s connection, which is made if need be. False: that rank cannot be reached."""
        link = self._links.get(to.nonce)
        if link is None:
            if to.nonce in self._lost:
                return False
            link = self._connect(to, timeout)
        return link is not None and self._push(link, _frame(header, payload))

    def knows(self, nonce: str) -> bool:
        """Whether there is a connection to that rank."""
        return nonce in self._links

    def is_lost(self, nonce: str) -> bool:
        return nonce in self._lost

    def backlog(self, nonce: str) -> int:
        """Bytes that wait for a slow receiver."""
        link = self._links.get(nonce)
        return len(link.outbox) if link is not None else 0

    def _connect(self, to: Card, timeout: float) -> _Link | None:
        try:
            sock = socket.create_connection((to.address, to.port), timeout)
        except OSError:
            self._lose(to.nonce)
            return None
        self._prepare(sock)
        link = _Link(sock, to.nonce)
        self._push(link, _frame({"token": to.token, "from": self.nonce}, b""))
        with self._lock:
            known = self._links.setdefault(to.nonce, link)
            self._changes.append(link)
        self._wake()
        return known

    def _prepare(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, int(self._patience) - 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._patience * 1000))

    def _push(self, link: _Link, data: bytes) -> bool:
        with link.lock:
            if link.closed:
                return False
            sent = 0
            if not link.outbox:
                try:
                    sent = link.sock.send(data)
                except BlockingIOError:
                    pass
                except OSError:
                    return False  # the thread reads the same, and tells
            if sent == len(data):
                return True
            link.outbox += data[sent:]
        with self._lock:
            self._changes.append(link)
        self._wake()
        return True

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake anyhow; closed: nobody to wake
            self._ring.send(b"!", socket.MSG_DONTWAIT)

    # --- the thread -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self.closed:
            for key, events in self._selector.select(1.0):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._alarm:
                    self._alarm.recv(4096)
                else:
                    self._attend(key.data, events)
            with self._lock:
                changes, self._changes = self._changes, []
            for link in changes:
                self._watch(link)
            self._bid_farewell()
        self._bid_farewell()
        self._shut()

    def _bid_farewell(self) -> None:
        while self._farewells:
            nonce, key = self._farewells.popleft()
            if (link := self._links.get(nonce)) is not None:
                self._push(link, _frame({"group": key, "kind": "bye"}, b""))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            self._prepare(sock)
            self._selector.register(sock, selectors.EVENT_READ, _Link(sock, None))

    def _watch(self, link: _Link) -> None:
        if link.closed:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.outbox else 0)
        with contextlib.suppress(OSError, ValueError):
            if link.sock.fileno() in self._selector.get_map():
                self._selector.modify(link.sock, events, link)
            else:
                self._selector.register(link.sock, events, link)

    def _attend(self, link: _Link, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            with link.lock, contextlib.suppress(OSError):
                del link.outbox[: link.sock.send(link.outbox)]
            self._watch(link)
        if events & selectors.EVENT_READ:
            try:
                data = link.sock.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._drop(link)
                return
            link.inbox += data
            self._read_frames(link)

    def _read_frames(self, link: _Link) -> None:
        """Deliver every whole frame of the inbox."""
        start = 0
        while len(link.inbox) - start >= LENGTHS.size:
            total, head = LENGTHS.unpack_from(link.inbox, start)
            if total > (LARGEST_FRAME if link.peer is not None else LARGEST_GREETING) or head > total:
                self._drop(link)
                return
            if len(link.inbox) - start < 8 + total:
                break
            try:
                header = json.loads(bytes(link.inbox[start + 8 : start + 8 + head]))
            except ValueError:  # not one of us
                self._drop(link)
                return
            payload = bytes(link.inbox[start + 8 + head : start + 8 + total])
            start += 8 + total
            if link.peer is None:
                if not self._admit(link, header):
                    return
            else:
                self._deliver(link.peer, header, payload)
        del link.inbox[:start]

    def _admit(self, link: _Link, header: Any) -> bool:
        """The first frame of an incoming connection must show our token."""
        token = header.get("token") if isinstance(header, dict) else None
        if not isinstance(token, str) or not hmac.compare_digest(token.encode(), self.token.encode()):
            self._drop(link)
            return False
        link.peer = str(header.get("from"))
        with self._lock:
            self._links.setdefault(link.peer, link)
            self._lost.discard(link.peer)
        return True

    def _deliver(self, sender: str, header: dict[str, Any], payload: bytes) -> None:
        key = header.get("group", "")
        with self._lock:
            found = self._members.get(key)
            if found is None and key in self._past:
                return
            if found is None:
                early = self._early.setdefault(key, [])
                if len(early) < EARLY_FRAMES:
                    early.append((sender, header, payload))
                return
        member = found()
        if member is not None:
            try:
                member.on_message(sender, header, payload)
            except Exception:  # a bug; other groups need the office all the same
                traceback.print_exc()

    def _drop(self, link: _Link) -> None:
        with link.lock:
            link.closed = True
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.sock)
        link.sock.close()
        if link.peer is not None and self._links.get(link.peer) is link:
            self._lose(link.peer)

    def _lose(self, nonce: str) -> None:
        with self._lock:
            self._links.pop(nonce, None)
            self._lost.add(nonce)
            members = [found() for found in self._members.values()]
        for member in members:
            if member is not None:
                member.on_lost(nonce)

    # --- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._flush(time.monotonic() + 1.0)
        self.closed = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def _flush(self, deadline: float) -> None:
        while (
            self._farewells or any(link.outbox for link in list(self._links.values()))
        ) and time.monotonic() < deadline:
            time.sleep(0.005)

    def _shut(self) -> None:
        self.close_sockets()
        self._selector.close()

    def close_sockets(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._ring.close()


def _frame(header: dict[str, Any], payload: bytes) -> bytes:
    head = json.dumps(header).encode()
    return LENGTHS.pack(len(head) + len(payload), len(head)) + head + payload
