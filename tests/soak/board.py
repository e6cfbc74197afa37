"""Does any reader ever see a torn version? ``python -m tests.soak.board READS [SEED]``: writers and readers of one
board, which are stopped, killed and replaced at random, until all readers together have read so many versions."""

from __future__ import annotations

import contextlib
import random
import secrets
import sys
import time

import numpy as np

import symcomm
from symcomm import errors
from tests.support.children import Child, children, shared_memory

ARRAYS, MOST = 5, 300 << 10  # of a state, and bytes of each at most
READERS = 3
CHUNK = 200  # reads between two reports


def state(number: int) -> dict[str, np.ndarray]:
    """Of many lengths, so that versions take each other's memory, and with one number all over."""
    return {f"p{i}": np.full(1 + (number * 7919 * (i + 1)) % (MOST // 8), number, np.int64) for i in range(ARRAYS)}


def write(say, name: str) -> None:
    board = taken_over(name)
    number = time.time_ns()
    while True:
        number += 1
        board.publish(state(number), version=number)


def taken_over(name: str) -> symcomm.Board:
    """The one before has just been killed."""
    for _ in range(1000):
        with contextlib.suppress(errors.CallerError):
            return symcomm.Board(name)
        time.sleep(0.01)
    raise AssertionError("the name stayed taken")


def read(say, name: str) -> None:
    reader, kept, reads = symcomm.BoardReader(name, timeout=60), [], 0
    while True:
        try:
            found = reader.wait(timeout=60)
        except errors.ProcessDiedError:
            continue  # the next writer comes
        kept = [*kept[-2:], found]  # old ones stay whole while newer ones are written
        for snapshot in kept:
            for name_of, array in snapshot.state.items():
                if not (array == snapshot.version).all():
                    say(("torn", snapshot.version, name_of, np.unique(array)[:4].tolist()))
        reads += 1
        if reads % CHUNK == 0:
            say(("read", CHUNK))


def soak(reads: int, seed: int = 1) -> dict[str, int]:
    """How many reads, torn ones and kills there were, and files left in /dev/shm."""
    chance, before = random.Random(seed), shared_memory()
    seen = {"read": 0, "torn": 0, "killed": 0, "left": 0}
    name = secrets.token_hex(8)
    with children() as start:
        roles = [write, *[read] * READERS]
        running: list[Child] = [start(role, name) for role in roles]
        while seen["read"] < reads:
            time.sleep(chance.random() * 0.3)
            for child in running:
                while child.has_said():
                    what, count, *details = child.hear()
                    seen[what] += count if what == "read" else 1
                    if what == "torn":
                        print(what, count, *details, file=sys.stderr)
            victim = chance.randrange(len(roles))
            if chance.random() < 0.5:
                running[victim].stop()
            if chance.random() < 0.8:
                running[victim].kill()
                seen["killed"] += 1
                running[victim] = start(roles[victim], name)
            else:
                running[victim].go_on()
    seen["left"] = len(shared_memory() - before)
    return seen


if __name__ == "__main__":
    found = soak(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    print(found)
    sys.exit(found["torn"] + found["left"] > 0)
