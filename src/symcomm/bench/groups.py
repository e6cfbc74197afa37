"""``symcomm bench groups``: what it costs to make a group, to keep it and to drop it, beside Gloo.

Three sides, each with ranks of its own: ``dist.new_group`` and ``dist.destroy_process_group`` on Gloo and on symcomm,
and ``group.new_group`` and ``destroy`` of our own API.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from symcomm.bench import table as bench_table
from symcomm.bench.frame import Asked, Measurement, TurnsWorkload, in_turns, slowest
from symcomm.bench.pictures import Bars, Panel
from symcomm.bench.run import Seen, Tick, open_sides, quiet

SIDES = {"gloo": "torch, gloo", "symcomm": "torch, symcomm", "ours": "symcomm"}
WORKER = "symcomm.bench.groups_worker"


@dataclass(frozen=True)
class GroupsWorkload(TurnsWorkload):
    """A step is a group."""

    held: int = 50  # groups alive at once, to measure what one takes

    @property
    def turns(self) -> int:
        return len(SIDES) * self.rounds


QUICK = {"rounds": 4, "steps": 10}


def ask(asked: Asked) -> GroupsWorkload:
    return asked.workload(GroupsWorkload, QUICK)


@dataclass
class GroupsMeasurement(Measurement):
    """One side. ``made`` and ``dropped``: seconds, the slowest rank's median in each turn."""

    side: str
    idle: float = 0.0  # bytes of an unused group, on the rank that needs most
    left: float = 0.0  # bytes that a destroyed group leaves behind
    made: list[float] = field(default_factory=list)
    dropped: list[float] = field(default_factory=list)

    def seconds(self, best: bool = False) -> tuple[float, float]:
        """To make a group, and to drop it."""
        return self.seconds_of("made", best), self.seconds_of("dropped", best)


def run_groups_bench(workload: GroupsWorkload, tick: Tick = quiet, seen: Seen = quiet) -> list[GroupsMeasurement]:
    found = [GroupsMeasurement(side) for side in SIDES]
    what = "making groups"
    with open_sides(list(SIDES), workload.ranks, pinned=False, worker=WORKER) as sides:
        for figures in in_turns(found, workload.rounds):
            answers = sides[figures.side].ask(what, {"do": "time", "steps": workload.steps})
            figures.made.append(slowest(answers, "make"))
            figures.dropped.append(slowest(answers, "drop"))
            tick(SIDES[figures.side])
        for figures in found:
            side = sides[figures.side]
            figures.left = max(a["bytes"] for a in side.ask(what, {"do": "leave", "groups": 4 * workload.held}))
            figures.idle = max(a["bytes"] for a in side.ask(what, {"do": "hold", "groups": workload.held}))
    return found


def as_table(found: Sequence[GroupsMeasurement], workload: GroupsWorkload, best: bool = False) -> bench_table.Table:
    head = ["side", "new_group (ms)", "gloo / this", "destroy (ms)", "idle group (KiB)", "left behind (KiB)"]
    gloo = next(figures for figures in found if figures.side == "gloo").seconds(best)[0]
    rows = []
    for figures in found:
        made, dropped = figures.seconds(best)
        rows.append([
            SIDES[figures.side], f"{made * 1e3:.2f}", bench_table.times(gloo / made), f"{dropped * 1e3:.2f}",
            f"{figures.idle / 1024:.1f}", f"{figures.left / 1024:.2f}",
        ])  # fmt: skip
    return f"groups, {workload.ranks} ranks", head, rows


def picture(found: Sequence[GroupsMeasurement], workload: GroupsWorkload, best: bool = False) -> list[Panel]:
    bars = (
        (name, SIDES[figures.side], seconds * 1e3)
        for figures in found
        for name, seconds in zip(("new_group", "destroy"), figures.seconds(best), strict=True)
    )
    return [Bars.of("a group", "milliseconds", bars)]


def note(found: Sequence[GroupsMeasurement], workload: GroupsWorkload) -> str:
    return "memory of an idle group, and what it leaves behind: the rank that needs most"


def to_json(found: Sequence[GroupsMeasurement], workload: GroupsWorkload) -> dict[str, Any]:
    rows = [
        {
            "side": f.side, "make_ms": f.seconds()[0] * 1e3, "drop_ms": f.seconds()[1] * 1e3,
            "fastest_make_ms": min(f.made) * 1e3, "turns_ms": [s * 1e3 for s in f.made],
            "idle_kib": f.idle / 1024, "left_kib": f.left / 1024,
        }
        for f in found
    ]  # fmt: skip
    return workload.to_json(rows)
