"""One rank of the training of `symcomm demo`: a small language model, data parallel, on the backend it is told.

On "symcomm" the model is wrapped in Symcomm's DistributedDataParallel, on "gloo" in torch's. The demo gives orders, a
few steps at a time, so that the two take turns; in between a rank sleeps.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from symcomm.bench.model import decoder, own_source, sample
from symcomm.bench.worker import GROUP_TIMEOUT, answer_orders, die_with

__all__ = ["Clock", "Training", "main"]

WIDTH, LAYERS, CONTEXT = 128, 2, 64
BATCH = 2  # texts for each rank and step
RATE = 3e-3
WARM_UP = 3


@dataclass
class Clock:
    """Times of passes with and without communication, and of whole steps."""

    passes: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def share(self) -> float:
        """The part of a step that is communication: medians, since other programs use this machine too."""
        if not self.plain or not self.passes:
            return 0.0
        above = statistics.median(self.passes) - statistics.median(self.plain)
        return max(0.0, above / statistics.median(self.steps))


class Training:
    """A model and its training on one rank. Every backend begins with the same parameters and reads the same text."""

    def __init__(self, backend: str, rank: int, world: int, store: str):
        import torch
        import torch.distributed as dist

        from symcomm.torch_backend.register import register

        register()
        torch.set_num_threads(1)
        dist.init_process_group(
            backend, store=dist.FileStore(store, world), rank=rank, world_size=world,
            timeout=timedelta(seconds=GROUP_TIMEOUT),
        )  # fmt: skip
        torch.manual_seed(0)
        self.rank, self.world, self.barrier = rank, world, dist.barrier
        self.module = decoder(WIDTH, LAYERS, CONTEXT)
        self.model = data_parallel(backend, self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=RATE, betas=(0.9, 0.98))
        self.data = torch.frombuffer(bytearray(own_source()), dtype=torch.uint8)
        self.draw = torch.Generator().manual_seed(1 + self.rank)  # every rank reads other places, the same on each side
        self.clock = Clock()
        self.done = 0

    def backward(self) -> float:
        """Forward and backward on texts from random places; the gradients are the mean of all ranks'."""
        import torch

        starts = torch.randint(len(self.data) - CONTEXT - 1, (BATCH,), generator=self.draw)
        texts = torch.stack([self.data[s : s + CONTEXT + 1] for s in starts.tolist()]).long()
        logits = self.model(texts[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())
        loss.backward()
        return float(loss.detach())

    def step(self) -> float:
        begin = time.perf_counter()
        loss = self.backward()
        passed = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.clock.passes.append(passed - begin)
        self.clock.steps.append(time.perf_counter() - begin)
        return loss

    def probe(self) -> None:
        """The same passes without communication. Nothing is learned from them, and they count in no speed."""
        begin = time.perf_counter()
        with self.model.no_sync():
            self.backward()
        self.clock.plain.append(time.perf_counter() - begin)
        self.optimizer.zero_grad()

    def set_rate(self, steps: int) -> None:
        """The learning rate rises for a moment, then falls in a line."""
        part = min(1.0, (self.done + 1) / 20) * max(0.1, 1 - self.done / steps)
        self.optimizer.param_groups[0]["lr"] = RATE * part

    def warm_up(self) -> None:
        """Some steps that teach nothing: the first are slower, since buckets are regrouped and memory is touched."""
        self.optimizer.param_groups[0]["lr"] = 0.0
        for _ in range(WARM_UP):
            self.step()
        self.probe()
        self.clock = Clock()

    def train(self, count: int, steps: int) -> list[dict[str, Any]]:
        """The next ``count`` of all ``steps``; how each went."""
        self.barrier()
        lines = []
        for _ in range(count):
            self.set_rate(steps)
            loss = self.step()
            self.done += 1
            tokens = self.done * BATCH * CONTEXT * self.world
            lines.append({"step": self.done, "loss": loss, "seconds": sum(self.clock.steps), "tokens": tokens})
        self.probe()
        return [line | {"share": self.clock.share()} for line in lines]


def data_parallel(backend: str, module: Any) -> Any:
    if backend == "symcomm":
        from symcomm.ddp import DistributedDataParallel

        return DistributedDataParallel(module)
    from torch.nn import parallel

    return parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)


def main() -> None:
    address, backend, rank, world, store, _ = sys.argv[1:7]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    die_with(connection)
    training = Training(backend, int(rank), int(world), store)
    training.warm_up()

    def obey(order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "train":
            return {"lines": training.train(order["count"], order["steps"])}
        return {"sample": sample(training.module, "def ", 300)}

    answer_orders(connection, training.rank, obey)


if __name__ == "__main__":
    main()
