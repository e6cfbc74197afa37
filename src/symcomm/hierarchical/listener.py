"""Where others connect to a rank, and those who have not proved yet that they belong to the job.

They are few, and not for long. A stranger has 5 seconds to send its greeting and 30 to prove who it is (a rank may be
busy between the two). Where too many come at once, new ones wait in the kernel until some are through; strangers that
have had a second make room. Whoever is refused is counted and, within reason, logged.
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
from symcomm.hierarchical.connection import Link
from symcomm.hierarchical.session import Callee

__all__ = ["Complaints", "Door"]

log = logging.getLogger("symcomm.hosts")

STRANGERS = 64  # at a time
GREETING_S = 5.0
PROOF_S = 30.0
ROOM_S = 1.0  # after which a stranger makes room for others, where there are too many
FULL_S = 0.05  # between two looks whether there is room again
NO_DESCRIPTOR_S = 1.0  # between two attempts to accept where the process has no descriptor left
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LINES_A_SECOND = 20  # of the log; the rest is counted
REASONS = 64  # remembered


class Complaints:
    """Connections that were refused: how many, why the last ones, and a log that nobody can flood."""

    def __init__(self) -> None:
        self.refused = 0
        self.reasons: deque[str] = deque(maxlen=REASONS)
        self._second, self._lines, self._muted = 0, 0, 0

    def note(self, who: str, why: str) -> None:
        self.refused += 1
        self.reasons.append(f"{who} {why}")
        self.say("the control channel closed a connection: %s %s", who, why)

    def say(self, text: str, *words: object) -> None:
        now = int(time.monotonic())
        if now != self._second:
            if self._muted:
                log.warning("the control channel closed %d more connections", self._muted)
            self._second, self._lines, self._muted = now, 0, 0
        self._lines += 1
        if self._lines <= LINES_A_SECOND:
            log.warning(text, *words)
        else:
            self._muted += 1


class Door:
    """Only the office's thread accepts; any may open and close addresses."""

    def __init__(self, watched: select.epoll, session: Callable[[], Callee], complaints: Complaints):
        self._watched, self._session, self._complaints = watched, session, complaints
        self._listeners: dict[str, socket.socket] = {}
        self._offered: Counter[str] = Counter()  # to groups that are being made
        self._needed: set[str] = set()
        self.strangers: dict[Link, float] = {}  # since when; the oldest first
        self._shut_until = 0.0  # nobody is let in before that; 0: open
        self.pauses = 0

    # --- addresses --------------------------------------------------------------------------------------------

    def open(self, address: str) -> int:
        """Listen at an address of this machine; the port. To be followed by ``settle``."""
        self._offered[address] += 1
        if address not in self._listeners:
            self._listeners[address] = listener = _listen(address)
            self._watched.register(listener, 0 if self._shut_until else select.EPOLLIN)
        return self._listeners[address].getsockname()[1]

    def settle(self, address: str, needed: bool) -> None:
        """Whether others will come there. An address that nobody needs is not listened at."""
        self._offered[address] -= 1
        if needed:
            self._needed.add(address)
        if not self._offered[address] and address not in self._needed and address in self._listeners:
            listener = self._listeners.pop(address)
            self._watched.unregister(listener)
            listener.close()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [listener.getsockname()[:2] for listener in list(self._listeners.values())]

    def listener(self, fd: int) -> socket.socket | None:
        return next((sock for sock in list(self._listeners.values()) if sock.fileno() == fd), None)

    def close(self) -> None:
        for listener in list(self._listeners.values()):
            listener.close()

    # --- strangers --------------------------------------------------------------------------------------------

    def accept(self, listener: socket.socket, drop: Callable[[Link, str], None]) -> socket.socket | None:
        """Somebody knocks. None: not now; the kernel keeps them waiting."""
        if len(self.strangers) >= STRANGERS and not self._make_room(drop):
            self._shut(FULL_S)
            return None
        try:
            return listener.accept()[0]
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                self.pauses += 1
                self._shut(NO_DESCRIPTOR_S)
                self._complaints.say(
                    "the control channel lets nobody in for %g s: %s; raise `ulimit -n`",
                    NO_DESCRIPTOR_S,
                    error.strerror,
                )
            return None

    def welcome(self, sock: socket.socket) -> Link:
        link = Link(sock, None, self._session())
        self.strangers[link] = time.monotonic()
        return link

    def _make_room(self, drop: Callable[[Link, str], None]) -> bool:
        """Silent ones first."""
        old = [link for link, since in self.strangers.items() if time.monotonic() - since >= ROOM_S]
        old.sort(key=_has_greeted)
        if old:
            drop(old[0], f"had not proved who it is, and {STRANGERS} others had not either")
        return bool(old)

    def let_in(self, link: Link) -> None:
        """It has proved who it is, or is gone."""
        self.strangers.pop(link, None)
        if self._shut_until and len(self.strangers) < STRANGERS:
            self._shut_until = min(self._shut_until, time.monotonic())

    def look(self, drop: Callable[[Link, str], None]) -> float:
        """End the patience with strangers, and open the door again. Returns the seconds until the next look."""
        now = time.monotonic()
        for link, since in list(self.strangers.items()):
            if now - since >= GREETING_S and not _has_greeted(link):
                drop(link, f"sent no greeting in {GREETING_S:g} s")
            elif now - since >= PROOF_S:
                drop(link, f"did not prove in {PROOF_S:g} s who it is")
        if self._shut_until and now >= self._shut_until:
            self._shut_until = 0.0
            self._listen_to(select.EPOLLIN)
        return min(1.0, max(0.001, self._shut_until - now)) if self._shut_until else 1.0

    def _shut(self, seconds: float) -> None:
        self._shut_until = time.monotonic() + seconds
        self._listen_to(0)

    def _listen_to(self, events: int) -> None:
        for listener in list(self._listeners.values()):
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                self._watched.modify(listener, events)


def _has_greeted(link: Link) -> bool:
    return isinstance(link.session, Callee) and link.session.greeted


def _listen(address: str) -> socket.socket:
    try:
        listener = _bound(address)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise errors.ResourceError(
                f"groups across hosts: cannot listen at {address or 'any address'} ({error.strerror})."
            ) from None
        log.warning("%s is no address of this machine, so the control channel listens at all of them", address)
        return _listen("")
    listener.setblocking(False)
    return listener


def _bound(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    name, _, scope = address.partition("%")
    place = (name, 0, 0, socket.if_nametoindex(scope)) if scope else (name, 0)
    return socket.create_server(place, family=family, backlog=1024)
