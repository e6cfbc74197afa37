"""Operations that run while the caller goes on: order, futures, errors, and ends that nobody waited for."""

from __future__ import annotations

import concurrent.futures
import gc
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import symcomm
from symcomm import errors, testing
from symcomm.group.process_group import ProcessGroup
from tests.support.faults import run_group

ROOT = Path(__file__).parents[2]


def threads(fn: Callable, n: int, *args: object, timeout: float = 20) -> list:
    return symcomm.spawn(fn, n, args, mode="threads", timeout=timeout, deadline=60)


@testing.ranks([1, 2, 4])
def test_order_with_blocking_calls(g: ProcessGroup):
    """Asynchronous and blocking calls, mixed, take effect in the order they were made."""
    t = torch.ones(5000)
    for step in range(200):
        if step % 3:
            g.all_reduce(t, op="avg", async_op=True)
        else:
            g.all_reduce(t)
            t /= g.size
    g.barrier()
    assert t.unique().tolist() == [1.0]
    a, b = torch.full((100_000,), 1.0), torch.zeros(100_000)
    g.all_reduce(a, async_op=True)
    g.broadcast(a, 0)  # runs after it
    g.all_gather_single(torch.zeros(100_000 * g.size), b, async_op=True).wait()
    assert a.unique().tolist() == [float(g.size)]


@testing.ranks(3)
def test_many_in_flight_and_dropped(g: ProcessGroup):
    tensors = [torch.full((257,), float(i)) for i in range(2000)]
    works = [g.all_reduce(t, async_op=True) for t in tensors]
    assert all(w.wait() for w in reversed(works))
    assert all(w.is_completed() and w.is_success() and w.exception() is None for w in works)
    assert all(t[0].item() == i * g.size for i, t in enumerate(tensors))
    for i in range(500):  # nobody keeps the works, nor the tensors
        g.all_reduce(torch.full((1000,), float(i)), async_op=True)
    g.barrier()
    assert len(g.pending) < 600


@testing.ranks(3)
def test_results_of_strided_tensors(g: ProcessGroup):
    base = torch.ones(1000, 2)
    work = g.all_reduce(base[:, 0], async_op=True)
    assert work.wait()
    assert base[:, 0].unique().tolist() == [g.size] and base[:, 1].unique().tolist() == [1.0]
    g.all_reduce(base[:, 1], async_op=True)  # dropped, and still copied back
    g.barrier()
    deadline = time.monotonic() + 10
    while base[0, 1].item() != g.size and time.monotonic() < deadline:
        time.sleep(0.001)
    assert base[:, 1].unique().tolist() == [g.size]


@testing.ranks([1, 2, 3])
def test_results_of_strided_tensors_behind_operations_that_write_them(g: ProcessGroup):
    """A copy of what an operation that still stands in the queue writes is made once that has run."""
    x = torch.empty(64, 64)
    for known in range(4):
        x.fill_(1.0)
        g.barrier()
        works = [g.all_reduce(x, async_op=True), g.all_reduce(x.t()[:, :32], async_op=True)]
        for work in works if known % 2 else reversed(works):
            work.wait()
        assert x[:32].unique().tolist() == [float(g.size**2)]
        assert x[32:].unique().tolist() == [float(g.size)]
    rows = torch.zeros(g.size, 512)
    for _ in range(4):
        rows.zero_()
        gathered = g.all_gather(list(rows), torch.full((512,), 1.0 + g.rank), async_op=True)
        other = g.broadcast(rows.t(), 0, async_op=True)
        assert other.wait() and gathered.wait()
        assert rows.sum().item() == 512 * sum(range(1, g.size + 1))


@testing.ranks(2)
def test_wait_with_a_timeout_that_is_enough_and_one_that_is_not(g: ProcessGroup):
    t = torch.ones(10)
    if g.rank == 0:
        work = g.all_reduce(t, async_op=True)
        assert not work.is_completed() and work.exception() is None
        g.send(t, 1)
        assert work.wait(20.0) and work.wait(timedelta(seconds=20)) and work.result()[0] is t
    else:
        g.recv(torch.empty(10), 0)
        g.all_reduce(t)
    assert t.tolist() == [2.0] * 10
    words = r"all_reduce #2 on group 'world' timed out on rank 0 after \d+ ms: did not come: 1; .* group.shrink\(\)"
    if g.rank == 0:
        for _ in range(2):  # it stays as it is
            with pytest.raises(errors.DeadlineError, match=words):
                work = g.all_reduce(t, async_op=True) if work.is_success() else work
                work.wait(timedelta(milliseconds=50))
    else:
        time.sleep(0.3)
        with pytest.raises(errors.DeadlineError, match=r"rank 0's deadline"):
            g.all_reduce(t)


@testing.ranks(2)
def test_futures_and_callbacks(g: ProcessGroup):
    t = torch.full((1000,), 2.0)
    future = g.all_reduce(t, async_op=True).get_future()
    assert isinstance(future, torch.futures.Future)
    doubled = future.then(lambda f: f.value()[0] * 2)
    assert doubled.wait()[0].item() == 4.0 * g.size
    called: list[str] = []
    done = threading.Event()
    work = g.all_reduce(t, async_op=True)
    work.add_done_callback(lambda: called.append("first"))
    work.add_done_callback(lambda: (called.append("second"), done.set()))
    assert done.wait(10) and called == ["first", "second"]
    work.add_done_callback(lambda: called.append("third"))  # at once
    assert called[-1] == "third"
    assert work.get_future().wait()[0] is t


def test_futures_without_torch():
    code = """
        import sys, array, symcomm
        from symcomm.group.buffers import Buffer
        from symcomm.types import DType
        class Raw:
            def __init__(self, a): self.a = a; self.buffer = Buffer(a.buffer_info()[0], len(a), DType.FLOAT64, a)
        def rank(g):
            a = array.array("d", [1.0, 2.0])
            f = g.all_reduce(Raw(a), async_op=True).get_future()
            f.result(10)
            return type(f).__module__, a.tolist()
        got = symcomm.spawn(rank, 2, mode="threads", deadline=20)
        assert got == [("concurrent.futures._base", [2.0, 4.0])] * 2, got
        assert "torch" not in sys.modules
    """
    run_script(code)
    assert concurrent.futures  # the kind of future meant above


def _errors(g: ProcessGroup) -> str:
    if g.rank == 1:
        time.sleep(0.05)
        g.barrier()
        return ""
    work = g.all_reduce(torch.ones(3), async_op=True)
    late = g.all_reduce(torch.ones(3), async_op=True)
    future = work.get_future()
    with pytest.raises(errors.CollectiveMismatchError) as first:
        work.wait()
    assert isinstance(work.exception(), errors.CollectiveMismatchError) and not work.is_success()
    with pytest.raises(errors.GroupUnusableError, match="cannot be used any more: all_reduce #1"):
        late.wait()
    with pytest.raises(Exception, match="the ranks did not make the same call"):
        future.wait()
    return str(first.value)


def test_errors_come_out_of_wait_and_the_future():
    outcomes = run_group(_errors, 2)
    assert outcomes[0].kind == "returned", outcomes[0]
    assert "rank 0 called all_reduce(float32 x 3, SUM) at " in outcomes[0].value
    assert "rank 1 called barrier() at " in outcomes[0].value
    assert isinstance(outcomes[1].error, errors.CollectiveMismatchError)


@testing.ranks(2)
def test_several_groups_from_several_threads(g: ProcessGroup):
    groups = [g.split(0, name=f"g{i}") for i in range(4)]
    problems: list[BaseException] = []

    def use(group: ProcessGroup, value: float) -> None:
        try:
            for _ in range(50):
                works = [group.all_reduce(torch.full((2000,), value), async_op=True) for _ in range(4)]
                t = torch.full((3000,), value)
                group.all_reduce(t)
                assert t[0].item() == value * g.size
                assert all(w.result()[0][0].item() == value * g.size for w in works)
        except BaseException as error:
            problems.append(error)

    team = [threading.Thread(target=use, args=(group, float(i + 1))) for i, group in enumerate(groups)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    assert not problems, problems


@testing.ranks(2)
def test_threads_that_submit_at_once(g: ProcessGroup):
    """Three threads of a rank submit to one group and drop the works: none may be lost while it runs."""
    sums: list[torch.Tensor] = []

    def submit() -> None:
        for number in range(300):
            tensor = torch.ones(100)
            g.all_reduce(tensor, async_op=True)
            if number % 50 == 0:
                sums.append(tensor)

    team = [threading.Thread(target=submit) for _ in range(3)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    gc.collect()
    g.barrier()
    assert len(sums) == 18 and all(tensor.unique().tolist() == [float(g.size)] for tensor in sums)


def _destroy_with_pending(g: ProcessGroup) -> float:
    tensors = [torch.ones(50_000) for _ in range(20)]
    for t in tensors:
        g.all_reduce(t, async_op=True)
    g.destroy()  # lets them end
    g.destroy()
    with pytest.raises(errors.GroupUnusableError, match="group 'world' was destroyed"):
        g.all_reduce(tensors[0])
    with pytest.raises(errors.GroupUnusableError, match="group 'world' was destroyed"):
        g.barrier(async_op=True)
    with pytest.raises(errors.GroupUnusableError, match="group 'world' was destroyed"):
        g.recv(tensors[0], 0)
    return tensors[-1].sum().item()


@pytest.mark.parametrize("world", [1, 3])
def test_destroy_with_pending_works(world: int):
    assert threads(_destroy_with_pending, world) == [50_000.0 * world] * world


# --- the end of the interpreter ------------------------------------------------------------------------------


def run_script(code: str, seconds: float = 60) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=seconds, cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", f"code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


ENDS = {
    "pending works": "works = [g.all_reduce(torch.ones(9)[::2], async_op=True) for _ in range(5)]",
    "pending receive": "work = g.irecv(torch.ones(9), 1)",
    "a future": "future = g.all_reduce(torch.ones(9), async_op=True).get_future()",
    "pending send": "work = g.isend(torch.ones(900_000), 1)",
    "nothing": "g.all_reduce(torch.ones(9), timeout=60) if False else None",
}


@pytest.mark.parametrize("what", ENDS)
def test_the_interpreter_ends_with(what: str):
    """Rank 0 ends without a word; rank 1 waits for it and must be told, not left."""
    said = run_script(
        f"""
        import os, sys, tempfile, time, torch
        from symcomm import errors
        from tests.support.faults import join_group
        folder = tempfile.mkdtemp()
        child = os.fork()
        g = join_group(1 if child == 0 else 0, 2, folder, 120.0)
        if child:
            {ENDS[what]}
            time.sleep(0.2)
            sys.exit(0)  # its output stays open until rank 1 has ended too
        try:
            time.sleep(0.4)
            g.recv(torch.ones(1), 0, tag=5)
        except errors.PeerError as error:
            os.write(1, f"told of {{error.ranks}}".encode())
        os._exit(0)
        """
    )
    assert said == "told of [0]"


def test_a_group_that_nobody_refers_to_is_left():
    def rank(g: ProcessGroup) -> str:
        team = g.split(0)
        assert team is not None
        if g.rank == 0:
            del team
            gc.collect()
            g.barrier()
            return ""
        with pytest.raises(errors.RankFailedError) as caught:
            team.barrier()
        g.barrier()
        return str(caught.value)

    assert "rank 0" in threads(rank, 2)[1]
