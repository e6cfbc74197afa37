"""fairscale: an optimizer whose state is divided among ranks (OSS), with ShardedDataParallel; and its pipeline's
all_to_all of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

from tests.programs.frame import Part, joined, numbers, tell, timed, training

VERSION = "0.4.13"
NEEDS = (f"fairscale=={VERSION}",)
PARTS = ("OSS and ShardedDataParallel", "a mixture of experts")
ENVIRONMENT = "trainers"
WIDTH, BATCH = 128, 16


def sharded() -> Part:
    import torch
    import torch.distributed as dist
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
    optimizer = OSS(net.parameters(), torch.optim.Adam, lr=0.01)
    model = ShardedDataParallel(net, optimizer)
    data = torch.Generator().manual_seed(dist.get_rank())

    def loss_of() -> torch.Tensor:
        x = torch.randn(BATCH, WIDTH, generator=data)
        return (model(x) - x.flip(1)).square().mean()

    losses, seconds = timed(training(loss_of, optimizer))
    return Part(PARTS[0], losses + numbers(*net.parameters()), seconds)


def experts() -> Part:
    import torch
    import torch.distributed as dist
    from fairscale.nn.moe import MOELayer, Top2Gate
    from torch import nn

    torch.manual_seed(0)
    gate = Top2Gate(WIDTH, 2 * dist.get_world_size())
    torch.manual_seed(1 + dist.get_rank())
    layer = MOELayer(gate, nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    data = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD([p for expert in layer.experts for p in expert.parameters()], lr=0.1)

    def loss_of() -> torch.Tensor:
        torch.manual_seed(0)  # the gate draws which second expert gets a token
        x = torch.randn(4, BATCH, WIDTH, generator=data)
        return (layer(x) - x.flip(2)).square().mean() + 0.01 * layer.l_aux

    losses, seconds = timed(training(loss_of, optimizer))
    return Part(PARTS[1], losses + numbers(*layer.experts.parameters()), seconds)


def main(backend: str) -> Iterator[Part]:
    with joined(backend):
        yield sharded()
        yield experts()


if __name__ == "__main__":
    tell(main)
