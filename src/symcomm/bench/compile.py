"""``symcomm bench compile``: what collectives cost in graphs that ``torch.compile`` has made.

Four sides run the same graphs: without the collectives (the floor), on Gloo, on the symcomm backend with torch's own
lowering (every collective is an eager call and a wait), and with ours. What a step takes above the floor is its
communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from symcomm import errors
from symcomm.bench import steps
from symcomm.bench import table as bench_table
from symcomm.bench.compile_worker import GRAPHS
from symcomm.bench.pictures import Panel
from symcomm.bench.run import Seen, Tick, open_sides, quiet

SIDES = {
    "alone": "no communication",
    "gloo": "gloo",
    "eager": "symcomm, torch's lowering",
    "symcomm": "symcomm, ours",
}
WORKER = "symcomm.bench.compile_worker"
COMPILE_SECONDS = 300.0  # a first compilation, on a busy machine
TOLERANCE = 1e-3  # rounding differs with the order of sums; a rank left out shows as 0.1 or more


@dataclass(frozen=True)
class Workload:
    """What to measure: ``rounds`` turns of every side, each of ``steps``."""

    ranks: int = 2
    rounds: int = 10
    steps: int = 20
    graphs: Sequence[str] = tuple(GRAPHS)
    scale: int = 1  # divides the graphs' width: for tests

    @property
    def turns(self) -> int:
        return len(self.graphs) * len(SIDES) * self.rounds


@dataclass
class Measurement(steps.Measurement):
    """One graph on one side."""

    nbytes: int = 0
    calls: int = 0


def run_compile_bench(workload: Workload, tick: Tick = quiet, seen: Seen = quiet) -> list[Measurement]:
    """Measure every graph on every side; ``tick`` is told after every turn, ``seen`` what is known after a graph."""
    found: list[Measurement] = []
    with open_sides(list(SIDES), workload.ranks, pinned=False, worker=WORKER) as sides:
        for graph in workload.graphs:
            here = [_prepare(sides[name], name, graph, workload) for name in SIDES]
            steps.take_turns(sides, here, workload, f"running {graph}", SIDES, tick)
            found += here
            seen(found)
    return found


def _prepare(side: Any, name: str, graph: str, workload: Workload) -> Measurement:
    """Compile on one side; refuse to time what does not give the right values."""
    what = f"compiling {graph}"
    prepared = side.ask(what, {"do": "prepare", "graph": graph, "scale": workload.scale}, COMPILE_SECONDS)
    error = 0.0
    if name != "alone":
        error = max(answer["apart"] for answer in side.ask(what, {"do": "check"}))
        if not error <= TOLERANCE:  # not: NaN is refused too
            raise errors.SymcommError(
                f"symcomm bench: {graph} on {SIDES[name]} does not give what one process gives ({error:.2g} of its "
                f"size apart, at most {TOLERANCE:g} is rounding); nothing was timed."
            )
    return Measurement(graph, name, error, nbytes=prepared[0]["bytes"], calls=prepared[0]["calls"])


def as_table(found: Sequence[Measurement], workload: Workload, best: bool = False) -> bench_table.Table:
    head = ["graph", "collectives", "KiB", "side", "us/step", "communication (us)", "gloo / this", "torch's / this"]
    above = steps.communication(found, best)
    rows = []
    for figures in found:
        mine = above.get((figures.program, figures.side))
        row = [figures.program, str(figures.calls), f"{figures.nbytes / 1024:.0f}", SIDES[figures.side]]
        row.append(f"{figures.seconds(best) * 1e6:.0f}")
        if mine is None:
            row += ["-", "-", "-"]
        else:
            ratios = [above[figures.program, other] / mine if mine > 0 else None for other in ("gloo", "eager")]
            row += [f"{mine * 1e6:.0f}", *map(bench_table.times, ratios)]
        rows.append(row)
    return f"compiled graphs, {workload.ranks} ranks", head, rows


def picture(found: Sequence[Measurement], workload: Workload, best: bool = False) -> list[Panel]:
    return steps.picture(found, SIDES, "us", best)


def note(found: Sequence[Measurement]) -> str:
    return f"results are at most {max(f.error for f in found):.1g} of their size from those of one process"


def to_json(found: Sequence[Measurement], workload: Workload) -> dict[str, Any]:
    """Everything measured, in microseconds."""
    rows = [
        {"graph": f.program, "bytes": f.nbytes, "collectives": f.calls, **steps.as_json(f, found, "us")} for f in found
    ]
    return {"machine": bench_table.machine(), "plan": asdict(workload), "rows": rows}
