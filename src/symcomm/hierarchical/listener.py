"""Accepts connections to a rank's control channel, and bounds the unauthenticated ones (strangers).

A stranger has 5 seconds to send its greeting and 30 to authenticate (a rank may be busy between the two). When there
are too many, new ones wait in the kernel's backlog, and strangers older than a second are dropped to make room. Refused
connections are counted, and logged at a limited rate.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import time
from collections import Counter, deque
from collections.abc import Callable

from symcomm import errors
from symcomm.hierarchical.connection import FramedConnection
from symcomm.hierarchical.session import Callee
from symcomm.store.tcp_server import CappedLog, bound_socket

log = logging.getLogger("symcomm.hosts")

STRANGERS = 64  # at a time
GREETING_S = 5.0
PROOF_S = 30.0
ROOM_S = 1.0  # seconds after which a stranger is dropped to make room for others
FULL_S = 0.05  # seconds between checks for room
NO_DESCRIPTOR_S = 1.0  # seconds between attempts to accept when the process is out of descriptors
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
REASONS = 64  # remembered
BACKLOG = 1024  # connections that the kernel keeps until they are accepted


class RefusalLog:
    """Refused connections: how many, why the last ones, and a log that cannot be flooded."""

    def __init__(self) -> None:
        self.refused = 0
        self.reasons: deque[str] = deque(maxlen=REASONS)
        self.warn = CappedLog(log, "the control channel closed %d more connections").warn

    def note(self, who: str, why: str) -> None:
        self.refused += 1
        self.reasons.append(f"{who} {why}")
        self.warn("the control channel closed a connection: %s %s", who, why)


class Listener:
    """Only the control channel's thread accepts; any thread may open and close addresses."""

    def __init__(self, epoll: select.epoll, session: Callable[[], Callee], refusals: RefusalLog):
        self._epoll, self._session, self._refusals = epoll, session, refusals
        self._sockets: dict[str, socket.socket] = {}
        self._offered: Counter[str] = Counter()  # by address: how many groups that are being built may use it
        self._needed: set[str] = set()
        self.strangers: dict[FramedConnection, float] = {}  # -> when it was accepted; the oldest first
        self._paused_until = 0.0  # accept no connection before then; 0: there is no pause
        self.pauses = 0

    # --- addresses --------------------------------------------------------------------------------------------

    def listen(self, address: str) -> int:
        """Listen at an address of this machine; returns the port. Must be followed by ``settle``."""
        self._offered[address] += 1
        if address not in self._sockets:
            self._sockets[address] = sock = _listen(address)
            self._epoll.register(sock, 0 if self._paused_until else select.EPOLLIN)
        return self._sockets[address].getsockname()[1]

    def settle(self, address: str, needed: bool) -> None:
        """``needed``: others will connect there. Stop listening at an address that no group needs."""
        self._offered[address] -= 1
        if needed:
            self._needed.add(address)
        if not self._offered[address] and address not in self._needed and address in self._sockets:
            sock = self._sockets.pop(address)
            self._epoll.unregister(sock)
            sock.close()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [sock.getsockname()[:2] for sock in list(self._sockets.values())]

    def socket_of(self, fd: int) -> socket.socket | None:
        return next((sock for sock in list(self._sockets.values()) if sock.fileno() == fd), None)

    def close(self) -> None:
        for sock in list(self._sockets.values()):
            sock.close()

    # --- strangers --------------------------------------------------------------------------------------------

    def accept(self, sock: socket.socket, drop: Callable[[FramedConnection, str], None]) -> socket.socket | None:
        """Accept a connection. None: not now; it stays in the backlog."""
        if len(self.strangers) >= STRANGERS and not self._make_room(drop):
            self._pause(FULL_S)
            return None
        try:
            return sock.accept()[0]
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                self.pauses += 1
                self._pause(NO_DESCRIPTOR_S)
                self._refusals.warn(
                    "the control channel accepts no connections for %g s: %s; raise `ulimit -n`",
                    NO_DESCRIPTOR_S,
                    error.strerror,
                )
            return None

    def add(self, sock: socket.socket) -> FramedConnection:
        conn = FramedConnection(sock, None, self._session())
        self.strangers[conn] = time.monotonic()
        return conn

    def _make_room(self, drop: Callable[[FramedConnection, str], None]) -> bool:
        """Drop an old stranger, preferably one that has sent nothing."""
        old = [conn for conn, since in self.strangers.items() if time.monotonic() - since >= ROOM_S]
        old.sort(key=_has_greeted)
        if old:
            drop(old[0], f"had not proved who it is, nor had {STRANGERS} others")
        return bool(old)

    def release(self, conn: FramedConnection) -> None:
        """A stranger has authenticated, or is gone."""
        self.strangers.pop(conn, None)
        if self._paused_until and len(self.strangers) < STRANGERS:
            self._paused_until = min(self._paused_until, time.monotonic())

    def expire(self, drop: Callable[[FramedConnection, str], None]) -> float:
        """Drop strangers whose time is up, and end a pause. Returns the seconds until the next call."""
        now = time.monotonic()
        for conn, since in list(self.strangers.items()):
            if now - since >= GREETING_S and not _has_greeted(conn):
                drop(conn, f"sent no greeting in {GREETING_S:g} s")
            elif now - since >= PROOF_S:
                drop(conn, f"did not prove in {PROOF_S:g} s who it is")
        if self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            self._set_events(select.EPOLLIN)
        return min(1.0, max(0.001, self._paused_until - now)) if self._paused_until else 1.0

    def _pause(self, seconds: float) -> None:
        self._paused_until = time.monotonic() + seconds
        self._set_events(0)

    def _set_events(self, events: int) -> None:
        for sock in list(self._sockets.values()):
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                self._epoll.modify(sock, events)


def _has_greeted(conn: FramedConnection) -> bool:
    return isinstance(conn.session, Callee) and conn.session.greeted


def _listen(address: str) -> socket.socket:
    try:
        sock = bound_socket(address, 0)
        sock.listen(BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise errors.ResourceError(f"groups across hosts: cannot listen at {address} ({error.strerror}).") from None
        log.warning("%s is no address of this machine, so the control channel listens at all addresses", address)
        return _listen("0.0.0.0")
    sock.setblocking(False)
    return sock
