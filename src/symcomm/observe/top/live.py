"""A running job as a trace, from which verdicts, tables and timelines are made.

A feed reads the ranks' recorders without their help; where ranks are in the program they are asked (see ask.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from symcomm.observe.recorder.dump import boot_id
from symcomm.observe.recorder.records import Operation
from symcomm.observe.recorder.stacks import ThreadStack
from symcomm.observe.recorder.trace import RankTrace, Trace
from symcomm.observe.top.feed import Feed, Sample, attach
from symcomm.observe.top.jobs import JobFacts

CLOCK = 0.1  # seconds to measure the rate of the processor's counter


def as_trace(sample: Sample, operations: Mapping[int, Iterable[Operation]]) -> Trace:
    """What is known of a running job, from a feed's sample and the ranks' operations."""
    wall = time.time_ns() - time.monotonic_ns() + sample.now_ns
    boot = boot_id()
    groups = [
        {"name": group.name, "rank": 0, "size": group.size, "ranks": list(group.ranks), "description": ""}
        for group in sample.groups
    ]
    known = {fact.rank: list(operations.get(fact.rank, ())) for fact in sample.ranks}
    a_death = any(op.state == "dead" for ops in known.values() for op in ops[-1:])
    ranks = {}
    for fact in sample.ranks:
        mine = known[fact.rank]
        end = "stopped" if fact.stopped else "" if fact.alive else _end(mine, a_death)
        ranks[fact.rank] = RankTrace(
            rank=fact.rank, pid=fact.pid, boot=boot, noted_ns=sample.now_ns, noted_wall_ns=wall, end=end,
            operations=mine, groups=groups,
        )  # fmt: skip
    return Trace(ranks, live=True)


def _end(operations: list[Operation], a_death: bool) -> str:
    """How a process ended that is gone. One that ended after an operation failed did not cause the failure."""
    state = operations[-1].state if operations else "completed"
    if state == "running" or (state == "completed" and a_death):
        return "died"
    return "left" if state == "completed" else ""


def look(job: JobFacts, call: str = "look") -> Trace:
    """All that the ranks of a job have recorded, and their stacks. ``call``: the caller's name, for errors."""
    feed: Feed = attach(job.pids, job.title, call=call)
    try:
        time.sleep(CLOCK)
        sample = feed.poll()
        trace = as_trace(sample, sample.operations)
        stacks = feed.find_stacks(rank for rank, one in trace.ranks.items() if not one.end)
    finally:
        feed.close()
    add_stacks(trace, stacks)
    for rank, found in stacks.items():
        if not found:
            trace.problems.append(f"rank {rank} (pid {trace.ranks[rank].pid}) did not say where it is.")
    return trace


def add_stacks(trace: Trace, stacks: Mapping[int, list[ThreadStack]]) -> None:
    """Adds the ranks' stacks. A rank that does not answer runs no Python: nothing else keeps it silent."""
    for rank, found in stacks.items():
        one = trace.ranks[rank]
        one.stacks, one.end = found, one.end or ("" if found else "silent")
