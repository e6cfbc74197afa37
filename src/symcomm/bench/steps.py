"""``symcomm bench steps``: training programs of several kinds, and what their communication costs.

FSDP2, tensor parallel, a pipeline and an embedding model, written for torch.distributed. Three sides run the same
programs: without any exchange (the floor), on Gloo, on the symcomm backend; with ``--heap`` also with the shared heap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from symcomm.bench import frame
from symcomm.bench import table as bench_table
from symcomm.bench.frame import Asked
from symcomm.bench.pictures import Panel
from symcomm.bench.run import Seen, Side, Tick, open_sides, quiet
from symcomm.bench.steps_worker import PROGRAMS

SIDES = {
    "alone": "no communication",
    "gloo": "gloo",
    "symcomm": "symcomm",
    "heap": "symcomm, shared heap",
}
WORKER = "symcomm.bench.steps_worker"
CHECK_STEPS = 3
TOLERANCE = 1e-4  # of losses: rounding differs with the order of sums; a rank left out shows as 0.1 or more


@dataclass(frozen=True)
class StepsWorkload(frame.TurnsWorkload):
    steps: int = 4
    programs: Sequence[str] = tuple(PROGRAMS)
    heap: bool = False
    scale: int = 1  # divides the programs' width: for tests

    @property
    def sides(self) -> list[str]:
        return [side for side in SIDES if side != "heap" or self.heap]

    @property
    def turns(self) -> int:
        return len(self.programs) * len(self.sides) * self.rounds


QUICK = {"rounds": 4, "steps": 2}


def ask(asked: Asked) -> StepsWorkload:
    return asked.workload(StepsWorkload, QUICK, heap=asked.heap)


@dataclass
class StepsMeasurement(frame.StepMeasurement):
    """One program on one side. ``error`` is that of losses, beside Gloo's."""

    parameters: int = 0
    nbytes: int = 0  # of our collectives, on all ranks
    direct: int = 0  # of those, how many were not copied through staging areas


def run_steps_bench(workload: StepsWorkload, tick: Tick = quiet, seen: Seen = quiet) -> list[StepsMeasurement]:
    found: list[StepsMeasurement] = []
    for program in workload.programs:
        what = f"running {program}"
        with open_sides(workload.sides, workload.ranks, pinned=False, worker=WORKER) as sides:
            here = _check(sides, program, workload, what)
            frame.time_steps(sides, here, workload, what, SIDES, tick)
            for figures in here:
                answers = sides[figures.side].ask(what, {"do": "copies"})
                figures.nbytes = sum(answer.get("bytes", 0) for answer in answers)
                figures.direct = sum(answer.get("direct_bytes", 0) for answer in answers)
        found += here
        seen(found)
    return found


def _check(sides: dict[str, Side], program: str, workload: StepsWorkload, what: str) -> list[StepsMeasurement]:
    """Run a few steps on every side; refuse to time one whose losses are not Gloo's."""
    prepared = {
        n: s.ask(what, {"do": "prepare", "program": program, "scale": workload.scale}) for n, s in sides.items()
    }
    losses = {
        name: [answer["losses"] for answer in side.ask(what, {"do": "check", "steps": CHECK_STEPS})]
        for name, side in sides.items()
    }
    found = []
    for name in sides:
        error = 0.0 if name == "alone" else disagreement(losses["gloo"], losses[name])
        frame.need_right(error, TOLERANCE, f"{program} on {SIDES[name]} has other losses than on Gloo" + " ({}")
        found.append(StepsMeasurement(program, name, error, parameters=prepared[name][0]["parameters"]))
    return found


def disagreement(right: Sequence[Sequence[float]], got: Sequence[Sequence[float]]) -> float:
    """The largest relative difference of two sides' losses, by rank and step."""
    pairs = [pair for r, g in zip(right, got, strict=True) for pair in zip(r, g, strict=True)]
    apart = [0.0 if a == b else abs(a - b) / abs(a) if a else float("inf") for a, b in pairs]
    return max(d if d == d else float("inf") for d in apart)


def as_table(found: Sequence[StepsMeasurement], workload: StepsWorkload, best: bool = False) -> bench_table.Table:
    head = ["program", "parameters", "side", "ms/step", "communication (ms)", "share", "gloo / this", "direct"]
    cells = frame.step_cells(found, best, ["gloo"], lambda seconds: f"{seconds * 1e3:.1f}", share=True)
    rows = [
        [f.program, f"{f.parameters / 1e6:.1f} M", SIDES[f.side], *timed,
         f"{f.direct / f.nbytes:.0%}" if f.nbytes else "-"]
        for f, timed in zip(found, cells, strict=True)
    ]  # fmt: skip
    return f"training programs, {workload.ranks} ranks", head, rows


def picture(found: Sequence[StepsMeasurement], workload: StepsWorkload, best: bool = False) -> list[Panel]:
    return frame.picture(found, SIDES, "ms", best)


def note(found: Sequence[StepsMeasurement], workload: StepsWorkload) -> str:
    return f"losses are at most {max(f.error for f in found):.1g} of their size from Gloo's"


def to_json(found: Sequence[StepsMeasurement], workload: StepsWorkload) -> dict[str, Any]:
    rows = [
        {
            "program": f.program, "parameters": f.parameters, "bytes": f.nbytes, "direct_bytes": f.direct,
            **frame.as_json(f, found, "ms"),
        }
        for f in found
    ]  # fmt: skip
    return workload.to_json(rows)
