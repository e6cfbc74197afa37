"""Deaths during reconfigure, at scripted steps: every survivor has the same outcome, and survivors can go on."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from symcomm import errors
from symcomm.membership.replicated_round import Reconfiguration
from symcomm.memory import share
from tests.support.ranks import die, returned
from tests.support.reconfigure_ranks import (
    STEPS,
    WAIT,
    Party,
    after_its_first_exchange,
    around,
    before_hosts_connect,
    expected,
    failure,
    on_hosts,
    run_parties,
)  # fmt: skip


def survive(party: Party, victim: int, step: Callable, everybody: list[int]) -> tuple:
    """Be there when ``victim`` dies at ``step``, then go on without it."""
    if party.me == victim:
        step(die)
    said = failure(lambda: party.become(1, everybody))
    empty = failure(lambda: party.group.barrier())
    survivors = [me for me in everybody if me != victim]
    party.become(2, survivors)
    return said, empty, party.facts()


def check_survivors(outcomes: list[Any], victim: int, everybody: Sequence[int]) -> None:
    survivors = [me for me in everybody if me != victim]
    assert (outcomes[victim].kind, outcomes[victim].value) == ("died", -signal.SIGKILL)
    values = returned([outcomes[me] for me in survivors])
    kind, words, ranks = values[0][0]
    assert [v[0] for v in values] == [(kind, words, ranks)] * len(values)  # one story, on all
    place = everybody.index(victim)
    assert kind == "RankFailedError" and ranks == [place]
    assert words.startswith(f"reconfigure of group 'world' to uuid 1 failed: rank {place} (pid ")
    assert words.endswith(") is gone; the group has no members yet.")
    for _, (kind, words, _), _ in values:
        assert kind == "GroupUnusableError" and "has no members: its reconfigure failed (rank " in words
        assert words.endswith("is gone). Call it again, with a fresh uuid.")
    assert [v[2] for v in values] == [expected(me, survivors) for me in survivors]


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["the first", "the second", "the last"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_death_before_the_verdict_ends_it_for_all(step, victim, tmp_path):
    check_survivors(run_parties(tmp_path, survive, 3, victim, step, [0, 1, 2]), victim, [0, 1, 2])


def test_a_peer_that_hangs_up_because_of_a_death_is_not_what_is_told(tmp_path):
    """The first rank finds the dead one, and hangs up on the second long before it says why."""

    def run(party: Party) -> tuple:
        if party.me == 0:
            around(Reconfiguration, "decide", before=lambda: time.sleep(0.5))
        if party.me == 1:
            share.SLICE = 0.4  # it looks for the dead more seldom than it hears of others
        return survive(party, 2, after_its_first_exchange, [0, 1, 2])

    check_survivors(run_parties(tmp_path, run, 3), 2, [0, 1, 2])


# --- deaths while the verdict is made --------------------------------------------------------------------------------


def decide_in_turn(party: Party, victim: int, keepers: int) -> None:
    """``victim`` dies once it has brought "go" to so many keepers; the others decide after that, in the order of
    their numbers, and the first of them has not heard that all have built."""
    decide = Reconfiguration.decide

    def decided(self: Reconfiguration, verdict: str) -> str:
        if party.me == victim:
            self._replicas = self._replicas[:keepers]
            decide(self, verdict)
            die()
        others = [me for me in range(self.size) if me != victim]
        await_death(party, victim)
        if party.me == others[0]:
            verdict = self.to_verdict(self.gone_ranks(victim))
        else:
            party.store.wait([f"decided/{others[0]}"])
        verdict = decide(self, verdict)
        party.store.set(f"decided/{party.me}", verdict)
        return verdict

    Reconfiguration.decide = decided  # type: ignore[method-assign]


def await_death(party: Party, victim: int) -> None:
    pid = int(party.handles([victim])[0].split("/")[4])
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] not in "ZX":
                time.sleep(0.01)
                continue
        return


def decided_with(party: Party, victim: int, keepers: int) -> str:
    decide_in_turn(party, victim, keepers)
    outcome = "go"
    try:
        party.become(1, [0, 1, 2, 3])
        told = failure(lambda: party.group.all_reduce(torch.ones(1)))
        assert told[0] == "RankFailedError" and told[2] == [victim]
    except errors.RankFailedError as error:
        outcome = str(error)
    return outcome


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("keepers", [0, 1, 2, 3])
def test_a_death_within_the_verdict_leaves_one_verdict(victim, keepers, tmp_path):
    outcomes = run_parties(tmp_path, decided_with, 4, victim, keepers)
    assert outcomes[victim].kind == "died"
    values = returned([o for me, o in enumerate(outcomes) if me != victim])
    assert len(set(values)) == 1, values
    # "go" stays where it reached a keeper that lives before anybody else came there
    reached = [me for me in range(3)[:keepers] if me != victim]
    if reached:
        assert values[0] == "go"
    else:
        assert f"failed: rank {victim} (pid " in values[0]


# --- keepers that some members cannot reach --------------------------------------------------------------------------


def decide_apart(party: Party, cut: dict[int, list[int]], order: list[int]) -> None:
    """At the verdict, ``cut[me]`` are the keepers that do not answer; members come there in this order."""
    decide, server = Reconfiguration.decide, Reconfiguration._server

    def decided(self: Reconfiguration, verdict: str) -> str:
        def unanswered(self: Reconfiguration, place: int, seconds: float) -> Any:
            if place in cut.get(party.me, []):
                raise errors.StoreUnreachableError("no answer")
            return server(self, place, seconds)

        before = order[: order.index(party.me)]
        if before:
            party.store.wait([f"decided/{before[-1]}"])
        Reconfiguration._server = unanswered  # type: ignore[method-assign]
        if 0 in cut.get(party.me, []):  # it would not have heard there that all have built
            verdict = self.to_verdict(self.gone_ranks(0))
        try:
            return decide(self, verdict)
        finally:
            Reconfiguration._server = server  # type: ignore[method-assign]
            party.store.set(f"decided/{party.me}", "x")

    Reconfiguration.decide = decided  # type: ignore[method-assign]


def parted(party: Party, cut: dict[int, list[int]], order: list[int]) -> str:
    party.become(1, [0, 1, 2, 3])
    old = party.group.current
    decide_apart(party, cut, order)
    try:
        return "new" if party.become(2, [0, 1, 2, 3]) is not old else "?"
    except errors.RankFailedError as error:
        if party.group._group is None:
            assert error.ranks == [party.me] and "cannot know whether the others went on" in str(error)
            return "none"
        return "old" if party.group.current is old else "?"


HALVES = {0: [1, 2], 3: [1, 2], 1: [0], 2: [0]}


@pytest.mark.parametrize("order", [[0, 3, 1, 2], [1, 2, 0, 3], [2, 0, 1, 3]], ids=str)
@pytest.mark.parametrize(
    ("cut", "expected"),
    [(HALVES, {"old", "none"}), ({3: [0, 1, 2]}, {"new", "none"}), ({1: [2], 3: [0]}, None), ({0: [1], 2: [0]}, None)],
    ids=["halves", "one alone", "one each", "the keepers"],
)
def test_a_keeper_that_some_cannot_reach_parts_nobody(cut, expected, order, tmp_path):
    """Who goes on goes on in one group: all in the new one, or all in the old one."""
    values = returned(run_parties(tmp_path, parted, 4, cut, order))
    assert not {"old", "new"} <= set(values) and "?" not in values, values
    assert expected is None or set(values) <= expected, values


# --- processes that leave, or stay behind ----------------------------------------------------------------------


def test_after_a_failure_members_have_the_group_they_had(tmp_path):
    def keep(party: Party) -> tuple:
        if party.me == 2:
            party.store.wait(["configured"])
            die()
        old = party.become(1, [0, 1])
        party.store.set("configured", "x")
        said = failure(lambda: party.become(2, [0, 1, 2]))
        assert party.group.current is old
        return said, party.facts()

    outcomes = run_parties(tmp_path, keep, 3)
    values = returned(outcomes[:2])
    assert values[0][0] == values[1][0] and values[0][0][2] == [2]
    assert values[0][0][1].endswith(") is gone; the group is what it was.")
    assert [v[1] for v in values] == [expected(me, [0, 1]) for me in range(2)]


def test_a_first_member_that_ends_at_once_takes_nothing_with_it(tmp_path):
    """It serves the store that the others meet in; when it has the new group, they have it too."""

    def work(party: Party) -> tuple:
        party.become(1, [0, 1, 2])
        if party.me == 0:
            die()
        said = failure(lambda: party.group.all_reduce(torch.ones(1)))
        party.become(2, [2, 1])
        return said[0], said[2], party.facts()

    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        values = returned(run_parties(folder, work, 3)[1:])
        assert values == [("RankFailedError", [0], expected(me, [2, 1])) for me in (1, 2)]


@pytest.mark.parametrize("hosts", ["aaa", "aab", "abb"])
def test_what_is_pending_on_the_old_group_is_told(hosts, tmp_path):
    """Works that wait for others, and a thread that blocks in a call."""

    def work(party: Party) -> list:
        party.become(1, [0, 1, 2])
        told: list = []
        if party.me == 0:
            pending = party.group.all_reduce(torch.ones(3), async_op=True)
            blocked = threading.Thread(
                target=lambda: told.append(failure(lambda: party.group.all_reduce(torch.ones(3))))
            )
            blocked.start()
            time.sleep(0.1)
            party.become(2, [0, 1])
            blocked.join(WAIT)
            told.append(failure(pending.wait))
            return [*told, party.facts()]
        if party.me == 1:
            party.become(2, [0, 1])
            return [party.facts()]
        return [failure(lambda: party.group.all_reduce(torch.ones(3))), (party.group.rank, party.group.size)]

    first, second, left_out = returned(run_parties(tmp_path, on_hosts(work, hosts), 3))
    why = "group 'world@1' was left when its members were reconfigured (uuid 2)."
    for kind, words, _ in first[:2]:  # rank 1 may be a little quicker to leave than this one
        told = kind == "GroupUnusableError" and words.endswith(why)
        assert told or ("rank 1 (pid " in words and " left the " in words)
    assert [first[2], *second] == [expected(me, [0, 1]) for me in range(2)]
    assert left_out[0][0] == "RankFailedError" and " left the group" in left_out[0][1]
    assert left_out[1] == (2, 3)


# --- several hosts ---------------------------------------------------------------------------------------------------


def test_members_of_two_hosts_come_and_go(tmp_path):
    script = [[0, 1], [0, 2], [3, 1, 0, 2], [2, 3], [1, 3, 2]]

    def follow(party: Party) -> list:
        seen = []
        for uuid, who in enumerate(script):
            if party.me in who:
                party.become(uuid, who)
                seen.append((party.group.spans_hosts, *party.facts()))
        return seen

    values = returned(run_parties(tmp_path, on_hosts(follow, "aabb"), 4))
    for me, seen in enumerate(values):
        spans = [len({"aabb"[i] for i in who}) > 1 for who in script]
        assert seen == [(spans[u], *expected(me, who)) for u, who in enumerate(script) if me in who]


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("step", [*STEPS, before_hosts_connect], ids=lambda step: step.__name__)
def test_a_death_on_one_of_two_hosts(step, victim, tmp_path):
    fn = on_hosts(survive, "aabb")
    check_survivors(run_parties(tmp_path, fn, 4, victim, step, [0, 1, 2, 3]), victim, [0, 1, 2, 3])
