"""What ``symcomm bits --training`` computes: a training in logical shards, and layers that are split over ranks."""

from __future__ import annotations

import hashlib
from typing import Any

SHARDS, STEPS, WIDTH = 8, 4, 64
KINDS = ("weights", "layers")


def on_rank(group: Any, kinds: Any) -> dict[str, tuple[str, list[bytes]]]:
    """By kind, a hash. Threads that share a process must not share a random generator: all draw from their own."""
    import torch

    torch.set_num_threads(1)
    made = {"weights": weights, "layers": layers}
    return {kind: (_hash(made[kind](group)), []) for kind in kinds}


def _hash(tensors: list[Any]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().numpy().tobytes())
    return whole.hexdigest()


def _drawn(module: Any) -> Any:
    """The same parameters on every rank."""
    import torch

    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=draw).mul_(WIDTH**-0.5)
    return module


def weights(group: Any) -> list[Any]:
    """After some steps of DistributedDataParallel, with a batch norm."""
    import torch
    from torch import nn

    from symcomm.ddp import DistributedDataParallel
    from symcomm.ddp.sampling import ShardSampler
    from symcomm.torch_backend.group import TorchGroup

    module = nn.Sequential(nn.Linear(16, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    torch_group: Any = TorchGroup(None, group.rank, group.size, group.timeout, group.name, core=group)
    model = DistributedDataParallel(_drawn(module), process_group=torch_group, logical_shards=SHARDS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = torch.randn(400, 16, generator=torch.Generator().manual_seed(1))
    sampler = ShardSampler(rows, shards=SHARDS, batch_size=6)
    for step in range(STEPS):
        optimizer.zero_grad()
        for shard in model.shards():
            own = rows[sampler.batch(step, shard)]
            (model(own) - own[:, :4]).square().mean().backward()
        optimizer.step()
    return list(module.state_dict().values())


def layers(group: Any) -> list[Any]:
    """Output and input's gradient of two linear layers that are split over the ranks."""
    import torch
    from torch import nn

    from symcomm.nn import ColumnParallelLinear, RowParallelLinear

    up, down = _drawn(nn.Linear(WIDTH, 8 * WIDTH)), _drawn(nn.Linear(8 * WIDTH, WIDTH))
    x = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = RowParallelLinear(down, SHARDS, group)(torch.relu(ColumnParallelLinear(up, SHARDS, group)(x)))
    y.square().sum().backward()
    return [y, x.grad]
