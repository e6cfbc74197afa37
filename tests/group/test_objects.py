"""Collectives of Python objects on our own groups."""

from __future__ import annotations

from typing import Any

import pytest

import symcomm
from symcomm import errors

pytestmark = [pytest.mark.without_torch, pytest.mark.usefixtures("forked_ranks")]

ODD = [5, None, "text", b"bytes", {"a": [1, 2.5]}, (), frozenset({3}), list(range(1000))]


def _exchange(group: Any) -> None:
    rank, size = group.rank, group.size
    mine = ODD[rank::size]
    assert group.all_gather_object(mine) == [ODD[r::size] for r in range(size)]
    for root in range(size):
        assert group.broadcast_object(mine if rank == root else "not looked at", root) == ODD[root::size]
        assert group.gather_object(mine, root) == ([ODD[r::size] for r in range(size)] if rank == root else None)
        given = [(root, r) for r in range(size)] if rank == root else None
        assert group.scatter_object(given, root) == (root, rank)
    assert group.all_gather_bytes(b"." * rank) == [b"." * r for r in range(size)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_object_comes_as_it_was(world):
    symcomm.spawn(_exchange, world)


def _on_the_default_group(group: Any) -> Any:
    assert symcomm.all_gather_object(group.rank) == [0, 1]
    assert symcomm.gather_object("x", root=1) == (["x", "x"] if group.rank else None)
    assert symcomm.scatter_object(["a", "b"] if group.rank == 0 else None) == "ab"[group.rank]
    return symcomm.broadcast_object({"seed": 7} if group.rank == 0 else None)


def test_calls_of_the_default_group():
    assert symcomm.spawn(_on_the_default_group, 2) == [{"seed": 7}] * 2


def _refused(group: Any) -> list[str]:
    said = []
    for call in (group.broadcast_object, group.gather_object, group.scatter_object):
        with pytest.raises(errors.BadArgumentError, match="root must be a rank of this group, 0 to 1, got 2") as caught:
            call("x", root=2)
        said.append(str(caught.value).partition(":")[0])
    if group.rank == 0:
        with pytest.raises(errors.BadArgumentError, match="2 objects, one for each rank"):
            group.scatter_object(["only one"])
    else:
        with pytest.raises(errors.CallRefusedError, match="rank 0 refused its call .* 2 objects, one for each rank"):
            group.scatter_object()
    group.barrier()
    return said


def test_what_cannot_be_is_refused_before_anything_is_sent():
    assert symcomm.spawn(_refused, 2) == [["broadcast_object", "gather_object", "scatter_object"]] * 2


def _different_roots(group: Any) -> list[str]:
    root, said = group.rank // 2, []
    for call in (group.broadcast_object, group.gather_object, lambda obj, root: group.scatter_object([obj] * 3, root)):
        with pytest.raises(errors.CollectiveMismatchError) as caught:
            call("x", root)
        said.append(str(caught.value))
    group.barrier()
    return said


def test_different_roots_are_told_on_every_rank():
    told = "_object on group 'world': ranks name different roots: rank 0 says 0, rank 1 says 0, rank 2 says 1."
    assert symcomm.spawn(_different_roots, 3) == [[call + told for call in ("broadcast", "gather", "scatter")]] * 3


def test_an_object_that_cannot_be_pickled_is_the_callers():
    def call(group: Any) -> None:
        with pytest.raises((AttributeError, TypeError), match="pickle"):
            group.all_gather_object(lambda: None)
        group.barrier()

    symcomm.spawn(call, 2, mode="threads")
