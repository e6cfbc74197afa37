"""Ranks that share two cores and count their sleeps: ``python -m tests.support.waking_ranks RANKS CALL``."""

from __future__ import annotations

import os
import sys
import time

import torch

from symcomm import ReduceOp
from symcomm.group.process_group import ProcessGroup
from tests.support.faults import run_group
from tests.support.ranks import returned

CALLS = 200
PATIENCE = 40.0  # seconds: a group that stays asleep does so for ever, but neighbours may be busy for a while
FEW = CALLS // 10  # sleeps of a rank: a neighbour may take its core now and then


def broadcast(g: ProcessGroup, t: torch.Tensor) -> None:
    g.broadcast(t, 0)


def pass_round(g: ProcessGroup, t: torch.Tensor) -> None:
    if g.rank == 0:
        g.send(t, 1)
        g.recv(t, g.size - 1)
    else:
        g.recv(t, g.rank - 1)
        g.send(t, (g.rank + 1) % g.size)


def sleeps(g: ProcessGroup, call: str) -> list[int]:
    """How often the rank that slept most slept in each CALLS calls after a disturbance, until no rank sleeps often."""
    t, run, found = torch.ones(4), globals()[call], []
    if g.rank == 0:
        time.sleep(0.02)  # so all others sleep
    going, end = torch.ones(1), time.monotonic() + PATIENCE
    while min(found, default=CALLS) > FEW and going.item():
        before = g.wait_stats()["slept"]
        for _ in range(CALLS):
            run(g, t)
        slept = torch.tensor([g.wait_stats()["slept"] - before])
        g.all_reduce(slept, op=ReduceOp.MAX)
        found.append(int(slept))
        going.fill_(time.monotonic() < end)
        g.broadcast(going, 0)
    assert t.tolist() == [1.0] * 4
    return found


def run(ranks: int, call: str) -> list[int]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(cores)[:2]))
    try:
        return returned(run_group(sleeps, ranks, call, deadline=60))[0]
    finally:
        os.sched_setaffinity(0, cores)


if __name__ == "__main__":
    print("sleeps", *run(int(sys.argv[1]), sys.argv[2]))
