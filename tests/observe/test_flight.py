"""The flight recorder's ring: what the core notes of each operation, and how others read it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import symcomm
from symcomm import errors
from symcomm._core import native
from symcomm.collectives.plan import ALGORITHMS, Collective
from symcomm.memory.flight import DEFAULT_CAPACITY, read_flight
from symcomm.observe.recorder.records import operations_of
from symcomm.types import DType
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("forked_ranks")


def own(group):
    return [e for e in read_flight(group.arena.flight.address) if e.group.get("name") == group.name]


def a_few_calls(group):
    t = torch.ones(1000)
    for _ in range(3):
        group.all_reduce(t)
    group.broadcast(t, 1)
    group.all_reduce(t, async_op=True).wait()
    symmetric = torch.frombuffer(group.arena.buffer(1 << 20), dtype=torch.float32)
    group.all_reduce(symmetric)
    if group.rank == 0:
        group.send(t, 1)
    else:
        group.recv(t, 0)
    return own(group)


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_each_operation_is_noted(mode):
    for rank, entries in enumerate(symcomm.spawn(a_few_calls, 2, mode=mode, deadline=60)):
        collectives, messages = [e for e in entries if e.path < 2], [e for e in entries if e.path == 2]
        assert [Collective(e.signature & 0xFF).label for e in collectives] == [
            "all_reduce", "all_reduce", "all_reduce", "broadcast", "all_reduce", "all_reduce",
        ]  # fmt: skip
        assert [e.count for e in collectives] == [1000] * 5 + [1 << 18]
        assert [DType(e.signature >> 8 & 0xFF).label for e in collectives] == ["float32"] * 6
        assert [e.seq for e in collectives] == list(range(collectives[0].seq, collectives[0].seq + 6))
        assert [e.path for e in collectives] == [0] * 5 + [1]
        assert ALGORITHMS[collectives[0].plan] == "one-shot" and ALGORITHMS[collectives[3].plan] == "streamed"
        assert all(e.status == 0 and e.finished >= e.created > 0 for e in entries)
        assert all(e.group["rank"] == rank and e.group["ranks"] == [0, 1] for e in entries)
        assert all(os.path.basename(e.site).startswith("test_flight.py:") for e in collectives), collectives
        (message,) = messages
        assert (message.count, message.signature & 1, message.signature >> 24) == (4000, rank == 0, 1 - rank)


def wait_for_a_late_one(group):
    t = torch.ones(4)
    group.all_reduce(t)
    group.barrier()
    if group.rank == 1:
        time.sleep(0.2)
    group.all_reduce(t)  # the second line that makes such a call
    return own(group)[-1]


def test_a_wait_is_noted_with_its_own_line():
    early, late = symcomm.spawn(wait_for_a_late_one, 2, mode="processes", deadline=60)
    assert early.waited_us > 100_000 and late.waited_us < 100_000
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "the second line" in text)
    assert early.exact_site and early.site.endswith(f"test_flight.py:{line}")


def test_times_are_those_of_the_monotonic_clock():
    before = time.monotonic_ns()
    group = symcomm.spawn(lambda g: (g.barrier(), own(g)[-1])[1], 1, mode="threads", deadline=60)[0]
    created, finished = native.ticks_to_ns(group.created), native.ticks_to_ns(group.finished)
    assert before - 1_000_000 < created <= finished < time.monotonic_ns() + 1_000_000


def many(group):
    t = torch.ones(1)
    for _ in range(DEFAULT_CAPACITY + 100):
        group.all_reduce(t)
    return own(group)


def test_the_oldest_make_room():
    entries = symcomm.spawn(many, 1, mode="threads", deadline=60)[0]
    assert len(entries) == DEFAULT_CAPACITY
    assert [e.number for e in entries] == list(range(entries[0].number, entries[0].number + DEFAULT_CAPACITY))


def die_in_a_call(rank, world, folder):
    store = symcomm.FileStore(folder + "/store", world)
    group = symcomm.init(store=store, rank=rank, world_size=world, timeout=20)
    t = torch.ones(10)
    group.all_reduce(t)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(errors.RankFailedError):
        group.all_reduce(t)
    return [(e.seq, e.finished > 0) for e in read_flight(group.peers[1].flight) if e.group["name"] == group.name]


def test_the_records_of_a_dead_rank_can_be_read(tmp_path):
    survivor, dead = run_ranks(die_in_a_call, 2, str(tmp_path), outcomes=True)
    assert dead.kind == "died"
    assert survivor.kind == "returned", survivor
    assert survivor.value[-1][1]  # its last operation had ended


@pytest.mark.parametrize(
    "name, value, kept",
    [("SYMCOMM_FLIGHT_ENTRIES", "0", 0), ("TORCH_FR_BUFFER_SIZE", "5", 8), ("TORCH_NCCL_TRACE_BUFFER_SIZE", "1", 1)],
)
def test_size_from_the_environment(name, value, kept):
    code = (
        "import symcomm; from symcomm.memory.flight import read_flight\n"
        "def f(g):\n for _ in range(20): g.barrier()\n return len(read_flight(g.arena.flight.address))\n"
        "print(symcomm.spawn(f, 1, mode='threads', deadline=30)[0])"
    )
    env = {**os.environ, name: value}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert out.stdout.strip() == str(kept), out.stderr


def test_a_wrong_size_is_refused():
    env = {**os.environ, "TORCH_FR_BUFFER_SIZE": "many"}
    code = "import symcomm.memory.flight"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert "TORCH_FR_BUFFER_SIZE must be a number of operations" in out.stderr


def work_for_records(group):
    t = torch.ones(6, dtype=torch.float64)
    group.all_reduce(t, symcomm.ReduceOp.MAX)
    group.reduce_scatter_single(torch.empty(3, dtype=torch.float64), t)
    group.broadcast(t, 1)
    if group.rank == 0:
        group.recv(t)
    else:
        group.send(t, 0)
    group.barrier()
    return [[op for op in ops if op.group == group.name] for ops in operations_of(group)]


def test_records_in_words():
    for ranks in symcomm.spawn(work_for_records, 2, mode="processes", deadline=60):
        for rank, ops in enumerate(ranks):
            assert [(o.call, o.op, o.root) for o in ops[:3]] == [
                ("all_reduce", "MAX", None), ("reduce_scatter", "SUM", None), ("broadcast", None, 1),
            ]  # fmt: skip
            assert all((o.count, o.nbytes) == (6, 48) for o in ops[:4])
            message = ("send", None, 0, 6, 48) if rank else ("recv", None, -1, 6, 48)
            assert message in [(o.call, o.op, o.root, o.count, o.nbytes) for o in ops if o.is_message]
            assert all(o.state == "completed" and o.finished_ns >= o.created_ns for o in ops[:4])
            assert all(o.rank == rank and o.dtype == "float64" and o.ranks == (0, 1) for o in ops[:4])
