"""Stragglers, clocks of several hosts, and the trace for Perfetto."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from symcomm.observe.analysis.clocks import offsets
from symcomm.observe.analysis.perfetto import chrome_trace
from symcomm.observe.analysis.report import as_data, as_text
from symcomm.observe.analysis.stragglers import WINDOWS, stragglers
from symcomm.observe.recorder.trace import RankTrace, Trace
from tests.support.faults import run_group
from tests.support.traces import SECOND, call

MS = 10**6


def late(steps, delays, **facts):
    """Ranks that each come ``delays[rank](step)`` ms after the step began; all end 1 ms after the last one came."""
    ranks = {}
    for rank, delay in enumerate(delays):
        ops = []
        for step in range(1, steps + 1):
            begin = step * SECOND
            came, last = delay(step), max(d(step) for d in delays)
            op = call(step, size=len(delays))
            ops.append(
                replace(op, rank=rank, created_ns=begin + came * MS, finished_ns=begin + (last + 1) * MS,
                        waited_us=(last - came) * 1000)
            )  # fmt: skip
        groups = [{"name": "world", "rank": rank, "size": len(delays), "ranks": list(range(len(delays)))}]
        ranks[rank] = RankTrace(rank, 100 + rank, boot="x", noted_ns=99 * SECOND, operations=ops, groups=groups)
    return Trace(ranks, **facts)


def test_who_makes_the_others_wait():
    trace = late(10, [lambda s: 0, lambda s: 30 if s > 5 else 1, lambda s: 2])
    worst, *others = stragglers(trace)
    assert (worst.rank, worst.collectives, worst.last) == (1, 10, 5)
    assert worst.late_s == pytest.approx(5 * 0.028)
    assert worst.caused_s == pytest.approx(5 * (0.030 + 0.028))
    assert worst.waited_s == pytest.approx(5 * 0.001)
    assert [row.rank for row in others] == [2, 0] and others[1].last == 0
    assert sum(worst.over_time) == pytest.approx(worst.caused_s) and len(worst.over_time) == WINDOWS
    assert worst.over_time[0] == 0 and worst.over_time[-1] > 0
    text = as_text(trace)
    assert "Who makes the others wait:" in text and "5 of 10" in text


def test_nobody_waits():
    trace = late(3, [lambda s: 0, lambda s: 0])
    assert all(row.caused_s == 0 for row in stragglers(trace))
    assert "Who makes" not in as_text(trace)
    assert stragglers(Trace({})) == []


def test_which_way_the_calls_took():
    trace = late(3, [lambda s: 0, lambda s: 0])
    assert "How the recorded" not in as_text(trace, paths=True)
    assert as_data(trace)["ways"] == []  # not known, as in torch's dumps
    for one in trace.ranks.values():
        ways = [("short", "inline"), ("long", "inline"), ("long", "queued")]
        pairs = zip(one.operations, ways, strict=True)
        one.operations = [replace(op, way=way, thread=thread) for op, (way, thread) in pairs]
    assert as_data(trace)["ways"] == [{"group": "world", "short": 2, "long": 4, "inline": 4, "queued": 2}]
    assert "How the recorded calls" not in as_text(trace)
    lines = as_text(trace, paths=True).splitlines()
    at = lines.index("How the recorded calls were made:")
    assert lines[at + 2].split() == ["world", "2", "4", "4", "2"]


def test_how_the_bytes_went():
    trace = late(3, [lambda s: 0, lambda s: 0])
    assert "How their bytes" not in as_text(trace) and as_data(trace)["copies"] == []  # not known
    for one in trace.ranks.values():
        kinds = zip(one.operations, ("direct", "ordinary_here", "direct"), strict=True)
        one.operations = [replace(op, copies=copies, nbytes=1 << 20) for op, copies in kinds]
    assert as_data(trace)["copies"] == [
        {"group": "world", "copies": "direct", "calls": 4, "bytes": 4 << 20},
        {"group": "world", "copies": "ordinary_here", "calls": 2, "bytes": 2 << 20},
    ]
    lines = as_text(trace).splitlines()
    at = lines.index("How their bytes went:")
    assert lines[at + 2].split() == ["world", "directly,", "nothing", "copied", "4", "4", "MiB"]
    assert "own tensor is ordinary" in lines[at + 3]


def slow_rank(group):
    import torch

    t = torch.ones(4)
    for _ in range(4):
        if group.rank == 1:
            time.sleep(0.05)
        group.all_reduce(t)
    from symcomm.observe.recorder.dump import note

    return note(group.rank, 0, group.arena.flight.address)


def test_a_real_straggler():
    outcomes = run_group(slow_rank, 3)
    assert [o.kind for o in outcomes] == ["returned"] * 3, outcomes
    worst = stragglers(Trace({o.rank: o.value for o in outcomes}))[0]
    assert worst.rank == 1 and worst.last >= 3 and worst.caused_s > 0.1


def on_another_host(trace, rank, ahead_ns):
    """As if the rank's clock were ahead."""
    one = trace.ranks[rank]
    one.boot = f"host-{rank}"
    one.operations = [
        replace(op, created_ns=op.created_ns + ahead_ns, finished_ns=op.finished_ns + ahead_ns) for op in one.operations
    ]
    one.noted_ns += ahead_ns
    return trace


def test_clocks_of_hosts_are_aligned_by_what_they_did_together():
    trace = on_another_host(late(9, [lambda s: 0, lambda s: 5, lambda s: 1]), 1, 777 * SECOND)
    assert offsets(trace) == {0: 0, 1: -777 * SECOND, 2: 0}
    assert stragglers(trace)[0].rank == 1


def test_clocks_of_hosts_that_did_nothing_together():
    trace = on_another_host(late(2, [lambda s: 0, lambda s: 0]), 1, 5 * SECOND)
    trace.ranks[1].operations = []
    for one in trace.ranks.values():
        one.noted_wall_ns = 1000 * SECOND
    assert offsets(trace) == {0: 0, 1: -5 * SECOND}
    assert offsets(Trace({})) == {}


def test_chrome_trace():
    trace = on_another_host(late(3, [lambda s: 0, lambda s: 20]), 1, 50 * SECOND)
    trace.ranks[0].operations.append(replace(call(4, state="running", size=2), rank=0, created_ns=90 * SECOND))
    data = chrome_trace(trace)
    assert set(data) == {"traceEvents", "displayTimeUnit"}
    events = data["traceEvents"]
    for event in events:
        assert event["ph"] in ("M", "X", "s", "f")
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
    slices = [e for e in events if e["ph"] == "X"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in slices if e["args"]["seq"] == 2] == [
        (0, 1e6, 21e3), (1, 1.02e6, 1e3),
    ]  # fmt: skip
    assert slices[3]["args"]["state"] == "running" and slices[3]["dur"] == 9e6  # until it was written down
    assert slices[0]["args"]["site"] == "/job/train.py:88" and "root" not in slices[0]["args"]
    arrows = {e["ph"]: e for e in events if e.get("cat") == "wait" and e["id"] == "world/1/0"}
    assert (arrows["s"]["pid"], arrows["f"]["pid"]) == (1, 0) and arrows["f"]["ts"] > arrows["s"]["ts"]
    names = {(e["pid"], e["name"]): e["args"] for e in events if e["ph"] == "M"}
    assert names[1, "process_name"] == {"name": "rank 1 (pid 101)"}
    assert names[0, "thread_name"] == {"name": "world"}
    assert chrome_trace(Trace({})) == {"traceEvents": [], "displayTimeUnit": "ms"}
