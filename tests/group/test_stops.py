"""Processes that stop (SIGSTOP) at every step of reconfigure and grow, and go on when the others have given up.

Whoever is stopped costs the others the deadline and no more. When it wakes, it hears what they were told, writes into
nobody's memory, and can take part again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from symcomm import errors
from symcomm.group import grow as growing
from symcomm.group.default import join_ranks
from symcomm.group.factory import make_group
from symcomm.membership import replicated_round
from symcomm.memory import share
from symcomm.observe.recorder.processes import process_state
from symcomm.store import FileStore
from tests.support.elastic_ranks import ElasticRanks
from tests.support.ranks import returned, until
from tests.support.reconfigure_ranks import STEPS, Party, around, before_hosts_connect, expected, failure, on_hosts

pytestmark = pytest.mark.long

SECONDS = 4.0  # of one deadline: all scenarios of a test run at once
WAIT = 20.0
EVERY_STEP = "SYMCOMM_EVERY_STEP" in os.environ  # for every victim, as `make soak` wants it


def play(folder: Path, size: int, run: Callable, scenarios: list[tuple]) -> list[list[Any]]:
    """What each of ``size`` processes returned from ``run(store, me, *scenario)``, of all scenarios at once."""
    forked = ElasticRanks(folder)
    for number, scenario in enumerate(scenarios):
        for me in range(size):
            path = str(folder / f"store{number}")
            forked.newcomer(lambda _, path=path, me=me, scenario=scenario: run(FileStore(path), me, *scenario))
    values = returned(forked.outcomes(deadline=80.0))
    return [values[at : at + size] for at in range(0, len(values), size)]


def stop_once() -> Callable[[], None]:
    """Stops this process, the first time that it is called."""
    done: list[bool] = []

    def stop() -> None:
        if not done:
            done.append(True)
            os.kill(os.getpid(), signal.SIGSTOP)

    return stop


def wake(pid: int) -> None:
    assert until(lambda: process_state(pid) == "T", WAIT)
    os.kill(pid, signal.SIGCONT)


# --- reconfigure -----------------------------------------------------------------------------------------------------


def stopped(party: Party, victim: int, step: Callable, size: int) -> tuple:
    """``victim`` stops at ``step``, and goes on when the others have given up; then all of them try again."""
    replicated_round.REPLICA_SECONDS = 0.5  # for one that is stopped to answer
    everybody = list(range(size))
    others = [me for me in everybody if me != victim]
    if party.me == victim:
        step(stop_once())
        said = failure(lambda: party.become(1, everybody, timeout=SECONDS))
    else:
        said = failure(lambda: party.become(1, everybody, timeout=SECONDS))
        party.store.set(f"told/{party.me}", "x")
        if party.me == others[0]:
            party.store.wait([f"told/{me}" for me in others])
            wake(int(party.handles([victim])[0].split("/")[4]))
    party.become(2, everybody)
    return said, party.facts()


def victims_of(size: int, step: int) -> list[int]:
    """The first serves the store that the others meet in."""
    return [0, size - 1] if EVERY_STEP else [[0, size - 1][step % 2]]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("hosts", ["aaa", "aabb"], ids=["on one host", "across hosts"])
def test_reconfigure_names_one_that_stops_at_any_step_and_it_hears_the_same(hosts, tmp_path):
    steps = STEPS if hosts == "aaa" else [*STEPS, before_hosts_connect]
    size = len(hosts)
    scenarios = [(victim, step) for at, step in enumerate(steps) for victim in victims_of(size, at)]
    if hosts != "aaa" and not EVERY_STEP:
        scenarios.append((size - 1, before_hosts_connect))

    def run(store: Any, me: int, victim: int, step: Callable) -> tuple:
        return on_hosts(stopped, hosts)(Party(store, me), victim, step, size)

    for (victim, step), values in zip(scenarios, play(tmp_path, size, run, scenarios), strict=True):
        kind, words, ranks = values[0][0]
        assert [v[0] for v in values] == [(kind, words, ranks)] * size, step  # one story, on all
        # Others are late because of it; where the first one passes on everybody's memory, some wait for that one.
        assert kind == "DeadlineError" and {victim, 0} & set(ranks), (step, words)
        assert words.startswith("reconfigure of group 'world' to uuid 1 failed: ")
        assert words.endswith("; the group has no members yet.")
        assert [v[1] for v in values] == [expected(me, range(size)) for me in range(size)], step


# --- grow ------------------------------------------------------------------------------------------------------------


def facts(group: Any) -> tuple[int, int, float]:
    total = torch.tensor([float(group.rank + 1)])
    group.all_reduce(total)
    return group.rank, group.size, total.item()


def stop_at(where: str) -> None:
    """At the first or second exchange of a round, around the passing of memory, or when all is built."""
    stop = stop_once()
    if where == "descriptors":
        around(share, "_pass_descriptors", before=stop)
    elif where == "memory":
        around(share, "_pass_descriptors", after=stop)
    elif where == "verdict":
        around(growing.Round, "decide", before=stop)
    else:
        exchange = growing.Round.exchange

        def stopping(self: Any, item: bytes) -> list[bytes]:
            if where == f"turn {self._turn + 1}":
                stop()
            return exchange(self, item)

        growing.Round.exchange = stopping  # type: ignore[method-assign]


def member_of_two(store: Any, rank: int) -> Any:
    return join_ranks(store, rank, 2, WAIT, partial(make_group, timeout=WAIT))


def take_in(store: Any, me: int, where: str) -> tuple:
    """Two members, and a newcomer that stops."""
    if me == 2:
        store.set("pid", str(os.getpid()))
        stop_at(where)
        return facts(growing.join_through(store, "world", 2 * WAIT))
    group = member_of_two(store, me)
    assert group.grow(timeout=SECONDS, wait=WAIT) is group
    assert facts(group) == (me, 2, 3.0)
    if me == 0:
        wake(int(store.get("pid")))
    return facts(group.grow(wait=WAIT))


GROWING = ["turn 1", "descriptors", "memory", "turn 2"]


@pytest.mark.timeout(120)
def test_grow_goes_on_without_a_newcomer_that_stops_at_any_step_and_takes_it_in_later(tmp_path):
    for values in play(tmp_path, 3, take_in, [(where,) for where in GROWING]):
        assert values == [(r, 3, 6.0) for r in range(3)]


def stop_as_member(store: Any, me: int, victim: int, where: str) -> tuple:
    """Two members, of which one stops, and a newcomer: (which group it is in then, that it works)."""
    if me == 2:
        try:
            return "new", facts(growing.join_through(store, "world", 2 * SECONDS))
        except errors.DeadlineError:
            return "none", None
    group = member_of_two(store, me)
    if me == victim:
        store.set("pid", str(os.getpid()))
        stop_at(where)
        after = group.grow(timeout=SECONDS, wait=WAIT)
    else:
        waker = threading.Timer(SECONDS + 1.0, lambda: wake(int(store.get("pid"))))
        waker.start()  # its peers wait for it, in the group that they have
        after = group.grow(timeout=SECONDS, wait=WAIT)
        waker.join()
    return "old" if after is group else "new", facts(after)


@pytest.mark.timeout(120)
def test_grow_splits_nobody_when_a_member_stops_at_any_step(tmp_path):
    """It is late for all alike. Once all have built, all are in the new group, and so is it when it wakes."""
    scenarios = [(victim, where) for where in [*GROWING, "verdict"] for victim in (0, 1)]
    for (_, where), values in zip(scenarios, play(tmp_path, 3, stop_as_member, scenarios), strict=True):
        if where == "verdict":
            assert values == [("new", (r, 3, 6.0)) for r in range(3)]
        else:
            assert values == [("old", (0, 2, 3.0)), ("old", (1, 2, 3.0)), ("none", None)], where
