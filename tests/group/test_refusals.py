"""A call that one rank refuses is refused on all, in that rank's words, and the group goes on.

Every row is a call whose first form is right and whose others are wrong; one rank after the other makes the wrong one.
All others must raise that rank's sentence with its line, and the next all_reduce must have the right values on all."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest
import torch

import symcomm
from symcomm import errors
from symcomm._core import native
from symcomm.group import refusal
from symcomm.hierarchical import pipelined
from symcomm.hierarchical import topology as layout
from tests.support.places import join, spawn
from tests.support.ranks import run_ranks, until

PLACES = ["threads", "processes", (2, 1), (1, 2), (1, 1, 1)]
ids = [place if isinstance(place, str) else "+".join(map(str, place)) for place in PLACES]
WORLD, COUNT = 3, 6


class Unpicklable:
    def __reduce__(self):
        raise TypeError("this one cannot be sent")


def emptied():
    tensor = ones()
    tensor.untyped_storage().resize_(0)
    return tensor


def ones(count=COUNT, dtype=torch.float32):
    return torch.ones(count, dtype=dtype)


def calls(group) -> dict:
    """Name -> what a rank calls: the right way, then wrong ones."""
    size, me = group.size, group.rank
    part = [ones(2) for _ in range(size)]
    return {
        "all_reduce": [
            lambda: group.all_reduce(ones()),
            lambda: group.all_reduce("tensor"),
            lambda: group.all_reduce(None),
            lambda: group.all_reduce(ones(), op=77),
            lambda: group.all_reduce(ones(), op="average"),
            lambda: group.all_reduce(ones(), op="band"),
            lambda: group.all_reduce(torch.empty(COUNT, device="meta")),
            lambda: group.all_reduce(torch.eye(2).to_sparse()),
            lambda: group.all_reduce(ones(), timeout=-1),
            lambda: group.all_reduce(ones(), timeout="soon"),
            lambda: group.all_reduce(ones(), async_op=ones()),
            lambda: group.all_reduce(np.int64(3)),
            lambda: group.all_reduce(emptied()),
            lambda: group.all_reduce(ones(), op=emptied()),
        ],
        "all_reduce async": [
            lambda: group.all_reduce(ones(), async_op=True).wait(),
            lambda: group.all_reduce("tensor", async_op=True).wait(),
            lambda: group.all_reduce(ones(), op=77, async_op=True).wait(),
        ],
        "reduce": [
            lambda: group.reduce(ones(), 0),
            lambda: group.reduce(ones(), size),
            lambda: group.reduce(ones(), -1),
            lambda: group.reduce(ones(), "first"),
            lambda: group.reduce(3, 0),
        ],
        "broadcast": [
            lambda: group.broadcast(ones(), 1),
            lambda: group.broadcast(ones(), size),
            lambda: group.broadcast(ones(), 1.0),
            lambda: group.broadcast([ones()], 1),
        ],
        "reduce_scatter_single": [
            lambda: group.reduce_scatter_single(ones(2), ones(2 * size)),
            lambda: group.reduce_scatter_single(ones(3), ones(2 * size)),
            lambda: group.reduce_scatter_single(ones(2), ones(2 * size, torch.float64)),
        ],
        "reduce_scatter": [
            lambda: group.reduce_scatter(ones(2), part),
            lambda: group.reduce_scatter(ones(2), part[1:]),
            lambda: group.reduce_scatter(ones(2), None),
        ],
        "all_gather_single": [
            lambda: group.all_gather_single(ones(2 * size), ones(2)),
            lambda: group.all_gather_single(ones(2 * size + 1), ones(2)),
            lambda: group.all_gather_single(ones(2 * size), 2),
        ],
        "all_gather": [
            lambda: group.all_gather(part, ones(2)),
            lambda: group.all_gather(part[1:], ones(2)),
            lambda: group.all_gather(part, ones(3)),
            lambda: group.all_gather([*part[1:], "x"], ones(2)),
        ],
        "gather": [
            lambda: group.gather(part if me == 0 else None, ones(2), 0),
            lambda: group.gather(part[1:], ones(2), 0),
            lambda: group.gather(part if me == 0 else None, ones(2), 9),
        ],
        "gather_single": [
            lambda: group.gather_single(ones(2 * size) if me == 0 else None, ones(2), 0),
            lambda: group.gather_single(ones(5), ones(2), 0),
        ],
        "scatter": [
            lambda: group.scatter(ones(2), part if me == 0 else None, 0),
            lambda: group.scatter(ones(2), part[1:], 0),
        ],
        "scatter_single": [
            lambda: group.scatter_single(ones(2), ones(2 * size) if me == 0 else None, 0),
            lambda: group.scatter_single(ones(2), ones(5), 0),
            lambda: group.scatter_single(ones(2), [ones(2 * size)], 0),
        ],
        "all_to_all_single": [
            lambda: group.all_to_all_single(ones(2 * size), ones(2 * size)),
            lambda: group.all_to_all_single(ones(2 * size), ones(2 * size + 1)),
        ],
        "all_to_all_single with splits": [
            lambda: group.all_to_all_single(ones(2 * size), ones(2 * size), [2] * size, [2] * size),
            lambda: group.all_to_all_single(ones(2 * size), ones(2 * size), [2] * size, [3] * size),
            lambda: group.all_to_all_single(ones(2 * size), ones(2 * size), ones(size), [2] * size),
        ],
        "all_to_all": [
            lambda: group.all_to_all([ones(2) for _ in part], part),
            lambda: group.all_to_all(part[1:], part),
        ],
        "barrier": [lambda: group.barrier(), lambda: group.barrier(timeout=0)],
        "monitored_barrier": [lambda: group.monitored_barrier(), lambda: group.monitored_barrier(timeout="soon")],
        "all_gather_bytes": [lambda: group.all_gather_bytes(b"ab"), lambda: group.all_gather_bytes(5)],
        "all_gather_object": [
            lambda: group.all_gather_object(1),
            lambda: group.all_gather_object(Unpicklable()),
        ],
        "broadcast_object": [lambda: group.broadcast_object(1, 1), lambda: group.broadcast_object(1, 5)],
        "gather_object": [lambda: group.gather_object(1), lambda: group.gather_object(Unpicklable())],
        "scatter_object": [
            lambda: group.scatter_object([1] * size if me == 0 else None),
            lambda: group.scatter_object([1], me),
        ],
        "all_reduce_coalesced": [
            lambda: group.all_reduce_coalesced([ones(), ones(), ones()]),
            lambda: group.all_reduce_coalesced([ones(), "x", ones()]),
            lambda: group.all_reduce_coalesced(7),
            lambda: group.all_reduce_coalesced([ones(), ones(), ones()], async_op=ones()),
        ],
        "all_reduce_coalesced async": [
            lambda: group.all_reduce_coalesced([ones(), ones(), ones()], async_op=True).wait(),
            lambda: group.all_reduce_coalesced([ones(), "x", ones()], async_op=True).wait(),
        ],
        "all_gather_coalesced": [
            lambda: group.all_gather_coalesced([ones(2 * size)] * 2, [ones(2)] * 2),
            lambda: group.all_gather_coalesced([ones(2 * size)], [ones(2)] * 2),
            lambda: group.all_gather_coalesced(None, [ones(2)] * 2),
        ],
        "all_gather_lists": [
            lambda: group.all_gather_lists([[ones(2)] for _ in part], [ones(2)]),
            lambda: group.all_gather_lists([[ones(2)]] + [{0: ones(2)}.values()] * (size - 1), [ones(2)]),
        ],
        "new_group": [
            lambda: group.new_group(range(size), name="some").destroy(),
            lambda: group.new_group(range(size), name=["some"]),
            lambda: group.new_group([size]),
        ],
        "split": [
            lambda: group.split(0, name="part").destroy(),
            lambda: group.split({3}),
            lambda: group.split(0, key=None),
            lambda: group.split(0, name=["part"]),
        ],
    }  # fmt: skip


def told(act) -> BaseException | None:
    try:
        act()
    except Exception as error:
        return error
    return None


def check_sum(group, row) -> None:
    total = torch.full((COUNT,), group.rank + 1.0)
    group.all_reduce(total)
    assert torch.equal(total, torch.full((COUNT,), group.size * (group.size + 1) / 2)), (row, total)


def every_refusal(group) -> list[str]:
    """What went wrong."""
    wrong = []
    for name, (right, *others) in calls(group).items():
        for k, bad in enumerate(others):
            for who in range(group.size):
                row = f"{name} {k} by {who}"
                error = told(bad if group.rank == who else right)
                mine = repr(error)
                if group.rank == who:
                    if error is None or isinstance(error, errors.CallRefusedError):
                        wrong.append(f"{row}: taken: {mine}")
                elif not isinstance(error, errors.CallRefusedError) or error.ranks != [who]:
                    wrong.append(f"{row}: {mine}")
                # The sentence is that of the rank which refused, and the line that of its call.
                sentences = group.all_gather_object(str(error))
                own, said = sentences[who], sentences[group.rank]
                line = re.search(r"test_refusals\.py:\d+", said)
                if group.rank != who and (own.rstrip(".")[:200] not in said or not line):
                    wrong.append(f"{row}: {said!r} is not about {own!r}")
                check_sum(group, row)
    return wrong


@pytest.mark.parametrize("place", PLACES, ids=ids)
def test_every_refusal_is_told(place):
    assert spawn(every_refusal, WORLD, place) == [[]] * WORLD


def large_refusals(group) -> list[str]:
    """Tensors that travel through the engine, of which receives are posted before ranks meet."""
    size, count, wrong = group.size, 3000, []
    rows = {
        "all_reduce": lambda: group.all_reduce(ones(count)),
        "reduce": lambda: group.reduce(ones(count), 1),
        "broadcast": lambda: group.broadcast(ones(count), 1),
        "all_gather": lambda: group.all_gather([ones(count) for _ in range(size)], ones(count)),
        "gather": lambda: group.gather([ones(count) for _ in range(size)] if group.rank == 0 else None, ones(count)),
        "scatter": lambda: group.scatter(ones(count), [ones(count)] * size if group.rank == 0 else None),
        "all_to_all": lambda: group.all_to_all_single(ones(size * count), ones(size * count)),
        "reduce_scatter": lambda: group.reduce_scatter_single(ones(count), ones(size * count)),
    }
    for name, right in rows.items():
        for who in range(size):
            error = told((lambda: group.all_reduce("x")) if group.rank == who else right)
            expected = errors.WrongTypeError if group.rank == who else errors.CallRefusedError
            if not isinstance(error, expected):
                wrong.append(f"{name} by {who}: {error!r}")
            right()
            total = torch.arange(count) * 1.0 + group.rank
            group.all_reduce(total)
            if not torch.equal(total, torch.arange(count) * float(size) + sum(range(size))):
                wrong.append(f"{name} by {who}: wrong values afterwards")
    return wrong


@pytest.mark.parametrize("place", [(2, 1), (1, 2), (1, 1, 1)], ids=["2+1", "1+2", "1+1+1"])
def test_refusals_of_large_tensors_across_hosts(place, monkeypatch):
    monkeypatch.setattr(pipelined, "CHUNK", 2048)
    monkeypatch.setattr(layout, "EAGER_HOST_MAX", 0)
    assert spawn(large_refusals, WORLD, place) == [[]] * WORLD


def in_a_row(group) -> list[str]:
    """A rank does not wait to refuse, however often; the others find every one."""
    said = []
    if group.rank == 1:
        said += [type(told(lambda: group.all_reduce(ones(), op=77))).__name__ for _ in range(5)]
        begun.set()
    else:
        begun.wait(20)  # nobody else has come by then
        said += [type(told(lambda: group.all_reduce(ones()))).__name__ for _ in range(5)]
    check_sum(group, "in a row")
    return said


begun = threading.Event()


@pytest.mark.parametrize("place", ["threads", (2, 1)], ids=["threads", "2+1"])
def test_a_rank_refuses_several_calls_before_anybody_comes(place):
    begun.clear()
    said = spawn(in_a_row, WORLD, place)
    assert said[1] == ["BadArgumentError"] * 5
    assert said[0] == said[2] == ["CallRefusedError"] * 5


raised = threading.Event()


def not_all_there(group) -> str:
    if group.rank == 2:
        raised.wait(20)
    error = told(lambda: group.all_reduce("x" if group.rank == 1 else ones()))
    if group.rank == 0:
        raised.set()
    check_sum(group, "late")
    return type(error).__name__


def test_others_learn_of_it_before_the_last_has_come():
    raised.clear()
    assert spawn(not_all_there, WORLD) == ["CallRefusedError", "WrongTypeError", "CallRefusedError"]


def refuses_and_ends(rank: int, world: int, path: str):
    group = join(rank, world, path)
    if rank == 1:
        try:
            group.all_reduce("x")
        except errors.WrongTypeError:
            group.destroy()
            return "gone"
    until(lambda: group.handle.report()["ranks"][1]["gone"], 20)
    first, second = (told(lambda: group.all_reduce(ones())) for _ in range(2))
    return [type(first).__name__, type(second).__name__]


def test_a_rank_that_refused_and_left(tmp_path):
    ended = ["CallRefusedError", "RankFailedError"]
    assert run_ranks(refuses_and_ends, WORLD, str(tmp_path / "store")) == [ended, "gone", ended]


def refused_behind_queued(group) -> list[str]:
    """A refusal keeps its turn among asynchronous operations, and its batch ends with it."""
    tensors = [torch.full((COUNT,), float(k)) for k in range(5)]
    works = []
    for k, tensor in enumerate(tensors):
        try:
            works.append(group.all_reduce("x" if (group.rank, k) == (1, 2) else tensor, async_op=True))
        except errors.WrongTypeError as error:
            works.append(error)
    said = [type(w).__name__ if isinstance(w, Exception) else type(told(w.wait)).__name__ for w in works]
    for k, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((COUNT,), float(k * (1 if k == 2 else group.size)))), (k, tensor)
    check_sum(group, "queued")
    return said


@pytest.mark.parametrize("place", ["threads", "processes", (2, 1)], ids=["threads", "processes", "2+1"])
def test_refusals_keep_their_turn(place):
    good, bad = "NoneType", "CallRefusedError"
    said = spawn(refused_behind_queued, WORLD, place)
    assert said[0] == said[2] == [good, good, bad, good, good]
    assert said[1] == [good, good, "WrongTypeError", good, good]


def deadline_of_a_refusal(group) -> list[str]:
    """Who refuses twice while nobody comes has made the others late, once its time-out is over."""
    if group.rank == 1:
        for _ in range(2):
            told(lambda: group.all_reduce("x"))
        error = told(lambda: group.all_reduce(ones()))
        assert isinstance(error, errors.DeadlineError) and error.missing == [0, 2], error
        return "late"
    begun.wait(20)
    return type(told(lambda: group.all_reduce(ones()))).__name__


def test_a_refusal_has_a_deadline():
    begun.clear()

    def rank(group):
        try:
            return deadline_of_a_refusal(group)
        finally:
            if group.rank == 1:
                begun.set()

    assert symcomm.spawn(rank, WORLD, mode="threads", timeout=1, deadline=60)[1] == "late"


def test_words_fit_whatever_their_length():
    for sentence, site in (("x" * 5000, "a.py:1"), ("x", "d/" * 900 + "a.py:1"), ("\N{SNOWMAN}" * 900, "a" * 900)):
        packed = refusal.pack(3, errors.BadArgumentError(sentence), site)
        rank, words, place = refusal.unpack(packed)
        assert len(packed) <= native.REFUSAL_BYTES and rank == 3 and words[:1] == sentence[:1] and place[-1] == site[-1]


def hook_that_raises(group) -> str:
    def hook(args):
        if group.rank == 1:
            raise ValueError("not today")

    group.register_pre_hook(0, hook)
    error = told(lambda: group.all_reduce(ones()))
    group.unregister_pre_hook(0)
    check_sum(group, "hook")
    return str(error)


def test_a_hook_that_raises_on_one_rank():
    said = spawn(hook_that_raises, WORLD)
    assert said[1] == "not today"
    assert all("rank 1 refused its call" in text and "ValueError: not today" in text for text in (said[0], said[2]))
