"""A CudaGroup's collectives, messages and symmetric memory on one GPU; the checks are in tests/cuda/checks.py."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu_ranks import join, sharing
from tests.support.ranks import run_ranks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
CHECKS = re.findall(r"^@check\ndef (\w+)", (Path(__file__).parent / "checks.py").read_text(), re.MULTILINE)


COMPILING = 300.0  # seconds: all kernels are compiled where the driver's cache has none yet


def run_all(rank: int, world: int, store: str) -> dict[str, str]:
    from tests.cuda.checks import run_all

    return run_all(rank, world, store)


@pytest.fixture(scope="module", params=["2", "4", "2 mps", "3 mps"])
def told(request: Any, tmp_path_factory: Any) -> list[dict[str, str]]:
    """What every rank has to say about every check."""
    world, _, mps = request.param.partition(" ")
    with sharing(bool(mps)):
        return run_ranks(run_all, int(world), str(tmp_path_factory.mktemp("gpu") / "store"), deadline=COMPILING)


@pytest.mark.timeout(COMPILING + 20)
@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str, told: list[dict[str, str]]):
    for rank, said in enumerate(told):
        assert said.get(name, "did not run") == "", f"rank {rank}: {said.get(name)}"


# --- trouble ------------------------------------------------------------------------------------------------------


def differ(rank: int, world: int, store: str) -> str:
    gpu = join(rank, world, store)
    try:
        if rank == 0:
            gpu.all_reduce(torch.ones(4, device="cuda"))
        else:
            gpu.core.all_reduce(torch.ones(4))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_gpu_call_and_a_cpu_call_are_a_mismatch(tmp_path: Path):
    for said in run_ranks(differ, 2, str(tmp_path / "store")):
        assert said.startswith("CollectiveMismatchError")
        assert "rank 0 called all_reduce(float32 x 4, SUM) on a GPU" in said
        assert "rank 1 called all_reduce(float32 x 4, SUM) at" in said


def die_in_the_stream(rank: int, world: int, store: str) -> tuple[float, str, str, str, str]:
    """Rank 1's GPU work never comes: it is busy, and then killed."""
    gpu = join(rank, world, store)
    tensor = torch.ones(1000, device="cuda")
    if rank == 1:
        torch.cuda._sleep(20_000_000_000)
        gpu.all_reduce(tensor)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    work = gpu.all_reduce(tensor, async_op=True)
    assert not work.is_completed()
    said = []
    while gpu.failures.gone() == []:
        time.sleep(0.001)
    died = time.monotonic()
    for ask in (gpu.synchronize, work.wait, lambda: gpu.all_reduce(tensor), torch.cuda.synchronize):
        try:
            ask()
            said.append("nothing")
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}")
    return (time.monotonic() - died, *said)


@pytest.mark.parametrize("mps", [False, True], ids=["turns", "mps"])
def test_a_rank_that_dies_while_the_gpu_waits_for_it(tmp_path: Path, mps: bool):
    with sharing(mps):
        first, second = run_ranks(die_in_the_stream, 2, str(tmp_path / "store"), outcomes=True)
    assert second.kind == "died" and first.kind == "returned", str(first)
    seconds, synchronized, waited, later, cuda = first.value
    assert seconds < 5
    assert synchronized.startswith("RankFailedError: all_reduce on cuda:0 of group 'world' failed on rank 0")
    # by which signal, it says only if its parent has not collected it yet
    assert re.search(r"rank 1 \(pid \d+\) died( with SIGKILL)? while the GPU waited for it", synchronized), synchronized
    assert waited.startswith("RankFailedError")
    assert later.startswith("GroupUnusableError")
    # NVIDIA leaves MPS undefined when a client is killed at work: others may lose the GPU, sooner or later.
    assert cuda == "nothing" or (mps and "illegal memory access" in cuda), cuda


def grow_while_others_are_late(rank: int, world: int, store: str) -> list[float]:
    """The first operations of a group need a staging area; one rank submits the second when the first has met."""
    from symcomm.cuda.group import device_group
    from symcomm.group.default import init

    torch.cuda.set_device(0)
    core = init(rank=rank, world_size=world, init_method=f"file://{store}", timeout=20)
    gpu = device_group(core, 0)
    tensors = [torch.full((1 << 18,), rank + 1.0, device="cuda") for _ in range(2)]
    if rank == 1:
        time.sleep(0.5)
    works = []
    for tensor in tensors:
        works.append(gpu.all_reduce(tensor, async_op=True))
        if rank == 1:
            time.sleep(0.2)
    for work in works:
        work.wait()
    gpu.synchronize()
    return [float(t.max()) for t in tensors] + [float(t.min()) for t in tensors]


@pytest.mark.parametrize("mps", [False, True], ids=["turns", "mps"])
def test_a_staging_area_that_grows_while_a_rank_is_late(tmp_path: Path, mps: bool):
    with sharing(mps):
        assert run_ranks(grow_while_others_are_late, 2, str(tmp_path / "store")) == [[3.0] * 4] * 2


def be_late(rank: int, world: int, store: str) -> str:
    gpu = join(rank, world, store)
    if rank == 1:
        torch.cuda._sleep(8_000_000_000)  # about 4 s
    begun = time.monotonic()
    try:
        gpu.all_reduce(torch.ones(4, device="cuda"), timeout=1.0)
        gpu.synchronize()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return f"nothing in {time.monotonic() - begun} s"


@pytest.mark.parametrize("mps", [False, True], ids=["turns", "mps"])
def test_a_deadline_of_gpu_work(tmp_path: Path, mps: bool):
    with sharing(mps):
        first, _ = run_ranks(be_late, 2, str(tmp_path / "store"))
    assert first.startswith("DeadlineError: all_reduce on cuda:0 of group 'world' timed out on rank 0 after 1"), first
    assert "the GPU work of rank 1 did not come so far" in first


def refuse_capture(rank: int, world: int, store: str) -> str:
    gpu = join(rank, world, store)
    tensor = torch.ones(4, device="cuda")
    said = ""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        try:
            gpu.all_reduce(tensor)
        except RuntimeError as error:
            said = str(error)
    return said


def test_capturing_a_graph_is_refused_in_words(tmp_path: Path):
    assert all("CUDA graph" in said for said in run_ranks(refuse_capture, 2, str(tmp_path / "store")))


def test_ranks_that_are_threads():
    import symcomm

    def rank_of(group: Any) -> float:
        from symcomm.cuda.group import device_group

        torch.cuda.set_device(0)
        gpu = device_group(group, 0)
        tensor = torch.full((1000,), float(gpu.rank), device="cuda")
        for _ in range(3):
            gpu.all_reduce(tensor, "max")
        gpu.all_reduce(tensor)
        gpu.synchronize()
        return float(tensor[0])

    assert symcomm.spawn(rank_of, 2, mode="threads", timeout=20, deadline=60) == [2.0, 2.0]
