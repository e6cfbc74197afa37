"""The sentence for each kind of trouble, from records made by hand."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace

import pytest

from symcomm.observe.analysis.perfetto import chrome_trace
from symcomm.observe.analysis.report import as_data, as_text
from symcomm.observe.analysis.verdict import judge
from symcomm.observe.recorder.stacks import Frame, ThreadStack, where
from symcomm.observe.recorder.torch_format import as_json, torch_dump
from symcomm.observe.recorder.trace import RankTrace, Trace
from tests.support.traces import SECOND, call

pytestmark = pytest.mark.without_torch


def trace_of(*ranks, live=False, **more):
    """Each rank: a list of calls, or (calls, facts of the rank)."""
    found = {}
    for rank, given in enumerate(ranks):
        if given is None:
            continue
        operations, facts = given if isinstance(given, tuple) else (given, {})
        operations = [replace(op, rank=op.ranks.index(rank), number=n) for n, op in enumerate(operations, 1)]
        groups = [{"name": "world", "rank": rank, "size": len(ranks), "ranks": list(range(len(ranks)))}]
        found[rank] = RankTrace(rank, 100 + rank, noted_ns=500 * SECOND, operations=operations, groups=groups, **facts)
    return Trace(found, live=live, **more)


def at(file, line, function):
    return [ThreadStack("MainThread", True, (Frame(file, line, function),))]


def test_missing():
    stuck = [call(411), call(412, state="timeout")]
    late = ([call(411)], {"stacks": at("/job/loader.py", 40, "next_batch")})
    verdict = judge(trace_of(stuck, stuck, stuck, late))
    assert verdict.sentence == (
        "rank 3 has not called all_reduce #412 (world), which ranks 0-2 called at train.py:88; "
        "it is at loader.py:40 in next_batch."
    )
    assert (verdict.kind, verdict.ranks, verdict.group, verdict.seq) == ("missing", [3], "world", 412)


def test_missing_with_sites_that_differ():
    stuck = [call(2, state="timeout", size=3)]
    other = [call(2, state="timeout", size=3, site="/job/eval.py:7")]
    assert judge(trace_of(stuck, other, [call(1, size=3)])).sentence == (
        "rank 2 has not called all_reduce #2 (world), which ranks 0, 1 called at eval.py:7 and train.py:88."
    )


def test_two_are_missing():
    stuck = [call(2, state="timeout")]
    a = ([call(1)], {"stacks": at("/job/a.py", 1, "f")})
    b = ([call(1)], {"stacks": at("/job/b.py", 2, "g")})
    assert judge(trace_of(stuck, stuck, a, b)).sentence == (
        "ranks 2, 3 have not called all_reduce #2 (world), which ranks 0, 1 called at train.py:88; "
        "rank 2 is at a.py:1 in f, rank 3 is at b.py:2 in g."
    )


def test_a_running_job_is_given_time():
    stuck = [call(488, state="running")]
    verdict = judge(trace_of(stuck, stuck, stuck, [call(487)], live=True))
    assert verdict.sentence == ("rank 3 has not called all_reduce #488 (world), which ranks 0-2 called at train.py:88.")
    assert verdict.since_ns == 488 * SECOND
    assert judge(trace_of(stuck, stuck, stuck, [call(487)], live=True), patience=13).kind == "fine"
    busy = [call(500, state="running")]
    assert judge(trace_of(busy, busy, busy, [call(499)], live=True)).kind == "fine"


def test_no_dump_of_the_missing_rank():
    stuck = [call(412, state="timeout")]
    assert judge(trace_of(stuck, stuck, stuck, None)).sentence == (
        "rank 3 has not called all_reduce #412 (world), which ranks 0-2 called at train.py:88; it left no dump."
    )


def test_mismatch_names_the_minority():
    one = [call(1), call(2, state="mismatch")]
    odd = [call(1), call(2, "broadcast", "mismatch", "/job/train.py:90", root=0)]
    verdict = judge(trace_of(one, one, odd, one))
    assert verdict.sentence == (
        "rank 2 called broadcast(float32 x 10, root 0) at train.py:90, "
        "where ranks 0, 1, 3 called all_reduce(float32 x 10, SUM) at train.py:88 (#2 of world)."
    )
    assert verdict.ranks == [2]


def test_mismatch_of_equal_sides():
    one, other = [call(1, size=2, count=5)], [call(1, size=2, site="/job/b.py:3")]
    verdict = judge(trace_of(one, other))
    assert verdict.sentence == (
        "the ranks did not make the same call as #1 of world: rank 0 called all_reduce(float32 x 5, SUM) at "
        "train.py:88; rank 1 called all_reduce(float32 x 10, SUM) at b.py:3."
    )
    assert verdict.ranks == [0, 1]


def test_who_ended_after_a_mismatch_did_not_cause_it():
    one, odd = [call(1, state="mismatch", size=2)], [call(1, "barrier", "mismatch", size=2)]
    assert judge(trace_of((one, {"end": "exited with code 1"}), odd)).kind == "mismatch"


def test_mismatch_of_sizes_in_a_list():
    one = [call(1, "all_gather", "mismatch", size=2)]
    assert judge(trace_of(one, one)).sentence == (
        "ranks 0, 1 called all_gather #1 (world) at train.py:88 with different lists of sizes."
    )


def test_dead():
    stuck = [call(11, size=3), call(12, state="dead", size=3)]
    gone = ([call(11, size=3)], {"end": "died with SIGKILL", "noted_by": 0})
    assert judge(trace_of(stuck, gone, stuck)).sentence == (
        "rank 1 (pid 101) died with SIGKILL after all_reduce #11 (world), "
        "while ranks 0, 2 waited for it in all_reduce #12 (world) at train.py:88."
    )


def test_two_dead():
    """Who stopped working first is the cause."""
    stuck = [call(11, size=3), call(12, state="dead", size=3)]
    late = ([*stuck[:1], call(12, state="running", size=3)], {"end": "exited with code 1"})
    first = ([call(11, size=3)], {"end": "died with SIGBUS"})
    assert judge(trace_of(late, first, stuck)).sentence == (
        "rank 1 (pid 101) died with SIGBUS after all_reduce #11 (world), "
        "while rank 2 waited for it in all_reduce #12 (world) at train.py:88; rank 0 ended too."
    )


def test_dead_in_the_operation():
    stuck = [call(12, state="dead", size=2)]
    gone = ([call(12, state="running", size=2)], {"end": "exited with code 1"})
    assert judge(trace_of(stuck, gone)).sentence == "rank 1 (pid 101) exited with code 1 in all_reduce #12 (world)."


def test_stopped():
    stuck = [call(1, "barrier", size=2), call(2, state="timeout", size=2)]
    stopped = ([call(1, "barrier", size=2)], {"end": "stopped"})
    assert judge(trace_of(stuck, stopped)).sentence == (
        "rank 1 (pid 101) is stopped after barrier #1 (world), while rank 0 waited for it in all_reduce #2 (world) at "
        "train.py:88; `kill -CONT 101` lets it go on."
    )


def test_left():
    stuck = [call(1, "barrier", size=2), call(2, state="left", size=2)]
    assert judge(trace_of(stuck, ([call(1, "barrier", size=2)], {"end": "left"}))).sentence == (
        "rank 1 left after barrier #1 (world) and never called all_reduce #2 (world), "
        "which rank 0 called at train.py:88."
    )


def test_groups_in_different_order():
    a = [call(3, state="timeout", group="dp", size=2, site="/job/a.py:1")]
    b = [call(7, state="timeout", group="tp", size=2, site="/job/a.py:2")]
    assert judge(trace_of(a, b)).sentence == (
        "ranks 0, 1 wait for each other in different groups: rank 0 is in all_reduce #3 (dp) at a.py:1, "
        "rank 1 is in all_reduce #7 (tp) at a.py:2; make every rank use its groups in the same order."
    )


def test_a_chain_of_waits_leads_to_its_end():
    """Rank 0 waits for rank 1, which waits for rank 2 in another group, which does not wait."""
    zero = [call(1, state="timeout", group="a", size=2)]
    one = [call(5, state="timeout", group="b", site="/job/b.py:5", ranks=(1, 2))]
    two = ([call(4, group="b", ranks=(1, 2))], {"stacks": at("/job/io.py", 9, "read")})
    assert judge(trace_of(zero, one, two)).sentence == (
        "rank 2 has not called all_reduce #5 (b), which rank 1 called at b.py:5; it is at io.py:9 in read."
    )


def test_message():
    zero = [call(1, "recv", "timeout", size=2, root=1)]
    one = ([], {"stacks": at("/job/io.py", 9, "read")})
    assert judge(trace_of(zero, one)).sentence == (
        "rank 0 could not receive 40 bytes from rank 1 (world) at train.py:88; rank 1 is at io.py:9 in read."
    )


def test_all_came_and_it_did_not_end():
    assert judge(trace_of([call(3, state="timeout", size=2)], [call(3, state="running", size=2)])).sentence == (
        "ranks 0, 1 called all_reduce #3 (world) at train.py:88, but it did not end on ranks 0, 1 (timeout)."
    )


@pytest.mark.parametrize("lost", [[613], list(range(0, 1000, 2))])
def test_a_thousand_ranks(lost):
    """Also when half of them are missing, and in groups that cross."""
    world = tuple(range(1000))
    done = [call(seq, ranks=world) for seq in range(1, 9)]
    stuck = [*done, call(9, ranks=world, state="running")]
    verdict = judge(trace_of(*(done if rank in lost else stuck for rank in world), live=True))
    assert (verdict.kind, verdict.ranks, verdict.seq) == ("missing", lost, 9)


def test_a_circle_of_a_thousand():
    def waits(rank):
        pair = tuple(sorted((rank, (rank + 1) % 1000)))
        return [call(1, group=f"pair{rank}", ranks=pair, state="running", site=f"/job/a.py:{rank}")]

    verdict = judge(trace_of(*(waits(rank) for rank in range(1000)), live=True))
    assert (verdict.kind, verdict.ranks) == ("circle", list(range(1000)))


def test_fine():
    two = [call(1, size=2), call(2, size=2)]
    assert judge(trace_of(two, two)).sentence == (
        "nothing went wrong: ranks 0, 1 made the same 2 calls (world), and all ended."
    )
    assert judge(trace_of([], [])).sentence == "nothing is recorded of ranks 0, 1."
    assert judge(Trace({})).sentence == "nothing is recorded of any rank."


def test_an_earlier_group_of_the_same_name_does_not_count():
    before = [call(1, "broadcast", size=2, root=0), call(2, "broadcast", size=2, root=0)]
    now = [call(1, size=2)]
    assert judge(trace_of([*before, *now], [*before[:1], *now])).kind == "fine"


def test_disjoint_groups_may_share_a_name():
    a, b = [call(1, group="dp", ranks=(0, 1))], [call(1, "barrier", group="dp", ranks=(2, 3))]
    assert judge(trace_of(a, a, b, b)).sentence == (
        "nothing went wrong: ranks 0-3 made the same 2 calls (2 groups), and all ended."
    )


@pytest.mark.parametrize("file", [pytest.__file__, "/x/lib/python3.11/site-packages/torch/utils/data.py"])
def test_where_is_in_the_program_not_in_a_library(file):
    own, library = Frame("/job/train.py", 5, "step"), Frame(file, 1, "inner")
    assert where([ThreadStack("MainThread", True, (library, own))]) == own
    assert where([ThreadStack("MainThread", True, (library,))]) == library
    assert where([ThreadStack("other", False, (own,))]) is None


def random_trace(seed):
    """Whatever ranks could leave behind, and more."""
    dice = random.Random(seed)
    states = ["completed"] * 6 + ["running", "timeout", "mismatch", "dead", "left", "aborted", "status 99"]
    names = ["all_reduce", "barrier", "broadcast", "send", "recv"]
    ranks = {}
    for rank in range(dice.randint(0, 5)):
        ops = []
        for number in range(1, dice.randint(1, 12)):
            group, members = dice.choice(
                [("a", (0, 1, 2, 3, 4)), ("b", (4, 2, 0)), ("b", (1, 3)), ("big", ()), ("?", ())]
            )
            name = dice.choice(names)
            root = dice.randint(-1, 3) if name in ("broadcast", "send", "recv") else None
            one = call(dice.randint(1, 6), name, dice.choice(states), dice.choice(["", "x.py:3"]), group, root=root)
            mine = members.index(rank) if rank in members else -1
            ops.append(replace(one, ranks=members, rank=mine, number=number, waited_us=dice.randint(0, 9)))
        end = dice.choice(["", "", "", "stopped", "left", "silent", "died with SIGKILL"])
        groups = [{"name": "a", "rank": rank, "size": 5, "ranks": [0, 1, 2, 3, 4]}]
        ranks[rank] = RankTrace(
            rank, 100 + rank, boot=dice.choice("xy"), noted_ns=20 * SECOND, end=end, operations=ops, groups=groups
        )
    return Trace(ranks, live=dice.random() < 0.3)


@pytest.mark.parametrize("block", range(4))
def test_every_trace_gets_a_sentence(block):
    for seed in range(block * 250, block * 250 + 250):
        trace = random_trace(seed)
        verdict = judge(trace)
        assert verdict.sentence.endswith(".") and "\n" not in verdict.sentence, seed
        assert "none" not in verdict.sentence and "()" not in verdict.sentence.replace("barrier()", ""), seed
        assert as_text(trace, verdict).startswith(verdict.sentence)
        json.dumps([as_data(trace), chrome_trace(trace)])
        again = Trace({r: RankTrace.from_dict(one.to_dict()) for r, one in trace.ranks.items()}, live=trace.live)
        assert again == trace
        for one in trace.ranks.values():
            json.loads(as_json(torch_dump(one.operations, dict(enumerate(one.groups, 1)))))


def test_a_program_in_a_folder_of_our_name_is_not_ours():
    own = Frame("/home/me/symcomm/examples/train.py", 5, "step")
    assert where([ThreadStack("MainThread", True, (Frame(threading.__file__, 1, "wait"), own))]) == own


def test_what_ranks_raised_names_groups_as_verdicts_do():
    raised = ["all_reduce #2 on group 'world' failed on rank 0: rank 1 died.", "barrier #1 on group '7' timed out."]
    trace = trace_of(([call(1)], {"errors": raised}), [call(1)])
    assert judge(trace).sentence == "rank 0: all_reduce #2 (world) failed on rank 0: rank 1 died."
    assert "rank 0 raised: barrier #1 (group 7) timed out." in as_text(trace) and "'" not in as_text(trace)
