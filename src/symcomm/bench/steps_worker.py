"""One rank of one side of `symcomm bench steps`: a training program, step by step when the controller asks for it.

order      answer
prepare    {"parameters": how many numbers all ranks' models have together}
check      {"losses": of the first steps}
time       {"seconds": [one step, ...]}
copies     {"bytes": of our collectives so far, "direct_bytes": of them, not staged}; empty on other sides

Sides: "alone" computes the same and exchanges nothing; "gloo" and "symcomm" are torch.distributed on that backend;
"heap" is the latter with the shared heap. Programs use torch as programs do: nothing here is written for our backend.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from symcomm.bench.torch_worker import join, time_steps
from symcomm.bench.worker import serve

Step = Callable[[], float]  # returns the loss
MICRO_BATCHES = 4
TABLES, ROWS, FEATURES, LOOKUPS = 64, 2000, 32, 8  # of the embedding model


def _linears(count: int, width: int) -> Any:
    from torch import nn

    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def _trained(module: Any, parameters: list[Any], loss_of: Callable[[], Any]) -> Step:
    import torch

    optimizer = torch.optim.SGD(parameters, lr=0.01)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _draw(rank: int) -> Any:
    import torch

    return torch.Generator().manual_seed(1 + rank)


# --- programs: (whether ranks talk, rank, world, scale) -> a step, and how many parameters there are in all -----------


def fsdp2(talks: bool, rank: int, world: int, scale: int) -> tuple[Step, int]:
    """torch's fully_shard on 8 layers of 2048 x 2048, batch 16: 33.6 M parameters."""
    import torch
    from torch.distributed.fsdp import fully_shard

    width = 2048 // scale
    model = _linears(8, width)
    parameters = sum(p.numel() for p in model.parameters())
    if talks:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    batch = torch.randn(16, width, generator=_draw(rank))
    step = _trained(model, list(model.parameters()), lambda: torch.nn.functional.mse_loss(model(batch), batch))
    return step, parameters


def tensor_parallel(talks: bool, rank: int, world: int, scale: int) -> tuple[Step, int]:
    """4 blocks of 1024 x 4096 and back, split by columns and rows, batch 128: an all_reduce of 512 KiB after each
    block, forwards and backwards. Alone, a rank has its part of each block."""
    import torch
    from torch import nn

    width, hidden = 1024 // scale, 4096 // scale
    blocks = []
    for _ in range(4):
        inner = hidden if talks else hidden // world
        blocks.append(nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)))
    model = nn.Sequential(*blocks)
    if talks:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (world,))
        for block in model:
            parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    batch = torch.randn(128, width, generator=_draw(0))
    step = _trained(model, list(model.parameters()), lambda: torch.nn.functional.mse_loss(model(batch), batch))
    return step, 4 * (2 * width * hidden + width + hidden)


def pipeline(talks: bool, rank: int, world: int, scale: int) -> tuple[Step, int]:
    """A stage of 4 layers of 1024 x 1024 on each rank, torch's GPipe schedule, 4 micro-batches of 64: 256 KiB go from
    rank to rank for each, forwards and backwards. Alone, a rank runs its stage on its own numbers."""
    import torch

    width = 1024 // scale
    torch.manual_seed(rank)
    stage = _linears(4, width)
    whole = torch.randn(64 * MICRO_BATCHES, width, generator=_draw(0))
    mse = torch.nn.functional.mse_loss
    parameters = world * sum(p.numel() for p in stage.parameters())
    if not talks:
        parts = whole.chunk(MICRO_BATCHES)

        def all_parts() -> Any:
            return torch.stack([mse(stage(part), part) for part in parts]).mean()

        return _trained(stage, list(stage.parameters()), all_parts), parameters
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    schedule = ScheduleGPipe(PipelineStage(stage, rank, world, torch.device("cpu")), MICRO_BATCHES, loss_fn=mse)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)

    def step() -> float:
        optimizer.zero_grad()
        losses: list[Any] = []
        inputs = (whole,) if rank == 0 else ()
        more = {"target": whole, "losses": losses} if rank == world - 1 else {}
        schedule.step(*inputs, **more)
        optimizer.step()
        return float(torch.stack(losses).mean().detach()) if losses else 0.0

    return step, parameters


def embedding(talks: bool, rank: int, world: int, scale: int) -> tuple[Step, int]:
    """A recommendation model: 64 tables of 2,000 x 32, each rank with its share of them, 512 samples a rank with 8
    lookups in each table. all_to_alls exchange indices, rows and their gradients; DDP has the two layers on top."""
    import torch
    import torch.distributed as dist
    from torch import nn

    own, samples = TABLES // world, 512 // scale
    torch.manual_seed(rank)
    tables = nn.ModuleList(nn.EmbeddingBag(ROWS, FEATURES, mode="sum") for _ in range(own))
    torch.manual_seed(0)
    top: Any = nn.Sequential(nn.Linear(own * world * FEATURES, 256), nn.ReLU(), nn.Linear(256, 1))
    parameters = [*tables.parameters(), *top.parameters()]
    if talks:
        top = nn.parallel.DistributedDataParallel(top)

    class Exchange(torch.autograd.Function):
        """Pieces to and from all ranks; their gradients go back the same way."""

        @staticmethod
        def forward(ctx: Any, pieces: Any) -> Any:
            return exchanged(pieces)

        @staticmethod
        def backward(ctx: Any, gradients: Any) -> Any:
            return exchanged(gradients)

    def exchanged(pieces: Any) -> Any:
        if not talks:
            return pieces
        pieces = pieces.contiguous()  # Gloo writes into tensors of other layouts as if they were
        came = torch.empty_like(pieces)
        dist.all_to_all_single(came, pieces, async_op=True).wait()
        return came

    draw = _draw(rank)
    indices = torch.randint(ROWS, (world, own, samples, LOOKUPS), generator=draw)  # [whose tables, table, sample]
    wanted = torch.randn(samples, 1, generator=draw)

    def loss_of() -> Any:
        asked = exchanged(indices)  # [by whom, table, sample, lookup]
        looked = [table(asked[:, k].reshape(-1, LOOKUPS)).view(world, samples, -1) for k, table in enumerate(tables)]
        rows = Exchange.apply(torch.stack(looked, 1))  # [whose, table, sample, feature]
        return nn.functional.mse_loss(top(rows.permute(2, 0, 1, 3).reshape(samples, -1)), wanted)

    return _trained(top, parameters, loss_of), own * world * ROWS * FEATURES + sum(p.numel() for p in top.parameters())


PROGRAMS = {"fsdp2": fsdp2, "tensor parallel": tensor_parallel, "pipeline": pipeline, "embedding": embedding}


class StepsOrders:
    """Ranks are not pinned: training jobs are not either."""

    def __init__(self, args: SimpleNamespace):
        if args.name == "heap":
            os.environ["SYMCOMM_HEAP"] = "1"
        import torch

        if args.name == "heap":
            from symcomm.torch_backend import torch_patches

            torch_patches.apply("cpu_allocator")  # where torch was loaded before
        torch.set_num_threads(1)
        self.name, self.rank, self.world = args.name, args.rank, args.world
        self.dist = None if args.name == "alone" else join("gloo" if args.name == "gloo" else "symcomm", args)

    def prepare(self, program: str, scale: int) -> dict[str, int]:
        import torch

        torch.manual_seed(0)
        self.step, parameters = PROGRAMS[program](self.dist is not None, self.rank, self.world, scale)
        return {"parameters": parameters}

    def check(self, steps: int) -> dict[str, list[float]]:
        return {"losses": [self.step() for _ in range(steps)]}

    def time(self, steps: int) -> dict[str, list[float]]:
        return time_steps(self.dist.barrier if self.dist else lambda: None, self.step, steps)

    def copies(self) -> dict[str, int]:
        if self.name not in ("symcomm", "heap"):
            return {}
        import torch.distributed as dist

        stats = [group.copy_stats() for group in dist.distributed_c10d._world.pg_map]
        kinds = [(kind, count) for one in stats for kind, count in one.items()]
        return {
            "bytes": sum(count["bytes"] for _, count in kinds),
            "direct_bytes": sum(count["bytes"] for kind, count in kinds if kind in ("direct", "attached")),
        }


if __name__ == "__main__":
    serve(StepsOrders)
