"""A process that connects to whatever the ranks listen on, and sends garbage: nobody may be disturbed by it."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.page_gate import Words

MOST_PIDS = 24
COUNT, FIRST, MET = 0, 1, 30  # words: how many pids, where they begin, how many connections were made
LISTENS = "0A"  # in /proc/net/tcp


class Stranger:
    """Started once, before anything else; ``watch(pids)`` says whom to disturb from now on."""

    def __init__(self, seed: int):
        self._words = Words(32)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._disturb(random.Random(seed))
            finally:
                os._exit(0)

    def watch(self, pids: list[int]) -> None:
        self._words[COUNT] = 0
        for i, pid in enumerate(pids[:MOST_PIDS]):
            self._words[FIRST + i] = pid
        self._words[COUNT] = min(len(pids), MOST_PIDS)

    @property
    def met(self) -> int:
        """Connections made so far."""
        return self._words[MET]

    def end(self) -> None:
        os.kill(self._pid, 9)
        os.waitpid(self._pid, 0)

    def _disturb(self, dice: random.Random) -> None:
        parent, open_ = os.getppid(), []
        while os.getppid() == parent:
            pids = [self._words[FIRST + i] for i in range(self._words[COUNT])]
            for family, address in listeners(pids):
                with contextlib.suppress(OSError):
                    guest = socket.socket(family)
                    guest.settimeout(0.05)
                    guest.connect(address)
                    self._words[MET] += 1
                    guest.sendall(garbage(dice))
                    if dice.random() < 0.3:
                        guest.recv(1000)
                    open_.append(guest)  # some stay, and say nothing more
            while len(open_) > 20 or (open_ and dice.random() < 0.5):
                leave(open_.pop(dice.randrange(len(open_))), dice)
            time.sleep(0.02)


def garbage(dice: random.Random) -> bytes:
    return dice.choice((
        b"",
        dice.randbytes(dice.randint(1, 64)),
        dice.randbytes(5000),
        struct.pack("<BQ", dice.randrange(12), 1 << dice.randint(1, 62)),
        struct.pack("<BIQ", 0, 0x3C85F7CE, dice.getrandbits(64)) + dice.randbytes(20),
        struct.pack("<I", dice.getrandbits(32)) + b'{"pid": 1, "nonce": "' + dice.randbytes(8).hex().encode(),
        b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % dice.randbytes(4).hex().encode(),
    ))  # fmt: skip


def leave(guest: socket.socket, dice: random.Random) -> None:
    """Politely, or with a reset."""
    with contextlib.suppress(OSError):
        if dice.random() < 0.5:
            guest.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    guest.close()


def listeners(pids: list[int]) -> Iterator[tuple[int, str | tuple[str, int]]]:
    """(family, address) of every socket that one of the processes listens on."""
    mine = {inode for pid in pids for inode in _sockets(pid)}
    for name, family, host in (("tcp", socket.AF_INET, "127.0.0.1"), ("tcp6", socket.AF_INET6, "::1")):
        for fields in _table(name):
            if len(fields) > 9 and fields[3] == LISTENS and fields[9] in mine:
                yield family, (host, int(fields[1].rpartition(":")[2], 16))
    for fields in _table("unix"):
        if len(fields) > 7 and int(fields[3], 16) & 0x10000 and fields[6] in mine:
            yield socket.AF_UNIX, fields[7].replace("@", "\0", 1)


def _table(name: str) -> list[list[str]]:
    try:
        return [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    except OSError:
        return []


def _sockets(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:["):
                    yield target[8:-1]
