"""What the fuzzers share: connections by the dozen, bytes that are almost right, and a look at what a process holds."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import threading
from collections.abc import Sequence

from tests.support.ranks import until

__all__ = ["AT_ONCE", "BATCH", "Holdings", "arguments", "connect", "damaged", "pump"]

AT_ONCE = 32  # connections
BATCH = 1000  # inputs between two looks
PAGE = os.sysconf("SC_PAGE_SIZE")


def arguments(description: str) -> tuple[int, int]:
    """``--inputs N --seed S``"""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    return given.inputs, given.seed


class Holdings:
    """Descriptors, threads and memory of this process, now and when all was warm."""

    def __init__(self, more_memory: int = 48 << 20):
        self._more_memory = more_memory
        self._before = self._look()

    @staticmethod
    def _look() -> tuple[int, int, int]:
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * PAGE
        return len(os.listdir("/proc/self/fd")), threading.active_count(), resident

    def check(self) -> None:
        """As before, once what is on its way has ended."""
        good = until(lambda: all(n <= b for n, b in zip(self._look()[:2], self._before[:2], strict=True)), 20)
        now = self._look()
        assert good, f"descriptors and threads: {now[:2]}, before: {self._before[:2]}"
        assert now[2] <= self._before[2] + self._more_memory, f"memory: {now[2]:,}, before: {self._before[2]:,}"


def damaged(rng: random.Random, data: bytes) -> bytes:
    """One thing is wrong with it, or a few."""
    spoiled = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(spoiled) + 1)
        kind = rng.randrange(6)
        if kind == 0 and spoiled:
            spoiled[at % len(spoiled)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del spoiled[at:]
        elif kind == 2:
            spoiled[at:at] = rng.randbytes(rng.choice((1, 2, 8, 100)))
        elif kind == 3:
            del spoiled[at : at + rng.choice((1, 4, 8))]
        elif kind == 4 and spoiled:
            spoiled[at : at + 4] = rng.choice((b"\xff" * 4, bytes(4), b"\x00\x00\x00\x80", b"\xff\xff\xff\x7f"))
        else:
            spoiled += spoiled[: rng.randrange(64)]
    return bytes(spoiled)


def pump(rng: random.Random, place: tuple[str, int], inputs: Sequence[bytes]) -> None:
    """Each input over a connection of its own, many at a time; returns when the other side has ended all of them."""
    for start in range(0, len(inputs), AT_ONCE):
        some = inputs[start : start + AT_ONCE]
        socks = [connect(rng, place) for _ in some]
        for sock, data in zip(socks, some, strict=True):
            with contextlib.suppress(ConnectionError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
        for sock in socks:
            with contextlib.suppress(ConnectionError):
                while sock.recv(1 << 16):
                    pass
            sock.close()


def connect(rng: random.Random, place: tuple[str, int]) -> socket.socket:
    """From any address of the loopback, since each has its own ports: they stay taken for a minute."""
    sock = socket.socket()
    sock.settimeout(20)
    sock.bind((f"127.{rng.randrange(1, 200)}.{rng.randrange(256)}.{rng.randrange(1, 255)}", 0))
    sock.connect(place)
    return sock
