"""Run by hand: ``python -m tests.fuzz.control [--inputs N] [--seed S]``. For a rank's control channel: bytes of
strangers that are almost a greeting, and signed frames of a rank of the job that are almost what a rank sends. After
each batch the channel's thread lives, honest ranks get through, nothing was written but what was received, and the
process holds what it held before."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import logging
import random
import socket
import threading
import time
from typing import Any

import torch

from symcomm.group.buffers import Buffer
from symcomm.group.p2p import Message
from symcomm.hierarchical.connection import LENGTHS, FramedConnection
from symcomm.hierarchical.control_channel import ControlChannel
from symcomm.hierarchical.frames import AGREEMENT_STEPS, FIELDS
from symcomm.hierarchical.group import HierarchicalGroup
from symcomm.hierarchical.matcher import MessageMatcher
from symcomm.hierarchical.message_works import RemoteWork
from symcomm.hierarchical.refusal import RefusalsAcrossHosts
from symcomm.hierarchical.rounds import Rounds
from symcomm.hierarchical.session import Caller
from symcomm.membership.quorum_board import QuorumBoard
from symcomm.store.address import LOOPBACK
from symcomm.types import DType
from symcomm.windows.hosts import Arrivals, deliver
from tests.fuzz.common import AT_ONCE, BATCH, Holdings, arguments, connect, damaged, pump
from tests.support.ranks import until

SIGNED = 3  # of ten inputs are frames of a rank of the job
STEPS = sorted(AGREEMENT_STEPS)
ROOM, GUARD = 16, 48  # bytes of a receive or a window, and of what lies on both sides of it
ODD: list[Any] = [
    None, True, -1, 0, 1, 16, 17, 1 << 31, 1 << 63, 1 << 70, 1e300, "", "x", "\ud800", "\xff", "9" * 5000, [], [[]], {},
    {"a": {}}, [0] * 6, [1 << 70] * 6, "envelope", "gone",
]  # fmt: skip


class Nobody:
    """An engine that moves nothing."""

    def start(self, *_: Any) -> None: ...


class Victim:
    """A group of two as its control channel sees it: whoever calls is rank 1. It looks at messages as a
    HierarchicalGroup does."""

    size, rank, name, timeout, _key = 2, 0, "victim", 10.0, "g"
    verdict = None  # of its failures
    doing = (0, "", "")

    def __init__(self) -> None:
        self.cond, self.left, self.engine = threading.Condition(), set(), Nobody()
        self._rank_of, self.failures, self.honest = self, self, []
        self.memory = (ctypes.c_uint8 * (GUARD + ROOM + GUARD))()
        self.buffer = Buffer(ctypes.addressof(self.memory) + GUARD, ROOM, DType.UINT8, self.memory)
        self.fresh()

    def fresh(self) -> None:
        """Everything of a group anew."""
        self.matcher, self.rounds, self.board = MessageMatcher(self), Rounds(self), QuorumBoard(self)
        self.refusals = RefusalsAcrossHosts(self)
        self.windows = Arrivals(torch.frombuffer(self.memory, dtype=torch.uint8)[GUARD : GUARD + ROOM], self.cond)
        inbox = functools.partial(deliver, {0: self.windows})
        self._handlers = {"window": inbox, "honest": lambda rank, header, payload: self.honest.append(bytes(payload))}
        self._post()

    def _post(self) -> None:
        """Somebody always waits for a message, and has sent some."""
        if not self.matcher._posted:
            for tag in range(2):
                self.matcher.receive(RemoteWork(self.matcher, Message(False, self.memory, 1, tag), self.buffer))
        if len(self.matcher._sends) < 2:
            self.matcher.send(Message(True, self.memory, 1, 0), self.buffer, 0)

    def on_message(self, sender: str, header: dict[str, Any], payload: bytes | bytearray) -> None:
        HierarchicalGroup.on_message(self, sender, header, payload)  # type: ignore[arg-type]
        self._post()

    def is_unharmed(self) -> bool:
        """Nothing was written but where something may be received."""
        memory = bytes(self.memory)
        return memory[:GUARD] == memory[GUARD + ROOM :] == bytes(GUARD)

    def get(self, sender: str) -> int:  # as the table of control channels
        return 1

    def tell(self, rank: int, header: dict[str, Any], payload: bytes = b"", timeout: float = 0.0) -> bool:
        return True

    def tell_known(self, rank: int, header: dict[str, Any]) -> bool:
        json.dumps(header)
        return True

    def notify(self) -> None: ...

    def answer(self, rank: int, header: dict[str, Any]) -> None:
        json.dumps(header)

    note_answer = answer

    def accept(self, header: dict[str, Any]) -> None:
        f"{header['story']} {sorted(header['ranks'])} {header['origin'] + header['seconds']}".encode()

    def on_leader_link(self, sender: str, conn: FramedConnection) -> None:
        conn.close()

    def on_lost(self, nonce: str) -> None: ...


def _frame(header: Any) -> bytes:
    head = json.dumps(header).encode()
    return LENGTHS.pack(len(head), len(head)) + head


def stranger_bytes(rng: random.Random) -> bytes:
    """A greeting, maybe a proof and more after it, most of the time with something wrong."""
    greeting: dict[str, Any] = {"from": f"{rng.getrandbits(64):x}.1", "nonce": rng.randbytes(32).hex()}
    if rng.random() < 0.3:
        greeting["group"] = "g"
    if rng.random() < 0.3:
        greeting[rng.choice(["from", "nonce", "group", "token"])] = rng.choice(ODD)
    data = _frame(greeting)
    kind = rng.random()
    if kind < 0.4:
        data += _frame({"proof": rng.choice([rng.randbytes(32).hex(), *ODD])}) + rng.randbytes(rng.randrange(40))
    elif kind < 0.5:
        deep = rng.choice([b"[", b'{"a":', b'["']) * rng.randrange(1, 3000)
        data = LENGTHS.pack(len(deep), len(deep)) + deep
    elif kind < 0.55:
        data = rng.randbytes(rng.randrange(300))
    return damaged(rng, data) if rng.random() < 0.5 else data


def rank_frame(rng: random.Random) -> tuple[dict[str, Any], bytes]:
    """A message that a rank may send, most of the time with something wrong."""
    usual: dict[str, Any] = {
        "number": rng.randrange(4), "tag": rng.randrange(3), "dtype": int(DType.UINT8), "nbytes": ROOM, "real": True,
        "inline": rng.random() < 0.8, "survey": 0, "seq": 1, "call": "x", "site": "y", "awaits": "w",
        "ended": {"1": "died"}, "place": "p", "where": False,
        "fault": "gone", "story": "z", "ranks": [1], "origin": 1, "seconds": 1.0, "topic": "t", "item": "x",
        "signature": [0] * 6, "window": 0, "start": rng.choice((0, 4, 8)), "step": rng.choice(STEPS),
        "proposal": [1, 1], "value": [1, 1, "AQ==", True, 1], "accepted": [[1, 1], [1, 1, "AQ==", True, 1]],
        "vote": 1, "done": 1, "late": 1,
        "told": '[1, "why", "where"]',
    }  # fmt: skip
    kind = rng.choice([*sorted(FIELDS), "window", "window"])
    fields = FIELDS.get(kind, ("window", "start"))
    if kind == "agree":
        fields = [*fields, *AGREEMENT_STEPS[usual["step"]]]
    header = {"group": "g", "kind": kind, **{name: usual[name] for name in fields}}
    if kind == "envelope" and rng.random() < 0.9:
        header["number"] = rng.getrandbits(60)  # otherwise it may be one that is on its way
    nbytes = ROOM if kind == "envelope" and header["inline"] else 8 if kind == "window" else 0
    for name in list(header):
        if rng.random() < 0.15:
            header[name] = rng.choice(ODD)
        elif rng.random() < 0.02:
            del header[name]
    if rng.random() < 0.2:
        nbytes = rng.choice((0, 1, 15, 17, 64, 5000, 70_000))
    return header, b"\x09" * nbytes


class Bench:
    """The rank that is attacked, an honest one, and one that is not."""

    def __init__(self) -> None:
        self.victim, self.member = Victim(), Victim()
        self.control, self.honest = ControlChannel("aa.1"), ControlChannel("bb.2")
        for channel, member in ((self.control, self.victim), (self.honest, self.member)):
            assert channel.join("g", member)
        self.endpoint = self.control.open_endpoint(LOOPBACK)

    def check(self, number: int) -> None:
        """Honest ranks get through, in order; the thread lives; nothing was written behind what was received."""
        self.victim.honest.clear()
        said = [f"{number}.{k}".encode() * (1 + 3000 * k) for k in range(3)]
        for text in said:
            assert self.honest.send(self.endpoint, {"group": "g", "kind": "honest"}, text)
        assert until(lambda: len(self.victim.honest) == len(said)), f"{self.control.stats()}"
        assert self.victim.honest == said and self.control._thread.is_alive()
        assert self.victim.is_unharmed(), "memory beside a receive was written"
        assert not self.control.stats()["unforeseen"]
        assert until(lambda: not self.control.stats()["strangers"])
        self.victim.fresh()
        for kept in (self.control._banned, self.control._lost, self.control._early):  # as long as the job, otherwise
            kept.clear()
        self.control._early_frames = self.control._early_bytes = 0

    def lie(self, rng: random.Random, count: int) -> None:
        """Ranks of the job, one a connection, that send a few frames each; returns when all were looked at."""
        for start in range(0, count, AT_ONCE):
            links = [self._admitted(rng) for _ in range(min(AT_ONCE, count - start))]
            for link in links:
                link.handshake()
                for _ in range(rng.randrange(1, 4)):
                    link.send(*rank_frame(rng))
                with contextlib.suppress(OSError):
                    link.sock.shutdown(socket.SHUT_WR)
            for link in links:
                with contextlib.suppress(ConnectionError):
                    while link.sock.recv(1 << 16):
                        pass
                link.close()

    def _admitted(self, rng: random.Random) -> FramedConnection:
        session = Caller(self.endpoint.secret.encode(), f"{rng.getrandbits(64):x}.3", self.endpoint.nonce)
        return FramedConnection(connect(rng, (LOOPBACK, self.endpoint.port)), self.endpoint.nonce, session)

    def close(self) -> None:
        self.control.close()
        self.honest.close()


def fuzz(inputs: int, seed: int, tell: bool = False) -> None:
    """Raises AssertionError, and says the seed, when anything is not as it should be."""
    logging.getLogger("symcomm.hosts").setLevel(logging.CRITICAL)
    rng, begun, bench = random.Random(seed), time.monotonic(), Bench()
    bench.check(-1)
    bench.lie(rng, 50)
    holdings = Holdings()
    for done in range(0, inputs, BATCH):
        count = min(BATCH, inputs - done)
        signed = count * SIGNED // 10
        try:
            pump(rng, (LOOPBACK, bench.endpoint.port), [stranger_bytes(rng) for _ in range(count - signed)])
            bench.lie(rng, signed)
            bench.check(done)
            holdings.check()
        except BaseException as error:
            raise AssertionError(f"control channel, seed {seed}, inputs {done} to {done + count}: {error!r}") from error
        if tell and done % (100 * BATCH) == 0:
            print(f"control channel: {done:,} inputs, {time.monotonic() - begun:.0f} s", flush=True)
    stats = bench.control.stats()
    assert stats["refused"] > inputs // 2, stats
    bench.close()


if __name__ == "__main__":
    number_of, seed_of = arguments(__doc__ or "")
    print(f"control channel: {number_of:,} inputs, seed {seed_of}", flush=True)
    fuzz(number_of, seed_of, tell=True)
    print("control channel: good", flush=True)
