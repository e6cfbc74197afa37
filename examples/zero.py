"""ZeroRedundancyOptimizer: every rank keeps the optimizer state of its share of the parameters."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "symcomm")
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
data = torch.Generator().manual_seed(dist.get_rank())

for _ in range(10):
    x = torch.randn(16, 20, generator=data)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print("loss", total.item(), flush=True)
dist.destroy_process_group()
