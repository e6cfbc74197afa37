"""Random faults at random points of random calls: ``python -m tests.soak --faults 1000 --seed 7`` or ``--minutes 2``.

Each scenario forks a few ranks that make random calls, the same on all, and compare every result with what it has to
be. One rank meets a fault (see soak_scenario.py): it is killed, ends, is stopped, makes another call, or another thread
of it aborts or leaves the group. Then every survivor must raise in time and name the right rank; in most scenarios they
go on in a smaller group, and take in newcomers, of which one may be killed. All the while a stranger sends garbage to
whatever the ranks listen on. Nothing may be left behind. A seed repeats a scenario.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from symcomm.group.default import join_ranks
from symcomm.group.factory import make_group
from symcomm.store import FileStore, TCPStore
from tests.soak import ranks as soak_ranks
from tests.soak.ranks import Report
from tests.soak.scenario import HARMLESS, STARVED, STOPPED_TIMEOUT, Scenario
from tests.soak.stranger import Stranger
from tests.support.elastic_ranks import ElasticRanks
from tests.support.faults import leftovers
from tests.support.page_gate import state_of
from tests.support.ranks import Outcome, until

LIMIT = 60.0  # seconds: a scenario that takes longer hangs
PAUSE = 0.3  # seconds: for less than the deadline of any call


class SoakCrowd(ElasticRanks):
    """Ranks that meet in a file, or through a server in this process."""

    def __init__(self, folder: Path, over_tcp: bool):
        super().__init__(folder, timeout=10.0)
        self._server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if over_tcp else None

    def _store(self) -> Any:
        if self._server is None:
            return FileStore(self.path)
        return TCPStore("127.0.0.1", self._server.port, is_master=False, wait_for_workers=False)

    def member(self, fn: Callable, rank: int, world: int, *args: Any) -> int:
        make = partial(make_group, timeout=self.timeout)
        # Nobody else may hold the group: what it holds is looked for when it was left.
        return self.start(lambda: fn(lambda: join_ranks(self._store(), rank, world, 30.0, make), *args))

    def newcomer(self, fn: Callable, *args: Any) -> int:
        return self.start(lambda: fn(self._store(), *args))


def disturb(plan: Scenario, forked: SoakCrowd) -> None:
    """What this process does to the ranks: lets a stopped one go on, kills a newcomer."""
    if plan.fault in ("stop", "pause"):
        victim = forked.pids[plan.victim]
        until(lambda: state_of(victim) in "TtZX", LIMIT)
        time.sleep(STOPPED_TIMEOUT + STARVED if plan.fault == "stop" else PAUSE)
        os.kill(victim, signal.SIGCONT)
    if plan.newcomer_killed:
        time.sleep(plan.kill_newcomer_after)
        os.kill(forked.pids[plan.world], signal.SIGKILL)


def judge_member(plan: Scenario, rank: int, report: Report) -> str:
    """What is wrong with the first error of a rank, or ""."""
    kind, victim = report.kind, rank == plan.victim
    if plan.fault in HARMLESS:
        good = not kind
    elif plan.fault == "mismatch":
        good = kind == "CollectiveMismatchError" and "reduce(float32 x 3, MAX" in report.message
    elif plan.fault == "abort":
        good = kind == "GroupUnusableError"
    elif plan.fault == "stop":
        # A message names its other side, which may itself be waiting for the stopped rank.
        names = victim or plan.victim in report.named or report.message.startswith(("send", "receive"))
        # Whoever has raised and goes on without the stopped rank may find others that still wait.
        overtaken = plan.goes_on and kind == "GroupUnusableError" and "was aborted by rank" in report.message
        good = (kind == "DeadlineError" and names) or overtaken
    elif victim:  # which another thread made leave
        good = bool(kind)
    else:
        good = kind == "RankFailedError" and report.named[:1] == [plan.victim]
    return "" if good else f"rank {rank} raised {kind or 'nothing'}: {report.message}"


def judge(plan: Scenario, outcomes: list[Outcome]) -> list[str]:
    """What is wrong with how the processes ended; nothing, one hopes."""
    wrong = []
    for o in outcomes:
        who = f"rank {o.rank}" if o.rank < plan.world else f"newcomer {o.rank - plan.world}"
        killed = o.rank == plan.victim and plan.dies
        may_die = killed or (o.rank == plan.world and plan.newcomer_killed)
        if o.kind == "died" and may_die:
            continue
        if o.kind != "returned" or killed:
            last = o.text.strip().splitlines()[-1] if o.text else o.value
            wrong.append(f"{who} {o.kind}: {last}")
            continue
        wrong += [f"{who}: {text}" for text in o.value.wrong]
        if o.rank < plan.world and (text := judge_member(plan, o.rank, o.value)):
            wrong.append(text)
    return wrong


def judge_sizes(plan: Scenario, outcomes: list[Outcome]) -> list[str]:
    """Whether those that went on were in groups of the same sizes, and of the right ones."""
    if not plan.goes_on or plan.fault in HARMLESS:
        return []
    stays = plan.fault in ("mismatch", "abort")
    first = plan.world if stays else plan.world - 1
    went_on = [o for o in outcomes if o.rank < plan.world and (stays or o.rank != plan.victim)]
    sizes = {tuple(o.value.sizes) for o in went_on if o.kind == "returned"}
    right = [(plan.world, first)]
    if plan.newcomers:
        least = 0 if plan.newcomer_killed else plan.newcomers
        right = [(plan.world, first, first + n) for n in range(least, plan.newcomers + 1)]
    return [] if len(sizes) == 1 and sizes <= set(right) else [f"groups of sizes {sizes}, not one of {right}"]


def run_one(seed: int, stranger: Stranger | None = None) -> list[str]:
    plan = Scenario(seed)
    open_before = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryDirectory(prefix="symcomm-soak-") as folder:
        forked = SoakCrowd(Path(folder), plan.over_tcp)
        for rank in range(plan.world):
            forked.member(soak_ranks.member, rank, plan.world, seed)
        for _ in range(plan.newcomers):
            forked.newcomer(soak_ranks.newcomer, seed)
        if stranger is not None:
            stranger.watch([os.getpid(), *forked.pids])
        disturb(plan, forked)
        outcomes = forked.outcomes(LIMIT)
        if stranger is not None:
            stranger.watch([])
        del forked
    wrong = judge(plan, outcomes)
    wrong += [] if wrong else judge_sizes(plan, outcomes)
    wrong += [f"left behind: {item}" for item in leftovers()]
    if not until(lambda: len(os.listdir("/proc/self/fd")) <= open_before, 5.0):  # a server's thread closes its own
        wrong.append("left behind: descriptors of the process that started them")
    return wrong


def soak(faults: int, seed: int, minutes: float = 0.0, progress: bool = False) -> dict[int, list[str]]:
    """seed -> what went wrong, of so many scenarios from ``seed`` on, or of as many as ``minutes`` have room for."""
    bad: dict[int, list[str]] = {}
    log = logging.getLogger("symcomm.store")
    level = log.level
    log.setLevel(logging.ERROR)  # each of the stranger's calls gets a line otherwise
    stranger = Stranger(seed)
    started, done = time.monotonic(), 0
    try:
        while time.monotonic() - started < 60 * minutes if minutes else done < faults:
            wrong = run_one(seed + done, stranger)
            if wrong:
                bad[seed + done] = wrong
                print(f"\n{Scenario(seed + done)}\n  " + "\n  ".join(wrong), flush=True)
            done += 1
            if progress:
                rate = done / (time.monotonic() - started)
                text = f"{done} faults, {len(bad)} bad, {rate:.1f}/s, {stranger.met} strangers"
                print(f"\r{text} ", end="", flush=True)
    finally:
        stranger.end()
        log.setLevel(level)
    if not stranger.met and any(Scenario(seed + i).over_tcp for i in range(done)):
        bad[-1] = ["the stranger met nobody"]
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description="Random faults; exit code 1 when one was not handled as promised.")
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=0.0, help="go on for so long, instead of a number of faults")
    parser.add_argument("--seed", type=int, default=None, help="of the first scenario; the others count on from it")
    options = parser.parse_args()
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    print(f"seeds from {seed} on", flush=True)
    bad = soak(options.faults, seed, options.minutes, progress=True)
    print(f"\n{len(bad)} bad{': seeds ' + ', '.join(map(str, bad)) if bad else ''}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
