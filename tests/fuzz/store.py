"""Run by hand: ``python -m tests.fuzz.store [--inputs N] [--seed S]``. Bytes that are almost a client's, for a
TCPStore server with and without a token. After each batch honest clients get right values, and the process holds what
it held before."""

from __future__ import annotations

import logging
import random
import struct
import time

from symcomm.store import tcp_wire as wire
from symcomm.store.tcp import StoreLimits, TCPStore
from tests.fuzz.common import BATCH, Holdings, arguments, damaged, pump
from tests.support.ranks import until

TOKEN = b"the job's token"
LIMITS = StoreLimits(max_key=256, max_value=1 << 14, max_frame=1 << 16, max_keys=64, max_memory=64 << 20)
HELLO = struct.pack("=BI", wire.HELLO, 0x3C85F7CE)
LENGTHS = (0, 1, 255, 256, 257, 1 << 14, (1 << 14) + 1, 1 << 16, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, 2**64 - 1)

# What follows each command: k a key, v a value, n a number, K and P counted keys and pairs of key and value.
FIELDS = {
    wire.SET: "kv", wire.COMPARE_SET: "kvv", wire.GET: "k", wire.ADD: "kn", wire.CHECK: "K", wire.WAIT: "K",
    wire.NUM_KEYS: "", wire.DELETE: "k", wire.APPEND: "kv", wire.MULTI_GET: "K", wire.MULTI_SET: "P", wire.CANCEL: "",
    wire.PING: "4", wire.PUSH: "kv", wire.POP: "k", wire.QUEUE_LEN: "k", wire.LIST_KEYS: "", wire.BARRIER: "kn",
    wire.CHALLENGE: "d", wire.PROOF: "d",
}  # fmt: skip


def _number(rng: random.Random, usual: int) -> bytes:
    return struct.pack("=Q", rng.choice(LENGTHS) if rng.random() < 0.05 else usual)


def _bytes(rng: random.Random, data: bytes) -> bytes:
    return _number(rng, len(data)) + data


def _field(rng: random.Random, kind: str) -> bytes:
    if kind == "k":
        return _bytes(rng, b"/fuzz/" + str(rng.randrange(40)).encode())
    if kind == "v":
        return _bytes(rng, rng.randbytes(rng.choice((0, 1, 8, 100))) if rng.random() < 0.7 else b"12")
    if kind == "n":
        return _number(rng, rng.randrange(4))
    if kind == "4":
        return rng.randbytes(4)
    if kind == "d":
        return rng.randbytes(32)
    count = rng.randrange(4)
    return _number(rng, count) + b"".join(_field(rng, f) for _ in range(count) for f in ("k" if kind == "K" else "kv"))


def _call(rng: random.Random) -> bytes:
    command = rng.choice(list(FIELDS)) if rng.random() < 0.97 else rng.randrange(256)
    return bytes([command]) + b"".join(_field(rng, kind) for kind in FIELDS.get(command, "kv"))


def client_bytes(rng: random.Random) -> bytes:
    """A whole client, most of the time with something wrong about it."""
    data = (HELLO if rng.random() < 0.97 else b"") + b"".join(_call(rng) for _ in range(rng.randrange(6)))
    kind = rng.random()
    if kind < 0.05:
        return rng.randbytes(rng.randrange(200))
    return damaged(rng, data) if kind < 0.6 else data


def _honest(server: TCPStore, token: bytes, number: int) -> None:
    """Somebody who was there all the time, and somebody who comes now."""
    other = TCPStore("127.0.0.1", server.port, token=token, timeout=20)
    value = f"value {number}".encode() * 50
    other.set("honest", value)
    assert server.get("honest") == value
    assert server.add("count", 1) == number + 1 == other.add("count", 0)
    other.close()


def fuzz(inputs: int, seed: int, tell: bool = False) -> None:
    """Raises AssertionError, and says the seed, when anything is not as it should be."""
    logging.getLogger("symcomm.store").setLevel(logging.ERROR)
    rng, begun, holdings = random.Random(seed), time.monotonic(), None
    for done in range(0, inputs, BATCH):
        token = TOKEN if done // BATCH % 4 == 3 else b""
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, token=token, limits=LIMITS)
        try:
            _honest(server, token, 0)
            pump(rng, ("127.0.0.1", server.port), [client_bytes(rng) for _ in range(min(BATCH, inputs - done))])
            _honest(server, token, 1)
            assert until(lambda s=server: s.server_stats()["clients"] == 1), server.server_stats()
            if token:  # nobody but the honest has written
                assert sorted(server.list_keys()) == ["count", "honest"]
        except BaseException as error:
            raise AssertionError(f"store, seed {seed}, inputs {done} to {done + BATCH}: {error!r}") from error
        finally:
            server.close()
        holdings = holdings or Holdings()
        holdings.check()
        if tell and done % (100 * BATCH) == 0:
            print(f"store: {done:,} inputs, {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    count, number = arguments(__doc__ or "")
    print(f"store: {count:,} inputs, seed {number}", flush=True)
    fuzz(count, number, tell=True)
    print("store: good", flush=True)
