"""Who runs an asynchronous operation: whoever waits for it, or else the group's thread."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import symcomm
from symcomm import testing
from symcomm.group.process_group import ProcessGroup
from tests.support.faults import attempt, run_group
from tests.support.ranks import returned

pytestmark = [pytest.mark.torch_versions, pytest.mark.timeout(120, method="thread")]

BY_CALLER = {"short": 1, "long": 0, "inline": 1, "queued": 0}
BY_THREAD = {"short": 1, "long": 0, "inline": 0, "queued": 1}


def threads(fn: Callable, n: int = 2) -> list:
    return symcomm.spawn(fn, n, mode="threads", timeout=20, deadline=60)


def counted(g: ProcessGroup, call: Callable[[], Any]) -> dict[str, int]:
    before = g.call_stats()["collectives"]
    call()
    return {name: n - before[name] for name, n in g.call_stats()["collectives"].items()}


def times(n: int, one: dict[str, int]) -> dict[str, int]:
    return {name: n * value for name, value in one.items()}


def asynchronous_calls(g: ProcessGroup) -> list[Callable[[], Any]]:
    n, root = g.size, 0
    at_root = g.rank == root
    one, row = torch.ones(5), torch.ones(5 * n)
    ones, rows = [torch.ones(5) for _ in range(n)], torch.ones(5 * n)
    return [
        lambda: g.all_reduce(one, "max", async_op=True),
        lambda: g.reduce(one, root, "max", async_op=True),
        lambda: g.broadcast(one, root, async_op=True),
        lambda: g.reduce_scatter_single(one, row, "max", async_op=True),
        lambda: g.reduce_scatter(one, ones, "max", async_op=True),
        lambda: g.all_gather_single(row, one, async_op=True),
        lambda: g.all_gather(ones, one, async_op=True),
        lambda: g.gather(ones if at_root else None, one, root, async_op=True),
        lambda: g.gather_single(row if at_root else None, one, root, async_op=True),
        lambda: g.scatter(one, ones if at_root else None, root, async_op=True),
        lambda: g.scatter_single(one, row if at_root else None, root, async_op=True),
        lambda: g.all_to_all_single(row, rows, async_op=True),
        lambda: g.barrier(async_op=True),
    ]


def _every_call(g: ProcessGroup) -> None:
    for call in asynchronous_calls(g):
        call().wait()
        for _ in range(10):  # it is known now, and waited for at once
            call().wait()
        # The group's thread takes an operation whose caller loses its core before it waits.
        assert BY_CALLER in [counted(g, lambda call=call: call().wait()) for _ in range(5)]


def test_who_waits_at_once_runs_the_operation_without_python():
    threads(_every_call)


@testing.ranks([1, 2, 4])
def test_results_of_calls_that_the_core_queues(g: ProcessGroup):
    mine, got = torch.empty(6), torch.empty(6 * g.size)
    outputs = [torch.empty(6) for _ in range(g.size)]
    for step in range(50):
        mine.fill_(step * g.size + g.rank)
        work = g.all_gather_single(got, mine, async_op=True)
        last = g.all_gather(outputs, mine, async_op=True)
        assert last.result() == outputs and work.result() == [got]
        expected = [float(step * g.size + r) for r in range(g.size) for _ in range(6)]
        assert got.tolist() == expected == torch.cat(outputs).tolist()
        total = torch.full((7,), float(g.rank + step))
        assert g.all_reduce(total, async_op=True).result()[0] is total
        assert total.tolist() == [sum(r + step for r in range(g.size))] * 7


@testing.ranks(3)
def test_waiting_for_the_last_runs_all_before_it(g: ProcessGroup):
    tensors = [torch.full((300,), float(i)) for i in range(40)]
    for t in tensors:
        g.all_reduce(t, async_op=True).wait()
    for i, t in enumerate(tensors):
        t.fill_(i)

    def all_at_once() -> None:
        works = [g.all_reduce(t, async_op=True) for t in tensors]
        works[-1].wait()  # the others come before it
        assert all(t[0].item() == i * g.size for i, t in enumerate(tensors))
        assert all(work.is_completed() and work.is_success() for work in works)

    assert counted(g, all_at_once)["short"] == 40


@testing.ranks(3)
def test_the_groups_thread_runs_what_nobody_waits_for(g: ProcessGroup):
    t = torch.ones(100)
    for _ in range(12):
        g.all_reduce(t, "max", async_op=True).wait()
    t.fill_(g.rank)
    g.all_reduce(t, "max", async_op=True)  # nobody waits, nor keeps the work
    deadline = time.monotonic() + 20
    while t[0].item() != g.size - 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert t.tolist() == [g.size - 1.0] * 100


def _late(g: ProcessGroup) -> None:
    t = torch.ones(100)
    for _ in range(12):
        g.all_reduce(t, "max", async_op=True).wait()

    def computing() -> None:
        work = g.all_reduce(t, "max", async_op=True)
        time.sleep(0.05)
        work.wait()

    computing()  # until here calls of this kind were waited for at once
    assert counted(g, computing) == BY_THREAD


def test_the_groups_thread_runs_what_is_waited_for_late():
    threads(_late)


@testing.ranks(3)
def test_results_that_are_copied_back(g: ProcessGroup):
    base = torch.zeros(50, 2)
    for step in range(20):
        base.fill_(step)
        work = g.all_reduce(base[:, 0], async_op=True)
        after = torch.full((3,), 1.0)
        g.all_reduce(after, async_op=True).wait()  # behind one whose result has to be copied
        assert after.tolist() == [g.size] * 3
        assert work.wait() and base.tolist() == [[step * g.size, step]] * 50


@testing.ranks(3)
def test_two_threads_wait_for_two_works(g: ProcessGroup):
    for step in range(100):
        a, b = torch.full((64,), float(step)), torch.full((65,), float(step + 1))
        first, second = g.all_reduce(a, async_op=True), g.all_reduce(b, async_op=True)
        other = threading.Thread(target=second.wait)
        other.start()
        first.wait()
        other.join()
        assert a[0].item() == step * g.size and b[0].item() == (step + 1) * g.size
    g.barrier()


def _behind(g: ProcessGroup) -> None:
    t, u = torch.ones(10), torch.ones(10)
    for _ in range(12):
        g.all_reduce(t, "max", async_op=True).wait()
    t.fill_(g.rank + 1)
    work = g.all_reduce(t, async_op=True)
    g.all_reduce(u)  # its caller runs both
    assert t[0].item() == sum(range(1, g.size + 1)) and u[0].item() == g.size
    assert work.wait()


def test_a_blocking_call_runs_what_is_queued_before_it():
    threads(_behind)


def naps_of_the_thread() -> int:
    """How often the group's thread has gone to sleep of its own accord."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "symcomm-async":
            lines = (task / "status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("voluntary")).split()[1])
    raise AssertionError("the group has no thread")


def _stream(g: ProcessGroup) -> list[int]:
    t = torch.ones(20_000)
    for _ in range(20):
        g.all_reduce(t, "max", async_op=True).wait()
    g.barrier()
    before, runs = naps_of_the_thread(), g.call_stats()["collectives"]["inline"]
    for _ in range(2000):
        g.all_reduce(t, "max", async_op=True).wait()
    return [naps_of_the_thread() - before, g.call_stats()["collectives"]["inline"] - runs]


def test_calls_that_are_waited_for_at_once_leave_the_thread_asleep():
    """It looks each 2 ms; if each call woke it, it would sleep once a call."""
    for naps, by_caller in returned(run_group(_stream, 2, deadline=60)):
        assert by_caller > 1000 and naps < by_caller / 2, (naps, by_caller)


# --- within other calls -----------------------------------------------------------------------------------------------


def _handled(g: ProcessGroup) -> list[Any]:
    t, u, refused = torch.full((10,), float(g.rank + 1)), torch.ones(3), []
    for _ in range(12):
        g.all_reduce(t.clone(), async_op=True).wait()
    if g.rank == 1:
        time.sleep(1.5)
        g.all_reduce(t)
        g.all_reduce(u)
        return [t[0].item(), u[0].item(), "CallerError"]

    def handler(*_: object) -> None:
        inner.append(g.all_reduce(u, async_op=True))
        refused.append(attempt(inner[0].wait))

    inner: list[Any] = []
    signal.signal(signal.SIGUSR1, handler)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    g.all_reduce(t, async_op=True).wait()
    inner[0].wait()
    return [t[0].item(), u[0].item(), *refused]


def test_a_signal_handler_that_waits_behind_its_own_threads_operation():
    """It cannot end before the handler returns: that is an error, and no standstill. The work itself goes on."""
    assert returned(run_group(_handled, 2, timeout=20)) == [[3.0, 2.0, "CallerError"]] * 2


def _ended(g: ProcessGroup, end: str) -> list[Any]:
    t = torch.ones(20_000)
    for _ in range(12):
        g.all_reduce(t, "max", async_op=True).wait()
    if g.rank == 1:
        time.sleep(1.5)
        return [attempt(lambda: g.all_reduce(t)), 1.0]
    signal.signal(signal.SIGUSR1, lambda *_: getattr(g, end)())
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    works = [g.all_reduce(t, async_op=True) for _ in range(2)]
    raised = [attempt(work.wait) for work in works]
    assert all(work.is_completed() for work in works)
    return [raised[0], t[0].item()]


@pytest.mark.parametrize(("end", "raised"), [("abort", "GroupUnusableError"), ("destroy", "CallerError")])
def test_a_signal_handler_that_ends_the_group_in_which_its_thread_waits(end: str, raised: str):
    """destroy() would first wait for that very operation."""
    assert returned(run_group(_ended, 2, end, timeout=20)) == [[raised, 1.0], ["GroupUnusableError", 1.0]]
