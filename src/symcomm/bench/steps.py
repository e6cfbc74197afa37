"""What ``bench ddp`` and ``bench compile`` share: programs whose steps are timed on several sides, in turns.

One side, "alone", does not communicate: it is the floor. What a step takes above it is its communication.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from symcomm.bench.pictures import Bars, Panel
from symcomm.bench.run import Side, Tick

UNITS = {"ms": ("milliseconds", 1e3), "us": ("microseconds", 1e6)}


@dataclass
class Measurement:
    """One program on one side. ``turns`` are seconds of a step: the slowest rank's median, once for every turn."""

    program: str
    side: str
    error: float  # how far its values are from those of one process, in units of their size
    turns: list[float] = field(default_factory=list)

    def seconds(self, best: bool = False) -> float:
        return min(self.turns) if best else statistics.median(self.turns)


def take_turns(
    sides: Mapping[str, Side], found: Sequence[Measurement], workload: Any, what: str, names: Mapping[str, str],
    tick: Tick,
) -> None:  # fmt: skip
    """``tick`` is told of every turn."""
    for number in range(workload.rounds):
        for figures in found[:: -1 if number % 2 else 1]:  # back and forth: a load that grows hits all alike
            answers = sides[figures.side].ask(what, {"do": "time", "steps": workload.steps})
            figures.turns.append(max(statistics.median(answer["seconds"]) for answer in answers))
            tick(f"{figures.program}, {names[figures.side]}")


def communication(found: Sequence[Measurement], best: bool) -> dict[tuple[str, str], float]:
    """(program, side) -> seconds of a step above the floor: the median of what it was in each round."""
    floors = {f.program: f for f in found if f.side == "alone"}
    above = {}
    for figures in found:
        floor = floors[figures.program]
        if figures is not floor:
            differences = [turn - low for turn, low in zip(figures.turns, floor.turns, strict=True)]
            fastest = figures.seconds(best) - floor.seconds(best)
            above[figures.program, figures.side] = fastest if best else statistics.median(differences)
    return above


def picture(found: Sequence[Measurement], names: Mapping[str, str], unit: str, best: bool) -> list[Panel]:
    """What a step takes, and what of it is communication."""
    words, factor = UNITS[unit]
    steps: dict[str, dict[str, float]] = {}
    above: dict[str, dict[str, float]] = {}
    for f in found:
        steps.setdefault(f.program, {})[names[f.side]] = f.seconds(best) * factor
    for (program, side), seconds in communication(found, best).items():
        above.setdefault(program, {})[names[side]] = seconds * factor
    return [Bars("a step", words, steps), Bars("of it communication", words, above)]


def as_json(figures: Measurement, found: Sequence[Measurement], unit: str) -> dict[str, Any]:
    """What was timed."""
    factor = UNITS[unit][1]
    row = {
        "side": figures.side, "error": figures.error, f"turns_{unit}": [s * factor for s in figures.turns],
        f"step_{unit}": figures.seconds() * factor, f"fastest_step_{unit}": figures.seconds(best=True) * factor,
    }  # fmt: skip
    if figures.side != "alone":
        for prefix, best in (("", False), ("fastest_", True)):
            above = communication(found, best)[figures.program, figures.side]
            row[f"{prefix}communication_{unit}"] = above * factor
    return row
