"""Which ranks make the others wait, how long, and when."""

from __future__ import annotations

from dataclasses import dataclass, field

from symcomm.observe.analysis.calls import RecordedCalls
from symcomm.observe.analysis.clocks import offsets
from symcomm.observe.recorder.records import Operation
from symcomm.observe.recorder.trace import Trace

WINDOWS = 8  # parts of the recorded time, to distinguish a rank that is always late from one that was late once


@dataclass
class Straggler:
    """One rank. It is charged with the others' sleep in collectives to which it came last."""

    rank: int
    collectives: int = 0  # of those that all ranks recorded, how many it took part in
    last: int = 0  # how many of them it arrived at last
    late_s: float = 0.0  # how long after the rank before it, in total
    caused_s: float = 0.0  # sleep of all other ranks in those
    waited_s: float = 0.0  # its own sleep
    over_time: list[float] = field(default_factory=lambda: [0.0] * WINDOWS)  # caused_s, by part of the recorded time


def stragglers(trace: Trace) -> list[Straggler]:
    """A row per rank, the one that caused the most waiting first."""
    rows = {rank: Straggler(rank) for rank in sorted(trace.ranks)}
    shift = offsets(trace)
    complete = [ops for ops in _meetings(trace) if len(ops) > 1]
    if not complete:
        return list(rows.values())
    came = {(r, id(op)): op.created_ns + shift[r] for ops in complete for r, op in ops.items()}
    begin, end = min(came.values()), max(came.values())
    for ops in complete:
        order = sorted(ops, key=lambda r: came[r, id(ops[r])])
        last, before = order[-1], order[-2]
        arrival = came[last, id(ops[last])]
        slept = sum(op.waited_us for r, op in ops.items() if r != last) / 1e6
        row = rows[last]
        row.last += 1
        row.late_s += (arrival - came[before, id(ops[before])]) / 1e9
        row.caused_s += slept
        row.over_time[min(WINDOWS - 1, (arrival - begin) * WINDOWS // max(1, end - begin))] += slept
        for rank, op in ops.items():
            rows[rank].collectives += 1
            rows[rank].waited_s += op.waited_us / 1e6
    return sorted(rows.values(), key=lambda row: -row.caused_s)


def _meetings(trace: Trace) -> list[dict[int, Operation]]:
    """Collectives that all ranks of the group recorded and completed, by rank."""
    return [
        ops
        for group in RecordedCalls(trace).groups
        for ops in group.by_seq.values()
        if len(ops) == len(group.ranks) and all(op.state == "completed" for op in ops.values())
    ]
