"""Odd requests to a rank's server: near-valid HTTP, and repeated by its seed.

``python -m tests.fuzz.http --inputs 1000000 --seed 7``. What comes back must be whole HTTP answers or nothing. After
each batch honest requests must be answered, and nothing may be left of the odd ones: no descriptors, threads or memory.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable

from symcomm.observe.server.connection import RateLimit
from symcomm.observe.server.server import Server, listen_tcp, listen_unix
from tests.fuzz.arena import held_now
from tests.fuzz.common import arguments
from tests.support.control_client import ask, connect

BATCH = 2_000
AT_ONCE = 8  # connections at the same time: fewer than strangers get
MEMORY_GROWTH = 16 << 20  # bytes; allocators keep some
TOKEN = "the-token-of-this-job"
ANSWER = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n(?:[!-9;-~]+: [^\r\n\0]*\r\n)*\r\n")

METHODS = ["GET", "POST", "HEAD", "PUT", "OPTIONS", "DELETE", "TRACE", "CONNECT", "get", "G\0T", "", "X" * 300]
TARGETS = [
    "/", "/handler/", "/handler/ping", "/handler/no_such", "/handler/..%2fping", "/api/v1/rank", "/api/v1/server", "*",
    "/api/v1/operations?limit=x", "/api/v1/stacks?a=b&a=c", "http://localhost/", "http://[", "//", "/%zz%00%ff", "?",
    "/api/v1/store?key=%ff", "/" + "a" * 5000, "/?" + "a=1&" * 120, "/\x7f", "/ü", "", "/a b",
]  # fmt: skip
VERSIONS = [
    "HTTP/1.1",
    "HTTP/1.1",
    "HTTP/1.1",
    "HTTP/1.0",
    "HTTP/2.0",
    "HTTP/1.10",
    "http/1.1",
    "HTTP/",
    "",
    "HTTP/1.1 ",
]
NAMES = [
    "Host", "Content-Length", "Transfer-Encoding", "Connection", "Expect", "Authorization", "Origin", "Content-Type",
    "Upgrade", "X", "X Y", "", "Host ", "\tX", "Content-Length\x0b", "Ä", "X\0", "Cookie",
]  # fmt: skip
VALUES = [
    "localhost", "evil.example", "0", "5", "-1", "+5", "5, 5", "5, 6", "0x5", "99999999999999999999999", "1048577",
    "chunked", "gzip", "chunked, chunked", "identity", "close", "keep-alive", "upgrade", "100-continue", "Bearer ",
    f"Bearer {TOKEN}", "Basic x", "null", "application/x-www-form-urlencoded", "", " ", "\0", "\x0b", "a" * 3000, "é",
    "a\rb", "a\n b", "h2c",
]  # fmt: skip
BODIES = [
    b"",
    b"hello",
    b"0\r\n\r\n",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"a=1&b=2",
    b"\xff\xfe",
    b"GET / HTTP/1.1\r\n\r\n",
    b"x" * 9000,
]
ENDS = ["\r\n", "\r\n", "\r\n", "\r\n", "\n", "\r", "\r\r\n", "\n\r"]


def odd_request(rng: random.Random) -> bytes:
    """A request with a few things wrong, or nothing at all."""
    lines = [f"{_mostly(rng, 'POST', METHODS)} {_mostly(rng, '/handler/ping', TARGETS)} {rng.choice(VERSIONS)}"]
    if rng.random() < 0.9:
        lines.append("Host: localhost")
    if rng.random() < 0.5:
        lines.append(f"Authorization: Bearer {TOKEN}")
    body = rng.choice(BODIES)
    if rng.random() < 0.6:
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{rng.choice(NAMES)}: {rng.choice(VALUES)}" for _ in range(rng.choice([0, 0, 1, 1, 2, 5, 130]))]
    end = rng.choice(ENDS)
    data = bytearray((end.join(lines) + end + end).encode("latin-1", "replace") + body)
    kind = rng.randrange(8)
    if kind == 0 and data:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 1:
        data = data[: rng.randrange(len(data) + 1)]
    elif kind == 2:
        at = rng.randrange(len(data) + 1)
        data[at:at] = rng.randbytes(rng.randrange(1, 30))
    elif kind == 3 and rng.random() < 0.1:
        data = bytearray(rng.randbytes(rng.choice([1, 100, 40_000])))
    return bytes(data)


def _mostly(rng: random.Random, usual: str, odd: list[str]) -> str:
    return usual if rng.random() < 0.5 else rng.choice(odd)


def check_answers(sent: bytes, received: bytes) -> None:
    """Whatever was asked: whole answers, one after the other, the last of which may end the connection."""
    rest = received
    while rest:
        found = ANSWER.match(rest)
        assert found, f"{sent!r} was answered with {rest[:200]!r}"
        length = re.search(rb"\r\nContent-Length: (\d+)\r\n", found[0])
        rest = rest[found.end() :]
        if length and b"HEAD" in sent:
            return  # which has a length and no body, if it was understood
        if length:
            assert len(rest) >= int(length[1]), f"{sent!r}: an answer is cut short"
            rest = rest[int(length[1]) :]


class _Talk:
    """One odd connection: what was sent, and what came back so far."""

    def __init__(self, address: str, data: bytes, rng: random.Random):
        self.data, self.received = data, bytearray()
        self.sock = connect(address)
        with contextlib.suppress(OSError):  # it may hang up while we send
            cut = rng.randrange(len(data) + 1) if rng.random() < 0.2 else len(data)
            self.sock.sendall(data[:cut])
            self.sock.sendall(data[cut:])
            self.sock.shutdown(socket.SHUT_WR)
        self.sock.setblocking(False)

    def read(self) -> bool:
        """Whether it is over."""
        with contextlib.suppress(BlockingIOError):
            try:
                while piece := self.sock.recv(1 << 16):
                    self.received += piece
            except ConnectionError:
                pass
            self.sock.close()
            return True
        return False


def attack(address: str, rng: random.Random, inputs: int) -> None:
    talks: dict[int, _Talk] = {}
    poll = select.poll()
    while inputs or talks:
        while inputs and len(talks) < AT_ONCE:
            talk = _Talk(address, odd_request(rng), rng)
            talks[talk.sock.fileno()] = talk
            poll.register(talk.sock, select.POLLIN)
            inputs -= 1
        ready = poll.poll(30_000)
        assert ready, "the server does not end odd connections"
        for fd, _ in ready:
            if talks[fd].read():
                poll.unregister(fd)
                talk = talks.pop(fd)
                check_answers(talk.data, bytes(talk.received))


def _serve(listener: socket.socket) -> Server:
    server = Server(listener, token=TOKEN)
    server.trusted_bucket = server.stranger_bucket = RateLimit(1e9, 1e9)  # so that requests are looked at, not counted
    return server


def _settled(server: Server, limit: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while server._acceptor.connections or not limit():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def run(inputs: int, seed: int) -> None:
    rng = random.Random(seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        _serve(listen_unix(os.path.join(folder, "socket"))) as unix,
        _serve(listen_tcp("127.0.0.1", 0)) as tcp,
    ):
        attack(unix.address, rng, 100)  # what is made once
        attack(tcp.address, rng, 100)
        assert _settled(unix, lambda: True) and _settled(tcp, lambda: True)
        before = held_now()
        for done in range(0, inputs, BATCH):
            some = min(BATCH, inputs - done)
            attack(unix.address, rng, some // 2)
            attack(tcp.address, rng, some - some // 2)
            for server in (unix, tcp):
                assert ask(server.address, "POST", "/handler/ping").content == b"pong"
                assert ask(server.address, "GET", "/api/v1/rank", token=TOKEN).json["pid"] == os.getpid()
                assert server._acceptor.thread.is_alive()
                assert server._acceptor.closed["failed"] == 0, "something was raised that nobody thought of"
                assert _settled(server, lambda: threading.active_count() <= before[1])
            after = held_now()
            assert after[:2] == before[:2], f"descriptors and threads were {before[:2]} and are {after[:2]}"
            assert after[2] - before[2] < MEMORY_GROWTH, f"{after[2] - before[2]} bytes more than before"


if __name__ == "__main__":
    count, number = arguments(__doc__ or "")
    begun = time.monotonic()
    run(count, number)
    print(f"{count:,} odd requests (seed {number}) in {time.monotonic() - begun:.0f} s: all survived")
