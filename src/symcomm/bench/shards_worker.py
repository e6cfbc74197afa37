"""One rank of one side of `symcomm bench shards`: a model, trained step by step when the controller asks for it.

order      answer
prepare    {}
check      {"losses": of the first steps, "gradients": samples, by parameter, "parameters": a checksum}
time       {"seconds": [one step, ...]}

Both sides are symcomm.ddp's DistributedDataParallel: "plain", or with logical "shards".
"""

from __future__ import annotations

import contextlib
import zlib
from types import SimpleNamespace
from typing import Any

from symcomm.bench.ddp_worker import BATCHES, MODELS, describe
from symcomm.bench.torch_worker import join, time_steps
from symcomm.bench.worker import serve


class ShardsTraining:
    def __init__(self, args: SimpleNamespace, model: str, scale: int, per_rank: int):
        import torch

        from symcomm.ddp import DistributedDataParallel

        torch.manual_seed(0)
        module, make_inputs, make_wanted, self.loss = MODELS[model](scale)
        self.per_rank, self.in_shards = per_rank, args.name == "shards"
        options = {"logical_shards": per_rank * args.world} if self.in_shards else {}
        self.model = DistributedDataParallel(module, **options)
        self.parameters = list(module.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.01)
        self.mine = range(args.rank * per_rank, (args.rank + 1) * per_rank)
        self.batches = {}
        for shard in self.mine:
            draw = torch.Generator().manual_seed(1 + shard)
            self.batches[shard] = [(make_inputs(draw), make_wanted(draw)) for _ in range(BATCHES)]
        self.steps = 0

    def loss_of(self, shard: int) -> Any:
        inputs, wanted = self.batches[shard][self.steps % BATCHES]
        return self.loss(self.model(inputs), wanted)

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.backward_of_shards() if self.in_shards else self.backward_of_batches()
        self.optimizer.step()
        self.steps += 1
        return loss

    def backward_of_shards(self) -> float:
        last = 0.0
        for shard in self.model.shards():
            loss = self.loss_of(shard)
            loss.backward()
            last = float(loss.detach())
        return last

    def backward_of_batches(self) -> float:
        last = 0.0
        for shard in self.mine:
            with self.model.no_sync() if shard != self.mine[-1] else contextlib.nullcontext():
                loss = self.loss_of(shard)
                (loss if self.per_rank == 1 else loss / self.per_rank).backward()
            last = float(loss.detach())
        return last

    def check(self, steps: int) -> dict[str, Any]:
        losses = [self.step() for _ in range(steps)]
        crc = 0
        for parameter in self.parameters:
            crc = zlib.crc32(parameter.detach().numpy().tobytes(), crc)
        return {"losses": losses, "gradients": [describe(p.grad) for p in self.parameters], "parameters": crc}


class ShardsOrders:
    """Ranks are not pinned: training jobs are not either."""

    def __init__(self, args: SimpleNamespace):
        import torch

        torch.set_num_threads(1)
        self.args, self.rank = args, args.rank
        self.dist = join("symcomm", args)

    def prepare(self, model: str, scale: int, per_rank: int) -> dict[str, Any]:
        self.training = ShardsTraining(self.args, model, scale, per_rank)
        return {}

    def check(self, steps: int) -> dict[str, Any]:
        return self.training.check(steps)

    def time(self, steps: int) -> dict[str, list[float]]:
        return time_steps(self.dist.barrier, self.training.step, steps)


if __name__ == "__main__":
    serve(ShardsOrders)
