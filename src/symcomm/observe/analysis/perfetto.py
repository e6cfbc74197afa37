"""The ranks' operations as a trace that chrome://tracing and ui.perfetto.dev show: a process per rank, a track per
group, and arrows from the rank that arrived last to those that waited for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from symcomm.observe.analysis.calls import RecordedCalls
from symcomm.observe.analysis.clocks import offsets
from symcomm.observe.recorder.records import Operation
from symcomm.observe.recorder.trace import Trace


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """In Chrome's JSON format; times in microseconds since the first operation."""
    shift = offsets(trace)
    calls = RecordedCalls(trace)
    operations = calls.operations
    groups = sorted({op.group for ops in operations.values() for op in ops})
    starts = [op.created_ns + shift[rank] for rank, ops in operations.items() for op in ops]
    begin = min(starts, default=0)
    events: list[dict[str, Any]] = []
    for rank, ops in operations.items():
        used = {op.group for op in ops}
        events += _names(trace, rank, {i: g for i, g in enumerate(groups) if g in used})
        noted = trace.ranks[rank].noted_ns
        events += [_slice(rank, groups.index(op.group), op, shift[rank] - begin, noted) for op in ops]
    events += _arrows(calls, groups, {rank: s - begin for rank, s in shift.items()})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(trace: Trace, rank: int, tracks: dict[int, str]) -> Iterator[dict[str, Any]]:
    one = trace.ranks[rank]
    label = f"rank {rank} (pid {one.pid}{f', {one.host}' if one.host else ''})"
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": label}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for tid, group in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": group}}


def _slice(rank: int, track: int, op: Operation, shift: int, noted_ns: int) -> dict[str, Any]:
    end = op.finished_ns if op.finished_ns is not None else max(noted_ns, op.created_ns)
    facts = ("seq", "dtype", "op", "root", "count", "nbytes", "waited_us", "state", "plan", "zero_copy", "site")
    return {
        "ph": "X",
        "name": op.call,
        "cat": "message" if op.is_message else "collective",
        "pid": rank,
        "tid": track,
        "ts": (op.created_ns + shift) / 1000,
        "dur": max(0, end - op.created_ns) / 1000,
        "args": {name: getattr(op, name) for name in facts if getattr(op, name) not in (None, "")},
    }


def _arrows(calls: RecordedCalls, tracks: list[str], shift: dict[int, int]) -> Iterator[dict[str, Any]]:
    """From the rank that came last to those that slept."""
    met = ((group, seq, ops) for group in calls.groups for seq, ops in sorted(group.by_seq.items()))
    for group, seq, ops in met:
        came_at = {rank: op.created_ns + shift[rank] for rank, op in ops.items() if op.finished_ns is not None}
        last = max(came_at, key=lambda rank: came_at[rank], default=-1)
        for rank in came_at:
            op = ops[rank]
            if rank == last or not op.waited_us:
                continue
            track = tracks.index(group.name)
            common = {"name": "waited for", "cat": "wait", "id": f"{group.name}/{seq}/{rank}", "tid": track}
            came = came_at[last] / 1000
            ended = ((op.finished_ns or 0) + shift[rank]) / 1000
            yield {**common, "ph": "s", "pid": last, "ts": came}
            yield {**common, "ph": "f", "bp": "e", "pid": rank, "ts": max(came, ended)}
