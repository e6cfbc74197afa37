"""Small messages between ranks of different hosts, and the news of who is gone.

Every rank has one office: a listening socket, a thread, and a connection to each rank it has spoken to. It carries what
groups have to say to each other (envelopes of messages, failures), and of their data only what is put into windows,
which nobody at the target waits for. A process that dies closes its connections, which the others read at once; a host
that vanishes is noticed by the kernel's keep-alive probes, which a stopped or busy process still answers.

Whoever connects has to prove that it is a rank of the job (session.py); until then it is a stranger (door.py). Where
its greeting names a group, the connection is that group's own from then on (lines.py). Nothing that comes over a
connection can do more than end it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import secrets
import select
import socket
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from symcomm import errors
from symcomm.hierarchical.connection import Broken, Link, Refused
from symcomm.hierarchical.listener import Complaints, Door
from symcomm.hierarchical.session import Callee, Caller, job_secret
from symcomm.memory.arena import Arena
from symcomm.store.address import LOOPBACK

__all__ = ["Card", "Office", "check_tokens", "host_patience", "office_in", "office_of"]

log = logging.getLogger("symcomm.hosts")

EARLY_FRAMES = 100_000  # kept for groups that are not made here yet
EARLY_BYTES = 256 << 20
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
    """Where an office is. ``secret``: what its callers have to know; empty where that is the job's token."""

    nonce: str
    address: str
    port: int
    secret: str


def check_tokens(cards: Sequence[dict[str, Any]]) -> None:
    """All ranks have the job's token, or none has."""
    without = [r for r, card in enumerate(cards) if not card["has_token"]]
    if without and len(without) < len(cards):
        raise errors.CollectiveMismatchError(
            f"groups across hosts: SYMCOMM_TOKEN is not set on rank {errors.words_for_ranks(without)}, and on the "
            "others it is; set the same one on all hosts."
        )


def office_in(card: dict[str, Any], across: bool) -> Card:
    """A rank's office, as its card says. What its callers have to know does not stay there."""
    nonce, address, port, secret = card["office"]
    card["office"] = ""
    return Card(nonce, address, port, secret) if across else Card(nonce, LOOPBACK, card["loopback"], secret)


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
        self._job = job_secret()
        self._secret = "" if self._job else secrets.token_hex(32)
        self.closed = False
        self._deserted = False  # the last group has left: nobody may join any more
        self._patience = host_patience()
        self._watched = select.epoll()
        self.complaints = Complaints()
        self._unforeseen = 0  # errors that nobody should be able to cause
        self.door = Door(self._watched, self._callee, self.complaints)
        self._alarm, self._ring = socket.socketpair()
        self._links: dict[str, Link] = {}
        self._by_fd: dict[int, Link] = {}
        self._lost: set[str] = set()
        self._banned: set[str] = set()  # for what they sent
        self._members: dict[str, weakref.ref[Any]] = {}  # a group that was forgotten goes away
        self._early: dict[str, list[tuple[str, dict[str, Any], bytes | bytearray]]] = {}
        self._early_frames = self._early_bytes = 0
        self._past: dict[str, None] = {}  # groups that were left, whose messages come too late
        self._farewells: deque[tuple[str, str]] = deque()  # (to whom, from which group)
        self._lock = threading.RLock()
        self._watched.register(self._alarm, select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, name="symcomm-office", daemon=True)
        self._thread.start()

    def card(self, address: str) -> Card:
        """For others to call; listens at ``address`` from now on. To be followed by ``settle``."""
        with self._lock:
            return Card(self.nonce, address, self.door.open(address), self._secret)

    def settle(self, address: str, needed: bool) -> None:
        """Whether somebody will call there."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # the office was closed
            self.door.settle(address, needed)

    @property
    def has_token(self) -> bool:
        """Whether it is the job's token that callers have to know."""
        return self._job is not None

    def _callee(self) -> Callee:
        return Callee(self._job or self._secret.encode(), self.nonce)

    def stats(self) -> dict[str, Any]:
        """Connections, strangers among them, those that were refused, and errors that nobody should have caused."""
        return {
            "connections": len(self._by_fd), "strangers": len(self.door.strangers), "pauses": self.door.pauses,
            "refused": self.complaints.refused, "reasons": list(self.complaints.reasons),
            "unforeseen": self._unforeseen,
        }  # fmt: skip

    # --- groups -----------------------------------------------------------------------------------------------

    def join(self, key: str, member: Member) -> bool:
        """From now on ``member`` gets the messages that carry ``key``, those that came early first.

        False: this office is about to close."""
        refused: list[tuple[str, str]] = []
        with self._lock:
            if self.closed or self._deserted:
                return False
            for sender, header, payload in self._early.pop(key, []):
                self._early_frames, self._early_bytes = self._early_frames - 1, self._early_bytes - len(payload)
                try:
                    member.on_message(sender, header, payload)
                except Refused as error:
                    refused.append((sender, str(error)))
            self._members[key] = weakref.ref(member)
        for sender, why in refused:
            if (link := self._links.get(sender)) is not None:
                self._refuse(link, why)
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
        return None if to.nonce in self._lost else self._greet(to, timeout, key)

    def _greet(self, to: Card, timeout: float, line: str | None = None) -> Link | None:
        sock = self._open(to, time.monotonic() + timeout)
        if sock is None:
            return None
        self._prepare(sock)
        return Link(sock, to.nonce, Caller(self._job or to.secret.encode(), self.nonce, to.nonce, line))

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
        link = self._greet(to, timeout)
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
        seconds = 1.0
        while not self.closed:
            for fd, events in self._watched.poll(seconds):
                try:
                    self._handle(fd, events)
                except Exception:  # a bug; others need the office all the same
                    self._unforeseen += 1
                    log.exception("the control channel met something unforeseen. Please report it.")
                    if (link := self._by_fd.get(fd)) is not None:
                        self._refuse(link, "led to an error")
            seconds = self.door.look(self._refuse)
            self._bid_farewell()
        self._bid_farewell()
        self.close_sockets()

    def _handle(self, fd: int, events: int) -> None:
        if (link := self._by_fd.get(fd)) is not None:
            self._attend(link, events)
        elif fd == self._alarm.fileno():
            self._alarm.recv(4096)
        elif (listener := self.door.listener(fd)) is not None:
            self._accept(listener)

    def _bid_farewell(self) -> None:
        while self._farewells:
            nonce, key = self._farewells.popleft()
            if (link := self._links.get(nonce)) is not None:
                self._push(link, {"group": key, "kind": "bye"})

    def _accept(self, listener: socket.socket) -> None:
        sock = self.door.accept(listener, self._refuse)
        if sock is None:
            return
        try:
            self._prepare(sock)
        except OSError:  # gone already
            sock.close()
            return
        self._add(self.door.welcome(sock))

    def _add(self, link: Link) -> None:
        with self._lock:
            self._by_fd[link.fd] = link
            self._watched.register(link.fd, select.EPOLLIN)
            self._watch(link)

    def _watch(self, link: Link) -> None:
        """What the office's thread is to look at."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # the office was closed
            if not link.closed:
                wanted = select.EPOLLIN | (select.EPOLLOUT if link.wants_to_send else 0)
                self._watched.modify(link.fd, wanted)

    def _attend(self, link: Link, events: int) -> None:
        if events & select.EPOLLOUT:
            link.push()
            self._watch(link)
        if not events & ~select.EPOLLOUT or link.closed:
            return
        try:
            if link.peer is None and not self._admit(link):
                return
            for header, payload in link.receive():
                self._deliver(link, header, payload)
                if link.closed:
                    return
        except Refused as error:
            self._refuse(link, str(error))
        except Broken as error:
            if link.peer is None:
                self._refuse(link, f"left before it had proved who it is ({error})")
            else:
                self._drop(link)
        if link.wants_to_send:
            self._watch(link)

    def _admit(self, link: Link) -> bool:
        """Go on with a stranger's handshake. True when it is a rank of the job, and its frames are the office's."""
        if not link.shake_hands():
            if link.wants_to_send:
                self._watch(link)
            return False
        self.door.let_in(link)
        session = link.session
        if session.peer in self._banned:
            raise Refused("is a rank that was refused before")
        if session.line is not None:
            link.peer = session.peer
            self._hand_over(link, session.line)
            return False
        with self._lock:
            link.peer = session.peer
            self._links.setdefault(link.peer, link)
            self._lost.discard(link.peer)
        return True

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

    def _deliver(self, link: Link, header: dict[str, Any], payload: bytes | bytearray) -> None:
        key, sender = header.get("group"), link.peer
        if not isinstance(key, str) or sender is None:
            raise Refused("sent a message for no group")
        with self._lock:
            found = self._members.get(key)
            if found is None and key in self._past:
                return
            if found is None:
                self._keep(key, sender, header, payload)
                return
        member = found()
        if member is not None:
            member.on_message(sender, header, payload)

    def _keep(self, key: str, sender: str, header: dict[str, Any], payload: bytes | bytearray) -> None:
        """For a group that is not made here yet."""
        if self._early_frames >= EARLY_FRAMES or self._early_bytes + len(payload) > EARLY_BYTES:
            raise Refused("sent more than can be kept for groups that this rank is not in yet")
        self._early_frames, self._early_bytes = self._early_frames + 1, self._early_bytes + len(payload)
        self._early.setdefault(key, []).append((sender, header, payload))

    def _refuse(self, link: Link, why: str) -> None:
        """End a connection for what came over it. If it is a rank's, that rank is lost, and may not come back: it may
        have two connections, or be about to have, where both sides called at once."""
        self.complaints.note(_name_of(link), why)
        proved = link.peer is not None and link.session.ready
        if proved:
            self._banned.add(link.session.peer)
        self._drop(link)
        if proved and (other := self._links.get(link.session.peer)) is not None:
            self._drop(other)

    def _drop(self, link: Link) -> None:
        self.door.let_in(link)
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
        self.door.close()
        for sock in (self._alarm, self._ring):
            sock.close()
        self._watched.close()


def _name_of(link: Link) -> str:
    """Who a connection is with, as far as anybody knows."""
    try:
        host, port = link.sock.getpeername()[:2]
        where = f"{host} port {port}"
    except (OSError, ValueError):
        where = "somebody who is gone"
    return where if link.peer is None else f"{where} (a rank)"
