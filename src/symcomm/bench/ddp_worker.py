"""One rank of one side of `symcomm bench ddp`: a model, trained step by step when the controller asks for it.

order      answer
prepare    {"parameters": how many numbers the model has}
check      {"losses": of the first steps, "gradients": samples, by parameter, "parameters": a checksum}
time       {"seconds": [one step, ...]}
memory     {"peak": bytes it had at most, "share": bytes it has, where memory of k processes counts 1/k in each}

Sides: "alone" does not communicate at all; "gloo" and "symcomm" are torch's DistributedDataParallel on that backend;
"ours" is symcomm.ddp's on the symcomm backend.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from symcomm.bench.model import SYMBOLS, decoder
from symcomm.bench.torch_worker import data_parallel, join, time_steps
from symcomm.bench.worker import serve

BATCHES = 4  # prepared batches, used in turns
CONTEXT = 64  # characters the transformer sees at once
SAMPLES = 16  # compared elements of each gradient


# --- models: name -> (module, inputs of a batch, what is wanted, loss), from a scale that divides their width ---------


def linear(scale: int) -> tuple[Any, Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """12 layers of 1024 x 1024, batch 16: 12.6 M parameters and little arithmetic, so communication weighs most."""
    import torch

    width = 1024 // scale
    module = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(12)))

    def numbers(draw: Any) -> Any:
        return torch.randn(16, width, generator=draw)

    return module, numbers, numbers, torch.nn.functional.mse_loss


def transformer(scale: int) -> tuple[Any, Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """A decoder of 4 layers, 256 wide, 2 texts of 64 characters a step: 3.3 M parameters."""
    import torch

    def text(draw: Any) -> Any:
        return torch.randint(SYMBOLS, (2, CONTEXT), generator=draw)

    def loss(logits: Any, wanted: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    return decoder(256 // scale, 4, CONTEXT), text, text, loss


def conv(scale: int) -> tuple[Any, Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Three convolutions with batch norm and two linear layers, 8 pictures of 32 x 32: 0.6 M parameters, 9 buffers."""
    import torch
    from torch import nn

    channels = [3, *(width // scale for width in (32, 64, 128))]
    layers: list[Any] = []
    for before, after in itertools.pairwise(channels):
        convolve = nn.Conv2d(before, after, 3, padding=1, bias=False)  # batch norm would remove a bias
        layers += [convolve, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(channels[-1] * 16, 256 // scale), nn.ReLU(), nn.Linear(256 // scale, 10)]

    def pictures(draw: Any) -> Any:
        return torch.randn(8, 3, 32, 32, generator=draw)

    def classes(draw: Any) -> Any:
        return torch.randint(10, (8,), generator=draw)

    return nn.Sequential(*layers), pictures, classes, nn.functional.cross_entropy


MODELS = {"linear": linear, "transformer": transformer, "conv": conv}


# --- sides -------------------------------------------------------------------------------------------------------


@dataclass
class DdpSide:
    rank: int
    world: int
    communicates: bool
    wrap: Callable[[Any], Any]  # module -> what is trained
    barrier: Callable[[], Any]


def make_side(args: SimpleNamespace) -> DdpSide:
    import torch

    torch.set_num_threads(1)
    if args.name == "alone":
        return DdpSide(args.rank, args.world, False, lambda module: module, lambda: None)
    dist = join("gloo" if args.name == "gloo" else "symcomm", args)
    return DdpSide(args.rank, args.world, True, functools.partial(data_parallel, args.name == "ours"), dist.barrier)


# --- training ----------------------------------------------------------------------------------------------------


class DdpTraining:
    """One model on one rank of one side. All sides begin with the same parameters and see the same batches."""

    def __init__(self, side: DdpSide, model: str, scale: int):
        import torch

        warm_up(model)
        self.before = reset_peak()
        self.share_before = memory("Pss:")
        self.side = side
        torch.manual_seed(0)
        module, make_inputs, make_wanted, self.loss = MODELS[model](scale)
        self.model = side.wrap(module)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.01)
        ranks = [side.rank] if side.communicates else range(side.world)
        self.batches = {r: [self._batch(make_inputs, make_wanted, r, i) for i in range(BATCHES)] for r in ranks}
        self.steps = 0

    @staticmethod
    def _batch(make_inputs: Callable[..., Any], make_wanted: Callable[..., Any], rank: int, number: int) -> Any:
        import torch

        draw = torch.Generator().manual_seed(1 + rank * BATCHES + number)
        return make_inputs(draw), make_wanted(draw)

    def backward(self, rank: int, share: float = 1.0) -> float:
        """Add the gradients of ``share`` times the loss of that rank's next batch."""
        inputs, wanted = self.batches[rank][self.steps % BATCHES]
        loss = self.loss(self.model(inputs), wanted)
        (loss * share if share != 1.0 else loss).backward()
        return float(loss.detach())

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.backward(self.side.rank)
        self.optimizer.step()
        self.steps += 1
        return loss

    def reference_step(self) -> float:
        """The step to compare with: one process that sees the batches of all ranks."""
        self.optimizer.zero_grad()
        losses = [self.backward(rank, 1 / self.side.world) for rank in range(self.side.world)]
        self.optimizer.step()
        self.steps += 1
        return losses[self.side.rank]

    def check(self, steps: int) -> dict[str, Any]:
        """Train some steps; tell losses, gradients and parameters."""
        step = self.step if self.side.communicates else self.reference_step
        losses = [step() for _ in range(steps)]
        crc = 0
        for parameter in self.parameters:
            crc = zlib.crc32(parameter.detach().numpy().tobytes(), crc)
        return {"losses": losses, "gradients": [describe(p.grad) for p in self.parameters], "parameters": crc}

    def memory(self) -> dict[str, int]:
        """What the model and its training need, beyond what the process had before."""
        return {"peak": memory("VmHWM:") - self.before, "share": memory("Pss:") - self.share_before}


def warm_up(model: str) -> None:
    """One step of a tiny model, so that torch's own code is loaded before we count the model's memory."""
    import torch

    module, make_inputs, make_wanted, loss = MODELS[model](16)
    draw = torch.Generator().manual_seed(0)
    loss(module(make_inputs(draw)), make_wanted(draw)).backward()
    torch.optim.SGD(module.parameters(), lr=0.01).step()


def describe(gradient: Any) -> dict[str, Any]:
    """Some of a gradient's elements, and their usual size."""
    flat = gradient.detach().flatten()
    some = flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES]
    return {"some": some.tolist(), "size": float(flat.norm()) / math.sqrt(len(flat))}


# --- memory ------------------------------------------------------------------------------------------------------


def memory(field: str) -> int:
    """A figure that the kernel keeps about this process, in bytes."""
    with open(f"/proc/self/{'smaps_rollup' if field == 'Pss:' else 'status'}") as figures:
        line = next(line for line in figures if line.startswith(field))
    return int(line.split()[1]) << 10


def reset_peak() -> int:
    """Restart the kernel's high-water mark; returns what the process has now."""
    gc.collect()
    with (
        contextlib.suppress(OSError),
        open("/proc/self/clear_refs", "w") as file,
    ):  # then the peak covers the whole life of the process
        file.write("5")
    return memory("VmRSS:")


class DdpOrders:
    """Ranks are not pinned: training jobs are not either."""

    def __init__(self, args: SimpleNamespace):
        self.side, self.rank = make_side(args), args.rank

    def prepare(self, model: str, scale: int) -> dict[str, int]:
        self.training = DdpTraining(self.side, model, scale)
        return {"parameters": sum(p.numel() for p in self.training.parameters)}

    def check(self, steps: int) -> dict[str, Any]:
        return self.training.check(steps)

    def time(self, steps: int) -> dict[str, list[float]]:
        return time_steps(self.side.barrier, self.training.step, steps)

    def memory(self) -> dict[str, int]:
        return self.training.memory()


if __name__ == "__main__":
    serve(DdpOrders)
