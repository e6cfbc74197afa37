"""``symcomm bench kernels``: the C core's reductions, every element type and operation, beside memcpy.

Bytes count as they move: every source is read once, the result written once; a memcpy reads and writes. The two take
turns, so that another program's load hits both.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from symcomm._core import native
from symcomm.bench import table as bench_table
from symcomm.bench.frame import Asked, Workload
from symcomm.bench.pictures import Bars, Panel
from symcomm.bench.run import Seen, Tick, quiet
from symcomm.memory.limits import format_bytes
from symcomm.types import DType, RedOpType

GOAL = 0.8  # of memcpy's rate, for data in no cache
GOAL_DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
USUAL_CACHES = {1: 32 << 10, 2: 1 << 20, 3: 32 << 20}  # if the kernel does not say
LARGEST = 256 << 20
SHIFT = 4096 + 64  # buffers at the same offset of their pages would compete for the same lines of a cache
COPY = -1


def cache_sizes(caches: Path = CACHES) -> dict[int, int]:
    """Bytes of each level's data cache."""
    found = dict(USUAL_CACHES)
    for index in caches.glob("index*"):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction" and size.endswith("K"):
            found[int(level)] = int(size[:-1]) << 10
    return found


def buffer_sizes(sources: int, caches: Path = CACHES) -> dict[str, int]:
    """Bytes of one buffer: all buffers together half fill the level, or are twice as large as the last one."""
    levels = cache_sizes(caches)
    fitting = {f"L{level}": 1 << (levels[level] // 2 // (sources + 1)).bit_length() - 1 for level in (1, 2)}
    return {**fitting, "memory": min(LARGEST, 1 << max(levels.values()).bit_length())}


@dataclass(frozen=True)
class KernelsWorkload(Workload):
    sources: int = 2
    rounds: int = 7
    seconds: float = 0.002  # of one repetition, at least
    dtypes: Sequence[DType] = tuple(DType)
    sizes: dict[str, int] = field(default_factory=lambda: buffer_sizes(2))

    @property
    def cases(self) -> list[tuple[DType, RedOpType]]:
        return [(d, op) for d in self.dtypes for op in RedOpType if native.reduce_defined(d, op)]

    @property
    def turns(self) -> int:
        return 1 + len(self.cases)


QUICK: dict[str, Any] = {
    "rounds": 3,
    "dtypes": (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64, DType.INT32, DType.UINT8),
}


def ask(asked: Asked) -> KernelsWorkload:
    sources = 2 if asked.ranks is None else asked.ranks
    return asked.workload(KernelsWorkload, QUICK, 1, sources=sources, sizes=buffer_sizes(max(1, sources)))


@dataclass(frozen=True)
class KernelsMeasurement:
    """One type and operation, or memcpy (None): GB/s by size, and the ratio to memcpy in the same turns."""

    dtype: DType | None
    op: RedOpType | None
    rates: dict[str, float]
    shares: dict[str, float]


class Buffers:
    """``sources`` + 1 buffers of ``nbytes``, all touched, each at another offset in its page."""

    def __init__(self, sources: int, nbytes: int):
        self.nbytes = nbytes
        self.maps = [mmap.mmap(-1, nbytes + (sources + 2) * SHIFT) for _ in range(sources + 1)]
        places = [ctypes.addressof(ctypes.c_char.from_buffer(m)) + i * SHIFT for i, m in enumerate(self.maps)]
        for place in places:
            ctypes.memset(place, 0x40, nbytes)  # a normal number in every type: some CPUs are slow with subnormals
        self.out, *self.sources = places

    def time(self, dtype: DType | None, op: int, repeats: int) -> float:
        """Seconds of one call."""
        count = self.nbytes // (dtype.itemsize if dtype is not None else 1)
        return native.time_reduce(dtype or 0, op, self.out, self.sources, count, repeats) / repeats

    def repeats(self, dtype: DType | None, op: int, seconds: float) -> int:
        """How many calls fill that time."""
        return max(1, round(seconds / max(self.time(dtype, op, 1), 1e-9)))


def _measure(workload: KernelsWorkload, buffers: Buffers, dtype: DType | None, op: int) -> tuple[float, float]:
    """(GB/s, ratio to memcpy), medians of rounds; memcpy's turn comes right before ours."""
    copies, calls = buffers.repeats(None, COPY, workload.seconds), buffers.repeats(dtype, op, workload.seconds)
    moved = buffers.nbytes * (2 if op == COPY else workload.sources + 1) / 1e9
    rates, shares = [], []
    for _ in range(workload.rounds):
        copied = 2 * buffers.nbytes / 1e9 / buffers.time(None, COPY, copies)
        rates.append(moved / buffers.time(dtype, op, calls))
        shares.append(rates[-1] / copied)
    return statistics.median(rates), statistics.median(shares)


def run_kernels_bench(workload: KernelsWorkload, tick: Tick = quiet, seen: Seen = quiet) -> list[KernelsMeasurement]:
    buffers = {name: Buffers(workload.sources, nbytes) for name, nbytes in workload.sizes.items()}
    rows = []
    cases: list[tuple[DType | None, RedOpType | None]] = [(None, None), *workload.cases]
    for dtype, op in cases:
        found = {name: _measure(workload, own, dtype, COPY if op is None else op) for name, own in buffers.items()}
        rates, shares = ({name: pair[i] for name, pair in found.items()} for i in (0, 1))
        rows.append(KernelsMeasurement(dtype, op, rates, shares))
        seen(rows)
        tick(" ".join(cells(rows[-1])[:2]))
    return rows


# --- words ---------------------------------------------------------------------------------------------------------


def head(workload: KernelsWorkload) -> list[str]:
    columns = [(f"{name}: {format_bytes(nbytes)}", "of memcpy") for name, nbytes in workload.sizes.items()]
    return ["type", "operation", *(word for pair in columns for word in pair)]


def missed(row: KernelsMeasurement) -> bool:
    return row.dtype in GOAL_DTYPES and row.shares.get("memory", 1) < GOAL


def cells(row: KernelsMeasurement) -> list[str]:
    words = ["memcpy", "-"] if row.dtype is None or row.op is None else [row.dtype.label, row.op.name]
    for name, rate in row.rates.items():
        mark = bench_table.MISSED if name == "memory" and missed(row) else ""
        words += [f"{rate:.1f}", "-" if row.dtype is None else f"{row.shares[name]:.0%}{mark}"]
    return words


def as_table(rows: Sequence[KernelsMeasurement], workload: KernelsWorkload, best: bool = False) -> bench_table.Table:
    title = f"GB/s moved by reductions of {workload.sources} sources, kernels: {native.reduce_sets()[1]}"
    return title, head(workload), [cells(row) for row in rows]


def note(rows: Sequence[KernelsMeasurement], workload: KernelsWorkload) -> str:
    said = "every source read once and the result written once; memcpy reads and writes; medians, in turns"
    below = sum(missed(row) for row in rows)
    return f"{said}; {bench_table.MISSED}: below {GOAL:.0%} of memcpy ({below})" if below else said


def picture(rows: Sequence[KernelsMeasurement], workload: KernelsWorkload, best: bool = False) -> list[Panel]:
    """A panel for each size; bars for the usual operations, grouped by type."""
    shown = (RedOpType.SUM, RedOpType.AVG, RedOpType.MAX)
    panels: list[Panel] = []
    for name, nbytes in workload.sizes.items():
        bars = (
            ("memcpy", "memcpy", row.rates[name]) if row.dtype is None or row.op is None
            else (row.dtype.label, row.op.name, row.rates[name])
            for row in rows if row.op is None or row.op in shown
        )  # fmt: skip
        panels.append(Bars.of(f"{name}, {format_bytes(nbytes)} each", "GB/s moved", bars))
    return panels


def to_json(rows: Sequence[KernelsMeasurement], workload: KernelsWorkload) -> dict[str, Any]:
    made = [
        {**asdict(row), "dtype": row.dtype and row.dtype.label, "op": None if row.op is None else row.op.name}
        for row in rows
    ]
    told = workload.to_json(made, kernels=native.reduce_sets()[1])
    told["plan"]["dtypes"] = [dtype.label for dtype in workload.dtypes]
    return told
