"""Benchmark results as text, Markdown, JSON and pictures.

Columns and bandwidths are those of nccl-tests: algbw is size / time; busbw is algbw times a factor that says how much
of the data has to cross from one rank to another, so that it can be held against what the memory can do.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import symcomm
from symcomm.bench.pictures import Bars, Curves, Panel
from symcomm.bench.run import PLACES, Case, CaseResult
from symcomm.memory.limits import format_bytes
from symcomm.simulate.units import bus_factor

MPI_GOAL, GLOO_GOAL = 1.0, 3.0  # our goals: so many times as fast as the best MPI and as Gloo
MISSED = "!"
LABELS = {  # of a picture's lines
    **{kind: f"symcomm, {kind} tensors" for kind in ("ordinary", "symmetric")},
    "heap": "symcomm, shared heap",
    "async": "symcomm, asynchronous",
}

Table = tuple[str, list[str], list[list[str]]]  # title, column names, rows


def bandwidths(case: Case, seconds: float, world: int) -> tuple[float, float]:
    """(algbw, busbw) in GB/s."""
    algbw = case.nbytes / seconds / 1e9 if seconds else 0.0
    return algbw, algbw * bus_factor(case.collective, world)


def pick(result: CaseResult | None, best: bool) -> float | None:
    """The time to show: the median, or the fastest repetition."""
    return None if result is None else result.fastest if best else result.seconds


# --- words -------------------------------------------------------------------------------------------------------


def microseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    us = seconds * 1e6
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


def ratio(theirs: float | None, ours: float | None) -> float | None:
    return theirs / ours if theirs and ours else None


# --- tables ------------------------------------------------------------------------------------------------------


def _by_case(results: Iterable[CaseResult]) -> dict[Case, dict[str, CaseResult]]:
    found: dict[Case, dict[str, CaseResult]] = {}
    for result in results:
        found.setdefault(result.case, {})[result.series] = result
    return found


def case_head(collective: str, kinds: Sequence[str], peers: Sequence[str]) -> list[str]:
    """nccl-tests' columns for the collective's placements, then the peers' times and ratios."""
    head = ["size(B)", "count", "type", "redop", "root", "tensors"]
    for place in _places(collective):
        head += [f"{place}:time(us)", "algbw", "busbw", "#wrong"] if kinds else []
        head += [word for peer in peers for word in ((f"{peer}(us)", "ratio") if kinds else (f"{peer}(us)",))]
    return head


def case_rows(
    results: Sequence[CaseResult], world: int, kinds: Sequence[str], peers: Sequence[str], best: bool
) -> list[list[str]]:
    """The rows of one size, one for each kind of tensor; ``results`` has all placements."""
    found = _by_case(results)
    return [_case_row(found, world, kind, peers, best) for kind in kinds or ("",)]


def _places(collective: str) -> list[str]:
    return [place for place in ("out", "in") if (place == "in") in PLACES[collective]]


def _case_row(
    found: dict[Case, dict[str, CaseResult]], world: int, kind: str, peers: Sequence[str], best: bool
) -> list[str]:
    """One size: what both placements share, then out of place, then in place."""
    case = next(iter(found))
    row = [str(case.nbytes), str(case.count), *_labels(case), kind or "-"]
    for place in _places(case.collective):
        here = next((found[c] for c in found if c.in_place is (place == "in")), {})
        ours = pick(here.get(kind), best)
        row += _our_cells(here.get(kind), ours, world) if kind else []
        for peer in peers:
            theirs = pick(here.get(peer), best)
            row += [microseconds(theirs), times(ratio(theirs, ours))] if kind else [microseconds(theirs)]
    return row


def _labels(case: Case) -> list[str]:
    """type, redop, root, as nccl-tests words them."""
    reducing = case.collective in ("all_reduce", "reduce", "reduce_scatter")
    rooted = case.collective in ("broadcast", "reduce", "gather", "scatter")
    dtype = "none" if case.collective == "barrier" else case.dtype
    return [dtype, case.op if reducing else "none", str(case.root) if rooted else "-1"]


def _our_cells(result: CaseResult | None, seconds: float | None, world: int) -> list[str]:
    if result is None or seconds is None:
        return ["-", "-", "-", "-"]
    algbw, busbw = bandwidths(result.case, seconds, world)
    wrong = "N/A" if result.wrong is None else str(result.wrong)
    return [microseconds(seconds), f"{algbw:.2f}", f"{busbw:.2f}", wrong]


def summary_head(kinds: Sequence[str], peers: Sequence[str]) -> list[str]:
    head = ["collective", "size", *[f"{kind} (us)" for kind in kinds], *[f"{peer} (us)" for peer in peers]]
    for kind in kinds:
        head += [f"{kind} vs MPI"] if any(peer != "gloo" for peer in peers) else []
        head += [f"{kind} vs gloo"] if "gloo" in peers else []
    return head


def summary_row(results: Sequence[CaseResult], kinds: Sequence[str], peers: Sequence[str], best: bool) -> list[str]:
    """One collective and size, from all results of a case."""
    case, found = results[0].case, {result.series: result for result in results}
    seconds = {name: pick(found.get(name), best) for name in (*kinds, *peers)}
    row = [case.collective, "" if case.collective == "barrier" else format_bytes(case.nbytes)]
    for name in (*kinds, *peers):
        wrong = found[name].wrong if name in found else None
        row.append(microseconds(seconds[name]) + (f" WRONG:{wrong}" if wrong else ""))
    mpis = [peer for peer in peers if peer != "gloo"]
    best_mpi = min((s for name in mpis if (s := seconds[name]) is not None), default=None)
    for kind in kinds:
        row += [marked(ratio(best_mpi, seconds[kind]), MPI_GOAL)] if mpis else []
        row += [marked(ratio(seconds["gloo"], seconds[kind]), GLOO_GOAL)] if "gloo" in peers else []
    return row


def marked(value: float | None, goal: float) -> str:
    return times(value) + (MISSED if value is not None and value < goal else "")


def _markdown_row(row: Sequence[str]) -> str:
    return "| " + " | ".join(row) + " |"


class GrowingTable:
    """A table printed row by row. Column widths come from usual contents, or from rows ``like`` it."""

    WIDEST = MappingProxyType({
        "call": 26, "collective": 14, "count": 10, "graph": 10, "method": 20, "model": 12, "operation": 10, "side": 20,
        "size(B)": 10, "tensors": 9, "type": 10,
    })  # fmt: skip

    def __init__(self, title: str, head: Sequence[str], say: Callable[[str], None], *, markdown: bool,
        like: Sequence[Sequence[str]] = (),
    ):  # fmt: skip
        self._say = say
        self._markdown = markdown
        self._widths = [max(self.WIDEST.get(words[0], 8), *map(len, words)) for words in zip(head, *like, strict=True)]
        ruled = [f"**{title}**", "", _markdown_row(head), "|" + " ---: |" * len(head)]
        lines = ruled if markdown else [f"# {title}", "# " + self._aligned(head)]
        for line in lines:
            say(line)

    def add(self, row: Sequence[str]) -> None:
        self._say(_markdown_row(row) if self._markdown else "  " + self._aligned(row))

    def _aligned(self, row: Sequence[str]) -> str:
        return "  ".join(word.rjust(width) for word, width in zip(row, self._widths, strict=True))


def reasons(results: Iterable[CaseResult]) -> list[str]:
    """Why each dash is a dash, each reason once."""
    return list(dict.fromkeys(f"{r.series}, {r.case.collective}: {r.reason}" for r in results if r.reason))


def ways(results: Iterable[CaseResult]) -> str:
    """Which path our calls took, as a warning if Python made some of them: then those times are not the core's."""
    counted = [r for r in results if r.calls]
    slow = [r for r in counted if r.long]
    if not counted:
        return ""
    total = sum(r.calls for r in counted)
    if not slow:
        return f"way: all {total:,} timed calls of ours took the fast path"
    where = ", ".join(dict.fromkeys(f"{r.case.collective} of {format_bytes(r.case.nbytes)}" for r in slow))
    return f"WARNING: {sum(r.long for r in slow):,} of {total:,} timed calls took the slow path through Python: {where}"


# --- files -------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "symcomm": symcomm.__version__,
    }


def to_json(results: Sequence[CaseResult], world: int, pinned: bool) -> dict[str, Any]:
    """Everything measured. Times are microseconds of one call, bandwidths GB/s."""
    rows = []
    for result in results:
        case = result.case
        dtype, op, root = _labels(case)
        row: dict[str, Any] = {
            "collective": case.collective, "series": result.series, "size": case.nbytes, "count": case.count,
            "type": dtype, "redop": op, "root": int(root), "in_place": case.in_place,
            "iterations": result.iterations, "wrong": result.wrong, "long_way": result.long,
        }  # fmt: skip
        if result.seconds is None or result.fastest is None:
            row["unsupported"] = result.reason
        else:
            algbw, busbw = bandwidths(case, result.seconds, world)
            row |= {"time_us": result.seconds * 1e6, "fastest_us": result.fastest * 1e6, "algbw": algbw, "busbw": busbw}
        rows.append(row)
    return {"machine": machine(), "ranks": world, "pinned": pinned, "rows": rows}


# --- pictures ----------------------------------------------------------------------------------------------------


def over_size(title: str, y: str, lines: Mapping[str, Sequence[tuple[int, float]]]) -> Panel:
    """Lines over sizes, both axes logarithmic; bars for a barrier, which has no size."""
    if not any(nbytes for points in lines.values() for nbytes, _ in points):
        return Bars(title, y, {"": {name: value for name, points in lines.items() for _, value in points}})
    return Curves(title, "size", y, lines, tick=format_bytes)


def picture(results: Sequence[CaseResult], series: Sequence[str], best: bool) -> list[Panel]:
    """Time over size, one panel per collective, of the placement that a summary shows."""
    panels = []
    for collective in dict.fromkeys(result.case.collective for result in results):
        mine = [result for result in results if result.case.collective == collective]
        shown = mine[0].case.in_place
        lines: dict[str, list[tuple[int, float]]] = {}
        for result in sorted(mine, key=lambda result: series.index(result.series)):
            seconds = pick(result, best)
            if seconds is not None and result.case.in_place is shown:
                label = LABELS.get(result.series, result.series)
                lines.setdefault(label, []).append((result.case.nbytes, seconds * 1e6))
        if lines:
            panels.append(over_size(collective, "microseconds", lines))
    return panels
