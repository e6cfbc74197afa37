"""Asynchronous all_to_alls of uneven pieces: ranks learn each other's sizes while their callers go on."""

from __future__ import annotations

import gc
import random
import threading
import time
from typing import Any

import pytest
import torch

import symcomm
from symcomm import errors, testing
from symcomm.group.process_group import ProcessGroup
from tests.support.faults import attempt, run_group
from tests.support.ranks import die, returned

pytestmark = [pytest.mark.torch_versions, pytest.mark.timeout(120, method="thread")]

Pieces = list[list[torch.Tensor]]  # by sender and receiver


def threads(fn: Any, n: int = 2, *args: Any) -> list:
    return symcomm.spawn(fn, n, args=args, mode="threads", timeout=20, deadline=60)


def pieces_of(size: int, seed: int) -> Pieces:
    draw = random.Random(seed)  # ranks are threads
    numbers = iter(range(1 << 20))
    counts = [[draw.choice((0, 1, 2, 7, 5000)) for _ in range(size)] for _ in range(size)]
    return [[torch.tensor([float(next(numbers)) for _ in range(n)]) for n in row] for row in counts]


def exchange(g: ProcessGroup, seed: int, as_list: bool) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """(the work, where pieces come, what they are to be)"""
    pieces = pieces_of(g.size, seed)
    expected = [row[g.rank] for row in pieces]
    sent, got = [len(piece) for piece in pieces[g.rank]], [len(piece) for piece in expected]
    if as_list:
        outputs = [torch.empty(n) for n in got]
        return g.all_to_all(outputs, pieces[g.rank], async_op=True), outputs, expected
    output = torch.empty(sum(got))
    work = g.all_to_all_single(output, torch.cat(pieces[g.rank]), got, sent, async_op=True)
    return work, list(output.split(got)), expected


def check_pieces(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True)), (outputs, expected)


@testing.ranks([1, 2, 4])
def test_values(g: ProcessGroup):
    under_way = []
    for seed in range(30):
        work, outputs, expected = exchange(g, seed, bool(seed % 2))
        under_way.append((work, outputs, expected))
        if seed % 5 == 4:
            total = torch.ones(3)
            g.all_reduce(total)  # comes behind all of them, in its caller's thread
            assert total.tolist() == [g.size] * 3
            for work, outputs, expected in random.Random(seed).sample(under_way, len(under_way)):
                assert work.wait() and work.is_success() and work.exception() is None
                check_pieces(outputs, expected)
            under_way.clear()
    work, outputs, expected = exchange(g, 99, True)
    assert work.get_future().wait() == outputs
    check_pieces(outputs, expected)


def _late(g: ProcessGroup) -> str:
    for seed, as_list in enumerate((True, False)):
        if g.rank == 1:  # it comes once rank 0 goes on after its call
            g.recv(torch.empty(1), 0)
        work, outputs, expected = exchange(g, seed, as_list)
        if g.rank == 0:
            assert not work.is_completed()
            g.send(torch.ones(1), 1)
        work.wait()
        check_pieces(outputs, expected)
    return "done"


def test_a_call_returns_though_another_rank_comes_after_it():
    assert returned(run_group(_late, 2, timeout=10)) == ["done"] * 2


@testing.ranks(3)
def test_the_groups_thread_runs_what_nobody_waits_for(g: ProcessGroup):
    work, outputs, expected = exchange(g, 3, True)
    del work
    gc.collect()
    deadline = time.monotonic() + 20
    while not all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True)):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _with_gaps(g: ProcessGroup) -> None:
    """Outputs that are copied back, and inputs on which outputs lie."""
    wide = torch.zeros(2 + g.rank, 2)
    outputs = [wide[:, 0], torch.empty(2 + g.rank)]
    work = g.all_to_all(outputs, [torch.full((2,), g.rank + 1.0), torch.full((3,), g.rank + 1.0)], async_op=True)
    work.wait()
    assert [t.tolist() for t in outputs] == [[1.0] * (2 + g.rank), [2.0] * (2 + g.rank)]
    assert wide[:, 1].tolist() == [0.0] * (2 + g.rank)
    row = torch.arange(3.0) + 10 * g.rank
    mine, theirs = [2, 1], [2, 2] if g.rank == 0 else [1, 1]
    splits = theirs if g.rank == 0 else [1, 1]
    output = torch.cat([row, row])[: sum(splits)]
    g.all_to_all_single(output, row, splits, mine, async_op=True).wait()
    assert output.tolist() == ([0.0, 1.0, 10.0, 11.0] if g.rank == 0 else [2.0, 12.0])


def test_outputs_with_gaps():
    threads(_with_gaps)


# --- failures -----------------------------------------------------------------------------------------------------


def _disagreement(g: ProcessGroup) -> list[str]:
    told = []
    for as_list in (True, False):
        n = 2 + (g.rank == 1)
        if as_list:
            work = g.all_to_all([torch.ones(n) for _ in range(2)], [torch.ones(2)] * 2, async_op=True)
        else:
            work = g.all_to_all_single(torch.ones(2 * n), torch.ones(4), [n, n], [2, 2], async_op=True)
        before, total = torch.ones(1), torch.ones(1)
        behind = g.all_reduce(before, async_op=True)
        g.all_reduce(total)
        behind.wait()
        assert before.item() == total.item() == g.size
        with pytest.raises(errors.BadArgumentError) as raised:
            work.wait()
        assert work.is_completed() and not work.is_success() and work.exception() is raised.value
        with pytest.raises(errors.BadArgumentError):
            work.get_future().wait()
        told.append(str(raised.value))
    return told


def test_ranks_that_disagree_learn_it_from_the_work():
    words = "rank 0 sends 2 elements to rank 1, which expects 3; make input and output splits agree."
    assert threads(_disagreement) == [[f"all_to_all: {words}", f"all_to_all_single: {words}"]] * 2


def _refused_by_one(g: ProcessGroup) -> str:
    good = [torch.ones(2)] * 2
    if g.rank == 1:
        said = attempt(lambda: g.all_to_all([torch.ones(2)], good, async_op=True))
    else:
        said = attempt(g.all_to_all([torch.ones(2) for _ in good], good, async_op=True).wait)
    return said + attempt(g.barrier)


def test_a_call_that_one_rank_refuses():
    assert threads(_refused_by_one) == ["CallRefusedError", "BadArgumentError"]


def _no_plan(g: ProcessGroup, error: BaseException) -> list[str]:
    """Rank 1 cannot make its plan, after ranks have agreed on sizes."""
    if g.rank == 1:

        def cannot(request: Any) -> Any:
            if request.op.plan == "all_to_all":
                g.executor._plan_of = plan_of
                raise error
            return plan_of(request)

        plan_of, g.executor._plan_of = g.executor._plan_of, cannot
    work, _, _ = exchange(g, 1, True)
    try:
        work.wait()
        said = [""]
    except BaseException as caught:
        said = [type(caught).__name__]
    return [*said, attempt(lambda: g.all_reduce(torch.ones(1)))]


def test_a_rank_without_room_for_the_plan():
    said = returned(run_group(_no_plan, 2, errors.ResourceError("no room")))
    assert said == [["CallRefusedError", ""], ["ResourceError", ""]]


def test_an_interrupt_while_the_plan_is_made():
    """As in a blocking call: it reaches the caller, and the group ends. (On a busy machine the group's thread may make
    the plan, which no real interrupt reaches: then its end is what the caller hears.)"""
    said = returned(run_group(_no_plan, 2, KeyboardInterrupt()))
    assert said[1][0] in ("KeyboardInterrupt", "GroupUnusableError") and said[1][1] == "GroupUnusableError"
    assert said[0][0] in ("RankFailedError", "GroupUnusableError") and said[0][1] == "GroupUnusableError"


def _dead(g: ProcessGroup) -> str:
    work, _, _ = exchange(g, 1, True)
    work.wait()
    if g.rank == 1:
        die()
    work, _, _ = exchange(g, 1, True)
    with pytest.raises(errors.RankFailedError) as raised:
        work.wait()
    return str(raised.value)


def test_a_rank_that_dies():
    said = run_group(_dead, 2)[0]
    assert said.kind == "returned" and "all_to_all #" in said.value and "rank 1" in said.value, said


def _aborted(g: ProcessGroup) -> list[str]:
    if g.rank == 1:
        return [attempt(lambda: g.recv(torch.empty(1), 0))]
    work, _, _ = exchange(g, 1, True)
    threading.Timer(0.1, g.abort).start()
    return [attempt(work.wait)]


def test_abort():
    assert returned(run_group(_aborted, 2)) == [["GroupUnusableError"]] * 2


def _too_late(g: ProcessGroup) -> str:
    if g.rank == 1:
        return attempt(lambda: g.recv(torch.empty(1), 0))
    work, _, _ = exchange(g, 1, True)
    return attempt(lambda: work.wait(0.2))


def test_a_wait_that_gives_up():
    assert returned(run_group(_too_late, 2)) == ["DeadlineError"] * 2
