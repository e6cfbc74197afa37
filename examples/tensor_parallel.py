"""DTensor tensor parallelism: the first layer is split by columns, the second by rows."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "symcomm")
torch.set_num_threads(1)
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 8))
model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = torch.Generator().manual_seed(7)  # the same batch on every rank

for _ in range(10):
    x = torch.randn(16, 20, generator=data)
    loss = (model(x) - x[:, :8]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print("loss", loss.item(), flush=True)
dist.destroy_process_group()
