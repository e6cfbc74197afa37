"""``symcomm bench noise``: collectives, ours and MPI's, while other processes take the ranks' cores now and then.

A neighbour is a process bound to one of the ranks' cores. It works for a burst, then sleeps; it is awake for a given
share of the time. All sides take turns beside the same neighbours, and every call is timed: the figures are the median
call and the 99th percentile.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from symcomm import errors
from symcomm.bench import table as bench_table
from symcomm.bench.frame import Asked, Workload, has_core_each, in_turns, pick
from symcomm.bench.peers import MPIS, is_set_up, parse_peers
from symcomm.bench.pictures import Bars, Panel
from symcomm.bench.run import Case, Seen, Side, Tick, calls_that_fill, make_cases, open_sides, quiet
from symcomm.memory.limits import format_bytes

WORK = (
    ("all_reduce", (8, 1 << 10, 64 << 10, 1 << 20)), ("all_gather", (64 << 10,)), ("broadcast", (1 << 10,)),
    ("p2p", (8,)),
)  # fmt: skip
QUICK = {"rounds": 2, "seconds": 0.1}
MOST_CALLS = 100_000  # of one turn
# Awake at the beginning of each period, on one core, until its parent is gone.
NEIGHBOUR = """
import os, sys, time
core, burst, period, start, parent = int(sys.argv[1]), *map(float, sys.argv[2:5]), int(sys.argv[5])
os.sched_setaffinity(0, {core})
now = time.monotonic
begin = now() + start
while os.getppid() == parent:
    time.sleep(max(0.0, begin - now()))
    end = now() + burst
    while now() < end:
        pass
    begin = max(begin + period, now())
"""


@dataclass(frozen=True)
class Neighbours:
    """One on each core, awake for ``burst`` seconds at a time and for the share ``duty`` of all time; 0: nobody."""

    duty: float = 0.0
    burst: float = 0.0

    def __str__(self) -> str:
        return f"{self.duty:.0%} of {self.burst * 1e3:g} ms" if self.duty else "none"


def parse_neighbours(text: str) -> tuple[Neighbours, ...]:
    """``none,2:1,25:4`` -> nobody, then 2 % of the time in bursts of 1 ms, then 25 % in bursts of 4 ms."""
    found = []
    for word in text.split(","):
        percent, _, ms = word.strip().partition(":")
        if word.strip() == "none":
            found.append(Neighbours())
            continue
        try:
            kind = Neighbours(float(percent) / 100, float(ms) / 1e3)
        except ValueError:
            kind = Neighbours()
        if not (0 < kind.duty < 1 and 0 < kind.burst <= 1):
            what = "none, or PERCENT:MILLISECONDS such as 25:4, with commas between them"
            raise errors.bad_argument("symcomm bench", "--neighbours", word, what)
        found.append(kind)
    return tuple(found)


@dataclass(frozen=True)
class NoiseWorkload(Workload):
    """Of every case, ``rounds`` turns of every side, each of about ``seconds``."""

    ranks: int = 2
    neighbours: tuple[Neighbours, ...] = ()
    peers: tuple[str, ...] = ()
    rounds: int = 3
    seconds: float = 0.3
    pin: bool = True

    def how(self, best: bool) -> str:
        return f"medians of {self.rounds} turns of {self.seconds:g} s"

    @property
    def sides(self) -> tuple[str, ...]:
        return ("symcomm", *self.peers)

    @property
    def pinned(self) -> bool:
        return self.pin and has_core_each(self.ranks)

    @property
    def cases(self) -> list[Case]:
        make = partial(make_cases, world=self.ranks, dtype="float32", op="sum", root=0, one_place=True)
        return [case for name, sizes in WORK for case in make(name, sizes)]

    @property
    def turns(self) -> int:
        return len(self.neighbours) * len(self.cases) * len(self.sides) * self.rounds

    @property
    def cores(self) -> list[int]:
        cores = sorted(os.sched_getaffinity(0))
        return cores[: self.ranks] if self.pinned else cores


def ask(asked: Asked) -> NoiseWorkload:
    kinds, peers = parse_neighbours(asked.neighbours), peers_at_hand(asked.against)
    return asked.workload(NoiseWorkload, QUICK, neighbours=kinds, peers=peers)


def peers_at_hand(text: str) -> tuple[str, ...]:
    """The MPIs that ``--against`` names; without it, those that are set up."""
    names = parse_peers(text) if text else [name for name in MPIS if is_set_up(name)]
    for name in names:
        if name not in MPIS:
            raise errors.bad_choice("symcomm bench", "--against", name, list(MPIS), "some")
    return tuple(names)


@dataclass
class NoiseMeasurement:
    """Seconds of a call on every side: in each turn, the slowest rank's median and 99th percentile."""

    neighbours: Neighbours
    case: Case
    medians: dict[str, list[float]] = field(default_factory=dict)
    tails: dict[str, list[float]] = field(default_factory=dict)

    def add(self, side: str, median: float, tail: float) -> None:
        self.medians.setdefault(side, []).append(median)
        self.tails.setdefault(side, []).append(tail)

    def seconds(self, side: str) -> tuple[float, float]:
        return pick(self.medians[side], best=False), pick(self.tails[side], best=False)

    def against(self, peers: Sequence[str]) -> tuple[float, float]:
        """The best peer's median and tail divided by ours."""
        ours, theirs = self.seconds("symcomm"), [self.seconds(peer) for peer in peers]
        return min(t[0] for t in theirs) / ours[0], min(t[1] for t in theirs) / ours[1]


@contextlib.contextmanager
def live_beside(neighbours: Neighbours, cores: Sequence[int]) -> Iterator[None]:
    """One neighbour on each core, no two of them in step."""
    period = neighbours.burst / neighbours.duty if neighbours.duty else 0.0
    there: list[subprocess.Popen[Any]] = []
    try:
        for place, core in enumerate(cores if neighbours.duty else ()):
            words = (core, neighbours.burst, period, period * place / len(cores), os.getpid())
            there.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", NEIGHBOUR, *map(str, words)]))
        yield
    finally:
        for process in there:
            process.kill()
            process.wait()


def run_noise_bench(workload: NoiseWorkload, tick: Tick = quiet, seen: Seen = quiet) -> list[NoiseMeasurement]:
    found: list[NoiseMeasurement] = []
    with open_sides(workload.sides, workload.ranks, workload.pinned) as sides:
        for neighbours in workload.neighbours:
            with live_beside(neighbours, workload.cores):
                for case in workload.cases:
                    found.append(_measure(sides, NoiseMeasurement(neighbours, case), workload, tick))
                    seen(found)
    return found


def _sample(side: Side, what: str, calls: int) -> float:
    """Seconds that so many calls took."""
    return max(answer["total"] for answer in side.ask(what, {"do": "sample", "case": 0, "calls": calls})) / 1e9


def _measure(
    sides: dict[str, Side], figures: NoiseMeasurement, workload: NoiseWorkload, tick: Tick
) -> NoiseMeasurement:
    what = f"{figures.case.collective} beside {figures.neighbours}"
    calls = {}
    for name, side in sides.items():
        side.ask(what, {"do": "prepare", "case": 0, "spec": asdict(figures.case) | {"kind": "ordinary"}})
        wrong = sum(answer["wrong"] for answer in side.ask(what, {"do": "check", "case": 0}))
        if wrong:
            raise errors.SymcommError(f"symcomm bench: {name}, {what}: {wrong} elements are wrong.")
        calls[name] = calls_that_fill(workload.seconds, partial(_sample, side, what), 20, MOST_CALLS, MOST_CALLS)
    for name in in_turns(list(sides), workload.rounds):
        answers = sides[name].ask(what, {"do": "sample", "case": 0, "calls": calls[name]}, workload.seconds)
        figures.add(name, *(max(answer[key] for answer in answers) / 1e9 for key in ("median", "p99")))
        tick(what)
    for side in sides.values():
        side.ask(what, {"do": "drop", "case": 0})
    return figures


# --- what there is to see ----------------------------------------------------------------------------------------


def head(workload: NoiseWorkload) -> list[str]:
    columns = [f"{name} {what} (us)" for name in ("ours", *workload.peers) for what in ("median", "p99")]
    return ["neighbours", "collective", "size", *columns, *(["median vs MPI", "p99 vs MPI"] if workload.peers else [])]


def row(figures: NoiseMeasurement, workload: NoiseWorkload) -> list[str]:
    cells = [str(figures.neighbours), figures.case.collective, format_bytes(figures.case.nbytes)]
    cells += [bench_table.microseconds(seconds) for side in workload.sides for seconds in figures.seconds(side)]
    if workload.peers:
        cells += [bench_table.marked(ratio, bench_table.MPI_GOAL) for ratio in figures.against(workload.peers)]
    return cells


def as_table(found: Sequence[NoiseMeasurement], workload: NoiseWorkload, best: bool = False) -> bench_table.Table:
    rows = [row(figures, workload) for figures in found]
    return f"{workload.ranks} ranks beside neighbours: time of one call", head(workload), rows


def note(found: Sequence[NoiseMeasurement], workload: NoiseWorkload) -> str:
    goal = f"{bench_table.MISSED} marks what is below {bench_table.MPI_GOAL:g}x"
    return f"ratios: the better MPI's time / our time; {goal}" if workload.peers else ""


def picture(found: Sequence[NoiseMeasurement], workload: NoiseWorkload, best: bool = False) -> list[Panel]:
    return [
        Bars.of(f"neighbours: {neighbours}", "microseconds", (
            (f"{f.case.collective} {format_bytes(f.case.nbytes)}",
             f"{'ours' if side == 'symcomm' else side}, {what}", seconds * 1e6)
            for f in found if f.neighbours == neighbours
            for side in workload.sides
            for what, seconds in zip(("median", "p99"), f.seconds(side), strict=True)
        )) for neighbours in workload.neighbours
    ]  # fmt: skip


def to_json(found: Sequence[NoiseMeasurement], workload: NoiseWorkload) -> dict[str, Any]:
    rows = [
        {
            "duty": f.neighbours.duty, "burst_ms": f.neighbours.burst * 1e3, "collective": f.case.collective,
            "size": f.case.nbytes, "side": side,
            "median_us": f.seconds(side)[0] * 1e6, "p99_us": f.seconds(side)[1] * 1e6,
            "turns_median_us": [s * 1e6 for s in f.medians[side]], "turns_p99_us": [s * 1e6 for s in f.tails[side]],
        }
        for f in found
        for side in workload.sides
    ]  # fmt: skip
    return workload.to_json(rows, pinned=workload.pinned)
