"""Tests written with the kit, and what it says of tests that fail."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import symcomm
from symcomm import testing
from symcomm.errors import BadArgumentError, RankFailedError
from symcomm.testing import RanksFailed, Schedule, every_fault, run
from symcomm.testing.running import Skip

HERE = Path(__file__)


@testing.ranks([2, 3])
def test_threads(group):
    x = torch.ones(3)
    group.all_reduce(x)
    assert x.tolist() == [group.size] * 3


@testing.ranks(2, mode="processes")
def test_processes(group):
    """torch.distributed is initialised, and stands on the same group."""
    x = torch.ones(3)
    dist.all_reduce(x)
    group.all_reduce(x)
    assert x.tolist() == [4.0] * 3 and dist.get_backend() == "symcomm"


@testing.ranks(2, mode="processes", backend="gloo")
def test_gloo(group):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 3 and group is dist.group.WORLD and dist.get_backend() == "gloo"


@pytest.fixture
def number(tmp_path):
    assert tmp_path.exists()
    return 5


@pytest.mark.parametrize("factor", [1, 2])
@testing.ranks(2, mode="processes")
def test_fixtures_and_parameters(group, number, factor, tmp_path):
    x = torch.tensor([number * factor])
    group.all_reduce(x)
    assert x.item() == 10 * factor
    (tmp_path / str(group.rank)).touch()


@pytest.fixture
def own(tmp_path):
    """A tensor of each rank's, and a note that its end was seen."""

    @testing.per_rank
    def make(group):
        yield torch.full((2,), float(group.rank))
        (tmp_path / f"over-{group.rank}").touch()

    yield make
    assert sorted(path.name for path in tmp_path.glob("over-*")) == ["over-0", "over-1"]


@pytest.fixture
def place():
    return testing.per_rank(lambda group: f"{group.rank} of {group.size}")


@testing.ranks(2)
def test_fixtures_of_threads_that_each_rank_makes(group, own, place, number):
    group.all_reduce(own)
    assert own.tolist() == [1.0, 1.0] and place == f"{group.rank} of 2" and number == 5


@testing.ranks(2, mode="processes")
def test_fixtures_of_processes_that_each_rank_makes(group, own, place, number):
    group.all_reduce(own)
    assert own.tolist() == [1.0, 1.0] and place == f"{group.rank} of 2" and number == 5


class TestInAClass:
    @testing.ranks(2)
    def test_method(self, group, number):
        assert isinstance(self, TestInAClass) and number == 5 and group.size == 2


@testing.ranks(3, mode="processes", kill="rank 2 at all_reduce 2")
def test_a_kill(group):
    x = torch.ones(3)
    group.all_reduce(x)
    with pytest.raises(RankFailedError) as caught:
        group.all_reduce(x)
    assert caught.value.ranks == [2] and group.rank != 2


@testing.ranks(3, kill="rank 2 at barrier 1")
def test_a_kill_of_a_thread(group):
    with pytest.raises(RankFailedError):
        group.barrier()
    assert group.rank != 2


@testing.ranks(2, mode="processes", stop="rank 1 at barrier 1 by 0.4")
def test_a_stop(group):
    begun = time.monotonic()
    group.barrier()
    assert time.monotonic() - begun > 0.3


@testing.ranks(2, delay="rank 1 at call 2 by 0.3")
def test_a_delay(group):
    group.barrier()
    begun = time.monotonic()
    group.barrier()
    assert time.monotonic() - begun > 0.2


@testing.ranks(2, raise_="rank 1 at barrier 2")
def test_an_exception(group):
    group.barrier()
    wanted = RuntimeError if group.rank == 1 else symcomm.errors.CallRefusedError
    with pytest.raises(wanted, match="rank 1 at barrier 2"):
        group.barrier()


def one_is_wrong(group):
    group.barrier()
    assert group.rank != 1, "wrong here"


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_a_failure_shows_the_ranks_own_traceback(mode):
    with pytest.raises(RanksFailed) as failed:
        run(one_is_wrong, 3, mode=mode)
    assert [end.kind for end in failed.value.ends] == ["returned", "raised", "returned"]
    text = str(failed.value)
    assert text.startswith("rank 1 raised:\nTraceback") and "\nAssertionError: wrong here" in text
    assert f'File "{HERE}", line' in text and "in one_is_wrong" in text and "running.py" not in text


def one_never_comes(group):
    group.barrier()
    if group.rank == 1:
        time.sleep(4)  # a thread cannot be ended
    group.barrier()


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_a_hang_says_who_waits_for_whom_and_where(mode):
    """Once; then it shows where each rank is."""
    with pytest.raises(RanksFailed) as failed:
        run(one_never_comes, 3, mode=mode, deadline=1.5, timeout=50.0)
    ends = failed.value.ends
    assert [end.kind for end in ends] == ["stuck"] * 3 and all("in one_never_comes" in end.text for end in ends)
    sentence = (
        r"rank 1 has not called barrier #2 \(world\), which ranks 0, 2 called at .*test_ranks.py:\d+; it is at .*"
    )
    assert re.match(sentence + r"test_ranks.py:\d+ in one_never_comes\.\n", ends[0].text)
    assert str(failed.value).count("has not called") == 1 and "running.py" not in str(failed.value)


def one_dies(group):
    if group.rank == 1:
        os._exit(3)
    group.barrier()


def test_a_death_that_nobody_asked_for():
    with pytest.raises(RanksFailed, match=r"rank 1 died:\nexited with code 3"):
        run(one_dies, 2, mode="processes")


def skips(group):
    pytest.skip("not here")


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_a_skip(mode):
    with pytest.raises(Skip, match="not here"):
        run(skips, 2, mode=mode)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kill": "rank two"}, "kill must be such as"),
        ({"kill": "rank 1 at allreduce 3"}, "kill must be 'call', or one of"),
        ({"kill": "rank 2"}, "kill must be a rank of 0 to 1"),
        ({"stop": "rank 1"}, "stop must be used with mode='processes'"),
        ({"lose": "rank 1"}, "arguments must be"),
    ],
)
def test_scripts_that_are_refused(wrong, words):
    with pytest.raises(BadArgumentError, match=words):
        testing.ranks(2, **wrong)


def two_steps(group):
    x = torch.full((2,), float(group.rank))
    group.all_reduce(x)
    group.barrier()
    assert x.tolist() == [1.0, 1.0]


def test_a_fault_at_every_call():
    """Two ranks, two calls, two kinds: all are tried, in an order that the seed gives again."""
    tried = every_fault(two_steps, 2, kinds=("kill", "delay"), seed=7)
    assert len(tried.faults) == len(set(tried.faults)) == 8 and tried.seed == 7
    assert {(f.kind, f.rank, f.number) for f in tried.faults} == {
        (kind, rank, number) for kind in ("kill", "delay") for rank in (0, 1) for number in (1, 2)
    }
    assert "broadcast" in tried.never_made and "barrier" not in tried.never_made
    assert every_fault(two_steps, 2, kinds=("kill", "delay"), seed=7, at_most=1).faults == tried.faults[:1]


def swallows(group):
    try:
        group.barrier()
    except RankFailedError:
        raise AssertionError("this program knows no deaths") from None


def test_a_fault_that_a_test_does_not_stand():
    with pytest.raises(RanksFailed, match=r"(?s)^with kill: rank [01] at call 1 \(seed 3\):.*knows no deaths"):
        every_fault(swallows, 2, kinds=["kill"], seed=3)


def comes_at_random(group):
    for _ in range(4):
        time.sleep(0.002 * (os.urandom(1)[0] % 4))
        group.barrier()


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_a_schedule_is_played_again(mode):
    first = Schedule()
    run(comes_at_random, 3, mode=mode, schedule=first)
    assert len(first.order) == 12 and sorted(first.order) == sorted([0, 1, 2] * 4)
    again = first.again()
    run(comes_at_random, 3, mode=mode, schedule=again)
    assert again.order == first.order


def test_a_schedule_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(testing.schedule, "PATIENCE", 0.2)
    with pytest.raises(RanksFailed, match="waits for its turn; rank 1 is to make call 1 of all"):
        run(one_alone, 2, schedule=Schedule([1, 0]))


def one_alone(group):
    if group.rank == 0:
        group.barrier()


def test_nothing_is_left(tmp_path):
    """No file, no descriptor, no child."""
    run(two_steps, 2, mode="processes")
    descriptors, children = len(os.listdir("/proc/self/fd")), psutil.Process().children()
    for _ in range(3):
        run(two_steps, 2, mode="processes")
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert psutil.Process().children() == children
