"""Things that people do to a group across hosts and should not, or that come at the worst moment. What one host answers
is the reference; each of the other tests once hung, leaked, lost something or was silent."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import pickle
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

import symcomm
from symcomm.group.p2p import Message
from symcomm.hierarchical.control_channel import ControlChannel
from symcomm.membership.newcomers import NewcomerProcess, join_request
from symcomm.types import RedOpType


def run(fn: Any, hosts: list[int], *args: Any, timeout: float = 10) -> list[Any]:
    return symcomm.spawn(fn, sum(hosts), args, mode="threads", hosts=hosts, deadline=60, timeout=timeout)


def attempt(call: Any) -> tuple[str, Any]:
    try:
        return "returned", call()
    except BaseException as error:
        return type(error).__name__, str(error)


# --- the same answers as on one host ----------------------------------------------------------------------------------


def _refusals(g: Any) -> dict[str, Any]:
    n, me, ones = g.size, g.rank, torch.ones
    next_, size = (me + 1) % n, {"timeout": 0.05}
    calls: dict[str, Any] = {
        "op": lambda: g.all_reduce(ones(3), "nope"),
        "BAND of floats": lambda: g.all_reduce(ones(3), RedOpType.BAND),
        "MAX of complex": lambda: g.all_reduce(ones(3, dtype=torch.complex64), "max"),
        "PREMUL_SUM": lambda: g.all_reduce(ones(3), RedOpType.PREMUL_SUM),
        "sparse": lambda: g.all_reduce(ones(3).to_sparse()),
        "meta": lambda: g.all_reduce(ones(3, device="meta")),
        "expanded": lambda: g.all_reduce(ones(1).expand(3)),
        "objects": lambda: g.all_reduce(np.array([None, {}])),
        "text": lambda: g.all_reduce("hello"),
        "root": lambda: g.broadcast(ones(3), n),
        "root of reduce": lambda: g.reduce(ones(3), -1),
        "root that is none": lambda: g.scatter(ones(3), None, "0"),
        "too few outputs": lambda: g.all_gather([ones(3)], ones(3)),
        "dtypes": lambda: g.all_gather([ones(3)] * n, ones(3).int()),
        "sizes": lambda: g.all_gather_single(ones(3 * n + 1), ones(3)),
        "sizes of pieces": lambda: g.reduce_scatter(ones(3), [ones(2)] * n),
        "list elsewhere": lambda: g.gather([ones(3)] * n, ones(3), 0) if me else None,
        "no list": lambda: g.scatter(ones(3), None, 0) if me == 0 else None,
        "rows": lambda: g.all_to_all_single(ones(n + 1), ones(n + 1)),
        "splits": lambda: g.all_to_all_single(ones(4), ones(4), [1], [4]),
        "splits that differ": lambda: g.all_to_all([ones(2) for _ in range(n)], [ones(3) for _ in range(n)]),
        "timeout": lambda: g.all_reduce(ones(3), timeout=0),
        "timeout that is none": lambda: g.barrier(timeout=float("nan")),
        "for ever": lambda: g.barrier(timeout=float("inf")),
        "peer": lambda: g.send(ones(3), n),
        "peer to receive from": lambda: g.recv(ones(3), -2),
        "tag": lambda: g.isend(ones(3), next_, 1 << 64),
        "nobody sends": lambda: g.recv(ones(3), next_, **size),
        "nobody sends to anybody": lambda: g.recv(ones(3), **size),
        "ranks": lambda: g.new_group([0, 0]),
        "excluded": lambda: g.shrink(exclude=[me]),
        "no store": lambda: g.grow(),
        "pickle": lambda: pickle.dumps(g),
    }
    said = {name: attempt(call) for name, call in calls.items()}
    g.all_reduce(total := ones(1))
    return {**said, "in the end": total.item()}


def _without_bystanders(answer: Any) -> Any:
    """A late message also says which collective its other side may be waiting in by then."""
    if not isinstance(answer, tuple):
        return answer
    bystander = r": ranks? [^:]* waits? in .* which this rank has not called"
    return tuple(re.sub(bystander, "", part) if isinstance(part, str) else part for part in answer)


@pytest.mark.parametrize("hosts", [[1, 1], [2, 1], [1, 1, 1]])
def test_refusals_are_those_of_one_host(hosts: list[int]) -> None:
    expected = symcomm.spawn(_refusals, sum(hosts), mode="threads", deadline=60, timeout=10)
    for mine, theirs in zip(run(_refusals, hosts), expected, strict=True):
        mine, theirs = ({name: _without_bystanders(a) for name, a in said.items()} for said in (mine, theirs))
        assert mine == theirs
    assert {answer[0] for answer in list(expected[1].values())[:-1]} >= {"BadArgumentError", "DeadlineError"}


def _odd_values(g: Any) -> list[Any]:
    n, me = g.size, g.rank
    base = torch.arange(12.0).view(3, 4) + me
    makers = [
        lambda: base.clone().t(), lambda: base.clone()[:, ::2], lambda: base.clone()[1:][1],
        lambda: torch.tensor(3.0 + me),
        lambda: torch.empty(0, 3), lambda: base.numpy().copy()[::-1], lambda: np.array([1, 2 + me], dtype=">f4"),
        lambda: torch.tensor([1 + 2j * me, 3]).conj(), lambda: torch.tensor([True, me > 0]),
        lambda: torch.full((5,), 7 - me, dtype=torch.uint16), lambda: torch.full((5,), 0.5 + me).to(torch.float8_e5m2),
    ]  # fmt: skip
    results = []
    for make in makers:
        reduced, sent, got = make(), make(), make()
        outs = [make() for _ in range(n)]
        works = [g.isend(sent, (me + 1) % n, 5), g.irecv(got, (me - 1) % n, 5)]
        g.all_reduce(reduced)
        g.all_gather(outs, make())
        g.all_to_all(swapped := [make() for _ in range(n)], [make() for _ in range(n)])
        for work in works:
            work.wait()
        results += [reduced, got, *outs, *swapped]
    x = torch.arange(3.0 * n) + me
    g.all_to_all_single(x, x)
    results.append(x)
    return [(r.float() if r.dtype == torch.float8_e5m2 else r).tolist() for r in results]


@pytest.mark.parametrize("hosts", [[2, 1], [3, 2]])
def test_odd_tensors_give_what_one_host_gives(hosts: list[int]) -> None:
    expected = symcomm.spawn(_odd_values, sum(hosts), mode="threads", deadline=60)
    assert run(_odd_values, hosts) == expected


def _mismatches(g: Any) -> list[str]:
    ones, n = torch.ones, g.size
    calls = [
        lambda s: s.all_reduce(ones(3)),
        lambda s: s.all_reduce(ones(4)),
        lambda s: s.all_reduce(ones(3).double()),
        lambda s: s.all_reduce(ones(3), "max"),
        lambda s: s.broadcast(ones(3), 0),
        lambda s: s.broadcast(ones(3), 1),
        lambda s: s.barrier(),
        lambda s: s.all_reduce(ones(300_000)),
        lambda s: s.all_to_all_single(ones(3 * n), ones(3 * n)),
        lambda s: s.all_reduce(ones(3), async_op=True).wait(),
        lambda s: s.all_gather([ones(1 + r) for r in range(n)], ones(1 + g.rank)),
        lambda s: s.all_gather([ones(n - r) for r in range(n)], ones(n - g.rank)),
    ]
    kinds = []
    for odd, (one, other) in itertools.product((0, n - 1), itertools.pairwise(calls)):
        team = g.split(0)
        kinds.append(attempt(functools.partial(other if g.rank == odd else one, team))[0])
        team.destroy()
    return kinds


@pytest.mark.parametrize("hosts", [[2, 1], [1, 1]])
def test_different_calls_are_told_on_every_rank(hosts: list[int]) -> None:
    for kinds in run(_mismatches, hosts):
        assert set(kinds) == {"CollectiveMismatchError"}


# --- groups that come and go ------------------------------------------------------------------------------------------


def _open() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_groups_that_were_left_or_forgotten_leave_nothing_behind() -> None:
    done = threading.Barrier(2)

    def rank(g: Any) -> tuple[Any, Any, int]:
        def use(k: int) -> None:
            team = g.split(0)
            team.all_reduce(torch.ones(5), async_op=True).wait()
            team.isend(torch.ones(5), 1 - g.rank)
            team.recv(torch.ones(5), 1 - g.rank)
            if k % 2:
                team.destroy()

        for k in range(2):
            use(k)
        gc.collect()
        done.wait(30)
        before = _open()
        done.wait(30)
        for k in range(30):
            use(k)
        gc.collect()
        done.wait(30)
        end = time.monotonic() + 5
        while time.monotonic() < end:
            after, early = _open(), sum(map(len, g.control._early.values()))
            if after[0] <= before[0] and after[1] <= before[1] and not early:
                break
            time.sleep(0.05)
        done.wait(30)
        return before, after, early

    for before, after, early in run(rank, [1, 1]):  # a group has about ten descriptors and three threads
        assert after[0] < before[0] + 20 and after[1] < before[1] + 6 and early < 6


def test_a_forgotten_group_leaves_at_once() -> None:
    def rank(g: Any) -> Any:
        team = g.split(0)
        g.barrier()  # both have it
        if g.rank == 1:
            return attempt(team.barrier)
        del team
        time.sleep(0.5)
        return None

    assert run(rank, [1, 1])[1][0] == "RankFailedError"


def test_groups_that_failed_or_were_left_make_no_groups() -> None:
    def rank(g: Any) -> list[Any]:
        team = g.split(0)
        first = attempt(lambda: team.all_reduce(torch.ones(3 + g.rank)))
        second = attempt(lambda: team.new_group([0, 1]))
        g.barrier()
        team = g.split(0)
        team.destroy()
        return [first[0], second[0], attempt(lambda: team.new_group([0, 1]))[0]]

    assert run(rank, [1, 1]) == [["CollectiveMismatchError", "GroupUnusableError", "GroupUnusableError"]] * 2


def test_an_abort_ends_the_making_of_a_group() -> None:
    def rank(g: Any) -> Any:
        if g.rank == 0:
            return attempt(lambda: g.new_group([0, 1]))
        time.sleep(0.2)
        g.abort()
        time.sleep(0.5)
        return None

    assert run(rank, [1, 1])[0] == (
        "GroupUnusableError",
        "new_group #1 on group 'world' was aborted by rank 1; destroy the group, or call group.shrink() to go on.",
    )


@pytest.mark.parametrize("wait", ["all_reduce", "recv", "anybody"])
def test_leaving_ends_what_other_threads_wait_for(wait: str) -> None:
    def rank(g: Any) -> Any:
        if g.rank:
            time.sleep(0.6)
            return None
        threading.Timer(0.1, g.destroy).start()
        calls = {"all_reduce": lambda: g.all_reduce(torch.ones(3)), "recv": lambda: g.recv(torch.ones(3), 1)}
        return attempt(calls.get(wait, lambda: g.recv(torch.ones(3))))

    kind, said = run(rank, [1, 1])[0]
    assert kind == "GroupUnusableError" and "was destroyed" in said


def test_an_office_that_nobody_holds_is_not_joined() -> None:
    class Someone:
        def on_message(self, *_: Any) -> None: ...

        def on_lost(self, *_: Any) -> None: ...

    someone, channel = Someone(), ControlChannel("x")
    assert channel.join("a", someone) and channel.join("b", someone)
    channel.leave("a")
    assert not channel.closed
    channel.leave("b")
    assert channel.closed and not channel.join("c", someone)


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [10, 10_000])
def test_a_message_outlives_its_sender(count: int) -> None:
    def rank(g: Any) -> Any:
        if g.rank == 0:
            return g.send(torch.ones(count), 1)
        time.sleep(0.3)
        x = torch.zeros(count)
        return g.recv(x, 0), x.sum().item()

    assert run(rank, [1, 1])[1] == (0, count)


def test_nobody_is_left_to_receive_from() -> None:
    def rank(g: Any) -> Any:
        if g.rank:
            return g.destroy()
        return attempt(lambda: g.recv(torch.ones(3), timeout=8))

    kind, said = run(rank, [1, 1])[0]
    assert kind == "RankFailedError" and "rank 1" in said and "left the group" in said


def test_messages_of_many_threads_and_a_batch_to_everybody() -> None:
    def rank(g: Any) -> list[float]:
        wrong: list[Any] = []

        def talk(tag: int) -> None:
            for k in range(9):
                count = (3, 5000, 100_000)[k % 3]
                x = torch.empty(count)
                works = [g.isend(torch.full((count,), float(tag + k)), 1 - g.rank, tag), g.irecv(x, 1 - g.rank, tag)]
                for work in works:
                    work.wait()
                if not (x == tag + k).all():
                    wrong.append((tag, k))

        threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        got = [torch.empty(70_000) for _ in range(2)]
        batch = [Message.send(torch.full((70_000,), float(g.rank)), peer, 9) for peer in range(2)]
        for work in g.batch(batch + [Message.receive(got[peer], peer, 9) for peer in range(2)]):
            work.wait()
        return [*wrong, *(x[-1].item() for x in got)]

    assert run(rank, [1, 1]) == [[0.0, 1.0]] * 2


# --- processes --------------------------------------------------------------------------------------------------------


def test_requests_of_other_hosts_are_not_looked_up_here() -> None:
    """The first process namespace has the same number on every host."""
    here = join_request(None)
    nobody = {**here, "pid": 2**22 + 1}
    assert not NewcomerProcess(here).is_dead() and NewcomerProcess(nobody).is_dead()
    assert not NewcomerProcess({**nobody, "names": "another-boot " + here["names"].split()[1]}).is_dead()
