"""A trace as text and as data: the verdict, a table of where each rank is, stragglers, and details."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from symcomm.errors import format_seconds
from symcomm.memory.limits import format_bytes
from symcomm.observe.analysis.stragglers import stragglers
from symcomm.observe.analysis.verdict import Verdict, judge, plain
from symcomm.observe.recorder.records import Operation
from symcomm.observe.recorder.stacks import short_site, where
from symcomm.observe.recorder.trace import RankTrace, Trace

DETAIL_FRAMES = 12
COPIES = {
    "direct": "directly, nothing copied",
    "attached": "read out of peers' ordinary memory",
    "ordinary_here": "copied: own tensor is ordinary",
    "ordinary_there": "copied: a peer's tensor is ordinary",
    "no_plan": "copied: too few for another way",
}
BARS = " ▁▂▃▄▅▆▇█"


def last_operations(trace: Trace) -> list[tuple[str, int, Operation | None]]:
    """(group, rank, its last operation there), for every rank of every group."""
    found: dict[tuple[str, int], Operation] = {}
    for rank, operations in trace.operations().items():
        for op in operations:
            found[op.group, rank] = op
    members = {
        (group["name"], rank)
        for one in trace.ranks.values()
        for group in one.groups
        for rank in (group["ranks"] or [one.rank])
    }
    return [(group, rank, found.get((group, rank))) for group, rank in sorted(members | set(found))]


def count_paths(trace: Trace) -> dict[str, dict[str, int]]:
    """By group, on all ranks: calls that the core made alone (short) or through Python (long), and in which thread."""
    found: dict[str, dict[str, int]] = {}
    for op in chain.from_iterable(trace.operations().values()):
        if op.way:  # torch's own dumps do not say
            counts = found.setdefault(op.group, {"short": 0, "long": 0, "inline": 0, "queued": 0})
            counts[op.way] += 1
            counts[op.thread] += 1
    return dict(sorted(found.items()))


def count_copies(trace: Trace) -> dict[tuple[str, str], tuple[int, int]]:
    """(Group, how its bytes went) -> calls and bytes, on all ranks."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for op in chain.from_iterable(trace.operations().values()):
        if op.copies:
            calls, nbytes = found.get((op.group, op.copies), (0, 0))
            found[op.group, op.copies] = (calls + 1, nbytes + op.nbytes)
    return dict(sorted(found.items()))


def as_data(trace: Trace) -> dict[str, Any]:
    verdict = judge(trace)
    return {
        "verdict": asdict(verdict),
        "problems": trace.problems,
        "last": [
            {"group": group, "rank": rank, "operation": op.to_dict() if op else None}
            for group, rank, op in last_operations(trace)
        ],
        "ways": [{"group": group, **counts} for group, counts in count_paths(trace).items()],
        "copies": [
            {"group": group, "copies": how, "calls": calls, "bytes": nbytes}
            for (group, how), (calls, nbytes) in count_copies(trace).items()
        ],
        "stragglers": [asdict(row) for row in stragglers(trace)],
        "ranks": {str(rank): one.to_dict() for rank, one in sorted(trace.ranks.items())},
    }


def as_text(trace: Trace, verdict: Verdict | None = None, *, paths: bool = False) -> str:
    """``paths``: also which way the recorded calls took."""
    verdict = verdict or judge(trace)
    parts = [verdict.sentence, "\n".join(f"note: {problem}" for problem in trace.problems), _table(trace)]
    parts += [_ways(trace) if paths else "", _copies(trace), _stragglers(trace), _details(trace, verdict)]
    return "\n\n".join(part for part in parts if part) + "\n"


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in [header, *rows])


def _table(trace: Trace) -> str:
    rows = []
    for group, rank, op in last_operations(trace):
        one = trace.ranks.get(rank)
        place = where(one.stacks) if one else None
        if op is None:
            last, state, waited, site = "nothing recorded", "no dump" if one is None else "", "", ""
        else:
            last, state, site = f"{op} #{op.seq}", op.state, short_site(op.site)
            waited = format_seconds(_waited(op, one)) if _waited(op, one) >= 0.001 else ""
        rows.append([group, str(rank), last, state, waited, site, one.end if one and one.end else str(place or "")])
    header = ["group", "rank", "last operation", "state", "waited", "called at", "rank is now"]
    return columns(header, rows) if rows else ""


def _waited(op: Operation, one: RankTrace | None) -> float:
    if op.state == "completed" or one is None:
        return op.waited_us / 1e6
    return max(0.0, ((op.finished_ns or one.noted_ns) - op.created_ns) / 1e9)


def _ways(trace: Trace) -> str:
    rows = [[group, *map(str, counts.values())] for group, counts in count_paths(trace).items()]
    header = ["group", "fast path", "through Python", "caller's thread", "group's thread"]
    return "How the recorded calls were made:\n" + columns(header, rows) if rows else ""


def _copies(trace: Trace) -> str:
    rows = [
        [group, COPIES[how], str(calls), format_bytes(nbytes)]
        for (group, how), (calls, nbytes) in count_copies(trace).items()
    ]
    return "How their bytes went:\n" + columns(["group", "", "calls", "bytes"], rows) if rows else ""


def _stragglers(trace: Trace) -> str:
    rows = [row for row in stragglers(trace) if row.collectives]
    if not any(row.caused_s for row in rows):
        return ""
    highest = max(max(row.over_time) for row in rows)
    told = [
        [
            str(row.rank), f"{row.last} of {row.collectives}", format_seconds(row.late_s),
            format_seconds(row.caused_s), format_seconds(row.waited_s),
            "".join(BARS[round(part / highest * (len(BARS) - 1))] for part in row.over_time),
        ]
        for row in rows
    ]  # fmt: skip
    header = ["rank", "came last", "late by", "others slept for it", "slept itself", "over time"]
    return "Who makes the others wait:\n" + columns(header, told)


def _details(trace: Trace, verdict: Verdict) -> str:
    parts = []
    for rank, one in sorted(trace.ranks.items()):
        for text in one.errors:
            parts.append(f"rank {rank} raised: {plain(text)}")
    for rank in verdict.ranks:
        for stack in trace.ranks[rank].stacks if rank in trace.ranks else []:
            if stack.is_rank or (len(trace.ranks[rank].stacks) <= 4 and not stack.name.startswith("symcomm-")):
                lines = [f"    {f.file}:{f.line} in {f.function}" for f in stack.frames[:DETAIL_FRAMES]]
                parts.append("\n".join([f"rank {rank}, thread {stack.name}, innermost first:", *lines]))
    return "\n".join(parts)
