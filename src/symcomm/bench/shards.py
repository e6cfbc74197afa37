"""``symcomm bench shards``: what logical shards add to a training step.

Two sides train the same models on the same micro-batches with Symcomm's DistributedDataParallel: a plain one, which
adds up the gradients of several micro-batches a rank in ``no_sync``, and one with logical shards. With one shard a rank
both must end with the same bits.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from symcomm import errors
from symcomm.bench import ddp, frame
from symcomm.bench import table as bench_table
from symcomm.bench.ddp_worker import MODELS
from symcomm.bench.frame import Asked
from symcomm.bench.pictures import Bars, Panel
from symcomm.bench.run import Seen, Side, Tick, open_sides, quiet

SIDES = {"plain": "plain", "shards": "logical shards"}
WORKER = "symcomm.bench.shards_worker"


@dataclass(frozen=True)
class ShardsWorkload(frame.TurnsWorkload):
    steps: int = 4
    models: Sequence[str] = tuple(MODELS)
    per_rank: Sequence[int] = (1, 2, 4)  # shards of a rank
    scale: int = 1  # divides the models' width: for tests

    @property
    def turns(self) -> int:
        return len(self.models) * len(self.per_rank) * len(SIDES) * self.rounds


QUICK = {"rounds": 4, "steps": 2}


def ask(asked: Asked) -> ShardsWorkload:
    return asked.workload(ShardsWorkload, QUICK)


@dataclass
class ShardsMeasurement(frame.Measurement):
    """One model with so many shards a rank. ``plain``, ``shards``: seconds of a step, in each turn."""

    model: str
    per_rank: int
    error: float
    plain: list[float] = field(default_factory=list)
    shards: list[float] = field(default_factory=list)

    def ratio(self, best: bool) -> float:
        if best:
            return min(self.shards) / min(self.plain)
        return statistics.median(ours / plain for ours, plain in zip(self.shards, self.plain, strict=True))


def run_shards_bench(workload: ShardsWorkload, tick: Tick = quiet, seen: Seen = quiet) -> list[ShardsMeasurement]:
    found: list[ShardsMeasurement] = []
    for model in workload.models:
        with open_sides(list(SIDES), workload.ranks, pinned=False, worker=WORKER) as sides:
            for per_rank in workload.per_rank:
                found.append(_measure(sides, model, per_rank, workload, tick))
                seen(found)
    return found


def _measure(
    sides: dict[str, Side], model: str, per_rank: int, workload: ShardsWorkload, tick: Tick
) -> ShardsMeasurement:
    what = f"training {model}, {per_rank} shards a rank"
    answers = {}
    for name, side in sides.items():
        side.ask(what, {"do": "prepare", "model": model, "scale": workload.scale, "per_rank": per_rank})
        answers[name] = side.ask(what, {"do": "check", "steps": ddp.CHECK_STEPS})
    error = ddp.disagreement(answers["plain"], answers["shards"])
    frame.need_right(error, ddp.TOLERANCE, f"{what}, does not train as without logical shards (gradients are {{}}")
    if per_rank == 1 and answers["plain"][0]["parameters"] != answers["shards"][0]["parameters"]:
        raise errors.SymcommError(f"symcomm bench: {what}, ends with other bits than plain DDP; nothing was timed.")
    figures = ShardsMeasurement(model, per_rank, error)
    for name in frame.in_turns(list(SIDES), workload.rounds):
        timed = sides[name].ask(what, {"do": "time", "steps": workload.steps})
        getattr(figures, name).append(frame.slowest(timed, "seconds"))
        tick(f"{model}, {SIDES[name]}")
    return figures


def as_table(found: Sequence[ShardsMeasurement], workload: ShardsWorkload, best: bool = False) -> bench_table.Table:
    head = ["model", "shards a rank", "plain (ms/step)", "logical shards (ms/step)", "logical shards / plain"]
    rows = []
    for figures in found:
        cells = [f"{figures.seconds_of(side, best) * 1e3:.1f}" for side in SIDES]
        rows.append([figures.model, str(figures.per_rank), *cells, f"{figures.ratio(best):.2f}x"])
    return f"logical shards, {workload.ranks} ranks", head, rows


def note(found: Sequence[ShardsMeasurement], workload: ShardsWorkload) -> str:
    return "with one shard a rank, weights are those of plain DDP, bit for bit"


def picture(found: Sequence[ShardsMeasurement], workload: ShardsWorkload, best: bool = False) -> list[Panel]:
    steps = (
        (f"{f.model} x {f.per_rank}", SIDES[side], f.seconds_of(side, best) * 1e3) for f in found for side in SIDES
    )
    return [Bars.of("a step", "milliseconds", steps)]
