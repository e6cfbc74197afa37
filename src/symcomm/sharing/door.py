"""Doors: processes get another's memory by a name. Its owner listens on a socket that is in no file system.

Each end checks the other's user id, and proves that it holds the token::

    owner   16 random bytes
    caller  16 random bytes, and a proof
    owner   a proof, with the descriptor; "!" if the caller's proof was wrong
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import socket
import threading
import time
import weakref

from symcomm import errors
from symcomm._core import native
from symcomm.memory.share import peer_of

GREETING_SECONDS = 1.0
LOOK = 0.01
NONCE = 16

log = logging.getLogger("symcomm.sharing")


def _address(kind: str, name: str) -> bytes:
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"\0symcomm-{kind}-{os.getuid()}-{digest}".encode()


def _proof(who: bytes, token: str, kind: str, name: str, nonces: bytes) -> bytes:
    return native.store_hmac(token.encode(), who + nonces + f"{kind}/{name}".encode())


def check_name(call: str, name: object) -> str:
    if not isinstance(name, str) or not name:
        raise errors.bad_argument(call, "name", name, "text")
    return name


def token_or_job_token(token: str | None) -> str:
    return os.environ.get("SYMCOMM_TOKEN", "") if token is None else token


class Door:
    """Gives ``fd`` to processes that know the name and the token, until it is closed."""

    def __init__(self, kind: str, name: str, fd: int, token: str):
        self._kind, self._name, self._fd, self._token = kind, name, fd, token
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(_address(kind, name))
        except OSError as error:
            self._listener.close()
            raise errors.CallerError(f"{kind} {name!r}: the name is taken{_owner(kind, name)}.") from error
        self._listener.listen(128)
        self._is_open = True
        _doors.add(self)
        self._thread = threading.Thread(target=self._serve, name=f"symcomm-{kind}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._listener.close()
            raise errors.no_thread(f"{kind} {name!r}", error) from error

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if not self._is_open:
                    return
                time.sleep(LOOK)  # this process is out of descriptors
                continue
            with sock, contextlib.suppress(OSError):
                self._greet(sock)

    def _greet(self, sock: socket.socket) -> None:
        pid, uid = peer_of(sock)
        if uid != os.getuid():
            log.warning("symcomm: process %d of user id %d asked for %s %r; refused.", pid, uid, self._kind, self._name)
            return
        sock.settimeout(GREETING_SECONDS)
        mine = secrets.token_bytes(NONCE)
        sock.send(mine)
        said = sock.recv(256)
        nonces = mine + said[:NONCE]
        if not hmac.compare_digest(said[NONCE:], _proof(b"caller", self._token, self._kind, self._name, nonces)):
            sock.send(b"!")
            return
        proof = _proof(b"owner", self._token, self._kind, self._name, nonces)
        socket.send_fds(sock, [proof], [self._fd])

    def close(self) -> None:
        self._is_open = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, whose accept() keeps the name
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * GREETING_SECONDS)
        self._listener.close()

    def forget(self) -> None:
        """In a forked child, which must not keep the name from others, and does not have the thread."""
        self._listener.close()
        self._thread = threading.current_thread()


_doors: weakref.WeakSet[Door] = weakref.WeakSet()


def _owner(kind: str, name: str) -> str:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(_address(kind, name))
        return f" (pid {peer_of(sock)[0]})"
    return ""


def _after_fork_in_child() -> None:
    for door in list(_doors):
        door.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


def ask(kind: str, name: str, token: str, seconds: float) -> int:
    """The descriptor that the owner of ``name`` gives. Waits up to ``seconds`` for an owner."""
    end = time.monotonic() + seconds
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(GREETING_SECONDS)
            try:
                sock.connect(_address(kind, name))
                return _ask(sock, kind, name, token)
            except OSError as error:
                if isinstance(error, errors.SymcommError):
                    raise
        if time.monotonic() >= end:
            raise errors.deadline(f"{kind} {name!r}", seconds, fix="No process on this host has opened it.")
        time.sleep(LOOK)


def _ask(sock: socket.socket, kind: str, name: str, token: str) -> int:
    pid, uid = peer_of(sock)
    if uid != os.getuid():
        raise errors.CallerError(f"{kind} {name!r}: process {pid} of user id {uid} has it, and this one is of user id "
                                 f"{os.getuid()}; refused.")  # fmt: skip
    theirs, mine = sock.recv(NONCE), secrets.token_bytes(NONCE)
    if len(theirs) != NONCE:
        raise OSError("hung up")
    nonces = theirs + mine
    sock.send(mine + _proof(b"caller", token, kind, name, nonces))
    said, fds, _, _ = socket.recv_fds(sock, 256, 1, socket.MSG_CMSG_CLOEXEC)
    if len(fds) == 1 and hmac.compare_digest(said, _proof(b"owner", token, kind, name, nonces)):
        return fds[0]
    for fd in fds:
        os.close(fd)
    if not said:
        raise OSError("hung up")
    raise errors.CallerError(
        f"{kind} {name!r}: process {pid} holds another token; set SYMCOMM_TOKEN to that token, or pass it as token=."
    )
