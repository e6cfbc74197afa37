"""``symcomm bench attach``: from which size on is reading a peer's ordinary tensor by system call (cross-memory attach)
faster than copying through shared memory? Later groups use the answer.

Two groups of the same ranks take turns: one always attaches, the other never does.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

from symcomm import errors
from symcomm.bench import table as bench_table
from symcomm.bench.frame import Asked, Workload, has_core_each, pick
from symcomm.bench.pictures import Bars, Panel
from symcomm.bench.run import Seen, Tick, quiet
from symcomm.collectives.limits import NO_BYTES, Limits
from symcomm.group import calibration
from symcomm.memory.limits import format_bytes
from symcomm.preflight import check_cache_directory

CALLS = ("all_to_all", "all_gather", "scatter")
SIZES = tuple(16 << 10 << k for k in range(8))  # of a piece: 16 KiB to 2 MiB
GAIN = 1.05  # on average; less is not worth another path
LOSS = 0.9  # at the largest size that is measured
FEWEST = Limits.attach_ranks
MOST = 16  # ranks, unless the caller says how many
MOST_RANKS = 128  # their tensors have 64 GiB together
DEADLINE = 120.0  # seconds for one size, if every rank has a core


@dataclass(frozen=True)
class AttachWorkload(Workload):
    ranks: int = field(default_factory=lambda: usual_ranks())
    rounds: int = 9
    seconds: float = 0.01  # of one turn, at least
    kept: bool = True  # for groups to come

    @property
    def where(self) -> str:
        return calibration.ROOMY if self.pinned else calibration.CROWDED

    @property
    def pinned(self) -> bool:
        return has_core_each(self.ranks)

    @property
    def deadline(self) -> float:
        return DEADLINE * max(1.0, self.ranks / len(os.sched_getaffinity(0)))

    @property
    def turns(self) -> int:
        return len(CALLS) * len(SIZES)


def usual_ranks() -> int:
    return min(max(FEWEST, len(os.sched_getaffinity(0))), MOST)


QUICK: dict[str, Any] = {"rounds": 5, "seconds": 0.003, "kept": False}


def ask(asked: Asked) -> AttachWorkload:
    workload = asked.workload(AttachWorkload, QUICK, FEWEST)
    if workload.ranks > MOST_RANKS:
        raise errors.bad_argument("symcomm bench", "--ranks", workload.ranks, f"{MOST_RANKS} at most for attach")
    check_cache_directory("symcomm bench attach")
    return workload


@dataclass(frozen=True)
class AttachMeasurement:
    """Microseconds of one call, medians."""

    call: str
    piece: int
    copied: float
    attached: float

    @property
    def gain(self) -> float:
        return self.copied / self.attached


# --- on ranks ------------------------------------------------------------------------------------------------------


def measure(group: Any, call: str, piece: int, workload: AttachWorkload) -> tuple[float, float] | None:
    """Seconds of a call that copies and of one that attaches; None for tensors larger than the cache, which ranks
    always copy."""
    from symcomm.group.factory import make_group

    if workload.pinned:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[group.rank]})
    groups = []
    for least in (NO_BYTES, 1):
        limits = replace(group.plan_limits, attach_bytes=least, attach_gather_bytes=least, attach_scatter_bytes=least)
        groups.append(make_group(group.rank, group.size, group.all_gather_bytes, limits=limits))
    calls = [_call_on(own, call, piece) for own in groups]
    groups[1].barrier()  # a peer must have arrived before we read it
    _call_on(groups[1], "scatter", SIZES[0])()
    _need_attached(groups[1])
    calls[1]()
    if not _has_attached(groups[1]):
        return None
    counts = [group.all_gather_object(_count(call_once, workload.seconds))[0] for call_once in calls]
    times: list[list[float]] = [[], []]
    for _ in range(workload.rounds):
        for side in (0, 1):
            times[side].append(_time(group, calls[side], counts[side]))
    return pick(times[0], best=False), pick(times[1], best=False)


def _call_on(group: Any, call: str, piece: int) -> Callable[[], Any]:
    import torch

    given, got = (torch.ones(group.size, piece, dtype=torch.uint8) for _ in range(2))
    if call == "all_to_all":
        return partial(group.all_to_all_single, got, given)
    if call == "all_gather":
        return partial(group.all_gather_single, got, given[0])
    return partial(group.scatter, got[0], list(given) if group.rank == 0 else None, 0)


def _need_attached(group: Any) -> None:
    """If the kernel refuses, the group copies, and there is nothing to compare."""
    if not _has_attached(group):
        raise errors.ResourceError(
            "symcomm bench attach: this kernel lets no rank read another's memory; leave it, ranks copy then, or allow "
            "it: `sysctl kernel.yama.ptrace_scope=0`, in a container also `docker run --cap-add SYS_PTRACE`."
        )


def _has_attached(group: Any) -> bool:
    from symcomm.observe.recorder.records import operations_of

    recorded = operations_of(group)[group.rank]
    if not recorded:
        raise errors.CallerError("symcomm bench attach: it needs the flight recorder; unset SYMCOMM_FLIGHT_ENTRIES.")
    return bool(recorded[-1].plan == "attached")


def _count(call_once: Callable[[], Any], seconds: float) -> int:
    call_once()
    begun = time.perf_counter()
    for _ in range(3):
        call_once()
    return max(1, round(seconds * 3 / max(time.perf_counter() - begun, 1e-7)))


def _time(group: Any, call_once: Callable[[], Any], count: int) -> float:
    """Seconds of a call, from one barrier to the next."""
    group.barrier()
    begun = time.perf_counter()
    for _ in range(count):
        call_once()
    group.barrier()
    return (time.perf_counter() - begun) / count


# --- for people ----------------------------------------------------------------------------------------------------


def run_attach_bench(workload: AttachWorkload, tick: Tick = quiet, seen: Seen = quiet) -> list[AttachMeasurement]:
    from symcomm.group.spawn import spawn

    rows: list[AttachMeasurement] = []
    for call in CALLS:
        for piece in SIZES:
            found = spawn(measure, workload.ranks, (call, piece, workload), deadline=workload.deadline)[0]
            if found is not None:
                rows.append(AttachMeasurement(call, piece, *(seconds * 1e6 for seconds in found)))
                seen(rows)
            tick(f"{call} {format_bytes(piece)}")
    return rows


def thresholds(rows: Sequence[AttachMeasurement]) -> calibration.Sizes:
    """For each call the size from which on attaching pays on the whole; NO_BYTES if it never does."""
    least = []
    for call in CALLS:
        largest_first = sorted((row for row in rows if row.call == call), key=lambda row: -row.piece)
        products = list(accumulate((row.gain for row in largest_first), operator.mul)) or [0.0]
        best = max(range(len(products)), key=products.__getitem__)
        gains = products[best] ** (1 / (best + 1)) >= GAIN and products[0] >= LOSS
        least.append(largest_first[best].piece if gains else NO_BYTES)
    return least[0], least[1], least[2]


def keep(rows: Sequence[AttachMeasurement], workload: AttachWorkload) -> str:
    """Write the sizes down for later groups, and say where."""
    if not workload.kept:
        return "not kept: --quick is too rough"
    return f"kept in {calibration.save(workload.where, thresholds(rows))}"


def cells(row: AttachMeasurement) -> list[str]:
    return [row.call, format_bytes(row.piece), f"{row.copied:.0f}", f"{row.attached:.0f}", f"{row.gain:.2f}x"]


def as_table(rows: Sequence[AttachMeasurement], workload: AttachWorkload, best: bool = False) -> bench_table.Table:
    title = f"copied through shared memory or read out of peers' memory, {workload.ranks} ranks"
    return title, ["collective", "piece", "copied, us", "attached, us", "gain"], [cells(row) for row in rows]


def note(rows: Sequence[AttachMeasurement], workload: AttachWorkload) -> str:
    def words(call: str, least: int) -> str:
        when = "never attaches" if least == NO_BYTES else f"attaches from {format_bytes(least)} on"
        return f"{call} {when}"

    chosen = "; ".join(map(words, CALLS, thresholds(rows)))
    return f"groups with {workload.where}: {chosen}"


def picture(rows: Sequence[AttachMeasurement], workload: AttachWorkload, best: bool = False) -> list[Panel]:
    bars = {
        call: [
            (format_bytes(row.piece), name, getattr(row, name))
            for row in rows if row.call == call
            for name in ("copied", "attached")
        ] for call in CALLS
    }  # fmt: skip
    return [Bars.of(call, "us a call", bars[call], logarithmic=True) for call in CALLS]
