"""Machines whose memory is divided: which node a rank is on, where its pages are, and what its group makes of it.

Nodes are made up, in a folder that looks like the kernel's, one for each core that is there.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import symcomm
from symcomm import errors
from symcomm._core import native
from symcomm.collectives.plan import ALGORITHMS
from symcomm.collectives.select import Limits
from symcomm.group import meeting
from symcomm.launcher.job import Job
from symcomm.launcher.launch import launch
from symcomm.launcher.output import Output
from symcomm.memory import numa
from symcomm.memory.arena import Arena
from symcomm.memory.flight import read_flight
from tests.support.plan_cases import tree
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.without_torch

COUNT = 100_003  # float32: more than node_bytes, several chunks, not a whole number of slices
PIECE = 25_000


def make_nodes(folder: Path, nodes: dict[int, str]) -> Path:
    for node, cores in nodes.items():
        (folder / f"node{node}").mkdir(parents=True)
        (folder / f"node{node}" / "cpulist").write_text(cores + "\n")
    (folder / "online").write_text("0-1\n")
    return folder


@pytest.fixture
def two_cores() -> list[int]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core only")
    return cores[:2]


def test_nodes_of_cores(tmp_path: Path):
    made = make_nodes(tmp_path / "a", {0: "0-2,8", 1: "3-4", 10: "5", 2: ""})
    assert numa.nodes_of_cores(str(made)) == {0: 0, 1: 0, 2: 0, 8: 0, 3: 1, 4: 1, 5: 10}
    assert numa.nodes_of_cores(str(tmp_path / "nothing")) == {}


def test_a_rank_is_on_a_node_if_it_is_bound_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_cores: list[int]
):
    one, other = two_cores
    monkeypatch.setattr(numa, "SYSFS", str(make_nodes(tmp_path / "two", {3: str(one), 4: str(other)})))
    before = os.sched_getaffinity(0)
    found = []
    try:
        for cores in ({one}, {other}, {one, other}):
            os.sched_setaffinity(0, cores)
            found.append(numa.current_node())
        monkeypatch.setattr(numa, "SYSFS", str(tmp_path / "nothing"))
        os.sched_setaffinity(0, {one})
        found.append(numa.current_node())
    finally:
        os.sched_setaffinity(0, before)
    assert found == [3, 4, numa.UNBOUND, numa.UNBOUND]


def test_ranks_are_bound_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cores = set(range(8))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(numa, "SYSFS", str(make_nodes(tmp_path / "two", {0: "0-2", 1: "3-7"})))
    low, high = {0, 1, 2}, {3, 4, 5, 6, 7}
    assert [numa.cores_for(rank, 4) for rank in range(4)] == [low, low, high, high]
    assert [numa.cores_for(rank, 3) for rank in range(3)] == [low, low, high]
    assert numa.cores_for(0, 1) == low
    cores -= {0, 1, 2}
    assert numa.cores_for(0, 4) == high
    monkeypatch.setattr(numa, "SYSFS", str(tmp_path / "nothing"))
    assert numa.cores_for(0, 4) == high


def test_the_launcher_binds_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_cores: list[int]):
    one, other = two_cores
    monkeypatch.setattr(numa, "SYSFS", str(make_nodes(tmp_path / "two", {0: str(one), 1: str(other)})))
    script = tmp_path / "script.py"
    script.write_text(
        f"import os; open(f'{tmp_path}/{{os.environ[\"RANK\"]}}', 'w').write(repr(os.sched_getaffinity(0)))"
    )
    for bound in (True, False):
        job = Job([sys.executable, str(script)], 3, bind_numa=bound)
        assert launch(job, Output(color=False, prefix=False, quiet=True)) == 0
        found = [(tmp_path / str(rank)).read_text() for rank in range(3)]
        assert found == ([repr({one}), repr({one}), repr({other})] if bound else [repr(os.sched_getaffinity(0))] * 3)


def policy_of(address: int) -> str:
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return next(line.split()[1] for line in lines if int(line.split()[0], 16) == address)


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this kernel knows no nodes")
def test_an_arena_takes_its_pages_from_its_node():
    """The kernel is asked what it will do; on a machine of one node there is but one to ask for."""
    arena = Arena()
    arena.node = numa.UNBOUND
    arena.move_to(0)
    assert arena.node == 0
    assert policy_of(arena.base) == "prefer:0"
    arena.move_to(numa.UNBOUND)
    arena.move_to(1022)  # which is not there
    assert arena.node == 0
    assert policy_of(arena.base) == "prefer:0"
    assert not native.prefer_node(arena.base, arena.nbytes, 100_000)


def placed(rank: int, world: int, store: str, folder: str, cores: list[int]) -> symcomm.ProcessGroup:
    numa.SYSFS = folder
    meeting.Limits = functools.partial(Limits, node_ranks=2, node_scatter_bytes=4 * PIECE)  # type: ignore[misc,assignment]
    os.sched_setaffinity(0, {cores[rank]} if rank < len(cores) else set(cores))
    return symcomm.init(store=symcomm.FileStore(store, world), rank=rank, world_size=world, timeout=30)


def values(rank: int) -> np.ndarray:
    """Of very different sizes, so that another order of additions gives other bits."""
    random = np.random.default_rng(rank)
    return (random.standard_normal(COUNT) * 10.0 ** random.integers(-4, 4, COUNT)).astype(np.float32)


def in_order(world: int) -> np.ndarray:
    return tree(np.add, [values(rank) for rank in range(world)])


def called(rank: int, world: int, store: str, folder: str, cores: list[int]) -> dict[str, Any]:
    """Each collective three times, since staging halves are used again, then with symmetric tensors."""
    group = placed(rank, world, store, folder, cores)

    def tensors(n: int) -> list[np.ndarray]:
        symmetric = np.frombuffer(group.arena.buffer(4 * n), np.float32)
        return [*(np.zeros(n, np.float32) for _ in range(3)), symmetric]

    right: dict[str, list[bool]] = {name: [] for name in ALL_RIGHT}
    pieces = slice(rank * PIECE, (rank + 1) * PIECE)
    for mine, gathered in zip(tensors(COUNT), tensors(COUNT * world), strict=True):
        mine[:] = values(rank)
        group.all_gather_single(gathered, mine)
        right["all_gather"].append(np.array_equal(gathered, np.concatenate([values(r) for r in range(world)])))
        group.all_reduce(mine)
        right["all_reduce"].append(np.array_equal(mine, in_order(world)))
        mine[:] = values(rank)
        group.reduce_scatter_single(mine[pieces], mine[: PIECE * world])
        right["reduce_scatter"].append(np.array_equal(mine[pieces], in_order(world)[pieces]))
        mine[:] = values(rank)
        group.broadcast(mine, 1)
        right["broadcast"].append(np.array_equal(mine, values(1)))
    half = group.split(rank // 2, rank)
    entries = [entry for entry in read_flight(group.arena.flight.address) if entry.count >= PIECE * world]
    found = {
        "nodes": group.plan_limits.nodes,
        "of a half": half.plan_limits.nodes if half is not None else None,
        "right": right,
        "algorithms": {ALGORITHMS[entry.plan] for entry in entries},
        "calls": len(entries),
    }
    group.barrier()
    return found


ALL_RIGHT = {name: [True] * 4 for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter")}


def test_a_group_on_two_nodes(tmp_path: Path, two_cores: list[int]):
    """The same bits as on one node, by plans that know nodes; a group of one node's ranks knows none."""
    one, other = two_cores
    folder = make_nodes(tmp_path / "two", {0: str(one), 1: str(other)})
    arguments = (str(tmp_path / "store"), str(folder), [one, one, other, other])
    for found in run_ranks(called, 4, *arguments):
        assert found["nodes"] == (0, 0, 1, 1)
        assert found["of a half"] == ()
        assert found["right"] == ALL_RIGHT
        assert found["algorithms"] == {"by-node"}
        assert found["calls"] == 16


def test_ranks_that_are_not_bound(tmp_path: Path, two_cores: list[int]):
    """One of four may run anywhere: plans are as on one node, on all ranks."""
    one, other = two_cores
    folder = make_nodes(tmp_path / "two", {0: str(one), 1: str(other)})
    for found in run_ranks(called, 4, str(tmp_path / "store"), str(folder), [one, one, other]):
        assert found["nodes"] == (0, 0, 1, numa.UNBOUND)
        assert found["right"] == ALL_RIGHT
        assert found["algorithms"] == {"two-shot", "streamed"}


def dies(rank: int, world: int, store: str, folder: str, cores: list[int]) -> tuple[str, tuple[int, ...]]:
    """Rank 2 dies before a call that the others make."""
    group = placed(rank, world, store, folder, cores)
    tensor = values(rank)
    group.all_reduce(tensor)
    if rank == 2:
        group.all_reduce(tensor[:10])
        os.kill(os.getpid(), signal.SIGKILL)
    group.all_reduce(tensor[:10])
    with pytest.raises(errors.RankFailedError) as raised:
        group.all_reduce(tensor)
    return type(raised.value).__name__, tuple(raised.value.ranks)


def test_a_rank_that_dies_is_named_by_node_too(tmp_path: Path, two_cores: list[int]):
    one, other = two_cores
    folder = make_nodes(tmp_path / "two", {0: str(one), 1: str(other)})
    found = run_ranks(dies, 4, str(tmp_path / "store"), str(folder), [one, one, other, other], outcomes=True)
    assert [outcome.kind for outcome in found] == ["returned", "returned", "died", "returned"]
    assert {outcome.value for outcome in found if outcome.rank != 2} == {("RankFailedError", (2,))}
