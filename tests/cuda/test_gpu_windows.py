"""Windows into CUDA tensors of ranks that share a GPU: puts and signals in the order of streams."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from symcomm import errors
from tests.support.ranks import run_ranks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DTYPES = ["float32", "float16", "bfloat16", "float64", "int64", "int8", "uint8", "bool", "complex64", "float8_e4m3fn"]


def join(rank: int, world: int, store: str, timeout: float = 30) -> Any:
    from symcomm.group.default import init

    torch.cuda.set_device(0)
    return init(rank=rank, world_size=world, init_method=f"file://{store}", timeout=timeout)


def zeros(*shape: int, dtype: Any = None) -> Any:
    from symcomm import symm_mem

    return symm_mem.zeros(*shape, dtype=dtype or torch.float32, device="cuda")


def values(rank: int, world: int, store: str) -> None:
    group = join(rank, world, store)
    right, left = (rank + 1) % world, (rank - 1) % world
    for name in DTYPES:
        dtype = getattr(torch, name)
        mine = zeros(2, 8, dtype=dtype)
        window = group.new_window(mine)
        source = (torch.arange(6, device="cuda") + rank).to(dtype)
        window.put(source, right, 5)
        window.put(source[::2], right, 12)  # not contiguous
        window.signal(right)
        window.wait_signal(left)
        expected = torch.zeros(16, device="cuda").to(dtype)
        expected[5:11] = (torch.arange(6, device="cuda") + left).to(dtype)
        expected[12:15] = (torch.arange(6, device="cuda") + left).to(dtype)[::2]
        assert torch.equal(mine.flatten().view(torch.uint8), expected.view(torch.uint8)), name
        assert window.get_attr(right).access_type.name == "UNIFIED"
        theirs = window.map_remote_tensor(right)
        assert theirs.shape == (2, 8) and theirs.dtype == dtype and theirs.device == mine.device
        window.tensor_deregister()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_values(world: int, tmp_path: Path):
    run_ranks(values, world, str(tmp_path / "store"), deadline=110)


def in_order(rank: int, world: int, store: str) -> None:
    group = join(rank, world, store)
    mine = zeros(1 << 16, dtype=torch.int32)
    window = group.new_window(mine)
    peer, seen = 1 - rank, []
    for i in range(1, 50):
        window.put(torch.full((1 << 16,), i, dtype=torch.int32, device="cuda"), peer)
        window.signal(peer)
        window.wait_signal(peer)
        seen.append(torch.stack([mine.min(), mine.max()]))
        window.signal(peer)  # we have looked
        window.wait_signal(peer)
    assert torch.stack(seen).tolist() == [[i, i] for i in range(1, 50)]
    for _ in range(5):
        window.signal(peer)  # counted: nobody has to take them first
    for _ in range(5):
        window.wait_signal(peer)
    first, second = window.wait_signal(peer, async_op=True), window.wait_signal(peer, async_op=True)
    window.put(torch.full((1,), 7, dtype=torch.int32, device="cuda"), peer, async_op=True).wait()
    with torch.cuda.stream(torch.cuda.Stream()):
        window.signal(peer)
    window.signal(peer)  # from another stream: after the one before
    assert first.wait() and second.wait() and second.wait(20)
    assert mine[0].item() == 7 and second.is_success()
    window.tensor_deregister()


def test_streams_keep_the_order(tmp_path: Path):
    run_ranks(in_order, 2, str(tmp_path / "store"), deadline=110)


def refusals(rank: int, world: int, store: str) -> None:
    group = join(rank, world, store)
    window = group.new_window()
    with pytest.raises(errors.CallerError, match="allocate it with symcomm.symm_mem.empty"):
        window.tensor_register(torch.zeros(4, device="cuda") if rank else zeros(4))
    with pytest.raises(errors.CollectiveMismatchError, match="different kinds of devices"):
        window.tensor_register(torch.zeros(4) if rank else zeros(4))
    mine = zeros(4)
    window.tensor_register(mine)
    for call, words in (
        (lambda: window.put(torch.ones(1), 0), "a dense tensor on cuda:0"),
        (lambda: window.put(torch.ones(2, device="cuda"), 0, 3), "target_offset_nelems must be 0 to 2"),
        (lambda: window.put(torch.ones(1, dtype=torch.int32, device="cuda"), 0), "must be of float32"),
    ):
        with pytest.raises(errors.BadArgumentError, match=words):
            call()
    group.barrier()
    assert mine.count_nonzero().item() == 0


def test_refusals(tmp_path: Path):
    run_ranks(refusals, 2, str(tmp_path / "store"), deadline=60)


def killed(rank: int, world: int, store: str) -> str:
    group = join(rank, world, store)
    window = group.new_window(zeros(4))
    if rank == 1:
        group.barrier()
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()
    work = window.wait_signal(1, async_op=True)
    with pytest.raises(errors.RankFailedError, match=r"wait_signal\(peer_rank=1\) on cuda:0 .* rank 1 \(pid") as caught:
        work.wait(20)
    assert caught.value.ranks == [1]
    with pytest.raises(errors.RankFailedError):  # the first call after it is told the same
        window.put(torch.ones(1, device="cuda"), 0)
    with pytest.raises(errors.GroupUnusableError):
        window.put(torch.ones(1, device="cuda"), 0)
    return str(caught.value)


def test_a_peer_that_is_killed_is_named(tmp_path: Path):
    outcomes = run_ranks(killed, 2, str(tmp_path / "store"), deadline=60, outcomes=True)
    assert [o.kind for o in outcomes] == ["returned", "died"], outcomes[0].text


def late(rank: int, world: int, store: str) -> None:
    group = join(rank, world, store)
    window = group.new_window(zeros(4))
    if rank == 0:
        window.wait_signal(1, timeout=0.3)
        torch.cuda.synchronize()  # the deadline ends it
        with pytest.raises(errors.DeadlineError, match=r"wait_signal\(peer_rank=1\) on cuda:0 .* timed out") as caught:
            window.signal(1)
        assert caught.value.missing == [1]
    time.sleep(1.0 if rank else 0.0)


def test_deadlines_end_a_streams_wait(tmp_path: Path):
    run_ranks(late, 2, str(tmp_path / "store"), deadline=60)


def through_torch(rank: int, world: int, store: str) -> list[float]:
    from tests.support.gpu_ranks import join_torch

    dist = join_torch(rank, world, store)
    mine = zeros(4)
    window = dist.group.WORLD.new_window(mine)
    peer = 1 - rank
    work = window.wait_signal(peer, True)
    assert window.put(torch.full((2,), rank + 1.0, device="cuda"), peer, 1, True).wait()
    window.signal(peer, False)
    assert work.wait() and isinstance(work, dist.Work)
    found = mine.tolist()
    dist.barrier()
    window.tensor_deregister()
    dist.destroy_process_group()
    return found


def test_through_torch_distributed(tmp_path: Path):
    assert run_ranks(through_torch, 2, str(tmp_path / "store"), deadline=60) == [[0, 2, 2, 0], [0, 1, 1, 0]]
