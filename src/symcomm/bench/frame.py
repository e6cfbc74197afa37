"""What all benchmarks share: workloads, measurements, turns, and how results are written down.

A *workload* says what to measure; a *measurement* is what one side did. Sides take turns, back and forth. The module of
a benchmark has ``ask`` (the workload that the command line asks for), ``run_NAME_bench(workload, tick, seen)``,
``as_table`` and ``picture``; where the usual will not do, also ``note``, ``to_json`` and ``keep``. cli/bench.py calls
them. ``bench ddp``, ``steps`` and ``compile`` also share the second half of this file: programs whose steps are timed.
One of their sides, "alone", does not communicate: what a step takes above that floor is communication.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from symcomm import errors
from symcomm.bench.pictures import Bars, Panel
from symcomm.bench.run import START_DEADLINE, Side, Tick
from symcomm.bench.table import machine, times

CALL = "symcomm bench"
UNITS = {"ms": ("milliseconds", 1e3), "us": ("microseconds", 1e6)}
T = TypeVar("T")
W = TypeVar("W", bound="Workload")


@dataclass(frozen=True)
class Asked:
    """The options of ``symcomm bench``. Each benchmark uses some of them."""

    what: str
    ranks: int | None = None
    rounds: int | None = None
    iters: int = 0
    quick: bool = False
    pin: bool = True
    against: str = ""
    collectives: str = "all_reduce"
    neighbours: str = ""
    python: str = ""
    shape: Mapping[str, int] = field(default_factory=dict)  # of bench llm's model
    heap: bool = False

    def workload(self, kind: type[W], quick: Mapping[str, Any], least: int = 2, **more: Any) -> W:
        """A workload of that kind: its defaults, what ``--quick`` changes, and the options that it has."""
        check_numbers(self.what, least if self.ranks is None else self.ranks, least, self.rounds, iters=self.iters)
        given = {"ranks": self.ranks, "rounds": self.rounds, "steps": self.iters or None, "pin": self.pin}
        own = {f.name for f in fields(kind)}  # type: ignore[arg-type]  # all are dataclasses
        options = {name: value for name, value in given.items() if name in own and value is not None}
        return kind(**{**(quick if self.quick else {}), **options, **more})


def check_numbers(what: str, ranks: int, least: int, rounds: int | None, **others: int) -> None:
    if ranks < least:
        raise errors.bad_argument(CALL, "--ranks", ranks, f"{least} or more for {what}")
    for option, value in others.items():
        if value < 0:
            raise errors.bad_argument(CALL, f"--{option}", value, "0 or more")
    if rounds is not None and rounds < 1:
        raise errors.bad_argument(CALL, "--rounds", rounds, "1 or more")


class Workload:
    """What to measure. Subclasses are frozen dataclasses, and their fields are written into the JSON file."""

    @property
    def pinned(self) -> bool:
        """Whether each rank keeps to a core."""
        return False

    def how(self, best: bool) -> str:
        return ""

    def to_json(self, rows: Sequence[Any], **more: Any) -> dict[str, Any]:
        """``rows``: measurements, or what to write of them."""
        plan: Any = self
        written = [row if isinstance(row, dict) else asdict(row) for row in rows]
        return {"machine": machine(), **more, "plan": asdict(plan), "rows": written}


@dataclass(frozen=True)
class TurnsWorkload(Workload):
    """``rounds`` turns of every side, each of ``steps``."""

    ranks: int = 2
    rounds: int = 10  # many and short, since other programs' load comes and goes
    steps: int = 20

    def how(self, best: bool) -> str:
        return "fastest turn" if best else f"median of {self.rounds} turns of {self.steps} steps"


@dataclass
class Measurement:
    """What one side did with one thing: lists of seconds, one for each turn."""

    def seconds_of(self, name: str, best: bool = False) -> float:
        return pick(getattr(self, name), best)

    def seconds(self, best: bool = False) -> Any:
        return self.seconds_of("turns", best)


def pick(turns: Sequence[float], best: bool) -> float:
    """The figure to show: the median, or the fastest."""
    return min(turns) if best else statistics.median(turns)


def has_core_each(ranks: int) -> bool:
    return ranks <= len(os.sched_getaffinity(0))


def in_turns(those: Sequence[T], rounds: int) -> Iterator[T]:
    """All of ``those`` in every round, back and forth, so that a growing load hits all alike."""
    for number in range(rounds):
        yield from those[:: -1 if number % 2 else 1]


@contextlib.contextmanager
def forked(what: str, main: Callable[..., None], *args: Any) -> Iterator[tuple[Any, Any]]:
    """A fork that runs ``main(*args, pipe)``: our end of the pipe, and what came first. It is killed at the end."""
    context: Any = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=main, args=(*args, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(START_DEADLINE):
            raise errors.ResourceError(f"{CALL}: {what} did not start.")
        yield ours, ours.recv()
    finally:
        process.kill()
        process.join()


def slowest(answers: Sequence[dict[str, Any]], name: str) -> float:
    """The slowest rank's median."""
    return max(statistics.median(answer[name]) for answer in answers)


# --- programs whose steps are timed ------------------------------------------------------------------------------


@dataclass
class StepMeasurement(Measurement):
    """One program on one side. ``turns``: seconds of a step, the slowest rank's median in each turn."""

    program: str
    side: str
    error: float  # relative difference from the values of one process
    turns: list[float] = field(default_factory=list)


def time_steps(
    sides: Mapping[str, Side], found: Sequence[StepMeasurement], workload: TurnsWorkload, what: str,
    names: Mapping[str, str], tick: Tick,
) -> None:  # fmt: skip
    for figures in in_turns(found, workload.rounds):
        answers = sides[figures.side].ask(what, {"do": "time", "steps": workload.steps})
        figures.turns.append(slowest(answers, "seconds"))
        tick(f"{figures.program}, {names[figures.side]}")


def need_right(error: float, most: float, what: str, whose: str = "their") -> None:
    if not error <= most:  # "not <=" refuses NaN too
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
    """For each measurement: time of a step, its communication, that one's share, and others' communication by it."""
    above = communication(found, best)
    for figures in found:
        seconds, mine = figures.seconds(best), above.get((figures.program, figures.side))
        if mine is None:
            yield [word(seconds), *["-"] * (1 + share + len(others))]
            continue
        ratios = [above[figures.program, other] / mine if mine > 0 else None for other in others]
        yield [word(seconds), word(mine), *([f"{mine / seconds:.0%}"] if share else []), *map(times, ratios)]


def picture(found: Sequence[StepMeasurement], names: Mapping[str, str], unit: str, best: bool) -> list[Panel]:
    words, factor = UNITS[unit]
    steps = ((f.program, names[f.side], f.seconds(best) * factor) for f in found)
    above = ((program, names[side], s * factor) for (program, side), s in communication(found, best).items())
    return [Bars.of("a step", words, steps), Bars.of("of it communication", words, above)]


def as_json(figures: StepMeasurement, found: Sequence[StepMeasurement], unit: str) -> dict[str, Any]:
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
