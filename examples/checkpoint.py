"""DistributedCheckpoint: train, save, load into a fresh model, go on where it stopped."""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "symcomm")
torch.set_num_threads(1)
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
data = torch.Generator().manual_seed(rank)


def fresh(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(model, optimizer, steps):
    for _ in range(steps):
        x = torch.randn(16, 20, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print("loss", total.item(), flush=True)


folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)
model, optimizer = fresh(seed=0)
train(model, optimizer, 5)
dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
again, optimizer = fresh(seed=1)
state = {"model": again.state_dict()}
dcp.load(state, checkpoint_id=folder[0])
again.load_state_dict(state["model"])
train(again, optimizer, 5)
dist.destroy_process_group()
