"""What the live page knows, from a simulated job with a clock of the test's own."""

from __future__ import annotations

import dataclasses
import json

import pytest

from symcomm.errors import BadArgumentError
from symcomm.observe.recorder.records import Operation
from symcomm.observe.top import model
from symcomm.observe.top.feed import Feed, GroupFacts, RankFacts, Sample
from symcomm.observe.top.model import BIN_NS, STATES, Live, end_of_pack
from symcomm.observe.top.simulate import SimulatedFeed
from symcomm.observe.top.snapshot import INSTANCES_SENT, RANK_OPERATIONS_SENT, snapshot

pytestmark = pytest.mark.without_torch

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
    worst = live.stragglers()[0]
    assert worst.rank == 5 and worst.times > 0.8 * len(live.over) and worst.seconds > 0.1 and worst is live.straggler()
    assert worst.times <= worst.of and 0 < worst.row()["usual"] < worst.seconds
    late = {rank: sum(column.get(rank, 0) for column in live.heat.values()) for rank in range(32)}
    assert max(late, key=lambda r: late[r]) == 5 and late[5] > 10 * sorted(late.values())[-2]


def test_of_two_ranks_one_is_a_straggler_only_if_it_is_mostly_the_last():
    slow, _ = simulated(2, straggler=1, seconds=20)
    assert slow.straggler() is not None and slow.straggler().rank == 1
    even, _ = simulated(2, seconds=20)
    assert even.straggler() is None and {late.rank for late in even.stragglers()} == {0, 1}


def test_the_pack_is_what_ranks_usually_differ_by():
    assert end_of_pack([10, 20]) == (10, 10)
    middle, end = end_of_pack([*range(100), 5000])
    assert middle == 50 and 100 < end < 250


def test_a_stuck_rank_gets_a_sentence():
    live, clock = simulated(16, stuck=11, stuck_after=5, seconds=14)
    verdict = live.verdict()
    assert verdict is not None and verdict.ranks == [11] and clock.now - verdict.since_ns > 8.9e9
    stuck = live.current[0]
    assert verdict.sentence == (
        f"rank 11 has not called {stuck.call} #{stuck.seq} (world), which ranks 0-10, 12-15 called at {stuck.site}; "
        "it is at storage.py:61 in read_exactly."
    )
    states = [STATES[s] for s in live.states()]
    assert states[11] == "late" and states.count("waiting") == 15
    assert live.lags()[11] == 1 and sum(live.lags()) == 1


def test_a_thousand_ranks_are_judged():
    live, _ = simulated(1000, stuck=613, stuck_after=20, seconds=50)
    verdict = live.verdict()
    assert verdict is not None and (verdict.kind, verdict.ranks) == ("missing", [613])
    assert "which ranks 0-612, 614-999 called at " in verdict.sentence


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


def test_how_many_went_directly():
    direct = {
        rank: [dataclasses.replace(op, copies="direct") for op in operations(range(5), rank=rank)] for rank in range(2)
    }
    copied = {
        rank: [dataclasses.replace(op, copies="no_plan") for op in operations(range(5, 20), rank=rank)]
        for rank in range(2)
    }
    told = {rank: [*direct[rank], *copied[rank]] for rank in range(2)}
    live = Live(Played(Sample(SECOND, facts(True, True), told, [GroupFacts("world", 2, (0, 1))])))
    live.refresh()
    assert [numbers.row()["direct"] for numbers in live.numbers.values()] == [0.25]


def judged(sample: Sample):
    live = Live(Played(sample))
    live.refresh()
    return live.verdict(), [STATES[s] for s in live.states()]


GROUPS = [GroupFacts("world", 2, (0, 1))]


@pytest.mark.parametrize(
    ("states", "alive", "sentence"),
    [
        (
            ["dead", "completed"],
            (True, False),
            "rank 1 (pid 101) died after all_reduce #1 (world), while rank 0 waited for it in all_reduce #2 (world) "
            "at a.py:1.",
        ),
        (
            ["left", "completed"],
            (True, False),
            "rank 1 left after all_reduce #1 (world) and never called all_reduce #2 (world), which rank 0 called at "
            "a.py:1.",
        ),
        (
            ["timeout", "completed"],
            (False, True),
            "rank 1 has not called all_reduce #2 (world), which rank 0 called at a.py:1.",
        ),
        (["completed", "completed"], (True, False), None),  # it has finished first
    ],
)
def test_who_ended_and_why(states, alive, sentence):
    told = {
        rank: [*operations([1], rank), *operations([2] if rank == 0 else [], rank, state)]
        for rank, state in enumerate(states)
    }
    verdict, shown = judged(Sample(SECOND, facts(*alive), told, GROUPS))
    assert (verdict and verdict.sentence) == sentence
    assert (shown.count("dead"), "failed" in shown) == (1, states[0] != "completed" and alive[0])


def test_a_mismatch_is_told_of_ranks_that_are_gone():
    told = {0: operations([0], 0, "mismatch"), 1: [dataclasses.replace(operations([0], 1, "mismatch")[0], count=5)]}
    verdict, shown = judged(Sample(SECOND, facts(False, False), told, GROUPS))
    assert verdict is not None and verdict.kind == "mismatch" and shown == ["dead", "dead"]


def test_disjoint_groups_of_one_name_are_told_apart():
    pairs = [(0, 1), (2, 3)]
    told = {
        rank: [dataclasses.replace(op, ranks=pair) for op in operations(range(5 if 0 in pair else 2), at)]
        for pair in pairs for at, rank in enumerate(pair)
    }  # fmt: skip
    live = Live(Played(Sample(SECOND, facts(*[True] * 4), told, [GroupFacts("world", 2, pair) for pair in pairs])))
    live.refresh()
    assert live.lags() == [0, 0, 0, 0] and len(live.over) == 7 and live.verdict() is None


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
    assert len(found["meetings"]) <= INSTANCES_SENT and found["skipped"] > 0
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
