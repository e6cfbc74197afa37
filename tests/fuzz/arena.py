"""Odd connections to the sockets on which ranks pass each other their memory: near-valid, and repeated by their seed.

``python -m tests.fuzz.arena --inputs 1000000 --seed 7``. After each batch the honest ranks must meet, and nothing may
be left of the strangers: no descriptors, no threads, no memory.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from symcomm import errors
from symcomm.memory import share
from symcomm.memory.arena import Arena
from tests.fuzz.common import arguments

BATCH = 2_000
HELD = 24  # strangers that stay connected at the same time
WORLD = 3
MEMORY_GROWTH = 16 << 20  # bytes; allocators keep some


@dataclass
class Party:
    """Ranks of a job that is about to start: their arenas, and what they published."""

    arenas: list[Arena]
    infos: list[dict]
    spare: int  # a descriptor of something that is no arena

    def peers(self) -> list[bytes]:
        return [arena.nonce for arena in self.arenas]


def make_party() -> Party:
    arenas = [Arena() for _ in range(WORLD)]
    infos = [{"nonce": arena.nonce.hex(), "nbytes": arena.nbytes, "socket": None} for arena in arenas]
    return Party(arenas, infos, os.memfd_create("odd"))


def odd_greeting(rng: random.Random, party: Party) -> tuple[bytes, list[int]]:
    """What a stranger says, and the descriptors it sends along. Never what a rank would say."""
    rank = rng.choice([0, 1, WORLD - 1, WORLD, 255, 1 << 31, 1 << 63, (1 << 64) - 1])
    nonce = bytearray(rng.choice(party.peers()))
    if rng.random() < 0.7:
        nonce[rng.randrange(16)] ^= 1 << rng.randrange(8)
    data = bytearray(share.HELLO.pack(rank, bytes(nonce)))
    kind = rng.randrange(6)
    if kind == 0:
        data = data[: rng.randrange(len(data))]
    elif kind == 1:
        data += rng.randbytes(rng.choice([1, 8, 1000, 60_000]))
    elif kind == 2:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 3:
        data = bytearray(rng.randbytes(rng.choice([0, 1, 8, len(data)])))
    fds = [party.spare] * rng.choice([0, 0, 1, 1, 2, 20, 253])
    if is_a_rank(bytes(data), party) and (fds or rng.random() < 0.5):
        fds = []  # a descriptor from somebody who knows the nonce would be believed
    return bytes(data), fds


def is_a_rank(data: bytes, party: Party) -> bool:
    return any(data == share.HELLO.pack(r, party.arenas[r].nonce) for r in range(1, WORLD))


def attack(name: bytes, rng: random.Random, party: Party, inputs: int) -> None:
    held: list[socket.socket] = []
    for _ in range(inputs):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.settimeout(10)
        if len(held) == HELD:
            held.pop(rng.randrange(HELD)).close()
        held.append(stranger)
        while True:
            try:
                stranger.connect(name)
                break
            except BlockingIOError:
                time.sleep(0.001)
        data, fds = odd_greeting(rng, party)
        with contextlib.suppress(OSError):  # dropped already
            if rng.random() < 0.05:
                continue  # says nothing
            if fds:
                socket.send_fds(stranger, [data], fds)
            else:
                stranger.send(data)
            if rng.random() < 0.2:
                stranger.send(rng.randbytes(9))
            if rng.random() < 0.2:
                stranger.shutdown(rng.choice([socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR]))
    for stranger in held:
        stranger.close()


def odd_answer(rng: random.Random) -> tuple[bytes, int]:
    """What something that claims to be rank 0 says, and how many descriptors it sends."""
    start = rng.choice([0, 0, 1, WORLD, 1 << 40, (1 << 64) - 1])
    data = share.FIRST.pack(start)
    kind = rng.randrange(4)
    if kind == 0:
        data = data[: rng.randrange(8)]
    elif kind == 1:
        data = share.SORRY + rng.randbytes(rng.choice([0, 5, 2000]))
    elif kind == 2:
        data += rng.randbytes(9)
    return data, rng.choice([0, 1, WORLD, WORLD + 1, 253])


def deceive(rng: random.Random, party: Party) -> None:
    """One rank joins, and what answers it is not rank 0. It has to be told so, in our words."""
    listener = share._listen()
    infos = [dict(info) for info in party.infos]
    infos[0]["socket"] = listener.getsockname().hex()
    infos[1]["nonce"] = infos[2]["nonce"] = "ab" * 16  # nothing of them is mapped yet
    data, count = odd_answer(rng)

    def answer() -> None:
        listener.setblocking(True)
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError):
            share.socket.send_fds(client, [data], [party.spare] * count)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        share._pass_descriptors(1, party.arenas[1], None, infos, share.Deadline(5.0, None))
    except errors.SymcommError:
        pass
    else:
        raise AssertionError(f"believed {data!r} with {count} descriptors")
    finally:
        thread.join(10)
        listener.close()


def batch(rng: random.Random, party: Party, inputs: int) -> None:
    """Strangers first, then the ranks: all of them must be served."""
    listener = share._listen()
    party.infos[0]["socket"] = listener.getsockname().hex()
    outcomes: dict[int, object] = {}

    def pass_as(rank: int) -> None:
        try:
            mine = listener if rank == 0 else None
            outcomes[rank] = share._pass_descriptors(
                rank, party.arenas[rank], mine, party.infos, share.Deadline(60.0, None)
            )
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=pass_as, args=(rank,)) for rank in range(WORLD)]
    threads[0].start()
    attack(listener.getsockname(), rng, party, inputs)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(60)
    listener.close()
    bad = {rank: outcome for rank, outcome in outcomes.items() if not isinstance(outcome, list)}
    assert not bad and len(outcomes) == WORLD, f"not every rank was served: {bad}"


def held_now() -> tuple[int, int, int]:
    """(descriptors, threads, bytes of memory)"""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), threading.active_count(), pages * os.sysconf("SC_PAGE_SIZE")


def held_at_rest(before: tuple[int, ...]) -> tuple[int, int, int]:
    """Once no more is held than before, if that comes soon: a thread may be about to end."""
    end = time.monotonic() + 5
    while (held := held_now()) and (held[0] > before[0] or held[1] > before[1]) and time.monotonic() < end:
        time.sleep(0.01)
    return held


def run(inputs: int, seed: int) -> None:
    rng, party = random.Random(seed), make_party()
    quiet = logging.getLogger("symcomm.memory")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        batch(rng, party, 50)  # what is made once
        before = held_now()
        for done in range(0, inputs, BATCH):
            some = min(BATCH, inputs - done)
            for _ in range(some // 20):
                deceive(rng, party)
            batch(rng, party, some - some // 20)
            after = held_at_rest(before)
            assert after[0] <= before[0] and after[1] <= before[1], (
                f"descriptors and threads were {before[:2]} and are {after[:2]}"
            )
            assert after[2] - before[2] < MEMORY_GROWTH, f"{after[2] - before[2]} bytes more than before"
    finally:
        quiet.setLevel(level)
        os.close(party.spare)


if __name__ == "__main__":
    count, number = arguments(__doc__ or "")
    begun = time.monotonic()
    run(count, number)
    print(f"{count:,} odd connections (seed {number}) in {time.monotonic() - begun:.0f} s: all dropped")
