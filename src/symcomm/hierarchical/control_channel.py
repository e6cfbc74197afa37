"""Small control messages between ranks of different hosts, and peer liveness.

Every rank has one control channel: a listening socket, a thread, and a connection to each rank it has talked to. It
carries the control messages of groups (message envelopes, failures) and no data, except puts into windows, for which no
rank waits. When a process dies, the kernel closes its connections, and its peers notice at once. TCP keep-alive probes
find a host that has vanished; a stopped or busy process still answers them.

A peer that connects must prove that it is a rank of the job (session.py); until then it is a stranger (listener.py).
Where its greeting names a group, the connection belongs to that group from then on (leader_links.py). Nothing received
over a connection can do more than end it.
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
from symcomm.hierarchical.connection import ConnectionClosed, FramedConnection, ProtocolViolation
from symcomm.hierarchical.listener import Listener, RefusalLog
from symcomm.hierarchical.session import Callee, Caller, job_secret
from symcomm.memory.arena import Arena
from symcomm.store.address import LOOPBACK

log = logging.getLogger("symcomm.hosts")

EARLY_FRAMES = 100_000  # buffered for groups that this rank has not built yet
EARLY_BYTES = 256 << 20
DIAL = 10.0  # seconds to connect to a rank
PAST_GROUPS = 1000  # groups remembered as left, so that nothing is buffered for them
DEFAULT_HOST_TIMEOUT = 5.0
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN)


def host_timeout() -> float:
    """Seconds of silence after which a host counts as gone (SYMCOMM_HOST_TIMEOUT)."""
    said = os.environ.get("SYMCOMM_HOST_TIMEOUT", "")
    try:
        seconds = float(said) if said else DEFAULT_HOST_TIMEOUT
    except ValueError:
        seconds = 0.0
    if seconds < 1:
        raise errors.bad_argument("groups across hosts", "SYMCOMM_HOST_TIMEOUT", said, "1 second or more")
    return seconds


class Endpoint(NamedTuple):
    """Where a control channel listens. ``secret``: what callers must know; empty if they must know the job's token."""

    nonce: str
    address: str
    port: int
    secret: str


def check_tokens(infos: Sequence[dict[str, Any]]) -> None:
    """Refuse a job in which some ranks have a token and others have none."""
    without = [r for r, info in enumerate(infos) if not info["has_token"]]
    if without and len(without) < len(infos):
        raise errors.CollectiveMismatchError(
            f"groups across hosts: SYMCOMM_TOKEN is missing on rank {errors.format_ranks(without)}, but the others "
            "have it; set the same one on all hosts."
        )


def endpoint_in(info: dict[str, Any], across: bool) -> Endpoint:
    """Take a rank's endpoint, with its secret, out of what the rank sent at bootstrap."""
    nonce, address, port, secret = info["control"]
    info["control"] = ""
    return Endpoint(nonce, address, port, secret) if across else Endpoint(nonce, LOOPBACK, info["loopback"], secret)


class Member(Protocol):
    """A group, as the control channel sees it. Its methods run in the channel's thread and must not block."""

    def on_message(self, sender: str, header: dict[str, Any], payload: bytes | bytearray) -> None: ...

    def on_leader_link(self, sender: str, conn: FramedConnection) -> None: ...

    def on_lost(self, nonce: str) -> None: ...


_channels: weakref.WeakValueDictionary[bytes, ControlChannel] = weakref.WeakValueDictionary()
_channels_lock = threading.Lock()


def _after_fork_in_child() -> None:
    """A forked child must close its copies: peers detect the parent's death by the end of its connections."""
    for channel in list(_channels.values()):
        channel.closed = True
        channel.close_sockets()


os.register_at_fork(after_in_child=_after_fork_in_child)


def channel_of(arena: Arena, key: str, member: Member) -> ControlChannel:
    """The one control channel of the rank that owns ``arena``, joined; it lives as long as a group has joined it."""
    with _channels_lock:
        channel = _channels.get(arena.nonce)
        if channel is None or channel.pid != os.getpid() or not channel.join(key, member):
            # A new name: peers that lost the rank's previous channel must not take this one for lost as well.
            channel = _channels[arena.nonce] = ControlChannel(f"{arena.nonce.hex()}.{secrets.token_hex(4)}")
            channel.join(key, member)
        return channel


@atexit.register
def _close_all() -> None:
    """A thread that is inside an engine when the interpreter exits would crash the process."""
    for channel in list(_channels.values()):
        if channel.pid == os.getpid():
            channel.close()


class ControlChannel:
    def __init__(self, nonce: str):
        self.nonce = nonce
        self.pid = os.getpid()
        self._job = job_secret()
        self._secret = "" if self._job else secrets.token_hex(32)
        self.closed = False
        self._closing = False  # the last group has left: no group may join any more
        self._host_timeout = host_timeout()
        self._epoll = select.epoll()
        self.refusals = RefusalLog()
        self._internal_errors = 0  # errors of ours, which no peer should be able to cause
        self.listener = Listener(self._epoll, self._callee, self.refusals)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._by_peer: dict[str, FramedConnection] = {}
        self._by_fd: dict[int, FramedConnection] = {}
        self._lost: set[str] = set()
        self._banned: set[str] = set()  # channels that were refused for what they sent
        self._members: dict[str, weakref.ref[Any]] = {}  # a group that was forgotten goes away
        self._early: dict[str, list[tuple[str, dict[str, Any], bytes | bytearray]]] = {}
        self._early_frames = self._early_bytes = 0
        self._left_groups: dict[str, None] = {}  # groups that were left, whose messages come too late
        self._unsent_byes: deque[tuple[str, str]] = deque()  # (to whom, from which group)
        self._lock = threading.RLock()
        self._epoll.register(self._wake_receiver, select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, name="symcomm-control", daemon=True)
        self._thread.start()

    def open_endpoint(self, address: str) -> Endpoint:
        """Listen at ``address`` from now on, for others to connect. Must be followed by ``settle``."""
        with self._lock:
            return Endpoint(self.nonce, address, self.listener.listen(address), self._secret)

    def settle(self, address: str, needed: bool) -> None:
        """``needed``: other ranks will connect there."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # closed meanwhile
            self.listener.settle(address, needed)

    @property
    def has_token(self) -> bool:
        """Whether callers authenticate with the job's token."""
        return self._job is not None

    def _callee(self) -> Callee:
        return Callee(self._job or self._secret.encode(), self.nonce)

    def stats(self) -> dict[str, Any]:
        """Open connections, unauthenticated ones among them, refused ones, and internal errors."""
        return {
            "connections": len(self._by_fd), "strangers": len(self.listener.strangers), "pauses": self.listener.pauses,
            "refused": self.refusals.refused, "reasons": list(self.refusals.reasons),
            "unforeseen": self._internal_errors,
        }  # fmt: skip

    # --- groups -----------------------------------------------------------------------------------------------

    def join(self, key: str, member: Member) -> bool:
        """Deliver messages for ``key`` to ``member``, first those that came early. False: the channel is closing."""
        refused: list[tuple[str, str]] = []
        with self._lock:
            if self.closed or self._closing:
                return False
            for sender, header, payload in self._early.pop(key, []):
                self._early_frames, self._early_bytes = self._early_frames - 1, self._early_bytes - len(payload)
                try:
                    member.on_message(sender, header, payload)
                except ProtocolViolation as error:
                    refused.append((sender, str(error)))
            self._members[key] = weakref.ref(member)
        for sender, why in refused:
            if (conn := self._by_peer.get(sender)) is not None:
                self._refuse(conn, why)
        return True

    def leave(self, key: str, peers: Iterable[str] = ()) -> None:
        """The last group to leave closes the channel. The channel's thread tells ``peers``: the garbage collector may
        call this while its thread is sending."""
        self._unsent_byes.extend((nonce, key) for nonce in peers)
        if self._unsent_byes:
            self._wake()
        with self._lock:
            self._members.pop(key, None)
            self._left_groups[key] = None
            if len(self._left_groups) > PAST_GROUPS:
                del self._left_groups[next(iter(self._left_groups))]
            last = self._closing = not self._members
        if last:
            self.close()

    # --- sending ----------------------------------------------------------------------------------------------

    def send(self, to: Endpoint, header: dict[str, Any], payload: bytes = b"", timeout: float = DIAL) -> bool:
        """Queue a message for ``to``, connecting first if needed. False: that rank cannot be reached."""
        conn = self._by_peer.get(to.nonce)
        if conn is None:
            if to.nonce in self._lost:
                return False
            conn = self._connect(to, timeout)
        return conn is not None and self._push(conn, header, payload)

    def is_connected(self, nonce: str) -> bool:
        """Whether there is a connection to that rank."""
        return nonce in self._by_peer

    def is_lost(self, nonce: str) -> bool:
        return nonce in self._lost

    def backlog(self, nonce: str) -> int:
        """Bytes queued for a slow receiver."""
        conn = self._by_peer.get(nonce)
        return conn.backlog if conn is not None else 0

    def dial(self, to: Endpoint, key: str) -> FramedConnection | None:
        """A connection to ``to``'s group of that name, owned by the caller. None: it cannot be reached."""
        return None if to.nonce in self._lost else self._dial(to, DIAL, key)

    def _dial(self, to: Endpoint, timeout: float, group: str | None = None) -> FramedConnection | None:
        sock = self._open(to, time.monotonic() + timeout)
        if sock is None:
            return None
        self._prepare(sock)
        return FramedConnection(sock, to.nonce, Caller(self._job or to.secret.encode(), self.nonce, to.nonce, group))

    def _open(self, to: Endpoint, deadline: float) -> socket.socket | None:
        """A socket connected to ``to``. A shortage in this process is not that rank's fault, and may pass."""
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

    def _connect(self, to: Endpoint, timeout: float) -> FramedConnection | None:
        conn = self._dial(to, timeout)
        if conn is None:
            return None
        with self._lock:
            if self.closed:
                conn.close()
                return None
            known = self._by_peer.setdefault(to.nonce, conn)
            self._add(conn)
        return known

    def _prepare(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, int(self._host_timeout) - 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._host_timeout * 1000))

    def _push(self, conn: FramedConnection, header: dict[str, Any], payload: bytes = b"") -> bool:
        sent = conn.send(header, payload)
        if conn.has_backlog:
            self._update_events(conn)
        return sent

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyhow; closed: there is no thread to wake
            self._wake_sender.send(b"!", socket.MSG_DONTWAIT)

    # --- the thread -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        seconds = 1.0
        while not self.closed:
            for fd, events in self._epoll.poll(seconds):
                try:
                    self.handle(fd, events)
                except Exception:  # a bug; other connections still need the thread
                    self._internal_errors += 1
                    log.exception("the control channel met an unexpected error. Please report it.")
                    if (conn := self._by_fd.get(fd)) is not None:
                        self._refuse(conn, "led to an error")
            seconds = self.listener.expire(self._refuse)
            self._send_byes()
        self._send_byes()
        self.close_sockets()

    def handle(self, fd: int, events: int) -> None:
        if (conn := self._by_fd.get(fd)) is not None:
            self._on_ready(conn, events)
        elif fd == self._wake_receiver.fileno():
            self._wake_receiver.recv(4096)
        elif (listener := self.listener.socket_of(fd)) is not None:
            self._accept(listener)

    def _send_byes(self) -> None:
        while self._unsent_byes:
            nonce, key = self._unsent_byes.popleft()
            if (conn := self._by_peer.get(nonce)) is not None:
                self._push(conn, {"group": key, "kind": "bye"})

    def _accept(self, listener: socket.socket) -> None:
        sock = self.listener.accept(listener, self._refuse)
        if sock is None:
            return
        try:
            self._prepare(sock)
        except OSError:  # gone already
            sock.close()
            return
        self._add(self.listener.add(sock))

    def _add(self, conn: FramedConnection) -> None:
        with self._lock:
            self._by_fd[conn.fd] = conn
            self._epoll.register(conn.fd, select.EPOLLIN)
            self._update_events(conn)

    def _update_events(self, conn: FramedConnection) -> None:
        """Tell epoll which events matter for this connection."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # closed meanwhile
            if not conn.closed:
                wanted = select.EPOLLIN | (select.EPOLLOUT if conn.wants_to_send else 0)
                self._epoll.modify(conn.fd, wanted)

    def _on_ready(self, conn: FramedConnection, events: int) -> None:
        if events & select.EPOLLOUT:
            conn.push()
            self._update_events(conn)
        if not events & ~select.EPOLLOUT or conn.closed:
            return
        try:
            if conn.peer is None and not self._advance_handshake(conn):
                return
            for header, payload in conn.receive():
                self._deliver(conn, header, payload)
                if conn.closed:
                    return
        except ProtocolViolation as error:
            self._refuse(conn, str(error))
        except ConnectionClosed as error:
            if conn.peer is None:
                self._refuse(conn, f"left before it had proved who it is ({error})")
            else:
                self._drop(conn)
        if conn.wants_to_send:
            self._update_events(conn)

    def _advance_handshake(self, conn: FramedConnection) -> bool:
        """Advance a stranger's handshake. True once it is authenticated and its frames are for this channel."""
        if not conn.handshake():
            if conn.wants_to_send:
                self._update_events(conn)
            return False
        self.listener.release(conn)
        session = conn.session
        if session.peer in self._banned:
            raise ProtocolViolation("is a rank that was refused before")
        if session.group is not None:
            conn.peer = session.peer
            self._hand_over(conn, session.group)
            return False
        with self._lock:
            conn.peer = session.peer
            self._by_peer.setdefault(conn.peer, conn)
            self._lost.discard(conn.peer)
        return True

    def _hand_over(self, conn: FramedConnection, key: str) -> None:
        """Give a connection to a group. All ranks of a group have joined before one can connect to another."""
        with self._lock:
            del self._by_fd[conn.fd]
            self._epoll.unregister(conn.fd)
            found = self._members.get(key)
        member = found() if found is not None else None
        if member is not None and conn.peer is not None:
            member.on_leader_link(conn.peer, conn)
        else:
            conn.close()

    def _deliver(self, conn: FramedConnection, header: dict[str, Any], payload: bytes | bytearray) -> None:
        key, sender = header.get("group"), conn.peer
        if not isinstance(key, str) or sender is None:
            raise ProtocolViolation("sent a message for no group")
        with self._lock:
            found = self._members.get(key)
            if found is None and key in self._left_groups:
                return
            if found is None:
                self._keep(key, sender, header, payload)
                return
        member = found()
        if member is not None:
            member.on_message(sender, header, payload)

    def _keep(self, key: str, sender: str, header: dict[str, Any], payload: bytes | bytearray) -> None:
        """Buffer a message for a group that this rank has not built yet."""
        if self._early_frames >= EARLY_FRAMES or self._early_bytes + len(payload) > EARLY_BYTES:
            raise ProtocolViolation("sent more than can be kept for groups that this rank is not in yet")
        self._early_frames, self._early_bytes = self._early_frames + 1, self._early_bytes + len(payload)
        self._early.setdefault(key, []).append((sender, header, payload))

    def _refuse(self, conn: FramedConnection, why: str) -> None:
        """Close a connection for what it sent. If the peer is a rank, it is lost and may not come back; it may have a
        second connection, where both sides connected at once."""
        self.refusals.note(_name_of(conn), why)
        proved = conn.peer is not None and conn.session.ready
        if proved:
            self._banned.add(conn.session.peer)
        self._drop(conn)
        if proved and (other := self._by_peer.get(conn.session.peer)) is not None:
            self._drop(other)

    def _drop(self, conn: FramedConnection) -> None:
        self.listener.release(conn)
        with self._lock:
            self._by_fd.pop(conn.fd, None)
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(conn.fd)
            conn.close()
        if conn.peer is not None and self._by_peer.get(conn.peer) is conn:
            self._lose(conn.peer)

    def _lose(self, nonce: str) -> None:
        with self._lock:
            self._by_peer.pop(nonce, None)
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
            self._unsent_byes or any(conn.has_backlog for conn in list(self._by_peer.values()))
        ) and time.monotonic() < deadline:
            time.sleep(0.005)

    def close_sockets(self) -> None:
        for conn in list(self._by_fd.values()):
            conn.sock.close()
        self.listener.close()
        for sock in (self._wake_receiver, self._wake_sender):
            sock.close()
        self._epoll.close()


def _name_of(conn: FramedConnection) -> str:
    """The peer's name, as far as it is known."""
    try:
        host, port = conn.sock.getpeername()[:2]
        where = f"{host} port {port}"
    except (OSError, ValueError):
        where = "a peer that is gone"
    return where if conn.peer is None else f"{where} (a rank)"
