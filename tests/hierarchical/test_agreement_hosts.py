"""shrink() across hosts, with a rank that dies or stops at every step, and with messages that are lost one way.

The steps are the messages that a rank sends. Hosts are pretended (SYMCOMM_HOST_ID); every scenario has ranks of its
own, and many run at the same time, since they mostly wait. Whatever happens, all ranks that get a group get one of the
same members, and where a part of the ranks is cut off from the rest, only one part goes on.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

import pytest
import torch

from symcomm import errors
from symcomm.hierarchical.group import HierarchicalGroup
from symcomm.observe.recorder.processes import process_state
from tests.support.host_ranks import run_on_hosts

SECONDS = 4.0  # of one deadline: many ranks share few cores, and none of them may be late for that


def _use(group: Any) -> list[float]:
    x = torch.full((5000,), float(group.global_ranks[group.rank] + 1))
    group.all_reduce(x, timeout=SECONDS)
    return x.unique().tolist()


def _meet(group: Any) -> None:
    """Nobody goes on before all have their group, though some may shrink it at once then."""
    group.barrier()
    marks = [os.path.join(group.marks, f"{group.scenario}-{r}-ready") for r in range(group.size)]
    open(marks[group.rank], "w").close()
    while not all(map(os.path.exists, marks)):
        time.sleep(0.005)


def _shrink_until_it_works(group: Any, **how: Any) -> list:
    """The members of each group on the way, and then what the last one gave, or why there is none."""
    told: list = []
    try:
        while True:
            group = group.shrink(timeout=SECONDS, **how)
            told.append(group.global_ranks)
            try:
                return [*told, _use(group)]
            except (errors.PeerError, errors.DeadlineError, errors.GroupUnusableError):
                continue
    except errors.RankFailedError as error:
        return [*told, str(error)]


def _check_one_set(told: list[list]) -> None:
    """What all ranks of a scenario say: the same members, time after time; the last group works or there is none."""
    longest = max(told, key=len)
    for history in told:
        sets, last = history[:-1], history[-1]
        assert sets == longest[: len(sets)], told
        if isinstance(last, list):
            assert last == [float(sum(r + 1 for r in sets[-1]))], told


# --- deaths and stops at every step -----------------------------------------------------------------------------

EVERY_STEP = "SYMCOMM_EVERY_STEP" in os.environ  # of both victims, as `make soak` wants it
STEPS = [("agree", n) for n in range(8)] + [("exchange", n) for n in (0, 1, 5, 9)]  # a kind of message, and which one


def _strike_at(kind: str, step: int, how: signal.Signals) -> None:
    """``how`` comes to this process just before it sends message number ``step`` of that kind."""
    tell, sent = HierarchicalGroup.tell, 0

    def striking(self: Any, rank: int, header: dict, *args: Any, **kwargs: Any) -> bool:
        nonlocal sent
        if header["kind"] == kind:
            if sent == step:
                os.kill(os.getpid(), how)
            sent += 1
        return tell(self, rank, header, *args, **kwargs)

    HierarchicalGroup.tell = striking  # type: ignore[method-assign]


def _with_a_victim(group: Any, scenario: tuple) -> list:
    victim, kind, step, how = scenario
    me, mark = group.rank, os.path.join(group.marks, f"{group.scenario}-{group.rank}")
    _meet(group)
    if me == victim:
        _strike_at(kind, step, how)
    try:
        return _shrink_until_it_works(group)
    finally:
        open(mark, "w").close()


def _continue_last(victim: int, count: int, marks: str, pids: list[int]) -> None:
    """Let each stopped rank go on when the others of its scenario have ended."""

    def has_ended(scenario: int, rank: int) -> bool:
        return os.path.exists(os.path.join(marks, f"{scenario}-{rank}"))

    waiting, end = set(range(count)), time.monotonic() + 60
    while waiting and time.monotonic() < end:
        for scenario in list(waiting):
            pid = pids[3 * scenario + victim]
            state = process_state(pid)
            if state == "Z" or has_ended(scenario, victim):
                waiting.discard(scenario)
            elif state == "T" and all(has_ended(scenario, r) for r in range(3) if r != victim):
                os.kill(pid, signal.SIGCONT)
        time.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stops"])
@pytest.mark.parametrize("victim", [0, 1])
def test_one_set_or_none_whoever_fails_at_whichever_step(victim: int, how: signal.Signals, tmp_path):
    chosen = STEPS if EVERY_STEP else STEPS[victim::2]
    scenarios = [(victim, kind, step, how) for kind, step in chosen]

    def body(group: Any, scenario: tuple) -> list:
        group.marks = str(tmp_path)
        return _with_a_victim(group, scenario)

    during = partial(_continue_last, victim, len(scenarios), str(tmp_path))
    for scenario, outcomes in zip(scenarios, run_on_hosts(body, [0, 1, 2], scenarios, during=during), strict=True):
        others = [o for o in outcomes if o.rank % 3 != victim]
        assert all(o.kind == "returned" for o in others), (scenario, *map(str, outcomes))
        struck = outcomes[victim]
        assert struck.kind == "returned" or (struck.kind == "died" and how == signal.SIGKILL), (scenario, str(struck))
        _check_one_set([o.value for o in outcomes if o.kind == "returned"])
        assert all(isinstance(o.value[-1], list) for o in others), (scenario, *map(str, outcomes))
        members = others[0].value[-2]
        assert set(members) in ({0, 1, 2}, {0, 1, 2} - {victim}), (scenario, *map(str, outcomes))


# --- messages that are lost -------------------------------------------------------------------------------------


def _lose_messages(me: int, lost: set[tuple[int, int]]) -> None:
    """What this rank tells others is lost on the way to some, and nobody notices."""
    tell = HierarchicalGroup.tell

    def losing(self: Any, rank: int, header: dict, *args: Any, **kwargs: Any) -> bool:
        return (me, self.global_ranks[rank]) in lost or tell(self, rank, header, *args, **kwargs)

    HierarchicalGroup.tell = losing  # type: ignore[method-assign]


def _with_losses(group: Any, lost: set[tuple[int, int]]) -> list:
    _meet(group)
    _lose_messages(group.rank, lost)
    return _shrink_until_it_works(group)


def test_one_set_or_none_whoever_is_not_heard_by_whom():
    pairs = [{(a, b)} for a in range(3) for b in range(3) if a != b]
    for lost, outcomes in zip(pairs, run_on_hosts(_with_losses, [0, 1, 2], pairs), strict=True):
        assert all(o.kind == "returned" for o in outcomes), (lost, *map(str, outcomes))
        told = [o.value for o in outcomes]
        _check_one_set(told)
        working = [history for history in told if isinstance(history[-1], list)]
        assert working and len(working) == len(working[0][-2]), (lost, told)  # all its members have it, nobody else


HALVES = [0, 0, 1, 1]
CUT = {(a, b) for a in range(4) for b in range(4) if (a < 2) != (b < 2)}


def _in_halves(group: Any, quorum: int | None) -> list:
    _meet(group)
    _lose_messages(group.rank, CUT)
    return _shrink_until_it_works(group, quorum=quorum)


def test_two_halves_never_both_go_on_unless_asked_to():
    by_default, asked, too_many = run_on_hosts(_in_halves, HALVES, [None, 2, 3])
    assert [o.value for o in by_default[:2]] == [[[0, 1], [3.0]]] * 2, "\n".join(map(str, by_default))
    for outcome in by_default[2:]:
        [why] = outcome.value
        assert "of its 4 ranks only" in why and "3 are needed" in why and "pass quorum=" in why, why
    assert [o.value for o in asked] == [[[0, 1], [3.0]]] * 2 + [[[2, 3], [7.0]]] * 2, "\n".join(map(str, asked))
    assert all("of its 4 ranks only" in o.value[0] for o in too_many), "\n".join(map(str, too_many))


def _refusals(group: Any, _: Any) -> list:
    refused = []
    for quorum in (0, 3, True, "all"):
        with pytest.raises(errors.BadArgumentError) as info:
            group.shrink(quorum=quorum)
        refused.append("quorum" in str(info.value))
    return refused


def test_a_quorum_is_a_number_of_ranks():
    [outcomes] = run_on_hosts(_refusals, [0, 1], [None])
    assert [o.value for o in outcomes] == [[True] * 4] * 2, "\n".join(map(str, outcomes))
