"""One clock for all ranks. Ranks of one host share theirs; between hosts the end of a collective is the same moment."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from symcomm.observe.recorder.trace import RankTrace, Trace


def offsets(trace: Trace) -> dict[int, int]:
    """Nanoseconds to add to each rank's times, so that all are on the clock of the first rank's host.

    A collective ends nowhere before all ranks have arrived, so its last ends on two hosts are close together; the
    median over all such pairs is the offset. Hosts without a common collective are aligned by the time of day.
    """
    if not trace.ranks:
        return {}
    ends = _last_ends(trace)
    first = trace.ranks[min(trace.ranks)]
    found: dict[str, int] = {first.boot: 0}
    for rank in sorted(trace.ranks):
        one = trace.ranks[rank]
        if one.boot not in found:
            found[one.boot] = _offset(ends.get(first.boot, {}), ends.get(one.boot, {}), first, one)
    return {rank: found[one.boot] for rank, one in trace.ranks.items()}


def _last_ends(trace: Trace) -> dict[str, dict[tuple[Any, ...], int]]:
    """By host: when the last of its ranks completed each collective."""
    ends: dict[str, dict[tuple[Any, ...], int]] = {}
    for rank, operations in trace.operations().items():
        here = ends.setdefault(trace.ranks[rank].boot, {})
        for op in operations:
            if op.state == "completed" and not op.is_message and op.finished_ns is not None:
                key = (op.group, op.ranks, op.seq)
                here[key] = max(op.finished_ns, here.get(key, 0))
    return ends


def _offset(base: Mapping[Any, Any], other: Mapping[Any, Any], first: RankTrace, one: RankTrace) -> int:
    differences = [base[key] - other[key] for key in base.keys() & other.keys()]
    if differences:
        return int(statistics.median(differences))
    return (one.noted_wall_ns - one.noted_ns) - (first.noted_wall_ns - first.noted_ns)
