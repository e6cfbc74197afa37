"""One rank of the training of `symcomm demo`: a small language model, data parallel, on the backend it is told.

On "symcomm" the model is wrapped in Symcomm's DistributedDataParallel, on "gloo" in torch's. The demo gives orders, a
few steps at a time, so that the two take turns; in between a rank sleeps.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from symcomm.bench import model as language
from symcomm.bench.torch_worker import data_parallel, join
from symcomm.bench.worker import serve

WIDTH, LAYERS, CONTEXT = 128, 2, 64
BATCH = 2  # texts for each rank and step
RATE = 3e-3
WARM_UP = 3


@dataclass
class PassTimes:
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


class DemoTraining:
    """A model and its training on one rank. Every backend begins with the same parameters and reads the same text."""

    def __init__(self, args: SimpleNamespace):
        import torch

        torch.set_num_threads(1)
        dist = join(args.name, args)
        torch.manual_seed(0)
        self.rank, self.world, self.barrier = args.rank, args.world, dist.barrier
        self.module = language.decoder(WIDTH, LAYERS, CONTEXT)
        self.model = data_parallel(args.name == "symcomm", self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=RATE, betas=(0.9, 0.98))
        self.data = torch.frombuffer(bytearray(language.own_source()), dtype=torch.uint8)
        self.draw = torch.Generator().manual_seed(1 + self.rank)  # every rank reads other places, the same on each side
        self.clock = PassTimes()
        self.done = 0
        self.warm_up()

    def backward(self) -> float:
        """Forward and backward on texts from random places; the gradients are the mean of all ranks'."""
        texts = language.draw_texts(self.data, CONTEXT + 1, BATCH, self.draw)
        loss = language.loss_of(self.model, texts)
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
        """The same passes without communication. They teach nothing and count in no speed."""
        begin = time.perf_counter()
        with self.model.no_sync():
            self.backward()
        self.clock.plain.append(time.perf_counter() - begin)
        self.optimizer.zero_grad()

    def set_rate(self, steps: int) -> None:
        """The learning rate rises briefly, then falls linearly."""
        part = min(1.0, (self.done + 1) / 20) * max(0.1, 1 - self.done / steps)
        self.optimizer.param_groups[0]["lr"] = RATE * part

    def warm_up(self) -> None:
        """Steps that teach nothing: the first are slower, since buckets regroup and memory is touched."""
        self.optimizer.param_groups[0]["lr"] = 0.0
        for _ in range(WARM_UP):
            self.step()
        self.probe()
        self.clock = PassTimes()

    def train(self, count: int, steps: int) -> dict[str, Any]:
        """The next ``count`` of ``steps`` steps; returns how each went."""
        self.barrier()
        lines = []
        for _ in range(count):
            self.set_rate(steps)
            loss = self.step()
            self.done += 1
            tokens = self.done * BATCH * CONTEXT * self.world
            lines.append({"step": self.done, "loss": loss, "seconds": sum(self.clock.steps), "tokens": tokens})
        self.probe()
        return {"lines": [line | {"share": self.clock.share()} for line in lines]}

    def sample(self) -> dict[str, str]:
        return {"sample": language.sample(self.module, "def ", 300)}


if __name__ == "__main__":
    serve(DemoTraining)
