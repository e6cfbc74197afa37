"""Small messages between ranks of different hosts, and the news of who is gone.

Every rank has one office: a listening socket, a thread, and a connection to each rank it has spoken to. It carries what
groups have to say to each other (envelopes of messages, failures), and of their data only what is put into windows,
which nobody at the target waits for. A process that dies closes its connections, which the others read at once; a host
that vanishes is noticed by the kernel's keep-alive probes, which a stopped or busy process still answers.

The first frame of a connection carries the token of the office that is called; it travelled through the store, so only
the job's ranks know it. Where it names a group, the connection is that group's own from then on (lines.py).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hmac
import os
import secrets
import select
import socket
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from symcomm import errors
from symcomm.hosts.link import Broken, Link
from symcomm.memory.arena import Arena

__all__ = ["Card", "Office", "host_patience", "office_of"]

EARLY_FRAMES = 100_000  # kept for a group that is not made here yet
PAST_GROUPS = 1000  # remembered, so that nothing is kept for them
DEFAULT_PATIENCE = 5.0
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN)


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
    """A group, as its rank's office knows it. All are called in the office's thread and must not block."""

    def on_message(self, sender: str, header: dict[str, Any], payload: bytes | bytearray) -> None: ...

    def on_line(self, sender: str, line: Link) -> None: ...

    def on_lost(self, nonce: str) -> None: ...


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
        self._watched = select.epoll()
        self._alarm, self._ring = socket.socketpair()
        self._links: dict[str, Link] = {}
        self._by_fd: dict[int, Link] = {}
        self._lost: set[str] = set()
        self._members: dict[str, weakref.ref[Any]] = {}  # a group that was forgotten goes away
        self._early: dict[str, list[tuple[str, dict[str, Any], bytes | bytearray]]] = {}
        self._past: dict[str, None] = {}  # groups that were left, whose messages come too late
        self._farewells: deque[tuple[str, str]] = deque()  # (to whom, from which group)
        self._lock = threading.RLock()
        self._watched.register(self._listener, select.EPOLLIN)
        self._watched.register(self._alarm, select.EPOLLIN)
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
        return link is not None and self._push(link, header, payload)

    def knows(self, nonce: str) -> bool:
        """Whether there is a connection to that rank."""
        return nonce in self._links

    def is_lost(self, nonce: str) -> bool:
        return nonce in self._lost

    def backlog(self, nonce: str) -> int:
        """Bytes that wait for a slow receiver."""
        link = self._links.get(nonce)
        return link.backlog if link is not None else 0

    def call(self, to: Card, key: str, timeout: float = 10.0) -> Link | None:
        """A line to ``to``'s group of that name, which this office does not look after. None: it cannot be reached."""
        return None if to.nonce in self._lost else self._greet(to, timeout, {"line": key})

    def _greet(self, to: Card, timeout: float, more: dict[str, Any]) -> Link | None:
        sock = self._open(to, time.monotonic() + timeout)
        if sock is None:
            return None
        self._prepare(sock)
        link = Link(sock, to.nonce)
        link.send({"token": to.token, "from": self.nonce, **more})
        return link

    def _open(self, to: Card, deadline: float) -> socket.socket | None:
        """A socket that is connected to ``to``. What this process lacks is not that rank's fault, and may pass."""
        while True:
            try:
                return socket.create_connection((to.address, to.port), max(0.001, deadline - time.monotonic()))
            except OSError as error:
                if error.errno not in SHORTAGES:
                    self._lose(to.nonce)
                    return None
                reason = error.strerror
            if time.monotonic() >= deadline:
                warnings.warn(
                    f"rank of pid {self.pid} cannot connect to {to.address}:{to.port}: {reason}; raise the limit on "
                    "open files (ulimit -n), or the range of local ports.",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return None
            time.sleep(0.01)

    def _connect(self, to: Card, timeout: float) -> Link | None:
        link = self._greet(to, timeout, {})
        if link is None:
            return None
        with self._lock:
            if self.closed:
                link.close()
                return None
            known = self._links.setdefault(to.nonce, link)
            self._add(link)
        return known

    def _prepare(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, int(self._patience) - 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._patience * 1000))

    def _push(self, link: Link, header: dict[str, Any], payload: bytes = b"") -> bool:
        sent = link.send(header, payload)
        if link.has_backlog:
            self._watch(link)
        return sent

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake anyhow; closed: nobody to wake
            self._ring.send(b"!", socket.MSG_DONTWAIT)

    # --- the thread -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self.closed:
            for fd, events in self._watched.poll(1.0):
                if fd == self._listener.fileno():
                    self._accept()
                elif fd == self._alarm.fileno():
                    self._alarm.recv(4096)
                elif (link := self._by_fd.get(fd)) is not None:
                    self._attend(link, events)
            self._bid_farewell()
        self._bid_farewell()
        self.close_sockets()

    def _bid_farewell(self) -> None:
        while self._farewells:
            nonce, key = self._farewells.popleft()
            if (link := self._links.get(nonce)) is not None:
                self._push(link, {"group": key, "kind": "bye"})

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            self._prepare(sock)
            self._add(Link(sock, None))

    def _add(self, link: Link) -> None:
        with self._lock:
            self._by_fd[link.fd] = link
            self._watched.register(link.fd, select.EPOLLIN)
            self._watch(link)

    def _watch(self, link: Link) -> None:
        """What the office's thread is to look at."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # the office was closed
            if not link.closed:
                wanted = select.EPOLLIN | (select.EPOLLOUT if link.has_backlog else 0)
                self._watched.modify(link.fd, wanted)

    def _attend(self, link: Link, events: int) -> None:
        if events & select.EPOLLOUT:
            link.push()
            self._watch(link)
        if events & ~select.EPOLLOUT and not link.closed:
            try:
                for header, payload in link.receive():
                    if link.peer is None:
                        self._admit(link, header)
                        if "line" in header:
                            self._hand_over(link, header["line"])
                            return
                    else:
                        self._deliver(link.peer, header, payload)
            except Broken:
                self._drop(link)

    def _admit(self, link: Link, header: dict[str, Any]) -> None:
        """The first frame of an incoming connection must show our token."""
        token = header.get("token")
        if not isinstance(token, str) or not hmac.compare_digest(token.encode(), self.token.encode()):
            raise Broken
        link.peer = str(header.get("from"))
        if "line" not in header:
            with self._lock:
                self._links.setdefault(link.peer, link)
                self._lost.discard(link.peer)

    def _hand_over(self, link: Link, key: str) -> None:
        """It is a group's from now on. All ranks of a group have joined before one of them can call another."""
        with self._lock:
            del self._by_fd[link.fd]
            self._watched.unregister(link.fd)
            found = self._members.get(key)
        member = found() if found is not None else None
        if member is not None and link.peer is not None:
            member.on_line(link.peer, link)
        else:
            link.close()

    def _deliver(self, sender: str, header: dict[str, Any], payload: bytes | bytearray) -> None:
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

    def _drop(self, link: Link) -> None:
        with self._lock:
            self._by_fd.pop(link.fd, None)
            with contextlib.suppress(OSError, ValueError):
                self._watched.unregister(link.fd)
            link.close()
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
            self._farewells or any(link.has_backlog for link in list(self._links.values()))
        ) and time.monotonic() < deadline:
            time.sleep(0.005)

    def close_sockets(self) -> None:
        for link in list(self._by_fd.values()):
            link.sock.close()
        for sock in (self._listener, self._alarm, self._ring):
            sock.close()
        self._watched.close()
