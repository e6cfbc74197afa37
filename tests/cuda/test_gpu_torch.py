"""``torch.distributed`` with backend "symcomm" on CUDA tensors: several ranks on one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu_ranks import join_torch
from tests.support.ranks import run_ranks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
STEPS = 6


def every_collective(rank: int, world: int, store: str) -> str:
    dist = join_torch(rank, world, store)
    total = sum(range(world))

    def mine(n: int = 4) -> Any:
        return torch.full((n,), float(rank), device="cuda")

    for async_op in (False, True):

        def ended(work: Any, async_op: bool = async_op) -> None:
            assert (work is not None) == async_op
            if work is not None:
                work.wait()

        t = mine()
        ended(dist.all_reduce(t, async_op=async_op))
        assert t.tolist() == [total] * 4
        t = mine()
        ended(dist.broadcast(t, 1, async_op=async_op))
        assert t.tolist() == [1.0] * 4
        t = mine()
        ended(dist.reduce(t, 0, async_op=async_op))
        assert rank != 0 or t.tolist() == [total] * 4
        out = torch.empty(4 * world, device="cuda")
        ended(dist.all_gather_into_tensor(out, mine(), async_op=async_op))
        assert out.view(world, 4)[:, 0].tolist() == list(range(world))
        outs = [torch.empty(4, device="cuda") for _ in range(world)]
        ended(dist.all_gather(outs, mine(), async_op=async_op))
        assert [o[0].item() for o in outs] == list(range(world))
        t = torch.empty(2, device="cuda")
        ended(dist.reduce_scatter_tensor(t, mine(2 * world), async_op=async_op))
        assert t.tolist() == [total] * 2
        t = torch.empty(world, device="cuda")
        ended(dist.all_to_all_single(t, mine(world), async_op=async_op))
        assert t.tolist() == list(range(world))
        ended(dist.gather(mine(), outs if rank == 0 else None, 0, async_op=async_op))
        ended(dist.scatter(t := mine(), outs if rank == 0 else None, 0, async_op=async_op))
        assert t.tolist() == [float(rank)] * 4
    future = dist.all_reduce(t := mine(), async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    assert future.wait().tolist() == [2.0 * total] * 4
    right, left = (rank + 1) % world, (rank - 1) % world
    got = torch.empty(3, device="cuda")
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine(3), right), dist.P2POp(dist.irecv, got, left)])
    for work in works:
        work.wait()
    assert got.tolist() == [left] * 3
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(world)]
    dist.barrier()
    import torch.distributed._functional_collectives as funcol

    assert funcol.all_reduce(mine(), "sum", dist.group.WORLD).tolist() == [total] * 4
    half = dist.new_group(list(range(world // 2 + 1)))
    if rank <= world // 2:
        dist.all_reduce(t := mine(), group=half)
        assert t.tolist() == [sum(range(world // 2 + 1))] * 4
    dist.destroy_process_group()
    return "good"


@pytest.mark.parametrize("world", [2, 4])
def test_every_collective(world: int, tmp_path: Path):
    assert run_ranks(every_collective, world, str(tmp_path / "store"), deadline=100) == ["good"] * world


def messages_first(rank: int, world: int, store: str) -> float:
    """Two of three ranks talk before anybody made a collective."""
    dist = join_torch(rank, world, store)
    t = torch.full((5,), float(rank), device="cuda")
    if rank == 0:
        dist.send(t, 2)
    if rank == 2:
        dist.recv(t, 0)
    dist.all_reduce(t)
    dist.destroy_process_group()
    return t[0].item()


def test_messages_need_no_others(tmp_path: Path):
    assert run_ranks(messages_first, 3, str(tmp_path / "store"), deadline=100) == [1.0] * 3


def model_and_data() -> tuple[Any, Any, Any]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).cuda()
    return model, torch.randn(16, 32).cuda(), torch.randn(16, 8).cuda()


def train(model: Any, inputs: Any, targets: Any, reduce: Any = None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.detach().clone()
        if reduce is not None:
            reduce(value)
        losses.append(value.item())
    return losses


def train_parallel(rank: int, world: int, store: str, kind: str) -> list[float]:
    dist = join_torch(rank, world, store)
    model, inputs, targets = model_and_data()
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cuda", (world,))
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    part = slice(rank * 16 // world, (rank + 1) * 16 // world)
    losses = train(model, inputs[part], targets[part], lambda v: dist.all_reduce(v, dist.ReduceOp.AVG))
    dist.destroy_process_group()
    return losses


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("world", [2, 4])
def test_training_is_that_of_one_rank_with_the_whole_batch(kind: str, world: int, tmp_path: Path):
    expected = train(*model_and_data())
    for losses in run_ranks(train_parallel, world, str(tmp_path / "store"), kind, deadline=110):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert losses[-1] < losses[0]
