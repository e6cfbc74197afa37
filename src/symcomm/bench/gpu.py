"""``symcomm bench gpu``: all_reduce of ranks that share a GPU, ours beside Gloo's and torch's symmetric memory.

All sides run in the same processes, in turns: once while the processes take turns on the GPU, and once while they use
it at the same time (MPS). Times are per operation: "in a row" does not wait for the GPU in between, "one by one" waits
after each.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from symcomm import errors
from symcomm.bench import table as bench_table
from symcomm.bench.frame import Asked, Measurement, Workload
from symcomm.bench.pictures import Curves, Panel
from symcomm.bench.plans import running
from symcomm.bench.run import Seen, Tick, quiet
from symcomm.cuda.devices import need_cuda
from symcomm.launcher.mps import multi_process_service
from symcomm.memory.limits import format_bytes

SIDES = {"ordinary": "ordinary", "symmetric": "symmetric", "gloo": "gloo", "torch": "torch's symmetric memory"}
TURNS, MPS = "in turns", "MPS"  # how processes share the GPU
WORKER = "symcomm.bench.gpu_worker"
QUICK = {"rounds": 2, "sizes": (4 << 10, 1 << 20, 64 << 20)}
THEIRS = ("gloo", "torch")
START_S, STEP_S = 120.0, 30.0  # deadlines: to start, which may compile kernels; for a side's turn


@dataclass(frozen=True)
class GpuWorkload(Workload):
    """``rounds`` turns of every side at every size."""

    ranks: int = 2
    rounds: int = 5
    sizes: Sequence[int] = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
    without: Sequence[str] = ()  # sides to leave out

    @property
    def turns(self) -> int:
        return 2 * len(self.sizes) * len(SIDES) * self.rounds


def ask(asked: Asked) -> GpuWorkload:
    return asked.workload(GpuWorkload, QUICK)


@dataclass
class GpuMeasurement(Measurement):
    """One size on one side. ``row`` and ``single``: seconds of an operation in each turn."""

    sharing: str
    nbytes: int
    side: str
    row: list[float] = field(default_factory=list)
    single: list[float] = field(default_factory=list)

    def seconds(self, best: bool = False) -> tuple[float, float]:
        """(in a row, one by one)"""
        return self.seconds_of("row", best), self.seconds_of("single", best)


def run_gpu_bench(workload: GpuWorkload, tick: Tick = quiet, seen: Seen = quiet) -> list[GpuMeasurement]:
    """Measure both ways to share the GPU; only the first where this machine has no MPS."""
    need_cuda("symcomm bench gpu")
    found = _measure(workload, TURNS, contextlib.nullcontext, tick)
    seen(found)
    try:
        with multi_process_service():
            pass
    except (errors.CallerError, errors.ResourceError) as error:
        print(f"# with MPS: not measured. {error}", file=sys.stderr)
        return found
    found += _measure(workload, MPS, multi_process_service, tick)
    seen(found)
    return found


class _StoodStill(Exception):
    """The ranks said nothing for STEP_S; ``doing``: their last words."""

    def __init__(self, doing: dict[str, Any]):
        self.doing = doing


def _measure(
    workload: GpuWorkload, sharing: str, service: Callable[[], AbstractContextManager[Mapping[str, str] | None]],
    tick: Tick,
) -> list[GpuMeasurement]:  # fmt: skip
    """Run the ranks. If a side that is not ours stands still, say so and leave it out from that size on.

    Each try has a ``service`` of its own: one whose clients were killed while they used the GPU lets nobody in."""
    found: dict[tuple[int, str], GpuMeasurement] = {}
    while True:
        try:
            with service() as environment:
                _run(workload, sharing, environment or {}, tick, found)
            return list(found.values())
        except _StoodStill as still:
            side, nbytes = still.doing["doing"], still.doing["nbytes"]
        words = f"{SIDES[side]} stood still for {STEP_S:.0f} s with {format_bytes(nbytes)} ({sharing})"
        print(f"# {words}; it is not measured from that size on.", file=sys.stderr, flush=True)
        found.pop((nbytes, side), None)
        for again in [key for key in found if key[0] == nbytes]:  # start its rounds over, so that sides take turns
            del found[again]
        sizes = tuple(size for size in workload.sizes if size >= nbytes)
        workload = replace(workload, sizes=sizes, without=(*workload.without, side))


def _run(
    workload: GpuWorkload, sharing: str, environment: Mapping[str, str], tick: Tick,
    found: dict[tuple[int, str], GpuMeasurement],
) -> None:  # fmt: skip
    """The first rank writes a line before each turn, saying what comes, and one after it."""
    doing: dict[str, Any] = {}
    env = {**environment, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    try:
        with running(
            "symcomm bench gpu", WORKER, workload, workload.ranks, env, (START_S, STEP_S), _words,
            lambda _, words, **how: subprocess.Popen(words, **how),
        ) as lines:  # fmt: skip
            for turn in map(json.loads, lines):
                if "doing" in turn:
                    doing = turn
                    continue
                nbytes, side = turn["nbytes"], turn["side"]
                figures = found.setdefault((nbytes, side), GpuMeasurement(sharing, nbytes, side))
                figures.row.append(turn["row"])
                figures.single.append(turn["single"])
                tick(f"{format_bytes(nbytes)}, {SIDES[side]}")
    except errors.DeadlineError:
        if doing.get("doing") in THEIRS:
            raise _StoodStill(doing) from None
        raise


def _words(line: str) -> str:
    turn = json.loads(line)
    return f"{SIDES[turn.get('doing') or turn['side']]} with {format_bytes(turn['nbytes'])}"


def as_table(found: Sequence[GpuMeasurement], workload: GpuWorkload, best: bool = False) -> bench_table.Table:
    """Microseconds in a row / one by one; Gloo's are compared with ordinary tensors, torch's with symmetric ones."""
    head = ["GPU shared", "size", *(f"{words} (us)" for words in SIDES.values())]
    head += ["gloo / ordinary", "torch's / symmetric"]
    cases: dict[tuple[str, int], dict[str, GpuMeasurement]] = {}
    for figures in found:
        cases.setdefault((figures.sharing, figures.nbytes), {})[figures.side] = figures
    rows = []
    for (sharing, nbytes), sides in cases.items():
        times = {side: figures.seconds(best) for side, figures in sides.items()}
        cells = ["{:.0f} / {:.0f}".format(*(s * 1e6 for s in times[side])) if side in times else "-" for side in SIDES]
        for side, ours in (("gloo", "ordinary"), ("torch", "symmetric")):
            pairs = zip(times[side], times[ours], strict=True) if side in times else ()
            cells.append(" / ".join(bench_table.times(theirs / mine) for theirs, mine in pairs) or "-")
        rows.append([sharing, format_bytes(nbytes), *cells])
    return f"all_reduce, float32 sum, {workload.ranks} ranks on one GPU: in a row / one by one", head, rows


def note(found: Sequence[GpuMeasurement], workload: GpuWorkload) -> str:
    sides = {figures.side for figures in found}
    return "" if "torch" in sides else "torch's symmetric memory refused ranks that share a GPU"


def picture(found: Sequence[GpuMeasurement], workload: GpuWorkload, best: bool = False) -> list[Panel]:
    panels: list[Panel] = []
    for sharing in dict.fromkeys(f.sharing for f in found):
        lines: dict[str, list[tuple[float, float]]] = {}
        for f in (f for f in found if f.sharing == sharing):
            lines.setdefault(SIDES[f.side], []).append((f.nbytes, f.seconds(best)[0] * 1e6))
        panels.append(Curves(f"GPU shared: {sharing}", "size", "microseconds in a row", lines, format_bytes))
    return panels


def to_json(found: Sequence[GpuMeasurement], workload: GpuWorkload) -> dict[str, Any]:
    rows = [
        {
            "sharing": f.sharing, "nbytes": f.nbytes, "side": f.side,
            "row_us": [s * 1e6 for s in f.row], "single_us": [s * 1e6 for s in f.single],
        }
        for f in found
    ]  # fmt: skip
    return workload.to_json(rows)
