"""Groups, collectives and messages on NumPy arrays: what works without torch, on every Python.

The other tests of collectives use torch tensors. These compare with what NumPy says of the same arrays.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import symcomm
from symcomm import errors
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.without_torch

MODES = ["processes", "threads"]
COUNTS = [1, 5, 1 << 15]
CASES = [(count, dtype) for count in COUNTS for dtype in ("f4", "f8", "i4", "i8", "u1")]
OPS = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}


def numbers(rank: int, count: int, dtype: str = "f8") -> Any:
    return ((np.arange(count) + 3 * rank) % 13 + 1).astype(dtype)


def everywhere(work: Any, world: int, mode: str, *args: Any) -> list[Any]:
    return symcomm.spawn(work, world, args, mode=mode, deadline=60)


def reductions(group: Any) -> dict[tuple[int, str], list[Any]]:
    """Of each size and dtype: the four reductions, and this rank's piece of a reduce_scatter."""
    got: dict[tuple[int, str], list[Any]] = {}
    for count, dtype in CASES:
        mine = [numbers(group.rank, count, dtype) for _ in OPS]
        for x, op in zip(mine, OPS, strict=True):
            group.all_reduce(x, op)
        piece = np.empty(count, dtype)
        pieces = [numbers(group.rank + k, count, dtype) for k in range(group.size)]
        group.reduce_scatter_single(piece, np.concatenate(pieces))
        got[count, dtype] = [*mine, piece]
    return got


@pytest.mark.parametrize("mode", MODES)
def test_reductions(mode):
    world = 3
    for rank, got in enumerate(everywhere(reductions, world, mode)):
        for (count, dtype), (*reduced, piece) in got.items():
            sources = [numbers(r, count, dtype) for r in range(world)]
            for ours, combine in zip(reduced, OPS.values(), strict=True):
                np.testing.assert_array_equal(ours, combine.reduce(sources, dtype=dtype))
            theirs = np.add.reduce([numbers(r + rank, count, dtype) for r in range(world)], dtype=dtype)
            np.testing.assert_array_equal(piece, theirs)
        assert list(got) == CASES


def moves(group: Any, count: int) -> dict[str, Any]:
    rank, size = group.rank, group.size
    mine = numbers(rank, count)
    whole, turned, own = np.empty(count * size), np.empty(count * size), np.empty(count)
    group.all_gather_single(whole, mine)
    group.all_to_all_single(turned, np.concatenate([numbers(rank * size + k, count) for k in range(size)]))
    from_last = mine.copy()
    group.broadcast(from_last, root=size - 1)
    gathered = [np.empty(count) for _ in range(size)] if rank == 0 else None
    group.gather(gathered, mine, 0)
    group.scatter(own, [numbers(10 + k, count) for k in range(size)] if rank == 1 else None, 1)
    return {"gathered": whole, "turned": turned, "broadcast": from_last, "gather": gathered, "scatter": own}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", COUNTS)
def test_moves(mode, count):
    world = 3
    results = everywhere(moves, world, mode, count)
    whole = np.concatenate([numbers(r, count) for r in range(world)])
    for rank, got in enumerate(results):
        np.testing.assert_array_equal(got["gathered"], whole)
        np.testing.assert_array_equal(
            got["turned"], np.concatenate([numbers(r * world + rank, count) for r in range(world)])
        )
        np.testing.assert_array_equal(got["broadcast"], numbers(world - 1, count))
        np.testing.assert_array_equal(got["scatter"], numbers(10 + rank, count))
    np.testing.assert_array_equal(np.concatenate(results[0]["gather"]), whole)


# --- which way calls take ------------------------------------------------------------------------------------------

WIDE = np.arange(96, dtype="f4").reshape(8, 12)
DTYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "c8", "c16", "?")
SHORT = {dtype: lambda dtype=dtype: np.ones(7, dtype) for dtype in DTYPES} | {
    "rows": lambda: WIDE.copy()[2:5],
    "slice": lambda: np.ones(20)[3:7],
    "no dimension": lambda: np.array(3.0),
    "no element": lambda: np.ones((3, 0, 2)),
    "one column of one": lambda: np.ones((6, 1))[:, 0],
}
LONG = {
    "columns": lambda: WIDE.copy()[:, 2:5],
    "Fortran's order": lambda: np.asfortranarray(WIDE),
    "backwards": lambda: np.arange(5.0)[::-1],
    "other bytes": lambda: np.arange(5).astype(">f4"),
    "a subclass": lambda: np.arange(5.0).view(np.recarray),
}


def takes(group: Any, kind: str) -> tuple[int, int]:
    """Short and long calls of five that come again, whose values are right."""
    made = {**SHORT, **LONG}[kind]
    before = group.call_stats()["collectives"]
    for turn in range(6):
        x, whole = made(), np.empty((group.size, *made().shape), made().dtype)
        if turn == 1:
            before = group.call_stats()["collectives"]
        expected = made().copy()
        group.broadcast(x, root=1)
        np.testing.assert_array_equal(x, expected)
        group.all_gather_single(whole, x)
        np.testing.assert_array_equal(whole, np.stack([expected] * group.size))
        reduced = made()
        group.all_reduce(reduced, "avg" if reduced.dtype.kind == "c" else "max")
        np.testing.assert_array_equal(reduced, expected)
    after = group.call_stats()["collectives"]
    return after["short"] - before["short"], after["long"] - before["long"]


@pytest.mark.parametrize("kind", [*SHORT, *LONG])
def test_arrays_that_are_contiguous_take_the_fast_path(kind):
    assert everywhere(takes, 2, "threads", kind) == [(15, 0) if kind in SHORT else (0, 15)] * 2


def scaled(group: Any) -> list[list[float]]:
    found = []
    for dtype, factor in (("f4", np.float64(2)), ("f2", np.float64(2)), ("i8", 2.5), ("i4", 2.0), (">f4", 2)):
        x = np.ones(3, dtype)
        group.all_reduce(x, symcomm.make_premul_sum(factor))
        found.append(x.tolist())
    x = np.array(1.0)
    group.all_reduce(x, symcomm.make_premul_sum(3))
    return [*found, [x.tolist()]]


def test_a_factor_of_another_dtype():
    assert everywhere(scaled, 2, "threads") == [[[4.0] * 3] * 5 + [[6.0]]] * 2


def messages(group: Any) -> dict[str, int]:
    x, other = np.full(5, float(group.rank)), 1 - group.rank
    for turn in range(4):
        if turn == 1:
            before = group.call_stats()["messages"]
        for sends in (group.rank == 0, group.rank == 1):
            group.send(x, other) if sends else group.recv(x, other)
            assert x.tolist() == [0.0] * 5
    return {way: count - before[way] for way, count in group.call_stats()["messages"].items()}


def test_so_do_messages():
    assert everywhere(messages, 2, "threads") == [{"short": 6, "long": 0, "inline": 6, "queued": 0}] * 2


def asynchronous(group: Any) -> list[float]:
    arrays = [np.full(n, float(group.rank + 1)) for n in (1, 100, 50_000)]
    works = [group.all_reduce(x, async_op=True) for x in arrays]
    for work in works:
        work.wait()
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    got = np.empty(70_000)
    sent = group.isend(np.full(70_000, float(group.rank)), after, tag=7)
    assert group.recv(got, before, tag=7) == before
    sent.wait()
    return [*(float(x[-1]) for x in arrays), float(got[-1])]


@pytest.mark.parametrize("mode", MODES)
def test_asynchronous_calls_and_messages(mode):
    assert everywhere(asynchronous, 3, mode) == [[6.0, 6.0, 6.0, float((r - 1) % 3)] for r in range(3)]


def groups_of_groups(group: Any) -> tuple[Any, ...]:
    team = group.split(color=group.rank % 2)
    pair = group.new_group([2, 0], name="pair")
    x = np.ones(3)
    team.all_reduce(x)
    found = (team.rank, list(team.global_ranks), x.tolist(), pair.rank if pair else None)
    team.destroy()
    return found


@pytest.mark.parametrize("mode", MODES)
def test_groups_from_groups(mode):
    assert everywhere(groups_of_groups, 4, mode) == [
        (0, [0, 2], [2.0] * 3, 1),
        (0, [1, 3], [2.0] * 3, None),
        (1, [0, 2], [2.0] * 3, 0),
        (1, [1, 3], [2.0] * 3, None),
    ]


def die_and_go_on(rank: int, world: int, path: str) -> Any:
    group = symcomm.init(f"file://{path}", rank, world, timeout=30)
    group.barrier()
    if rank == 1:
        import os

        os._exit(3)
    with pytest.raises(errors.RankFailedError, match="rank 1"):
        for _ in range(100_000):
            group.barrier()
    smaller = group.shrink()
    x = np.full(2, float(smaller.rank + 1))
    smaller.all_reduce(x)
    return smaller.size, x.tolist()


def test_a_dead_rank_is_named_and_left_behind(tmp_path):
    told = run_ranks(die_and_go_on, 3, str(tmp_path / "store"), outcomes=True)
    assert [told[r].value for r in (0, 2)] == [(2, [3.0, 3.0])] * 2, told
    assert told[1].kind == "died"


def mismatch(group: Any) -> str:
    with pytest.raises(errors.CollectiveMismatchError) as info:
        group.all_reduce(np.ones(3 + group.rank))
    return str(info.value)


def test_a_mismatch_names_both_calls():
    for said in everywhere(mismatch, 2, "threads"):
        assert "all_reduce(float64 x 3" in said and "all_reduce(float64 x 4" in said


def loaded(_: Any) -> bool:
    return "torch" in sys.modules


def test_nothing_loads_torch():
    assert everywhere(loaded, 2, "processes") == [False, False]
