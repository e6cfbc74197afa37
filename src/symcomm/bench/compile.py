"""``symcomm bench compile``: what collectives cost in graphs that ``torch.compile`` has made.

Four sides run the same graphs: without the collectives (the floor), on Gloo, on the symcomm backend with torch's own
lowering (every collective is an eager call and a wait), and with ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from symcomm import errors
from symcomm.bench import frame
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
class CompileWorkload(frame.TurnsWorkload):
    graphs: Sequence[str] = tuple(GRAPHS)
    scale: int = 1  # divides the graphs' width: for tests

    @property
    def turns(self) -> int:
        return len(self.graphs) * len(SIDES) * self.rounds


QUICK = {"rounds": 4, "steps": 10}


def ask(asked: frame.Asked) -> CompileWorkload:
    workload = asked.workload(CompileWorkload, QUICK)
    if workload.ranks not in (2, 4, 8):
        allowed = "2, 4 or 8 for compile, which divides 8 heads"
        raise errors.bad_argument("symcomm bench", "--ranks", workload.ranks, allowed)
    return workload


@dataclass
class CompileMeasurement(frame.StepMeasurement):
    nbytes: int = 0
    calls: int = 0


def run_compile_bench(workload: CompileWorkload, tick: Tick = quiet, seen: Seen = quiet) -> list[CompileMeasurement]:
    found: list[CompileMeasurement] = []
    with open_sides(list(SIDES), workload.ranks, pinned=False, worker=WORKER) as sides:
        for graph in workload.graphs:
            here = [_prepare(sides[name], name, graph, workload) for name in SIDES]
            frame.time_steps(sides, here, workload, f"running {graph}", SIDES, tick)
            found += here
            seen(found)
    return found


def _prepare(side: Any, name: str, graph: str, workload: CompileWorkload) -> CompileMeasurement:
    """Compile on one side; refuse to time wrong values."""
    what = f"compiling {graph}"
    prepared = side.ask(what, {"do": "prepare", "graph": graph, "scale": workload.scale}, COMPILE_SECONDS)
    error = 0.0
    if name != "alone":
        error = max(answer["apart"] for answer in side.ask(what, {"do": "check"}))
        wrong = f"{graph} on {SIDES[name]} does not give what one process gives"
        frame.need_right(error, TOLERANCE, wrong + " ({}", "its")
    return CompileMeasurement(graph, name, error, nbytes=prepared[0]["bytes"], calls=prepared[0]["calls"])


def as_table(found: Sequence[CompileMeasurement], workload: CompileWorkload, best: bool = False) -> bench_table.Table:
    head = ["graph", "collectives", "KiB", "side", "us/step", "communication (us)", "gloo / this", "torch's / this"]
    cells = frame.step_cells(found, best, ["gloo", "eager"], lambda seconds: f"{seconds * 1e6:.0f}", share=False)
    rows = [
        [f.program, str(f.calls), f"{f.nbytes / 1024:.0f}", SIDES[f.side], *timed]
        for f, timed in zip(found, cells, strict=True)
    ]
    return f"compiled graphs, {workload.ranks} ranks", head, rows


def picture(found: Sequence[CompileMeasurement], workload: CompileWorkload, best: bool = False) -> list[Panel]:
    return frame.picture(found, SIDES, "us", best)


def note(found: Sequence[CompileMeasurement], workload: CompileWorkload) -> str:
    return f"results are at most {max(f.error for f in found):.1g} of their size from those of one process"


def to_json(found: Sequence[CompileMeasurement], workload: CompileWorkload) -> dict[str, Any]:
    rows = [
        {"graph": f.program, "bytes": f.nbytes, "collectives": f.calls, **frame.as_json(f, found, "us")} for f in found
    ]
    return workload.to_json(rows)
