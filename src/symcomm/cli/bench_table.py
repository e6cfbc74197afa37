"""Benchmark results as text, Markdown, JSON and pictures.

Columns and bandwidths are those of nccl-tests: algbw is size / time; busbw is algbw times a factor that says how much
of the data has to cross from one rank to another, so that it can be held against what the memory can do.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import symcomm
from symcomm.cli.bench_run import OURS, Case, Result
from symcomm.cli.pictures import Bars, Curves, Panel

__all__ = ["bandwidths", "case_tables", "over_size", "pick", "picture", "short_size", "summary_table", "to_json"]

MPI_GOAL, GLOO_GOAL = 1.0, 3.0  # how many times faster than the best MPI, and than Gloo, we mean to be
MISSED = "!"

Table = tuple[str, list[str], list[list[str]]]  # title, column names, rows


def bus_factor(collective: str, world: int) -> float:
    """nccl-tests' factor between algbw and busbw."""
    if collective == "all_reduce":
        return 2 * (world - 1) / world
    if collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (world - 1) / world
    return 1.0


def bandwidths(case: Case, seconds: float, world: int) -> tuple[float, float]:
    """(algbw, busbw) in GB/s."""
    algbw = case.nbytes / seconds / 1e9 if seconds else 0.0
    return algbw, algbw * bus_factor(case.collective, world)


def pick(result: Result | None, best: bool) -> float | None:
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


def short_size(nbytes: int) -> str:
    """1048576 -> "1 MiB"; what is no round number stays in bytes."""
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def ratio(theirs: float | None, ours: float | None) -> float | None:
    return theirs / ours if theirs and ours else None


# --- tables ------------------------------------------------------------------------------------------------------


def _by_case(results: Iterable[Result]) -> dict[Case, dict[str, Result]]:
    found: dict[Case, dict[str, Result]] = {}
    for result in results:
        found.setdefault(result.case, {})[result.series] = result
    return found


def case_tables(results: Sequence[Result], world: int, kinds: Sequence[str], peers: Sequence[str], best: bool) -> list:
    """nccl-tests' table, one per collective and kind of tensor, with the peers' times and ratios behind."""
    cases = _by_case(results)
    tables: list[Table] = []
    for collective in dict.fromkeys(case.collective for case in cases):
        mine = {case: found for case, found in cases.items() if case.collective == collective}
        sizes = dict.fromkeys(case.nbytes for case in mine)
        for kind in kinds:
            title = f"{collective}, {world} ranks, {kind} tensors"
            head = ["size(B)", "count", "type", "redop", "root"]
            for place in ("out", "in"):
                head += [f"{place}:time(us)", "algbw", "busbw", "#wrong"]
                head += [word for peer in peers for word in (f"{peer}(us)", "ratio")]
            rows = [_case_row([c for c in mine if c.nbytes == n], mine, world, kind, peers, best) for n in sizes]
            tables.append(_without_empty_columns((title, head, rows)))
    return tables


def _case_row(
    cases: list[Case], found: dict[Case, dict[str, Result]], world: int, kind: str, peers: Sequence[str], best: bool
) -> list[str]:
    """One size: what both placements share, then out of place, then in place."""
    case = cases[0]
    row = [str(case.nbytes), str(case.count), *_labels(case)]
    for in_place in (False, True):
        here = next((found[c] for c in cases if c.in_place is in_place), {})
        ours = pick(here.get(kind), best)
        row += _our_cells(here.get(kind), ours, world)
        for peer in peers:
            theirs = pick(here.get(peer), best)
            row += [microseconds(theirs), times(ratio(theirs, ours))]
    return row


def _labels(case: Case) -> list[str]:
    """type, redop, root, as nccl-tests words them."""
    reducing = case.collective in ("all_reduce", "reduce", "reduce_scatter")
    rooted = case.collective in ("broadcast", "reduce", "gather", "scatter")
    dtype = "none" if case.collective == "barrier" else case.dtype
    return [dtype, case.op if reducing else "none", str(case.root) if rooted else "-1"]


def _our_cells(result: Result | None, seconds: float | None, world: int) -> list[str]:
    if result is None or seconds is None:
        return ["-", "-", "-", "-"]
    algbw, busbw = bandwidths(result.case, seconds, world)
    wrong = "N/A" if result.wrong is None else str(result.wrong)
    return [microseconds(seconds), f"{algbw:.2f}", f"{busbw:.2f}", wrong]


def _without_empty_columns(table: Table) -> Table:
    """Leave out a placement that the collective does not have."""
    title, head, rows = table
    keep = [i for i in range(len(head)) if any(row[i] != "-" for row in rows)]
    return title, [head[i] for i in keep], [[row[i] for i in keep] for row in rows]


def summary_table(results: Sequence[Result], kinds: Sequence[str], peers: Sequence[str], best: bool) -> Table:
    """One line per collective and size. Ratios take our ordinary tensors, where those were measured."""
    mpis = [peer for peer in peers if peer != "gloo"]
    head = ["collective", "size", *[f"{kind} (us)" for kind in kinds], *[f"{peer} (us)" for peer in peers]]
    for kind in kinds:
        head += [f"{kind} vs MPI"] if mpis else []
        head += [f"{kind} vs gloo"] if "gloo" in peers else []
    rows = []
    for case, found in _by_case(results).items():
        seconds = {name: pick(found.get(name), best) for name in (*kinds, *peers)}
        row = [case.collective, "" if case.collective == "barrier" else short_size(case.nbytes)]
        for name in (*kinds, *peers):
            wrong = found[name].wrong if name in found else None
            row.append(microseconds(seconds[name]) + (f" WRONG:{wrong}" if wrong else ""))
        best_mpi = min((s for name in mpis if (s := seconds[name]) is not None), default=None)
        for kind in kinds:
            row += [_marked(ratio(best_mpi, seconds[kind]), MPI_GOAL)] if mpis else []
            row += [_marked(ratio(seconds["gloo"], seconds[kind]), GLOO_GOAL)] if "gloo" in peers else []
        rows.append(row)
    return "summary", head, rows


def _marked(value: float | None, goal: float) -> str:
    return times(value) + (MISSED if value is not None and value < goal else "")


def as_text(table: Table) -> str:
    title, head, rows = table
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [f"# {title}", "# " + "  ".join(word.rjust(w) for word, w in zip(head, widths, strict=True))]
    lines += ["  " + "  ".join(word.rjust(w) for word, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


class Lines:
    """A table whose rows are printed as they come. ``widths``: of columns that are wider than their names."""

    def __init__(self, head: list[str], widths: Mapping[str, int], markdown: bool):
        self.head, self.markdown = head, markdown
        self.widths = [max(len(word), widths.get(word, 0)) for word in head]
        self.shown = False

    def show(self, row: list[str]) -> None:
        if not self.shown:
            print(_markdown_head(self.head) if self.markdown else "# " + self._spaced(self.head))
        self.shown = True
        print(_markdown_row(row) if self.markdown else "  " + self._spaced(row), flush=True)

    def _spaced(self, row: list[str]) -> str:
        return "  ".join(word.rjust(w) for word, w in zip(row, self.widths, strict=True))


def as_markdown(table: Table) -> str:
    title, head, rows = table
    return "\n".join([f"**{title}**", "", _markdown_head(head), *map(_markdown_row, rows)])


def _markdown_head(head: list[str]) -> str:
    return _markdown_row(head) + "\n|" + " ---: |" * len(head)


def _markdown_row(row: list[str]) -> str:
    return "| " + " | ".join(row) + " |"


def reasons(results: Iterable[Result]) -> list[str]:
    """Why a dash is a dash, each reason once."""
    return list(dict.fromkeys(f"{r.series}, {r.case.collective}: {r.reason}" for r in results if r.reason))


# --- files -------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "symcomm": symcomm.__version__,
    }


def to_json(results: Sequence[Result], world: int, pinned: bool) -> dict[str, Any]:
    """Everything measured. Times are microseconds of one call, bandwidths GB/s."""
    rows = []
    for result in results:
        case = result.case
        dtype, op, root = _labels(case)
        row: dict[str, Any] = {
            "collective": case.collective, "series": result.series, "size": case.nbytes, "count": case.count,
            "type": dtype, "redop": op, "root": int(root), "in_place": case.in_place,
            "iterations": result.iterations, "wrong": result.wrong,
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
    """Figures over sizes, both axes logarithmic; bars for what has no size, a barrier."""
    if not any(nbytes for points in lines.values() for nbytes, _ in points):
        return Bars(title, y, {"": {name: value for name, points in lines.items() for _, value in points}})
    return Curves(title, "size", y, lines, tick=short_size)


def picture(results: Sequence[Result], series: Sequence[str], best: bool) -> list[Panel]:
    """Time over size, one panel per collective, of the form that a summary shows."""
    panels = []
    for collective in dict.fromkeys(result.case.collective for result in results):
        mine = [result for result in results if result.case.collective == collective]
        shown = mine[0].case.in_place
        lines: dict[str, list[tuple[int, float]]] = {}
        for result in sorted(mine, key=lambda result: series.index(result.series)):
            seconds = pick(result, best)
            if seconds is not None and result.case.in_place is shown:
                label = f"symcomm, {result.series} tensors" if result.series in OURS else result.series
                lines.setdefault(label, []).append((result.case.nbytes, seconds * 1e6))
        if lines:
            panels.append(over_size(collective, "microseconds", lines))
    return panels
