"""Members come and go: who is in a group after each reconfigure, and which calls are refused."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import symcomm
from symcomm.group import registry
from symcomm.group.reconfigure import ReconfigurableGroup
from symcomm.membership.handles import Handle
from tests.support.ranks import returned
from tests.support.reconfigure_ranks import WAIT, Party, expected, failure, run_parties


@pytest.fixture
def alone():
    group = ReconfigurableGroup(timeout=WAIT)
    yield group
    group.destroy()


# --- who is in it ----------------------------------------------------------------------------------------------------


def follow(party: Party, script: list[list[int]]) -> list[tuple]:
    """Take part in each configuration that has this process."""
    seen = []
    for uuid, who in enumerate(script):
        if party.me in who:
            group = party.become(uuid, who)
            assert group is party.group.current and group.name == f"world@{uuid}"
            seen.append((uuid, *party.facts()))
    return seen


def check_script(folder: Any, script: list[list[int]], count: int, fn: Callable = follow) -> None:
    values = returned(run_parties(folder, fn, count, script))
    for me, seen in enumerate(values):
        assert seen == [(uuid, *expected(me, who)) for uuid, who in enumerate(script) if me in who]


def test_members_come_go_and_change_places(tmp_path):
    check_script(tmp_path, [[0, 1], [0, 1, 2], [2, 0], [3, 2, 1, 0], [1], [1, 2], [0, 1, 2, 3]], 4)


def test_ten_configurations_by_chance(tmp_path):
    """As a training job would: steps between, whoever is there."""
    chance = random.Random(11)
    script = [chance.sample(range(4), chance.randint(1, 4)) for _ in range(10)]

    def train(party: Party, script: list[list[int]]) -> list[tuple]:
        seen = follow(party, script[:0])
        for uuid, who in enumerate(script):
            if party.me in who:
                party.become(uuid, who)
                for step in range(5):
                    gradient = torch.full((1000,), float(step + party.me))
                    party.group.all_reduce(gradient)
                    assert gradient.eq(sum(step + i for i in who)).all()
                seen.append((uuid, *party.facts()))
        return seen

    check_script(tmp_path, script, 4, train)


def test_hooks_go_on_watching(tmp_path):
    def watched(party: Party) -> list[str]:
        seen: list[str] = []
        party.become(1, [0, 1])
        party.group.register_pre_hook(3, lambda call: seen.append(call.name.name))
        party.group.barrier()
        party.become(2, [1, 0])
        party.facts()
        party.group.unregister_pre_hook(3)
        party.group.barrier()
        return seen

    assert returned(run_parties(tmp_path, watched, 2)) == [["BARRIER", "ALLREDUCE"]] * 2


def test_of_a_set_all_make_the_same_choice(tmp_path):
    def choose(party: Party) -> tuple:
        group = party.group.reconfigure(7, set(party.handles(range(3))))
        ranks = [torch.zeros(1) for _ in range(3)]
        group.all_gather(ranks, torch.tensor([float(party.me)]))
        return group.rank, [int(r) for r in ranks]

    values = returned(run_parties(tmp_path, choose, 3))
    order = values[0][1]
    assert sorted(order) == [0, 1, 2] and [v[1] for v in values] == [order] * 3
    assert [v[0] for v in values] == [order.index(me) for me in range(3)]


def test_threads_are_ranks_too():
    def work(group: Any) -> tuple:
        mine = ReconfigurableGroup(timeout=WAIT)
        handles = [bytes(h).decode() for h in group.all_gather_bytes(mine.get_reconfigure_handle().encode())]
        seen = []
        for uuid, order in enumerate((handles, handles[::-1], handles[:2])):
            if mine.get_reconfigure_handle() in order:
                mine.reconfigure(uuid, order)
                total = torch.ones(1)
                mine.all_reduce(total)
                seen.append((mine.rank, total.item()))
        return tuple(seen)

    values = symcomm.spawn(work, 3, mode="threads", deadline=40)
    assert values == [((0, 3.0), (2, 3.0), (0, 2.0)), ((1, 3.0), (1, 3.0), (1, 2.0)), ((2, 3.0), (0, 3.0))]


def test_nothing_stays_in_the_stores(tmp_path):
    def keys(party: Party) -> list[str]:
        for uuid in range(3):
            party.become(uuid, [0, 1])
            party.group.barrier()
        party.store.set(f"done/{party.me}", "x")
        party.store.wait(["done/0", "done/1"])
        end = time.monotonic() + 5.0  # the last of a round deletes its keys after it has the group
        while time.monotonic() < end and len(left := party.group._handle_server.store.list_keys()) > 2:
            time.sleep(0.01)
        return [key.split("/")[0] for key in left]

    assert returned(run_parties(tmp_path, keys, 2)) == [["at", "at"], []]


# --- the default group -----------------------------------------------------------------------------------------------


def test_init_takes_no_members():
    for given in ({"rank": 0}, {"world_size": 2}, {"store": symcomm.HashStore()}):
        kind, said, _ = failure(lambda given=given: symcomm.init(enable_reconfigure=True, **given))
        assert kind == "CallerError" and "goes without store, rank and world_size" in said
    assert not symcomm.is_initialized()


def test_init_waits_for_nobody():
    group = symcomm.init(enable_reconfigure=True, timeout=WAIT)
    try:
        empty = "has not been initialized: it has no members yet. Call reconfigure() before issuing collectives."
        for call in (lambda: group.all_reduce(torch.ones(1)), symcomm.barrier, symcomm.rank, lambda: group.size):
            assert failure(call)[:2] == ("GroupUnusableError", f"group 'world' {empty}")
        assert repr(group) == "<ReconfigurableGroup 'world': no members>"
        assert group.get_reconfigure_handle() == group.get_reconfigure_handle()
        assert group.reconfigure(1, [group.get_reconfigure_handle()]) is group.current
        total = torch.ones(2)
        symcomm.all_reduce(total)
        assert (symcomm.rank(), symcomm.world_size(), total.tolist()) == (0, 1, [1.0, 1.0])
        assert group.timeout == WAIT
        group.set_timeout(3.0)
        group.reconfigure(2, [group.get_reconfigure_handle()])
        assert group.timeout == 3.0
        assert registry.find("world") is registry.find("world@2") is group.current
    finally:
        symcomm.destroy()
    assert failure(group.get_reconfigure_handle)[1] == "group 'world' was destroyed."
    assert not symcomm.is_initialized()


def test_a_forked_child_is_not_a_member(alone):
    alone.reconfigure(1, [alone.get_reconfigure_handle()])
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(writer, failure(alone.get_reconfigure_handle)[1].encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    said = os.read(reader, 1000).decode()
    os.close(reader), os.close(writer)
    assert said.startswith("group 'world' cannot be used: it belongs to the process that this one was forked from")
    alone.reconfigure(2, [alone.get_reconfigure_handle()])


# --- wrong calls -----------------------------------------------------------------------------------------------------


def changed(handle: str) -> str:
    return handle.replace("/1/", "/1/9", 1)


def of_another_version(handle: str) -> str:
    return handle.replace("/1/", "/2/", 1)


@pytest.mark.parametrize(
    ("handles", "words"),
    [
        (lambda h: [h, "gloo:0:-1:0:"], "must be a handle from get_reconfigure_handle(), got 'gloo:0:-1:0:'"),
        (lambda h: [h[:-5]], "each handle must be a complete handle, got 'symcomm-handle/1/"),
        (lambda h: [h[:40]], "each handle must be a complete handle, got 'symcomm-handle/1/"),
        (lambda h: [changed(h)], "it was cut or changed on its way."),
        (lambda h: [of_another_version(h)], "each handle must be of version 1, got 'symcomm-handle/2/"),
        (lambda h: [h, h], "handles must be unique; the one at position 1 occurs before."),
        (lambda h: [str(Handle("127.0.0.1", 1, 2, "x", "y"))], "none of the 1 handles is this process's own; only"),
        (lambda h: [], "handles must be at least one handle, got []"),
        (lambda h: h, "handles must be a list or a set of handles, got 'symcomm-handle/"),
        (lambda h: [h, 3], "each handle must be a handle from get_reconfigure_handle(), got 3"),
    ],
)  # fmt: skip
def test_wrong_handles_are_refused_before_anything_happens(alone, handles, words):
    handle = alone.get_reconfigure_handle()
    kind, said, _ = failure(lambda: alone.reconfigure(1, handles(handle)))
    assert kind == "BadArgumentError" and said.startswith("reconfigure: ") and words in said
    assert Handle.parse(handle).token not in said or isinstance(handles(handle), str)
    alone.reconfigure(1, [handle])  # not even the uuid is used
    assert alone.size == 1


@pytest.mark.parametrize("uuid", ["7", 1.0, True, 1 << 63, None])
def test_a_uuid_is_a_number(alone, uuid):
    kind, said, _ = failure(lambda: alone.reconfigure(uuid, [alone.get_reconfigure_handle()]))
    assert (kind, said) == ("BadArgumentError", f"reconfigure: uuid must be a whole number of 64 bits, got {uuid!r}.")


def test_a_used_uuid_is_refused_on_all_also_on_those_who_do_not_know_it(tmp_path):
    def reuse(party: Party) -> tuple:
        if party.me < 2:
            party.become(5, [0, 1])
        said = failure(lambda: party.become(5, [0, 1, 2]))
        party.become(6, [0, 1, 2])
        return said[:2], party.facts()

    values = returned(run_parties(tmp_path, reuse, 3))
    refused = ("BadArgumentError", "reconfigure: uuid must be a fresh one each time, got 5; it was already used.")
    assert [v[0] for v in values[:2]] == [refused] * 2
    kind, said = values[2][0]
    assert kind == "BadArgumentError" and "uuid 5 was already used by rank " in said
    assert said.endswith("; the group has no members yet.")
    assert [v[1] for v in values] == [expected(me, [0, 1, 2]) for me in range(3)]


def test_who_comes_with_another_uuid_or_other_handles_is_named(tmp_path):
    def differ(party: Party) -> tuple:
        said = failure(lambda: party.become(10 + party.me, [0, 1], timeout=1.0))
        party.store.set(f"said/{party.me}", "x")
        party.store.wait(["said/0", "said/1"])
        order = [0, 1] if party.me == 0 else [0, 1, 2]
        other = failure(lambda: party.become(20, order, timeout=1.0))
        party.become(30, [1, 0])
        return said, other, party.facts()

    (said0, other0, facts0), (said1, _, facts1), _ = returned(
        run_parties(tmp_path, lambda p: differ(p) if p.me < 2 else (), 3)
    )
    assert said0[0] == said1[0] == "DeadlineError" and (said0[2], said1[2]) == ([1], [0])
    assert "; it came with uuid 11) did not come within 1 s; the group has no members yet." in said0[1]
    assert "; it came with uuid 10) did not come within 1 s" in said1[1]
    assert "; it came with other handles) did not come within 1 s" in other0[1]
    assert (facts0, facts1) == (expected(0, [1, 0]), expected(1, [1, 0]))
