"""A rank dies while a group across hosts is being made, wherever in that: every other is told at once who it was, in
the same words."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest

from symcomm import errors
from symcomm.group.default import join_ranks
from symcomm.group.factory import make_group
from symcomm.hierarchical.engines import torch_engine
from symcomm.hierarchical.group import HierarchicalGroup
from symcomm.hierarchical.intra_host import IntraHostGroup
from symcomm.store import FileStore
from symcomm.store.handshake import _Attempt
from tests.support.faults import few_descriptors
from tests.support.ranks import die, run_ranks

pytestmark = pytest.mark.long

HOSTS = ["a", "a", "b", "b"]
LONG = 100.0  # what a rank would wait for another that does not come
SOON = 30.0  # a wide bound of "at once"


def calling(owner: Any, name: str, first: Callable[[], None] | None, then: Callable[[], None] | None = None) -> Any:
    """Around a method: what happens before and after."""
    method = getattr(owner, name)

    def instead(*args: Any, **more: Any) -> Any:
        if first is not None:
            first()
        value = method(*args, **more)
        if then is not None:
            then()
        return value

    return mock.patch.object(owner, name, instead)


@contextlib.contextmanager
def in_the_store(name: str) -> Any:
    """Dies in a call that Gloo makes of the store, in a thread."""
    as_torch_store = torch_engine._as_torch_store

    def made(*args: Any) -> Any:
        store = as_torch_store(*args)
        setattr(store, name, lambda *_: die())
        return store

    with mock.patch.object(torch_engine, "_as_torch_store", made):
        yield


@contextlib.contextmanager
def at_exchange(turn: int) -> Any:
    exchange, count = _Attempt._exchange, 0

    def counting(self: Any, item: bytes) -> list[bytes]:
        nonlocal count
        count += 1
        if count == turn:
            die()
        return exchange(self, item)

    with mock.patch.object(_Attempt, "_exchange", counting):
        yield


POINTS: dict[str, Callable[[], Any]] = {
    "before its host's group": partial(calling, IntraHostGroup, "__init__", die),
    "before the engine": partial(calling, torch_engine.GlooEngine, "__init__", die),
    "before it says where": partial(at_exchange, 3),
    "before it connects": partial(calling, torch_engine.GlooEngine, "connect", die),
    "before it writes its address": partial(in_the_store, "set"),
    "before it waits for addresses": partial(in_the_store, "wait"),
    "when it has connected": partial(calling, torch_engine.GlooEngine, "connect", None, die),
    "before the others know": partial(at_exchange, 4),
    "in the first operation": partial(calling, HierarchicalGroup, "barrier", die),
}

ENOUGH = 30
SPARE = (1, 5, 9, ENOUGH)
FEW = {
    f"{spare} left": partial(calling, torch_engine.GlooEngine, "connect", partial(few_descriptors, spare))
    for spare in SPARE
}


def _name_of(error: errors.SymcommError) -> str:
    kind = next(kind for kind in type(error).__mro__ if not kind.__name__.startswith("_"))
    return kind.__name__


def meet(rank: int, world: int, path: str, point: str, victim: int) -> tuple[str, Any, str]:
    os.environ.update(SYMCOMM_HOST_ID=HOSTS[rank], SYMCOMM_ENGINE="gloo")
    with {**POINTS, **FEW}[point]() if rank == victim else contextlib.nullcontext():
        try:
            join_ranks(FileStore(path), rank, world, LONG, partial(make_group, timeout=LONG))
        except errors.SymcommError as error:
            return _name_of(error), getattr(error, "ranks", None), str(error)
    return "", None, ""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_that_dies(tmp_path, point, victim):
    outcomes = run_ranks(meet, len(HOSTS), str(tmp_path / "store"), point, victim, deadline=SOON, outcomes=True)
    kinds = ["died" if rank == victim else "returned" for rank in range(len(HOSTS))]
    assert [o.kind for o in outcomes] == kinds, "\n".join(map(str, outcomes))
    told = [o.value for o in outcomes if o.rank != victim]
    assert [(kind, ranks) for kind, ranks, _ in told] == [("RankFailedError", [victim])] * 3, told
    if point != "in the first operation":  # of which each says how long it took
        words = {words.replace(" with SIGKILL", "") for *_, words in told}  # which only some are in time to see
        assert len(words) == 1, told
    assert all(f"rank {victim} (pid " in words and ") died" in words for *_, words in told), told


@pytest.mark.timeout(200)
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("spare", SPARE)
def test_a_rank_that_runs_out_of_descriptors(tmp_path, spare, victim):
    """It says so. Gloo would end the process, or wait for a rank that the store cannot let in."""
    point = f"{spare} left"
    outcomes = run_ranks(meet, len(HOSTS), str(tmp_path / "store"), point, victim, deadline=SOON, outcomes=True)
    assert {o.kind for o in outcomes} == {"returned"}, "\n".join(map(str, outcomes))
    told = [o.value for o in outcomes if o.rank != victim]
    own = outcomes[victim].value
    if spare == ENOUGH:
        assert [*told, own] == [("", None, "")] * 4
        return
    assert own[0] == "ResourceError" and "open files" in own[2], own
    assert all(kind == "RankFailedError" and ranks == [victim] for kind, ranks, _ in told), told
    assert {words for *_, words in told} == {told[0][2]} and f"rank {victim} gave up: {own[2]}" in told[0][2], told
