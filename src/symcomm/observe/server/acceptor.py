"""Accepts clients on a listening socket: one thread accepts, one serves each client, up to a limit.

Unauthenticated clients share a few slots, so that they can neither exhaust the process's threads nor keep trusted ones
out. An error on a connection ends only that connection, which is closed, logged (``symcomm.server``) and counted
(``closed``).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

CONNECTIONS = 64
STRANGERS = 16
DRAIN_BYTES, DRAIN_SECONDS = 256 << 10, 0.5
END_SECONDS = 5.0
PAUSE = 0.2  # seconds until we try again after running out of descriptors
SAY_AGAIN = 60.0  # seconds between two warnings that there are none

log = logging.getLogger("symcomm.server")


class ClientSession(Protocol):
    """Serves one client."""

    trusted: bool
    end: str  # why it ended, unless the client closed it

    def serve(self, sock: socket.socket) -> None:
        """Serve until the client leaves; raises OSError if it is gone or too slow."""


@dataclass(eq=False)
class _Client:
    socket: socket.socket
    session: ClientSession
    thread: threading.Thread | None = None


class ConnectionAcceptor:
    """``open_session(sock)`` returns at once what will serve a client. ``name`` is for the log."""

    def __init__(
        self, listener: socket.socket, open_session: Callable[[socket.socket], ClientSession], name: str, tls: Any
    ):
        self.closed: Counter[str] = Counter()  # connections that we ended, by reason
        self.pauses = 0  # how often there were no descriptors
        self._say_again = 0.0
        self._listener, self._open_session, self._name, self._tls = listener, open_session, name, tls
        self._clients: list[_Client] = []
        self._lock = threading.Lock()
        self._ending = False
        self._wake_read, self._wake_write = socket.socketpair()
        self.thread = threading.Thread(target=self._accept_all, name="symcomm-server", daemon=True)
        self.thread.start()

    @property
    def connections(self) -> int:
        return len(self._clients)

    def _note(self, why: str, detail: object = "") -> None:
        with self._lock:
            self.closed[why] += 1
        log.info("symcomm: %s: a connection was closed: %s %s", self._name, why, detail)

    # --- taking clients ------------------------------------------------------------------------------------------

    def _accept_all(self) -> None:
        poll = select.poll()  # which needs no descriptor
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while not self._ending:
            poll.poll()
            if self._ending:
                return
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                continue
            except OSError as error:
                self._pause(error)
                continue
            try:
                self._admit(client)
            except Exception as error:  # whatever it was, serve the others
                self._note("failed", repr(error))
                client.close()

    def _pause(self, error: OSError) -> None:
        """Wait, and log it: we are probably out of descriptors, and another part of the program may close one."""
        self.pauses += 1
        if time.monotonic() > self._say_again:
            fix = "; raise the limit on open files (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
            log.warning("symcomm: %s takes no clients for now: %s%s.", self._name, error.strerror or error, fix)
            self._say_again = time.monotonic() + SAY_AGAIN
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        while not self._ending:
            poll.poll(PAUSE * 1e3)
            with contextlib.suppress(OSError):
                socket.socket().close()  # is there a descriptor now?
                return

    def _admit(self, raw: socket.socket) -> None:
        """Give a client a thread. If there are too many unauthenticated ones, drop the oldest."""
        client = _Client(raw, self._open_session(raw))
        pushed_out = None
        with self._lock:
            strangers = [other for other in self._clients if not other.session.trusted]
            full = len(self._clients) >= CONNECTIONS
            if strangers and (full or (len(strangers) >= STRANGERS and not client.session.trusted)):
                pushed_out = strangers[0]
                self._clients.remove(pushed_out)
                full = False
            if not full:
                self._clients.append(client)
                client.thread = threading.Thread(
                    target=self._serve, args=(client,), name="symcomm-request", daemon=True
                )
        if full:
            self._note("no room")
            raw.close()
            return
        if pushed_out is not None:
            self._note("made room")
            _hang_up(pushed_out.socket)
        try:
            assert client.thread is not None
            client.thread.start()
        except RuntimeError as error:  # no more threads
            self._note("no thread", error)
            self._forget(client)

    def _serve(self, client: _Client) -> None:
        session = client.session
        try:
            if self._tls is not None:
                client.socket = self._tls.wrap_socket(client.socket, server_side=True, do_handshake_on_connect=False)
            session.serve(client.socket)
            if session.end:
                self._note("refused", session.end)
            _drain(client.socket)
        except TimeoutError:
            self._note("too slow")
        except OSError as error:
            self._note("lost", error)
        except Exception as error:
            first = not self.closed["failed"]
            self._note("failed", repr(error))
            if first:  # a bug of ours; logged once
                log.warning("symcomm: %s: a connection was closed after an error", self._name, exc_info=True)
        finally:
            self._forget(client)

    def _forget(self, client: _Client) -> None:
        client.socket.close()
        with self._lock, contextlib.suppress(ValueError):
            self._clients.remove(client)

    # --- the end -------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Close all connections and sockets; once."""
        with self._lock:
            self._ending = True
            clients = list(self._clients)
        self._wake_write.send(b".")
        for client in clients:
            _hang_up(client.socket)
        end = time.monotonic() + END_SECONDS
        for thread in (self.thread, *(c.thread for c in clients)):
            if thread is not None and thread is not threading.current_thread() and thread.is_alive():
                thread.join(max(0.0, end - time.monotonic()))
        self._close_sockets()

    def _close_sockets(self) -> None:
        for sock in (self._listener, self._wake_read, self._wake_write):
            sock.close()

    def drop(self) -> None:
        """In a forked child: close our copies of the sockets, silently."""
        self._lock = threading.Lock()
        self._ending = True
        self._close_sockets()
        for client in self._clients:
            client.socket.close()
        self._clients = []


# TLS sockets keep their state in Python objects that the serving thread uses, so these two work below TLS.


def _hang_up(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(client, socket.SHUT_RDWR)


def _drain(client: socket.socket) -> None:
    """Drain the input before closing, or the kernel would discard our answer with a reset."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(client, socket.SHUT_WR)
        end, left = time.monotonic() + DRAIN_SECONDS, DRAIN_BYTES
        while left > 0 and (seconds := end - time.monotonic()) > 0:
            client.settimeout(seconds)
            if not (data := socket.socket.recv(client, min(left, 1 << 16))):
                break
            left -= len(data)
