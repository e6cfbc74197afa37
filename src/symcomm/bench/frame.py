"""What all benchmarks share: what is to be measured, what was found, turns, and how results are written down.

A *workload* says what to measure, a *measurement* is what was found of one thing on one side. Sides take turns, back
and forth. ``bench ddp`` and ``bench compile`` also share what is below: programs whose steps are timed. One of their
sides, "alone", does not communicate: what a step takes above that floor is its communication.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from symcomm import errors
from symcomm.bench.pictures import Bars, Panel
from symcomm.bench.run import Side, Tick
from symcomm.bench.table import machine, times

UNITS = {"ms": ("milliseconds", 1e3), "us": ("microseconds", 1e6)}
T = TypeVar("T")


class Workload:
    """What to measure. Subclasses are frozen dataclasses: their fields are the plan that is written down."""

    @property
    def pinned(self) -> bool:
        """Whether each rank keeps to a core."""
        return False

    def to_json(self, rows: Sequence[Any], **more: Any) -> dict[str, Any]:
        plan: Any = self
        return {"machine": machine(), **more, "plan": asdict(plan), "rows": list(rows)}


@dataclass(frozen=True)
class TurnsWorkload(Workload):
    """``rounds`` turns of every side, each of ``steps``."""

    ranks: int = 2
    rounds: int = 10  # many and short: others' load comes and goes
    steps: int = 20


@dataclass
class Measurement:
    """What was found of one thing on one side: seconds, once for every turn."""

    def seconds_of(self, name: str, best: bool = False) -> float:
        """Of the turns in that attribute."""
        return pick(getattr(self, name), best)

    def seconds(self, best: bool = False) -> Any:
        return self.seconds_of("turns", best)


def pick(turns: Sequence[float], best: bool) -> float:
    """What to show of them: the median, or the fastest."""
    return min(turns) if best else statistics.median(turns)


def has_core_each(ranks: int) -> bool:
    return ranks <= len(os.sched_getaffinity(0))


def in_turns(those: Sequence[T], rounds: int) -> Iterator[T]:
    """Every one of ``those``, in every round; back and forth, so that a load that grows hits all alike."""
    for number in range(rounds):
        yield from those[:: -1 if number % 2 else 1]


def slowest(answers: Sequence[dict[str, Any]], name: str) -> float:
    """The slowest rank's median."""
    return max(statistics.median(answer[name]) for answer in answers)


# --- programs whose steps are timed ------------------------------------------------------------------------------


@dataclass
class StepMeasurement(Measurement):
    """One program on one side. ``turns`` are seconds of a step: the slowest rank's median, once for every turn."""

    program: str
    side: str
    error: float  # how far its values are from those of one process, in units of their size
    turns: list[float] = field(default_factory=list)


def time_steps(
    sides: Mapping[str, Side], found: Sequence[StepMeasurement], workload: TurnsWorkload, what: str,
    names: Mapping[str, str], tick: Tick,
) -> None:  # fmt: skip
    """Fill in the turns of ``found``."""
    for figures in in_turns(found, workload.rounds):
        answers = sides[figures.side].ask(what, {"do": "time", "steps": workload.steps})
        figures.turns.append(slowest(answers, "seconds"))
        tick(f"{figures.program}, {names[figures.side]}")


def need_right(error: float, most: float, what: str, whose: str = "their") -> None:
    """Refuse to time what is not right."""
    if not error <= most:  # not: NaN is refused too
        raise errors.SymcommError(
            f"symcomm bench: {what.format(f'{error:.2g}')} of {whose} size apart, at most {most:g} is rounding); "
            "nothing was timed."
        )


def communication(found: Sequence[StepMeasurement], best: bool) -> dict[tuple[str, str], float]:
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


def step_cells(
    found: Sequence[StepMeasurement], best: bool, others: Sequence[str], word: Callable[[float], str], share: bool
) -> Iterator[list[str]]:
    """For each: what a step takes, what of it is communication, its share, and how much more that is on others."""
    above = communication(found, best)
    for figures in found:
        seconds, mine = figures.seconds(best), above.get((figures.program, figures.side))
        if mine is None:
            yield [word(seconds), *["-"] * (1 + share + len(others))]
            continue
        ratios = [above[figures.program, other] / mine if mine > 0 else None for other in others]
        yield [word(seconds), word(mine), *([f"{mine / seconds:.0%}"] if share else []), *map(times, ratios)]


def picture(found: Sequence[StepMeasurement], names: Mapping[str, str], unit: str, best: bool) -> list[Panel]:
    """What a step takes, and what of it is communication."""
    words, factor = UNITS[unit]
    steps = ((f.program, names[f.side], f.seconds(best) * factor) for f in found)
    above = ((program, names[side], s * factor) for (program, side), s in communication(found, best).items())
    return [Bars.of("a step", words, steps), Bars.of("of it communication", words, above)]


def as_json(figures: StepMeasurement, found: Sequence[StepMeasurement], unit: str) -> dict[str, Any]:
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
