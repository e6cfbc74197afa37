"""A rank of tests/soak/churn.py: counts in steps, with all others, and meets its own faults.

Its state is a tensor of whole numbers, so that every rank can check every step against what it has to be, however many
ranks made it. The folder that it is started with has these files::

    order     a fault that waits for a rank: phase, action, seconds; whoever takes it renames it
    taken-P   the order that process P has taken
    made-P    how many steps process P has made, of 8 bytes
    wrong-P   what process P found wrong
    enough    exists: all ranks end after this step
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from symcomm import elastic
from symcomm.elastic import session as sessions
from symcomm.elastic import state as states
from symcomm.group import grow
from symcomm.group.process_group import ProcessGroup
from symcomm.membership.shared_board import Records
from symcomm.store import handshake

ELEMENTS, BATCH = 20_000, 24
FOLDER, ME = sys.argv[1], os.getpid()
dice = random.Random(ME)


def path(name: str) -> str:
    return os.path.join(FOLDER, name)


def at(phase: str) -> None:
    """A moment of a phase: takes the order that waits for it, now or at a later moment like this."""
    try:
        with open(path("order")) as file:
            order = json.load(file)
        if order["phase"] != phase or dice.random() < 0.5:
            return
        os.rename(path("order"), path(f"taken-{ME}"))
    except (OSError, ValueError):  # there is none, or another rank was faster
        return
    time.sleep(dice.uniform(0.0, 0.003))
    os.kill(ME, signal.SIGKILL if order["action"] == "kill" else signal.SIGSTOP)


def around(phase: str, owner: Any, name: str) -> None:
    """Makes every call of ``owner.name`` a moment of the phase, before it and after."""
    inner: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        at(phase)
        result = inner(*args, **kwargs)
        at(phase)
        return result

    setattr(owner, name, call)


for phase, owner, name in (
    ("meet", handshake._Attempt, "_exchange"),
    ("join", grow.JoinQueue, "request_to_join"),
    ("join", grow.JoinQueue, "answer"),
    ("agree", grow.Round, "exchange"),
    ("agree", grow.Round, "decide"),
    ("agree", Records, "publish"),
    ("agree", Records, "swap"),
    ("agree", sessions.Session, "_settle"),
    ("hand-over", ProcessGroup, "all_gather_bytes"),
    ("hand-over", states, "_broadcast"),
):
    around(phase, owner, name)


class Numbers:
    """The state: after step s every element is the sum of all items of the batches of the steps up to s."""

    def __init__(self) -> None:
        self.sums = torch.zeros(ELEMENTS, dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums.copy_(state["sums"])


def sum_after(steps: int) -> int:
    """Of the items 0, 1, 2 ... of so many batches."""
    return steps * BATCH * (steps * BATCH - 1) // 2


def check(what: str, got: Any, expected: Any) -> None:
    if got != expected:
        with open(path(f"wrong-{ME}"), "a") as file:
            file.write(f"{what}: {got}, not {expected}\n")


def step(session: Any) -> int:
    at("step")
    mine = range(BATCH)[session.share(BATCH)]
    part = torch.full((ELEMENTS,), sum(session.step * BATCH + item for item in mine), dtype=torch.int64)
    ending = torch.tensor([os.path.exists(path("enough"))], dtype=torch.int64)
    session.group.all_reduce(part)
    at("step")
    numbers.sums += part
    low, high = numbers.sums.aminmax()
    check(f"step {session.step} on {session.size} ranks", {low.item(), high.item()}, {sum_after(session.step + 1)})
    check("results", session.results, list(range(session.step)))
    session.group.all_reduce(ending)
    at("step")
    os.pwrite(made, (int.from_bytes(os.pread(made, 8, 0), "little") + 1).to_bytes(8, "little"), 0)
    if ending.item():
        elastic.close(session.group)
        session.group.barrier()
        os._exit(0)
    return session.step


at("start")
made = os.open(path(f"made-{ME}"), os.O_RDWR | os.O_CREAT)
numbers = Numbers()
with elastic.Session(others={"numbers": numbers}, admit_every=3) as session:
    session.run(step, 10**9)
