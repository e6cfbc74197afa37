"""``symcomm bench torch``: how long small calls of torch.distributed take, on each path that a call can go.

Paths: a group of ours called directly; a group of ours that one of torch's hooks watches, so that calls go through C++
and the Backend inside (torch 2.14 and newer); torch's own Gloo. Environments with other versions of torch can take
turns in the same run.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from symcomm import errors
from symcomm.bench import table as bench_table
from symcomm.bench.frame import Asked, Measurement, TurnsWorkload, has_core_each, in_turns, pick
from symcomm.bench.pictures import Bars, Panel
from symcomm.bench.run import Seen, Side, Tick, open_sides, quiet
from symcomm.bench.torch_calls_worker import CALLS, WAYS

WORKER = "symcomm.bench.torch_calls_worker"


@dataclass(frozen=True)
class TorchWorkload(TurnsWorkload):
    """A step is a call of every kind in every environment."""

    rounds: int = 15
    steps: int = 300
    pythons: Sequence[str] = (sys.executable,)

    @property
    def turns(self) -> int:
        return len(self.pythons) * len(WAYS) * self.rounds

    @property
    def pinned(self) -> bool:
        return has_core_each(self.ranks)


@dataclass
class TorchMeasurement(Measurement):
    """One path in one environment. ``turns``: call -> seconds, the slowest rank's in each turn."""

    torch: str
    way: str
    turns: dict[str, list[float]] = field(default_factory=lambda: {call: [] for call in CALLS})
    long: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CALLS, 0))  # calls that Python had to plan

    def of(self, call: str, best: bool = False) -> float:
        return pick(self.turns[call], best)


QUICK = {"rounds": 3, "steps": 50}


def ask(asked: Asked) -> TorchWorkload:
    return asked.workload(TorchWorkload, QUICK, pythons=find_pythons(asked.python))


def find_pythons(text: str) -> tuple[str, ...]:
    """This interpreter, and those named with commas between them."""
    found = [sys.executable]
    for name in filter(None, (part.strip() for part in text.split(","))):
        path = shutil.which(name)
        if path is None:
            allowed = "Python interpreters of environments with torch, with commas between them"
            raise errors.bad_argument("symcomm bench", "--python", name, allowed)
        found.append(os.path.abspath(path))
    return tuple(dict.fromkeys(found))


def run_torch_bench(workload: TorchWorkload, tick: Tick = quiet, seen: Seen = quiet) -> list[TorchMeasurement]:
    names = {f"torch{i}": python for i, python in enumerate(workload.pythons)}
    with open_sides(list(names), workload.ranks, workload.pinned, WORKER, pythons=names) as sides:
        starting = {side: side.ask("starting", {"do": "prepare"})[0] for side in sides.values()}
        found = [
            (side, TorchMeasurement(facts["torch"], way))
            for side, facts in starting.items() for way in WAYS if way in facts["ways"]
        ]  # fmt: skip
        for side, figures in in_turns(found, workload.rounds):
            _measure(side, figures, workload.steps)
            tick(f"torch {figures.torch}, {WAYS[figures.way]}")
    return [figures for _, figures in found]


def _measure(side: Side, figures: TorchMeasurement, steps: int) -> None:
    for call in CALLS:
        answers = side.ask(call, {"do": "time", "way": figures.way, "call": call, "steps": steps})
        figures.turns[call].append(max(answer["seconds"] for answer in answers))
        figures.long[call] += sum(answer["long"] for answer in answers)


# --- words -------------------------------------------------------------------------------------------------------


def as_table(found: Sequence[TorchMeasurement], workload: TorchWorkload, best: bool = False) -> bench_table.Table:
    head = ["torch", "way", *(f"{call} (us)" for call in CALLS)]
    rows = [[f.torch, WAYS[f.way], *(bench_table.microseconds(f.of(call, best)) for call in CALLS)] for f in found]
    return f"small calls of torch.distributed, {workload.ranks} ranks", head, rows


def picture(found: Sequence[TorchMeasurement], workload: TorchWorkload, best: bool = False) -> list[Panel]:
    groups = {call: {f"{f.torch}, {WAYS[f.way]}": f.of(call, best) * 1e6 for f in found} for call in CALLS}
    return [Bars("small calls of torch.distributed", "microseconds", groups, logarithmic=True)]


def note(found: Sequence[TorchMeasurement], workload: TorchWorkload) -> str:
    units = "us: one call of dist.*, of the slowest rank; asynchronous calls include their wait"
    blocking = [(f, call) for f in found for call, what in CALLS.items() if not (what and what[1])]
    slow = [f"{call} ({WAYS[f.way]}, torch {f.torch})" for f, call in blocking if f.long[call]]
    if slow:
        return f"{units}\n# WARNING: calls took the slow path through Python: {', '.join(slow)}"
    return f"{units}\n# way: all blocking calls of ours took the fast path"


def to_json(found: Sequence[TorchMeasurement], workload: TorchWorkload) -> dict[str, Any]:
    rows = [
        {
            "torch": f.torch, "way": f.way, "call": call, "us": f.of(call) * 1e6,
            "turns_us": [seconds * 1e6 for seconds in f.turns[call]], "long_way": f.long[call],
        }
        for f in found for call in CALLS
    ]  # fmt: skip
    return workload.to_json(rows)
