"""One client's connection to a TCPStore server: connect, say hello, prove the job token, exchange frames.

The protocol is PyTorch's: a command byte, then fields in the machine's byte order; keys and values are a 64-bit length
and bytes. Where both sides hold a job token, two commands of our own come before any other (see ``_prove_token``);
where neither does, every byte is as PyTorch's client sends it.
"""

from __future__ import annotations

import errno
import hmac
import os
import random
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from symcomm._core import native
from symcomm.errors import ResourceError, StoreAuthError, StoreConnectionError, StoreUnreachableError, format_seconds

HELLO, SET, COMPARE_SET, GET, ADD, CHECK, WAIT, NUM_KEYS, DELETE, APPEND = range(10)
MULTI_GET, MULTI_SET, CANCEL, PING, PUSH, POP, QUEUE_LEN, LIST_KEYS, BARRIER = range(10, 19)
CHALLENGE, PROOF = 0xA7, 0xA8  # ours; a server that does not know them closes the connection

_HELLO = struct.pack("=BI", HELLO, 0x3C85F7CE)
_REFUSAL = struct.unpack("=I", b"AUTH")[0]  # instead of the ping's nonce: this server wants a token
_NONCE_SIZE = 32
_FIRST_PAUSE, _LAST_PAUSE = 0.005, 0.5  # seconds between attempts to connect
_FOREIGN = 5.0  # seconds; a port that changes hands answers otherwise before
_SLICE = struct.pack("@ll", 1, 0)  # a socket's own time-out; the native exchange counts on one second


class Foreign(ConnectionError):
    """What answers is not a store."""


class Refused(Exception):
    """The server closed the connection during the hello; another try may go better."""


class StoreConnection:
    """A connected socket that has said hello. Calls use its ``fd`` (see _core/store/client.c); not thread safe."""

    def __init__(self, sock: socket.socket):
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)  # a server's host that lost its power is
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)  # noticed after about half a minute
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SLICE)
        self.fd = sock.detach()  # an unclosed socket would warn when it is collected

    def exchange(self, frame: bytes, shape: str, count: int, seconds: float) -> Any:
        """Send a frame and return an answer of the given shape."""
        return native.store_exchange(self.fd, frame, shape, count, seconds)

    def close(self, close: Callable[[int], None] = os.close) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close(fd)

    __del__ = close


def connect(host: str, port: int, seconds: float, token: bytes | None, *, patient: bool = True) -> StoreConnection:
    """Connect and say hello; try again until ``seconds`` have passed, or only once if not ``patient``."""
    end = time.monotonic() + seconds
    pause = _FIRST_PAUSE
    refusals, late, foreign_since = 0, False, 0.0
    while True:
        try:
            return _connect_once(host, port, end, token)
        except Refused as error:
            refusals += 1
            reason = _reason(error)
            if token is not None and refusals >= 3:
                raise StoreAuthError(
                    f"the store at {host}:{port} closed the connection when asked to prove the job token: it has none "
                    "(a PyTorch server, for example). Start that server with the same token, or use no token here."
                ) from None
        except OSError as error:
            _raise_if_hopeless(host, port, error)
            late = isinstance(error, TimeoutError)
            foreign_since = (foreign_since or time.monotonic()) if isinstance(error, Foreign) else 0.0
            if foreign_since and (not patient or time.monotonic() > foreign_since + _FOREIGN):
                raise port_taken(f"{error}; end that program, or choose another port.") from None
            reason = _reason(error)  # not the error: its traceback would keep this frame, and our callers'
        left = end - time.monotonic()
        if not patient or left <= 0:
            raise _cannot_connect(host, port, seconds if patient or late else None, reason) from None
        time.sleep(min(left, pause * random.uniform(0.5, 1.0)))  # spread out: a thousand clients may be retrying
        pause = min(pause * 2, _LAST_PAUSE)


def _connect_once(host: str, port: int, end: float, token: bytes | None) -> StoreConnection:
    problem: OSError = OSError(errno.EADDRNOTAVAIL, "the name has no address")
    for family, kind, proto, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, proto)
        try:
            sock.settimeout(max(end - time.monotonic(), 0.001))
            sock.connect(address)
            connection = StoreConnection(sock)
            try:
                _say_hello(connection, f"{host}:{port}", max(end - time.monotonic(), 0.001), token)
            except BaseException:
                connection.close()
                raise
            return connection
        except OSError as error:
            sock.close()
            if isinstance(error, StoreAuthError):
                raise
            problem = error
        except BaseException:
            sock.close()
            raise
    try:
        raise problem
    finally:
        del problem  # as in connect()


def _say_hello(connection: StoreConnection, where: str, seconds: float, token: bytes | None) -> None:
    nonce = os.getpid() & 0xFFFFFFFF
    ping = struct.pack("=BI", PING, nonce)
    try:
        if token is None:
            answer = connection.exchange(_HELLO + ping, "4", 0, seconds)
        else:
            answer = _prove_token(connection, where, seconds, token, ping)
    except native.StoreGone:
        raise Refused("it closed the connection during the hello") from None
    if answer == _REFUSAL and token is None:
        raise StoreAuthError(
            f"the store at {where} wants a job token and this client has none: "
            "pass token=, or set SYMCOMM_TOKEN to what the server has."
        )
    if answer == _REFUSAL:
        raise StoreAuthError(f"the store at {where} did not accept this client's job token.")
    if answer != nonce:
        raise Foreign(f"what answers at {where} is not a store")


def port_taken(text: str) -> StoreConnectionError:
    """Something else has the port, and it is in vain to wait for a store there."""
    error = StoreConnectionError(text)
    error.errno = errno.EADDRINUSE
    return error


def answers(host: str, port: int, seconds: float, token: bytes | None) -> bool:
    """Whether a store is there, of this job or of another one."""
    try:
        _connect_once(host, port, time.monotonic() + seconds, token).close()
    except (Refused, StoreAuthError):
        return True
    except OSError:
        return False
    return True


def _prove_token(connection: StoreConnection, where: str, seconds: float, token: bytes, ping: bytes) -> int:
    """Both sides prove that they hold the token by signing two fresh nonces; it never travels.

    client: hello, CHALLENGE, its nonce.   server: 1 (or 0: no token here), its nonce, its signature of both.
    client: PROOF, its signature of both.  server: goes on, or the refusal in place of the ping's answer.
    """
    mine = secrets.token_bytes(_NONCE_SIZE)
    answer = connection.exchange(_HELLO + bytes([CHALLENGE]) + mine, "r", 1 + 2 * _NONCE_SIZE, seconds)
    status, theirs, signature = answer[0], answer[1 : 1 + _NONCE_SIZE], answer[1 + _NONCE_SIZE :]
    if status != 1:
        raise StoreAuthError(
            f"the store at {where} has no job token, so it cannot prove that it belongs to this job: "
            "start that server with the same token, or use no token here."
        )
    if not hmac.compare_digest(signature, sign(token, "server", mine + theirs)):
        raise StoreAuthError(f"the store at {where} holds another job token than this client: start both with one.")
    return connection.exchange(bytes([PROOF]) + sign(token, "client", mine + theirs) + ping, "4", 0, seconds)


def sign(token: bytes, role: str, nonces: bytes) -> bytes:
    """What ``role`` answers to a challenge."""
    return hmac.digest(token, b"symcomm store " + role.encode() + nonces, "sha256")


def _raise_if_hopeless(host: str, port: int, error: OSError) -> None:
    if isinstance(error, StoreAuthError):
        raise error
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise ResourceError(
            f"cannot connect to the store at {host}:{port}: this process has no descriptor left; raise `ulimit -n`."
        ) from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _cannot_connect(host: str, port: int, seconds: float | None, reason: str) -> StoreConnectionError:
    if seconds is None:
        return StoreConnectionError(f"the store at {host}:{port} is gone: {reason}.")
    return StoreUnreachableError(
        f"no store answered at {host}:{port} in {format_seconds(seconds)} (last try: {reason}). "
        "Check the address, that the process with is_master=True runs, and that no firewall is in between "
        f"(the client socket has timed out after {seconds * 1e3:.0f}ms while trying to connect to ({host}, {port}))."
    )
