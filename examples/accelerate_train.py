"""HuggingFace accelerate. It takes the process group that exists, so the backend is chosen before."""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "symcomm")
torch.set_num_threads(1)
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
x = torch.randn(960, 20)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for inputs, wanted in loader:
    loss = (model(inputs) - wanted).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    everyone = accelerator.gather(loss.detach().reshape(1))
    if accelerator.is_main_process:
        print("loss", everyone.mean().item(), flush=True)
accelerator.end_training()
if dist.is_initialized():  # older versions leave that to us
    dist.destroy_process_group()
