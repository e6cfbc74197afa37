"""CUDA graphs that hold collectives of ranks that share a GPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from symcomm.types import DType, RedOpType
from tests.support.gpu_ranks import join, sharing
from tests.support.ranks import run_ranks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module", autouse=True)
def shared_gpu() -> Iterator[None]:
    """One service for all: a second one in a process may not be there in time."""
    with sharing(True):
        yield


def captured(gpu: Any, tensor: Any, calls: int = 1) -> Any:
    """A graph of ``calls`` all_reduces of ``tensor``, which also doubles it before each."""
    gpu.all_reduce(tensor)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            tensor.mul_(2)
            gpu.all_reduce(tensor)
    return graph


def replay(rank: int, world: int, store: str) -> dict[str, Any]:
    gpu = join(rank, world, store)
    assert gpu.collectives.can_capture(DType.FLOAT32, RedOpType.SUM), "MPS is not in use"
    found = {}
    for count in (1, 1023, 1 << 20, 3 << 20):
        for calls in (1, 2, 3):
            tensor = torch.ones(count, dtype=torch.int64, device="cuda")
            graph = captured(gpu, tensor, calls)
            tensor.fill_(rank + 1)
            expected = world * (world + 1)
            for turn in range(7):
                if turn % 3 == rank % 3:
                    time.sleep(0.002)  # ranks are not at the same replay
                graph.replay()
                if turn == 3:  # eager ones in between
                    other = torch.full((5,), float(rank), device="cuda")
                    gpu.all_reduce(other)
                    assert other.tolist() == [world * (world - 1) / 2] * 5
            for _ in range(7 * calls - 1):
                expected *= 2 * world
            torch.cuda.synchronize()
            found[f"{count} {calls}"] = bool((tensor == expected).all())
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_replays_give_what_calls_would(tmp_path: Path, world: int):
    for found in run_ranks(replay, world, str(tmp_path / "store"), deadline=110):
        assert len(found) == 12 and all(found.values()), found


def refused(rank: int, world: int, store: str) -> list[str]:
    gpu = join(rank, world, store)
    tensor, said = torch.ones(4, device="cuda"), []
    calls = [
        lambda: gpu.all_reduce(tensor.half()),  # of a dtype that was not used before
        lambda: gpu.broadcast(tensor),
        lambda: gpu.all_reduce(tensor, async_op=True),
        lambda: gpu.send(tensor, 1 - rank),
    ]
    for call in calls:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            try:
                call()
            except RuntimeError as error:
                said.append(str(error))
    gpu.all_reduce(tensor)
    return [*said, tensor.tolist()]


def test_what_a_graph_cannot_hold_is_refused_and_nothing_is_lost(tmp_path: Path):
    for *said, values in run_ranks(refused, 2, str(tmp_path / "store")):
        assert len(said) == 4 and all("CUDA graph is being captured" in text for text in said), said
        assert values == [2.0] * 4


def lose_a_rank(rank: int, world: int, store: str) -> str:
    gpu = join(rank, world, store)
    tensor = torch.ones(1 << 16, device="cuda")
    graph = captured(gpu, tensor)
    gpu.core.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    graph.replay()
    began = time.monotonic()
    torch.cuda.synchronize()  # the watchdog ends the wait
    assert time.monotonic() - began < 5
    try:
        gpu.synchronize()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "success"


def test_a_replay_that_waits_for_the_dead_ends(tmp_path: Path):
    survivor, killed = run_ranks(lose_a_rank, 2, str(tmp_path / "store"), outcomes=True)
    assert killed.kind == "died"
    first = survivor.value
    assert first.startswith("RankFailedError: a captured all_reduce on cuda:0 of group 'world' failed on rank 0"), first
