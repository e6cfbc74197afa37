"""DeepSpeed, ZeRO stage 2: `init_distributed` takes the backend's name. On CPUs with DS_ACCELERATOR=cpu."""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

deepspeed.init_distributed(dist_backend=sys.argv[1] if len(sys.argv) > 1 else "symcomm", verbose=False)
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
settings = {
    "train_micro_batch_size_per_gpu": 16,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
data = torch.Generator().manual_seed(dist.get_rank())

for _ in range(20):
    x = torch.randn(16, 20, generator=data)
    loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print("loss", total.item(), flush=True)
dist.destroy_process_group()
