"""What the live page knows, from a simulated job with a clock of the test's own."""

from __future__ import annotations

import dataclasses
import json
import sys
import types

import pytest

from symcomm.errors import BadArgumentError
from symcomm.observe.records import Operation
from symcomm.observe.top import model
from symcomm.observe.top.feed import Feed, GroupFacts, RankFacts, Sample
from symcomm.observe.top.model import BIN_NS, STATES, Live, end_of_pack
from symcomm.observe.top.simulate import SimulatedFeed
from symcomm.observe.top.snapshot import MEETINGS_SENT, RANK_OPERATIONS_SENT, snapshot

SECOND = 1_000_000_000


class Clock:
    def __init__(self):
        self.now = 1000 * SECOND

    def __call__(self) -> int:
        return self.now


def simulated(ranks: int, *, seconds: float = 10.0, **options) -> tuple[Live, Clock]:
    clock = Clock()
    live = Live(SimulatedFeed(ranks, clock=clock, history=0, **options))
    for _ in range(int(seconds * 2)):
        clock.now += SECOND // 2
        live.refresh()
    return live, clock


@pytest.mark.parametrize("ranks", [1, 2, 9, 200])
def test_meetings_are_put_together(ranks):
    live, _ = simulated(ranks)
    assert len(live.over) > 5 and all(m.is_whole and m.is_over for m in live.over)
    assert [m.first.seq for m in live.over] == list(range(len(live.over)))
    assert all(len(m.starts) == ranks == len(m.ends) for m in live.over)
    assert live.verdict() is None and max(live.lags()) <= 1
    assert set(live.states()) <= {model.COMPUTING, model.COMMUNICATING, model.WAITING, model.LATE}


def test_a_straggler_is_seen():
    live, _ = simulated(32, straggler=5, seconds=20)
    rank, times, seconds = live.stragglers()[0]
    assert rank == 5 and times > 0.8 * len(live.over) and seconds > 0.1
    late = {rank: sum(column.get(rank, 0) for column in live.heat.values()) for rank in range(32)}
    assert max(late, key=lambda r: late[r]) == 5 and late[5] > 10 * sorted(late.values())[-2]


def test_the_pack_is_what_ranks_usually_differ_by():
    assert end_of_pack([10, 20]) == (10, 10)
    middle, end = end_of_pack([*range(100), 5000])
    assert middle == 50 and 100 < end < 250


def test_a_stuck_rank_gets_a_sentence():
    live, clock = simulated(16, stuck=11, stuck_after=5, seconds=14)
    verdict = live.verdict()
    assert verdict is not None and verdict.ranks == (11,)
    assert verdict.sentence.startswith("Stuck: 15 ranks have waited 9 s in ") and clock.now - verdict.since_ns > 8.9e9
    assert "for rank 11, which last finished" in verdict.sentence and "train.py:" in verdict.sentence
    states = [STATES[s] for s in live.states()]
    assert states[11] == "late" and states.count("waiting") == 15
    assert live.lags()[11] == 1 and sum(live.lags()) == 1


def test_words_of_trace_are_used_where_they_are(monkeypatch):
    asked = []

    @dataclasses.dataclass
    class RankTrace:
        rank: int
        pid: int
        noted_ns: int
        end: str
        operations: list
        groups: list

    def judge(trace):
        asked.append(trace)
        return types.SimpleNamespace(kind="missing", sentence="rank 3 has not called it yet.", ranks=[3])

    stand_in = types.SimpleNamespace(RankTrace=RankTrace, Trace=lambda ranks, live: ranks)
    monkeypatch.setitem(sys.modules, "symcomm.observe.trace", stand_in)
    monkeypatch.setitem(sys.modules, "symcomm.observe.verdict", types.SimpleNamespace(judge=judge))
    live, _ = simulated(4, stuck=3, stuck_after=2, seconds=9)
    verdict = live.verdict()
    assert verdict is not None and verdict.sentence == "Stuck: Rank 3 has not called it yet."
    assert asked[0][0].operations[-1].state == "running" and asked[0][3].operations[-1].state == "completed"


class Played(Feed):
    """Tells what a test has prepared."""

    def __init__(self, *samples: Sample):
        self.samples = list(samples)

    def poll(self) -> Sample:
        return self.samples.pop(0)


A_CALL = Operation(
    rank=0, number=1, group="world", ranks=(0, 1), seq=0, call="all_reduce", dtype="float32", op="SUM", root=None,
    count=4, nbytes=16, created_ns=0, finished_ns=None, waited_us=0, state="running", plan="one-shot", zero_copy=False,
    site="a.py:1", exact_site=True,
)  # fmt: skip


def operations(seqs, rank=0, state="completed"):
    """One operation every microsecond."""
    return [
        dataclasses.replace(
            A_CALL, rank=rank, seq=seq, number=seq + 1, created_ns=seq * 1000, state=state,
            finished_ns=None if state == "running" else seq * 1000 + 500,
        )
        for seq in seqs
    ]  # fmt: skip


def facts(*alive: bool) -> list[RankFacts]:
    return [RankFacts(rank, 100 + rank, lives, 10, 1 << 20) for rank, lives in enumerate(alive)]


def test_a_part_that_was_overwritten_does_not_stay_open():
    """Rank 0's ring forgot operations 0 to 9 before anybody looked: rank 1's are not shown as waiting."""
    told = {0: operations(range(10, 20)), 1: operations(range(20), rank=1)}
    live = Live(Played(Sample(SECOND, facts(True, True), told, [GroupFacts("world", 2, (0, 1))])))
    live.refresh()
    assert not live.running and len(live.over) == 20 and live.verdict() is None
    assert sum(n.count for n in live.numbers.values()) == 10


def test_the_dead_and_the_failed_are_named():
    groups = [GroupFacts("world", 2, (0, 1))]
    waiting = {0: operations([0, 1], state="running")[1:], 1: operations([0], rank=1)}
    live = Live(Played(Sample(SECOND, facts(True, False), waiting, groups)))
    live.refresh()
    assert live.verdict().sentence.endswith("for rank 1; rank 1 ended.")
    assert [STATES[s] for s in live.states()] == ["waiting", "dead"]
    live = Live(Played(Sample(SECOND, facts(True, True), {0: operations([0], state="mismatch")}, groups)))
    live.refresh()
    assert live.verdict().sentence == "Rank 0 failed in all_reduce #0: mismatch."


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(model, "RANK_OPERATIONS_KEPT", 1000)
    live, clock = simulated(50, seconds=30)
    assert sum(len(m.starts) for m in live.over) <= 1000
    assert min(live.heat) >= clock.now // BIN_NS - model.BINS
    assert all(len(recent) <= model.RECENT for recent in live.recent.values())


def test_snapshots_tell_only_what_is_new():
    live, clock = simulated(8)
    first = snapshot(live, 0)
    assert len(first["meetings"]) >= len(live.over) and first["since"] == 0
    clock.now += SECOND // 2
    live.refresh()
    second = snapshot(live, first["version"])
    assert 0 < len(second["meetings"]) < len(first["meetings"]) / 3
    known = {row[0]: row for row in first["meetings"]} | {row[0]: row for row in second["meetings"]}
    whole = {row[0]: row for row in snapshot(live, 0)["meetings"]}
    assert {i: row for i, row in known.items() if i in whole} == whole
    assert snapshot(live, live.version + 7)["since"] == 0  # a page of an earlier server starts afresh


def test_a_snapshot_of_a_thousand_ranks_is_bounded():
    live, _ = simulated(1000, seconds=60, straggler=7)
    found = snapshot(live, 0)
    assert len(found["meetings"]) <= MEETINGS_SENT and found["skipped"] > 0
    assert sum(len(row[12]) for row in found["meetings"]) <= RANK_OPERATIONS_SENT
    assert len(json.dumps(found)) < 2_000_000
    assert found["meetings"][-1][3] >= max(m.first.seq for m in live.over)  # the newest are there
    assert found["groups"][0]["ranks"] == "0-999"


def test_the_same_seed_tells_the_same_job():
    one, two = (simulated(6, seed=3)[0] for _ in range(2))
    assert [m.starts for m in one.over] == [m.starts for m in two.over]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"ranks": 0}, "--simulate must be 1 rank or more"), ({"ranks": 2, "stuck": 2}, "--stuck must be a rank, 0 to 1")],
)
def test_bad_simulations_are_refused(options, words):
    with pytest.raises(BadArgumentError, match=words):
        SimulatedFeed(**options)
