"""``symcomm bench ddp``: what data parallel training costs beyond each rank's own work.

Four sides train the same model from the same parameters on the same batches: every rank alone (the floor), torch's
DistributedDataParallel on Gloo, the same on the symcomm backend, and Symcomm's own. Every model has fresh processes, so
that its memory is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from symcomm.bench import frame
from symcomm.bench import table as bench_table
from symcomm.bench.ddp_worker import MODELS
from symcomm.bench.frame import Asked
from symcomm.bench.pictures import Panel
from symcomm.bench.run import Seen, Side, Tick, open_sides, quiet

SIDES = {
    "alone": "no DDP",
    "gloo": "torch DDP, gloo",
    "symcomm": "torch DDP, symcomm",
    "ours": "symcomm DDP",
}
WORKER = "symcomm.bench.ddp_worker"
CHECK_STEPS = 4  # DDP regroups its buckets after the first
# Rounding differs with the order in which gradients are added: 1e-5 is usual. A rank left out shows as 0.1 or more.
TOLERANCE = 0.01


@dataclass(frozen=True)
class DdpWorkload(frame.TurnsWorkload):
    steps: int = 4
    models: Sequence[str] = tuple(MODELS)
    scale: int = 1  # divides the models' width: for tests

    @property
    def turns(self) -> int:
        return len(self.models) * len(SIDES) * self.rounds


QUICK = {"rounds": 4, "steps": 2}


def ask(asked: Asked) -> DdpWorkload:
    return asked.workload(DdpWorkload, QUICK)


@dataclass
class DdpMeasurement(frame.StepMeasurement):
    """One model on one side. ``error`` is that of gradients and losses."""

    parameters: int = 0
    peak: int = 0  # bytes more than before the model, on the rank that needs most
    share: int = 0  # the same at the end, where memory that ranks share is divided among them


def run_ddp_bench(workload: DdpWorkload, tick: Tick = quiet, seen: Seen = quiet) -> list[DdpMeasurement]:
    found: list[DdpMeasurement] = []
    for model in workload.models:
        found += _measure(workload, model, tick)
        seen(found)
    return found


def _measure(workload: DdpWorkload, model: str, tick: Tick) -> list[DdpMeasurement]:
    what = f"training {model}"
    with open_sides(list(SIDES), workload.ranks, pinned=False, worker=WORKER) as sides:
        found = _check(sides, model, workload, what)
        frame.time_steps(sides, found, workload, what, SIDES, tick)
        for figures in found:
            answers = sides[figures.side].ask(what, {"do": "memory"})
            figures.peak = max(answer["peak"] for answer in answers)
            figures.share = max(answer["share"] for answer in answers)
    return found


# --- values ------------------------------------------------------------------------------------------------------


def _check(sides: dict[str, Side], model: str, workload: DdpWorkload, what: str) -> list[DdpMeasurement]:
    """Train a few steps on every side; refuse to time one that learns something else than the others."""
    found, reference = [], None
    for name, side in sides.items():
        prepared = side.ask(what, {"do": "prepare", "model": model, "scale": workload.scale})
        answers = side.ask(what, {"do": "check", "steps": CHECK_STEPS})
        reference = reference or answers
        error = disagreement(reference, answers)
        wrong = f"{model} on {SIDES[name]} does not train as one process with all batches does"
        frame.need_right(error, TOLERANCE, wrong + " (gradients or losses are {}")
        found.append(DdpMeasurement(model, name, error, parameters=prepared[0]["parameters"]))
    return found


def disagreement(reference: list[dict[str, Any]], answers: list[dict[str, Any]]) -> float:
    """The largest difference between two sides' losses and gradients, in units of their size.

    Infinite when the ranks of a side ended with different parameters."""
    if len({answer["parameters"] for answer in answers}) > 1:
        return float("inf")
    worst = 0.0
    for right, got in zip(reference, answers, strict=True):
        pairs = [(r, g, abs(r)) for r, g in zip(right["losses"], got["losses"], strict=True)]
        largest = max(gradient["size"] for gradient in right["gradients"])
        for r, g in zip(right["gradients"], got["gradients"], strict=True):
            size = max(r["size"], 1e-6 * largest)  # a gradient of nothing but rounding has no size
            pairs += [(a, b, size) for a, b in zip(r["some"], g["some"], strict=True)]
        differences = [abs(a - b) / size if size else abs(a - b) for a, b, size in pairs]
        worst = max([worst, *(d if d == d else float("inf") for d in differences)])
    return worst


# --- words -------------------------------------------------------------------------------------------------------


def as_table(found: Sequence[DdpMeasurement], workload: DdpWorkload, best: bool = False) -> bench_table.Table:
    head = ["model", "parameters", "side", "ms/step", "communication (ms)", "share", "gloo / this"]
    head += ["peak RSS (MiB)", "PSS (MiB)"]
    cells = frame.step_cells(found, best, ["gloo"], lambda seconds: f"{seconds * 1e3:.1f}", share=True)
    rows = [
        [f.program, f"{f.parameters / 1e6:.2f} M", SIDES[f.side], *timed, f"{f.peak / 2**20:.0f}",
         f"{f.share / 2**20:.0f}"]
        for f, timed in zip(found, cells, strict=True)
    ]  # fmt: skip
    return f"data parallel training, {workload.ranks} ranks", head, rows


def picture(found: Sequence[DdpMeasurement], workload: DdpWorkload, best: bool = False) -> list[Panel]:
    return frame.picture(found, SIDES, "ms", best)


def note(found: Sequence[DdpMeasurement], workload: DdpWorkload) -> str:
    return f"gradients are at most {max(f.error for f in found):.1g} of their size from those of one process"


def to_json(found: Sequence[DdpMeasurement], workload: DdpWorkload) -> dict[str, Any]:
    rows = [
        {
            "model": f.program, "parameters": f.parameters, "peak_mib": f.peak / 2**20, "pss_mib": f.share / 2**20,
            **frame.as_json(f, found, "ms"),
        }
        for f in found
    ]  # fmt: skip
    return workload.to_json(rows)
