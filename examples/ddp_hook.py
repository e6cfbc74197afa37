"""A communication hook of your own on torch's DistributedDataParallel: only signs travel, one byte a number.

Each rank sends the signs of its gradients and their mean size, and keeps what that leaves out for the next step (error
feedback). `symcomm run -n 2 examples/ddp_hook.py`
"""

import sys

import torch
import torch.distributed as dist
from torch import nn


class Signs:
    """The hook's state: what was left out of each parameter's gradient so far, and how many bytes were sent."""

    def __init__(self):
        self.residuals = {}
        self.sent = self.plain = 0


def sign_hook(state: Signs, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    flat, parameters = bucket.buffer(), bucket.parameters()
    for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
        gradient += state.residuals.get(parameter, 0)  # a view of flat
    scale = flat.abs().mean()
    signs = torch.where(flat >= 0, 1, -1).to(torch.int8)
    missed = (flat - scale * signs).split([parameter.numel() for parameter in parameters])
    state.residuals.update((p, part.view_as(p)) for p, part in zip(parameters, missed, strict=True))
    state.sent += signs.nbytes
    state.plain += flat.nbytes

    everyone = torch.empty(dist.get_world_size(), len(flat), dtype=torch.int8)
    scales = torch.empty(dist.get_world_size())
    dist.all_gather(list(scales.split(1)), scale.reshape(1))
    work = dist.all_gather(list(everyone), signs, async_op=True)
    return work.get_future().then(lambda _: flat.copy_((everyone * scales[:, None]).mean(0)))


dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "symcomm")
torch.set_num_threads(1)
torch.manual_seed(0)
state = Signs()
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)))
model.register_comm_hook(state, sign_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
data = torch.Generator().manual_seed(dist.get_rank())

for _ in range(20):
    x = torch.randn(16, 20, generator=data)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print("loss", total.item(), flush=True)
if dist.get_rank() == 0:
    print(f"{1 - state.sent / state.plain:.0%} of the bytes saved")
dist.destroy_process_group()
