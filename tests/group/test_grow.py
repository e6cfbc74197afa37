"""Newcomers join a running group: who is in it afterwards, and that no death on the way hangs or splits the members."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from typing import Any

import pytest
import torch

from symcomm import errors
from symcomm.group import calibration, default
from symcomm.group import grow as growing
from symcomm.group.factory import make_group
from symcomm.memory import share
from symcomm.memory.arena import Arena, use_arena
from symcomm.store import HashStore
from tests.support.elastic_ranks import ElasticRanks
from tests.support.ranks import die, returned

WAIT = 15.0


def facts(group: Any) -> tuple:
    """Who is in it, and that it works."""
    total = torch.tensor([float(group.rank + 1)])
    group.all_reduce(total)
    return group.rank, group.size, group.global_ranks, group.newcomers, total.item()


def grown(group: Any, size: int) -> tuple:
    bigger = group.grow(wait=WAIT, size=size)
    assert bigger is not group and bigger.timeout == group.timeout
    return facts(bigger)


def joined(store: Any, rank: int | None = None) -> tuple:
    return facts(growing.join_through(store, "world", WAIT, rank))


def test_members_keep_their_order_and_newcomers_come_after(tmp_path):
    forked = ElasticRanks(tmp_path)
    for rank in range(2):
        forked.member(grown, rank, 2, 4)
    forked.newcomer(joined, 7)
    forked.newcomer(joined, 5)
    values = returned(forked.outcomes())
    assert [v[1:] for v in values] == [(4, [0, 1, 5, 7], [2, 3], 10.0)] * 4
    assert [v[0] for v in values] == [0, 1, 3, 2]


def sizes_of(group: Any) -> tuple[int, int, int]:
    limits = group.plan_limits
    return limits.attach_bytes, limits.attach_gather_bytes, limits.attach_scatter_bytes


def test_a_grown_group_goes_by_what_its_machine_was_measured_at(tmp_path, monkeypatch):
    """Which a single rank had no use for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for where in (calibration.ROOMY, calibration.CROWDED):
        calibration.save(where, (77, 88, 99))
    forked = ElasticRanks(tmp_path)
    forked.member(lambda group: (sizes_of(group), sizes_of(group.grow(wait=WAIT, size=4))), 0, 1)
    for _ in range(3):
        forked.newcomer(lambda store: sizes_of(growing.join_through(store, "world", WAIT)))
    (before, after), *newcomers = returned(forked.outcomes())
    assert before != after and [after, *newcomers] == [(77, 88, 99)] * 4


def test_what_was_told_on_the_way_does_not_stay_in_the_store():
    """The ranks of a group across hosts tell each other secrets there."""
    store, built = HashStore(), [None, None]

    def build(index: int) -> None:
        round_ = growing.Round(store, index, 2, WAIT)
        built[index] = round_.build(lambda r: r.exchange(f"secret {index}".encode()) + r.exchange(b"more"))

    threads = [threading.Thread(target=build, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert built == [[b"secret 0", b"secret 1", b"more", b"more"]] * 2
    assert sorted(store.list_keys()) == ["3/0", "3/1", "verdict"]  # that all have built theirs


def joined_elsewhere(store: Any) -> tuple:
    os.environ["SYMCOMM_HOST_ID"] = "another"
    return joined(store)


def grown_and_shrunk(group: Any, size: int) -> tuple:
    bigger = group.grow(wait=WAIT, size=size)
    told = (bigger.spans_hosts, *facts(bigger))
    smaller = bigger.shrink(exclude=[size - 1])
    return (*told, *facts(smaller))


def test_a_newcomer_on_another_host(tmp_path):
    """The group spans two hosts from then on; without the newcomer, it is one host's again, and can grow again."""
    forked = ElasticRanks(tmp_path)
    for rank in range(2):
        forked.member(grown_and_shrunk, rank, 2, 3)
    forked.newcomer(joined_elsewhere)
    members = returned(forked.outcomes())
    assert [v[1:6] for v in members[:2]] == [(r, 3, [0, 1, 2], [2], 6.0) for r in range(2)]
    assert [v[0] for v in members[:2]] == [True, True]
    assert [v[6:] for v in members[:2]] == [(r, 2, [0, 1], [], 3.0) for r in range(2)]
    assert members[2] == (2, 3, [0, 1, 2], [2], 6.0)


def test_named_memory(tmp_path, monkeypatch):
    """Where arenas are files, the members' have lost their names long ago; descriptors are passed instead."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setenv("SYMCOMM_SHARE", "named")
        monkeypatch.setenv("SYMCOMM_SHM_DIR", folder)
        forked = ElasticRanks(tmp_path)
        for rank in range(2):
            forked.member(grown, rank, 2, 3)
        forked.newcomer(joined)
        assert returned(forked.outcomes()) == [(r, 3, [0, 1, 2], [2], 6.0) for r in range(3)]
        assert os.listdir(folder) == []


def test_nobody_waits(tmp_path):
    def member(group: Any) -> bool:
        return group.grow() is group and group.grow(wait=0.05, size=9) is group and group.size == 2

    forked = ElasticRanks(tmp_path)
    for rank in range(2):
        forked.member(member, rank, 2)
    assert returned(forked.outcomes()) == [True, True]


def test_shrink_then_grow_then_again(tmp_path):
    """Rank 0 dies, which is nothing special: the file remembers. The newcomer takes its place, at the end."""

    def member(group: Any) -> tuple:
        if group.rank == 0:
            die()
        with pytest.raises(errors.RankFailedError):
            group.barrier()
        smaller = group.shrink()
        bigger = smaller.grow(wait=WAIT, size=3)
        assert bigger.name == "world+1"
        return facts(bigger.grow(wait=WAIT, size=4))

    def newcomer(store: Any) -> tuple:
        return facts(growing.join_through(store, "world", WAIT, 0).grow(wait=WAIT, size=4))

    def late(store: Any) -> tuple:
        while not store.check(["grow/world/1/verdict"]):
            time.sleep(0.01)
        return joined(store)

    forked = ElasticRanks(tmp_path)
    for rank in range(3):
        forked.member(member, rank, 3)
    forked.newcomer(newcomer)
    forked.newcomer(late)
    dead, *others = forked.outcomes()
    assert dead.kind == "died" and dead.value == -signal.SIGKILL
    assert returned(others) == [(r, 4, [1, 2, 0, 3], [3], 10.0) for r in range(4)]


def test_no_more_than_there_is_room_for(tmp_path):
    def member(group: Any) -> tuple:
        return facts(group.grow(wait=WAIT, size=2))

    def newcomer(store: Any) -> Any:
        try:
            return facts(growing.join_through(store, "world", 2.0))
        except errors.DeadlineError as error:
            return str(error)

    forked = ElasticRanks(tmp_path)
    forked.member(member, 0, 1)
    forked.newcomer(newcomer)
    forked.newcomer(newcomer)
    member_saw, *newcomers = returned(forked.outcomes())
    assert member_saw == (0, 2, [0, 1], [1], 3.0)
    late = next(n for n in newcomers if isinstance(n, str))
    assert late == (
        "join of group 'world' timed out after 2 s. Nobody let this process in: "
        "the members have to call group.grow() between steps."
    )


# --- deaths ----------------------------------------------------------------------------------------


def dying(store: Any, where: str) -> None:
    """A newcomer that dies at a scripted point of joining."""
    exchange, apply, build = growing.Round.exchange, growing.JoinQueue.request_to_join, growing.Round.build

    def exchange_dying(self: Any, item: bytes) -> list[bytes]:
        if where == f"turn {self._turn + 1}":
            die()
        return exchange(self, item)

    def pass_dying(*_: Any) -> None:
        die()

    def apply_dying(self: Any, request: Any) -> int:
        ticket = apply(self, request)
        if where == "request":
            die()
        return ticket

    def build_dying(self: Any, make: Any) -> Any:
        if where == "invited":
            die()
        return build(self, make)

    growing.Round.exchange, growing.JoinQueue.request_to_join, growing.Round.build = (
        exchange_dying,
        apply_dying,
        build_dying,
    )
    if where == "descriptors":
        share._pass_descriptors = pass_dying
    growing.join_through(store, "world", WAIT)


def members_of_a_dying_newcomer(group: Any, where: str) -> tuple:
    """One call in which a newcomer dies, then one that takes another one in."""
    store = group.store
    if where == "request":  # it is dead before anybody looks
        while not store.check(["grow/world/request/1"]):
            time.sleep(0.01)
        time.sleep(0.2)
    same = group.grow(timeout=1.0, wait=0.0 if where == "request" else WAIT)
    assert same is group, "a group with a dead rank in it"
    group.barrier()
    store.set("next", "x")
    return facts(group.grow(wait=WAIT))


def next_one(store: Any) -> tuple:
    while not store.check(["next"]):
        time.sleep(0.01)
    return joined(store)


@pytest.mark.parametrize("where", ["request", "invited", "turn 1", "descriptors", "turn 2"])
def test_a_newcomer_that_dies_is_left_behind(tmp_path, where):
    forked = ElasticRanks(tmp_path)
    for rank in range(2):
        forked.member(members_of_a_dying_newcomer, rank, 2, where)
    forked.newcomer(dying, where)
    forked.newcomer(next_one)
    one, two, dead, other = forked.outcomes()
    assert dead.kind == "died" and dead.value == -signal.SIGKILL, str(dead)
    assert returned([one, two, other]) == [(r, 3, [0, 1, 2], [2], 6.0) for r in range(3)]


@pytest.mark.parametrize(("victim", "where"), [(0, "turn 1"), (1, "turn 2"), (0, "turn 2"), (1, "verdict")])
def test_a_member_that_dies_splits_nobody(tmp_path, victim, where):
    """The others all stay in the old group, or all are in the new one; either way they shrink together and go on."""

    def member(group: Any) -> tuple:
        if group.rank == victim:
            exchange, decide = growing.Round.exchange, growing.Round.decide

            def exchange_dying(self: Any, item: bytes) -> list[bytes]:
                if where == f"turn {self._turn + 1}":
                    die()
                return exchange(self, item)

            def decide_dying(self: Any, verdict: str) -> str:
                decide(self, verdict)
                die()
                return verdict

            growing.Round.exchange = exchange_dying
            growing.Round.decide = decide_dying if where == "verdict" else decide
        after = group
        with pytest.raises(errors.RankFailedError):
            after = group.grow(timeout=5.0, wait=WAIT)
            after.barrier()
        assert (after is not group) == (where == "verdict")
        return facts(after.shrink().grow(wait=WAIT, size=3))

    def newcomer(store: Any) -> tuple:
        group = growing.join_through(store, "world", WAIT)
        if group.name == "world+1":  # it came in before the member died
            with pytest.raises(errors.RankFailedError):
                group.barrier()
            group = group.shrink().grow(wait=WAIT, size=3)
        return facts(group)

    forked = ElasticRanks(tmp_path)
    for rank in range(3):
        forked.member(member, rank, 3)
    forked.newcomer(newcomer)
    outcomes = forked.outcomes()
    dead = outcomes.pop(victim)
    assert dead.kind == "died" and dead.value == -signal.SIGKILL, str(dead)
    ranks = [r for r in range(3) if r != victim]
    assert returned(outcomes) == [(r, 3, [*ranks, 3], [] if where == "verdict" else [2], 6.0) for r in range(3)]


@pytest.mark.parametrize("losers", [[1], [0], [0, 1]], ids=str)
def test_members_who_lose_the_store_at_the_verdict_ask_each_other(tmp_path, losers):
    """Where one of them knows it, it holds for all; where none does, they stay as they are."""

    def member(group: Any) -> tuple:
        if group.rank in losers:

            def lost(self: Any, verdict: str) -> str:
                raise errors.StoreConnectionError("the store is gone")

            growing.Round.decide = lost
        after = group.grow(timeout=5.0, wait=WAIT)
        assert (after is group) == (len(losers) == 2)
        if after is group:
            group.store.set("stayed", "x")
        return facts(after)

    def newcomer(store: Any) -> tuple | str:
        group = growing.join_through(store, "world", WAIT)
        if len(losers) == 2:  # nobody else decided, so this one did
            store.wait(["stayed"])
            with pytest.raises(errors.RankFailedError):
                group.barrier()
            return "alone"
        return facts(group)

    forked = ElasticRanks(tmp_path)
    for rank in range(2):
        forked.member(member, rank, 2)
    forked.newcomer(newcomer)
    *members, new = returned(forked.outcomes())
    if len(losers) == 2:
        assert members == [(r, 2, [0, 1], [], 3.0) for r in range(2)] and new == "alone"
    else:
        assert [*members, new] == [(r, 3, [0, 1, 2], [2], 6.0) for r in range(3)]


def test_a_member_who_cannot_know_the_verdict_is_in_no_group(tmp_path):
    """It loses the store, and a member dies so that the others cannot be asked: the rest goes on as the store said."""

    def member(group: Any) -> Any:
        decide, gather = growing.Round.decide, group.all_gather_bytes

        def lost(self: Any, verdict: str) -> str:
            raise errors.StoreConnectionError("the store is gone")

        def gather_dying(item: bytes, *args: Any) -> list[bytes]:
            if item in (b"", b"go"):  # the verdict
                die()
            return gather(item, *args)

        growing.Round.decide = lost if group.rank == 1 else decide
        if group.rank == 2:
            group.all_gather_bytes = gather_dying
        if group.rank == 1:
            with pytest.raises(errors.RankFailedError, match="rank 1 lost the store, and could not ask") as caught:
                group.grow(timeout=5.0, wait=WAIT)
            return caught.value.ranks, group.is_usable
        bigger = group.grow(timeout=5.0, wait=WAIT)
        assert bigger is not group
        return bigger.global_ranks

    forked = ElasticRanks(tmp_path)
    for rank in range(3):
        forked.member(member, rank, 3)
    forked.newcomer(lambda store: growing.join_through(store, "world", WAIT).global_ranks)
    first, loser, dead, new = forked.outcomes()
    assert dead.kind == "died", str(dead)
    assert returned([first, loser, new]) == [[0, 1, 2, 3], ([1], False), [0, 1, 2, 3]]


# --- words, threads --------------------------------------------------------------------------------


def test_a_job_that_is_over_takes_nobody_in(tmp_path):
    def member(group: Any) -> None:
        growing.close(group)

    def newcomer(store: Any) -> str:
        with pytest.raises(errors.GroupUnusableError) as caught:
            growing.join_through(store, "world", WAIT)
        return str(caught.value)

    forked = ElasticRanks(tmp_path)
    forked.member(member, 0, 1)
    forked.newcomer(newcomer)
    assert returned(forked.outcomes()) == [None, "join: the job is over; there is nothing to join."]


def test_threads_join_threads():
    store = HashStore()
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        use_arena(Arena())
        if rank == 0:
            group = make_group(0, 1, lambda item: [item])
            group.store = store
            results[0] = facts(group.grow(wait=WAIT, size=3))
        else:
            results[rank] = facts(growing.join_through(store, "world", WAIT, rank))
        use_arena(None)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {r: (r, 3, [0, 1, 2], [1, 2], 6.0) for r in range(3)}


def test_words_of_refusals(monkeypatch):
    group = make_group(0, 1, lambda item: [item])
    with pytest.raises(errors.CallerError, match="it has no store, so newcomers could not find it; grow the group"):
        group.grow()
    with pytest.raises(errors.BadArgumentError, match="grow: size must be a number of ranks, 1 or more, got 0"):
        group.grow(size=0)
    monkeypatch.setenv("SYMCOMM_JOIN", "0")
    with pytest.raises(errors.RendezvousError, match=r"call symcomm.join\(\) here"):
        default.init()
    group.destroy()
