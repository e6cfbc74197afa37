"""Making a group, with a member that dies or stops at every step: nobody waits for the store's deadline.

Meetings in a store are those of torch's new_group(); groups of groups meet in memory, or by messages between hosts.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from symcomm import errors
from symcomm.group.default import join_ranks
from symcomm.group.executor import LocalExecutor
from symcomm.group.factory import make_group
from symcomm.hierarchical.group import HierarchicalGroup
from symcomm.memory import share
from symcomm.observe.recorder.processes import process_state
from symcomm.store import FileStore, PrefixStore
from symcomm.store.handshake import _Attempt
from symcomm.torch_backend.group import TorchGroup
from tests.support.faults import run_group
from tests.support.host_ranks import run_on_hosts
from tests.support.ranks import Outcome, run_ranks

pytestmark = pytest.mark.torch_versions

NOTICED = 8.0  # seconds, on a busy machine; the deadlines are far longer
STOPPED = 4.0  # seconds: longer than the deadline of those who wait


def _strike_at(owner: Any, names: tuple[str, ...], step: int, how: signal.Signals = signal.SIGKILL) -> None:
    """``how`` comes to this process just before call number ``step`` of some methods, counted together."""
    taken = 0

    def striking(method: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal taken
            if taken == step:
                os.kill(os.getpid(), how)
            taken += 1
            return method(*args, **kwargs)

        return call

    for name in names:
        setattr(owner, name, striking(getattr(owner, name)))


def _seconds_until(call: Callable[[], Any]) -> tuple[float, BaseException]:
    begun = time.monotonic()
    try:
        call()
    except errors.SymcommError as error:
        return time.monotonic() - begun, error
    raise AssertionError("it went well")


# --- torch's new_group: in a store ------------------------------------------------------------------------------------


def _torch_world(rank: int, world: int, folder: str, timeout: float) -> int:
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("symcomm", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=600))
    return rank


def _new_group_without(rank: int, victim: int, step: int) -> tuple:
    dist.all_reduce(torch.ones(1))
    if rank == victim:
        if step < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        _strike_at(_Attempt, ("_arrive", "_lead", "_answer", "_set"), step)

    def make_and_use() -> None:
        group = dist.new_group([0, 1, 2])
        if rank == victim:  # it did not take so many steps
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            dist.all_reduce(torch.ones(1), group=group)

    seconds, error = _seconds_until(make_and_use)
    return seconds, type(error).__name__, getattr(error, "ranks", None), str(error)


@pytest.mark.parametrize("step", [-1, 0, 1, 2], ids=["before", "arriving", "answering", "after"])
@pytest.mark.parametrize("victim", [0, 2])
def test_new_group_notices_who_died_as_a_collective_does(victim: int, step: int):
    outcomes = run_group(_new_group_without, 3, victim, step, join=_torch_world)
    for outcome in outcomes:
        if outcome.rank == victim:
            assert outcome.kind == "died", outcome
            continue
        assert outcome.kind == "returned", outcome
        seconds, kind, ranks, text = outcome.value
        assert seconds < NOTICED and kind == "RankFailedError" and victim in ranks, outcome
        assert f"rank {victim}" in text, outcome


def test_a_store_that_died_with_its_rank_is_blamed_on_the_rank():
    for outcome in run_group(_new_group_in_tcp, 3, join=_torch_world_in_tcp):
        if outcome.rank == 0:
            assert outcome.kind == "died", outcome
            continue
        seconds, kind, ranks, text = outcome.value
        assert seconds < NOTICED and kind == "RankFailedError" and ranks == [0], outcome


def _torch_world_in_tcp(rank: int, world: int, folder: str, timeout: float) -> int:
    place = os.path.join(folder, "port")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, True, wait_for_workers=False)
        with open(place + ".new", "w") as file:
            file.write(str(store.port))
        os.rename(place + ".new", place)
    else:
        while not os.path.exists(place):
            time.sleep(0.005)
        with open(place) as file:
            store = dist.TCPStore("127.0.0.1", int(file.read()), world, False, wait_for_workers=False)
    dist.init_process_group("symcomm", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=600))
    return rank


def _new_group_in_tcp(rank: int) -> tuple:
    """Rank 0 serves the store, and dies while the others wait for it there."""
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        time.sleep(0.5)  # they are in new_group() by then, or find it dead: either way they must tell
        os.kill(os.getpid(), signal.SIGKILL)
    seconds, error = _seconds_until(lambda: dist.new_group([0, 1, 2]))
    return seconds, type(error).__name__, getattr(error, "ranks", None), str(error)


# --- merge_remote_group: in a store, ranks of several groups ----------------------------------------------------------


def _two_pairs(rank: int, world: int, folder: str, timeout: float) -> tuple:
    store = dist.FileStore(os.path.join(folder, "store"), world)
    pair = dist.PrefixStore(f"pair {rank // 2}", store)
    long = timedelta(seconds=600)
    return rank, TorchGroup(pair, rank % 2, 2, long, "pair"), dist.PrefixStore("all", store)


def _merge_without_the_last(party: tuple, how: str) -> tuple:
    rank, pair, store = party
    pair.allreduce([torch.ones(1)]).wait()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "merge":
        seconds, error = _seconds_until(lambda: pair.merge(store, None, rank, 4))
    else:
        seconds, error = _seconds_until(lambda: pair.merge_remote_group(store, 4))
    return seconds, type(error), str(error)


@pytest.mark.parametrize("how", ["merge", "merge_remote_group"])
def test_groups_that_merge_notice_who_died(how: str):
    """Nobody knows the ranks of the other pair: the one that has lost its partner tells them."""
    *survivors, last = run_group(_merge_without_the_last, 4, how, join=_two_pairs)
    assert last.kind == "died"
    for outcome in survivors:
        assert outcome.kind == "returned", outcome
        seconds, kind, text = outcome.value
        assert seconds < NOTICED and issubclass(kind, errors.RankFailedError), outcome
        assert "SIGKILL" in text, outcome


def _merge_survivors(party: tuple) -> float:
    rank, pair, store = party
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        with pytest.raises(errors.RankFailedError):
            pair.allreduce([torch.ones(1)]).wait()
    three = pair.merge_remote_group(store, 3)
    x = torch.ones(1)
    three.allreduce([x]).wait()
    three.shutdown()
    return x.item()


def test_a_survivor_merges_with_others():
    """Its own group has failed, which everybody knows: who comes is nobody else's business."""
    *survivors, last = run_group(_merge_survivors, 4, join=_two_pairs)
    assert last.kind == "died"
    assert [o.value for o in survivors] == [3.0] * 3, survivors


# --- groups of groups: in memory, and by messages between hosts -------------------------------------------------------


def _new_group_of(group: Any, scenario: tuple) -> tuple:
    """Rank 1 is struck; the others make the group, and use it, until they are told."""
    step, how = scenario
    group.barrier()  # all have joined
    if group.rank == 1:
        _strike_at(
            HierarchicalGroup if group.spans_hosts else LocalExecutor,
            ("tell" if group.spans_hosts else "_run",),
            step,
            how,
        )

    def make_and_use() -> None:
        smaller = group.new_group([0, 1, 2], timeout=3.0)
        if group.rank == 1:
            os.kill(os.getpid(), how)
        while True:
            smaller.all_reduce(torch.ones(1))

    seconds, error = _seconds_until(make_and_use)
    culprits = getattr(error, "ranks", None) or getattr(error, "missing", [])
    return seconds, type(error).__name__, list(culprits)


def _continue_after_deadlines(pids: list[int]) -> None:
    """Stopped ranks go on when the others' deadlines are over."""
    end = time.monotonic() + 12
    while not any(process_state(pid) == "T" for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(STOPPED)
    for pid in pids:
        if process_state(pid) == "T":
            os.kill(pid, signal.SIGCONT)


def _check(outcomes: list[Outcome], scenario: tuple) -> None:
    step, how = scenario
    for rank, outcome in enumerate(outcomes):
        if rank == 1 and how == signal.SIGKILL:
            assert outcome.kind == "died", (scenario, str(outcome))
            continue
        assert outcome.kind == "returned", (scenario, str(outcome))
        seconds, kind, culprits = outcome.value
        assert seconds < NOTICED + (STOPPED if rank == 1 else 0), (scenario, str(outcome))
        if how == signal.SIGKILL:
            assert kind == "RankFailedError" and 1 in culprits, (scenario, str(outcome))
        elif rank != 1:
            assert kind == "DeadlineError" and 1 in culprits, (scenario, str(outcome))


ON_ONE_HOST = [(0, signal.SIGKILL), (1, signal.SIGKILL), (9, signal.SIGKILL), (1, signal.SIGSTOP)]
ACROSS = [(n, signal.SIGKILL) for n in (0, 1, 4, 9, 99)] + [(n, signal.SIGSTOP) for n in (1, 4)]


@pytest.mark.parametrize("scenario", ON_ONE_HOST, ids=lambda s: f"{s[0]}-{s[1].name}")
def test_groups_of_groups_notice_who_died_or_stopped(scenario: tuple):
    during = _continue_after_deadlines if scenario[1] == signal.SIGSTOP else None
    _check(run_group(_new_group_of, 3, scenario, timeout=3.0, during=during), scenario)


def test_groups_of_groups_across_hosts_notice_who_died_or_stopped():
    every = run_on_hosts(_new_group_of, [0, 0, 1], ACROSS, timeout=3.0, during=_continue_after_deadlines)
    for scenario, outcomes in zip(ACROSS, every, strict=True):
        _check(outcomes, scenario)


# --- what a meeting costs ---------------------------------------------------------------------------------------------


def _count_exchanges(rank: int, world: int, path: str, hosts: list[str], way: str, alone: list[int]) -> tuple:
    """How many exchanges the first group takes, and one of the same ranks after it; who shares a host; a sum.

    Ranks in ``alone`` cannot open the others' memory, nor the others theirs."""
    os.environ.update(SYMCOMM_HOST_ID=hosts[rank], SYMCOMM_SHARE=way, SYMCOMM_ENGINE="gloo")
    counts, groups, open_named = [], [], share._open_named

    def open_some(infos: Any, ranks: Any) -> Any:
        return open_named(infos, [r for r in ranks if rank not in alone and r not in alone])

    share._open_named = open_some
    for turn in range(2):

        def make(rank: int, world: int, exchange: Any) -> Any:
            def counting(item: bytes) -> list[bytes]:
                counts[-1] += 1
                return exchange(item)

            counts.append(0)
            return make_group(rank, world, counting, timeout=60)

        groups.append(join_ranks(PrefixStore(str(turn), FileStore(path)), rank, world, 60.0, make, tidy=False))
    group = groups[0]
    x = torch.ones(3)
    group.all_reduce(x)
    together = group.layout.hosts if group.spans_hosts else [list(range(world))]
    group.barrier()
    return counts, together, x[0].item()


SAME, PAIR = ["", "", ""], ["a", "b", "a"]


@pytest.mark.parametrize(
    ("hosts", "way", "alone", "counts", "together"),
    [
        (SAME, "fd", [], [1, 1], [[0, 1, 2]]),
        (SAME, "named", [], [2, 1], [[0, 1, 2]]),  # the second: who could open whose file
        (PAIR, "fd", [], [3, 3], [[0, 2], [1]]),
        (PAIR, "named", [], [4, 3], [[0, 2], [1]]),
        (SAME, "named", [1], [4, 1], [[0, 2], [1]]),  # the second: by descriptor, since the names are gone
    ],
    ids=["one host", "by name", "two hosts", "two hosts by name", "memory that only some can open"],
)
def test_a_meeting_takes_few_exchanges(tmp_path, hosts, way, alone, counts, together):
    for told in run_ranks(_count_exchanges, 3, str(tmp_path / "store"), hosts, way, alone):
        assert told == (counts, together, 3.0)
