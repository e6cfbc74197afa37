"""Random faults at random points of random operations: ``python -m tests.soak --faults 1000 --seed 7``.

Each scenario forks a few ranks that run a random sequence of collectives and messages, the same on all. One rank meets
a fault at a random step: it is killed, ends, is stopped, or makes another call. Then every survivor must raise in time,
its error must name the right rank, and nothing may be left behind. A seed repeats a scenario exactly.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from symcomm import errors
from symcomm.group.process_group import ProcessGroup
from tests.faults import Outcome, leftovers, run_group

FAULTS = ("kill", "kill later", "exit", "stop", "mismatch")
STOPPED_TIMEOUT = 1.0  # seconds: how long the others wait for a stopped rank; a starved one must not look like it
LIMIT = 20.0  # seconds: a scenario that takes longer hangs


@dataclass
class Scenario:
    """What happens, all of it from one seed."""

    seed: int

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.world = rng.randint(2, 6)
        self.victim = rng.randrange(self.world)
        self.fault = rng.choice(FAULTS)
        self.step = rng.randint(0, 12)  # at which the fault happens
        self.delay = rng.uniform(0, 0.01)  # "kill later": seconds after the step began
        # Do survivors live on, or end as soon as they have raised? A late message is no failure of the group, so the
        # end of the rank that raised for it would be a second fault.
        self.linger = rng.random() < 0.5 or self.fault == "stop"

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.fault} of rank {self.victim} of {self.world} at step {self.step}"


def one_step(g: ProcessGroup, rng: random.Random) -> None:
    """A random operation, the same on all ranks since their random numbers are."""
    count = rng.choice((1, 100, 5000, 70_000, 400_000))
    kind, root, is_async = rng.randrange(7), rng.randrange(g.size), rng.random() < 0.3
    t = torch.ones(count)
    if kind == 0:
        work = g.all_reduce(t, async_op=is_async)
    elif kind == 1:
        work = g.broadcast(t, root, async_op=is_async)
    elif kind == 2:
        work = g.all_gather_single(torch.empty(count * g.size), t, async_op=is_async)
    elif kind == 3:
        work = g.reduce_scatter_single(t, torch.ones(count * g.size), async_op=is_async)
    elif kind == 4:
        work = g.all_to_all_single(torch.empty(count * g.size), torch.ones(count * g.size), async_op=is_async)
    elif kind == 5:
        work = g.barrier(async_op=is_async)
    else:  # round the ring; a fault of a rank reaches those that do not talk to it at the barrier
        work = None
        sending = g.isend(t, (g.rank + 1) % g.size, tag=count)
        g.recv(torch.empty(count), (g.rank - 1) % g.size, tag=count)
        sending.wait()
        g.barrier()
    if work is not None:
        work.wait()


def strike(plan: Scenario) -> None:
    """The fault itself, on the victim; a mismatch is made by rank_main."""
    pid = os.getpid()
    if plan.fault == "kill":
        os.kill(pid, signal.SIGKILL)
    elif plan.fault == "kill later":
        threading.Thread(target=lambda: (time.sleep(plan.delay), os.kill(pid, signal.SIGKILL)), daemon=True).start()
    elif plan.fault == "exit":
        os._exit(5)
    elif plan.fault == "stop":
        os.kill(pid, signal.SIGSTOP)


def rank_main(g: ProcessGroup, seed: int) -> None:
    plan, rng = Scenario(seed), random.Random(-1 - seed)
    if plan.fault == "stop":
        g.set_timeout(STOPPED_TIMEOUT)
    for step in range(2000):
        if step == plan.step and plan.fault == "mismatch":
            g.reduce(torch.ones(3), op="max") if g.rank == plan.victim else g.all_reduce(torch.ones(7))
        elif step == plan.step and g.rank == plan.victim:
            strike(plan)
        one_step(g, rng)


def continue_later(plan: Scenario) -> Callable[[list[int]], None] | None:
    if plan.fault != "stop":
        return None

    def during(pids: list[int]) -> None:
        """Once it has stopped, however long that takes, give the others time for their deadline; then let it go on."""
        victim = pids[plan.victim]
        for _ in range(1500):
            if is_stopped(victim):
                break
            time.sleep(0.01)
        time.sleep(STOPPED_TIMEOUT + 0.7)
        os.kill(victim, signal.SIGCONT)

    return during


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def judge(plan: Scenario, outcomes: list[Outcome]) -> list[str]:
    """What is wrong with how the ranks ended; nothing, one hopes."""
    wrong = []
    for o in outcomes:
        message = str(o.error)
        if o.rank == plan.victim and plan.fault in ("kill", "kill later", "exit"):
            good = o.kind == "died"
        elif o.kind != "raised":
            good = False
        elif plan.fault == "mismatch":
            good = isinstance(o.error, errors.CollectiveMismatchError) and "reduce(float32 x 3, MAX" in message
        elif plan.fault == "stop":
            # A message names its other side, which may itself be waiting for the stopped rank.
            names = plan.victim in [o.rank, *getattr(o.error, "missing", [])] or message.startswith(("send", "receive"))
            good = isinstance(o.error, errors.DeadlineError) and names
        else:
            good = isinstance(o.error, errors.RankFailedError) and o.error.ranks[:1] == [plan.victim]
        if not good:
            wrong.append(f"{o.rank} {o.kind}: {o.text.strip().splitlines()[-1] if o.text else o.value}")
    return wrong


def run_one(seed: int) -> list[str]:
    plan = Scenario(seed)
    outcomes = run_group(
        rank_main, plan.world, seed, timeout=10, deadline=LIMIT, during=continue_later(plan), linger=plan.linger
    )
    return judge(plan, outcomes) + [f"left behind: {item}" for item in leftovers()]


def soak(faults: int, seed: int, progress: bool = False) -> dict[int, list[str]]:
    """seed -> what went wrong, for the scenarios ``seed`` to ``seed + faults - 1`` in which something did."""
    bad: dict[int, list[str]] = {}
    started = time.monotonic()
    for i in range(faults):
        wrong = run_one(seed + i)
        if wrong:
            bad[seed + i] = wrong
            print(f"\n{Scenario(seed + i)}\n  " + "\n  ".join(wrong), flush=True)
        if progress:
            rate = (i + 1) / (time.monotonic() - started)
            print(f"\r{i + 1}/{faults} faults, {len(bad)} bad, {rate:.1f}/s ", end="", flush=True)
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description="Random faults; exit code 1 when one was not handled as promised.")
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="of the first scenario; the others count on from it")
    options = parser.parse_args()
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    print(f"seeds {seed} to {seed + options.faults - 1}", flush=True)
    bad = soak(options.faults, seed, progress=True)
    print(f"\n{options.faults} faults, {len(bad)} bad{': seeds ' + ', '.join(map(str, bad)) if bad else ''}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
