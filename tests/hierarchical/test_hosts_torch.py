"""torch.distributed on a group across hosts: init_process_group, sub-groups, objects, DDP, messages."""

from __future__ import annotations

import os

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.torch_versions


def _program(rank: int, world: int, path: str):
    import torch
    import torch.distributed as dist

    from symcomm.torch_backend.register import register

    register()
    torch.set_num_threads(1)
    os.environ["SYMCOMM_HOST_ID"] = "left" if rank < 2 else "right"
    dist.init_process_group("symcomm", store=dist.FileStore(path, world), rank=rank, world_size=world)
    said = []
    x = torch.full((4,), float(rank))
    dist.all_reduce(x)
    said.append(x.tolist())
    everyone: list = [None] * world
    dist.all_gather_object(everyone, {"rank": rank})
    said.append(everyone)
    pair = dist.new_group([1, 2])
    y = torch.ones(2, dtype=torch.bfloat16)
    if rank in (1, 2):
        dist.all_reduce(y, group=pair)
    said.append(y.tolist())
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    said.append(work.get_future().wait()[0].tolist())
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.full((3, 4), float(rank))).sum().backward()
    said.append((model.module.weight.detach().clone(), model.module.weight.grad[0, 0].item()))
    z = torch.zeros(50_000)
    if rank == 0:
        dist.send(torch.ones(50_000), 3, tag=4)
    elif rank == 3:
        dist.recv(z, 0, tag=4)
    said.append(z.sum().item())
    dist.monitored_barrier()
    dist.destroy_process_group()
    return said


def test_a_program_on_two_hosts(tmp_path):
    said = run_ranks(_program, 4, str(tmp_path / "store"), deadline=90)
    for rank, (total, everyone, pair, ones, (weight, gradient), z) in enumerate(said):
        assert total == [6.0] * 4 and everyone == [{"rank": r} for r in range(4)]
        assert pair == ([2.0, 2.0] if rank in (1, 2) else [1.0, 1.0]) and ones == [4.0] * 3
        assert (weight == said[0][4][0]).all() and gradient == 3 * 1.5
        assert z == (50_000.0 if rank == 3 else 0.0)
