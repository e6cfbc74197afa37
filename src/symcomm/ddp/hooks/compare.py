"""``python -m symcomm.ddp.hooks.compare``: what each hook saves and what it costs in loss, measured on a small model.

The same model, data and seed for each; ranks are threads of this process. The loss is taken at the end, on data that
was not trained on.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import symcomm
from symcomm.ddp import hooks
from symcomm.ddp.hooks._state import HookState

__all__ = ["CHOICES", "Result", "compare", "main"]

DIM, WIDTH, BATCH = 32, 128, 32
Make = Callable[[nn.Module], HookState]

# name -> (the state for a model, the hook)
CHOICES: dict[str, tuple[Make, Any]] = {
    "plain all-reduce": (lambda m: HookState(), None),
    "bf16": (lambda m: hooks.CastState(torch.bfloat16), hooks.cast_hook),
    "fp16": (lambda m: hooks.CastState(torch.float16), hooks.cast_hook),
    "fp8, blocks of 256": (lambda m: hooks.BlockwiseState(torch.float8_e4m3fn), hooks.blockwise_hook),
    "int8, blocks of 256": (lambda m: hooks.BlockwiseState(), hooks.blockwise_hook),
    "int8, error feedback": (lambda m: hooks.BlockwiseState(error_feedback=True), hooks.blockwise_hook),
    "top 1 %": (lambda m: hooks.TopKState(0.01), hooks.topk_hook),
    "top 5 %": (lambda m: hooks.TopKState(0.05), hooks.topk_hook),
    "PowerSGD, rank 2": (lambda m: hooks.PowerSGDState(2, start=10), hooks.power_sgd_hook),
    "PowerSGD, rank 4": (lambda m: hooks.PowerSGDState(4, start=10), hooks.power_sgd_hook),
    "local SGD, every 10": (lambda m: hooks.LocalSGDState(m.parameters(), 10), hooks.local_sgd_hook),
    "DiLoCo, every 10": (
        lambda m: hooks.DiLoCoState(m.parameters(), 10, lr=0.7, momentum=0.5),
        hooks.local_sgd_hook,
    ),
    "DiLoCo, every 10, int8": (
        lambda m: hooks.DiLoCoState(m.parameters(), 10, lr=0.7, momentum=0.5, dtype=torch.int8),
        hooks.local_sgd_hook,
    ),
}


class Result(NamedTuple):
    loss: float
    kilobytes_sent: float  # by a rank, in a step
    saved: float


def _batch(source: torch.Generator, count: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and what a network should learn to make of them."""
    x = torch.randn(count, DIM, generator=source)
    y = torch.stack([x[:, :4].sum(1), x[:, 4] * x[:, 5], x[:, 6].sin(), x[:, 7].abs()], 1)
    return x, y


def _model() -> nn.Module:
    source = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=source) / parameter.shape[-1] ** 0.5)
    return model


def _train(group: Any, make: Make, hook: Any, steps: int) -> Result:
    """One rank of one run."""
    model = _model()
    state = make(model)
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=state.process_group, bucket_cap_mb=0.05)
    wrapped.register_comm_hook(state, hook or (lambda state, bucket: state.average(bucket)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(group.rank + 1)
    for _ in range(steps):
        x, y = _batch(data)
        optimizer.zero_grad()
        (wrapped(x) - y).square().mean().backward()
        optimizer.step()
        if isinstance(state, hooks.LocalSGDState):
            state.step()
    x, y = _batch(torch.Generator().manual_seed(99), 512)
    with torch.no_grad():
        loss = (model(x) - y).square().mean().item()
    return Result(loss, state.bytes_sent / steps / 1000, state.saved)


def compare(ranks: int, steps: int) -> dict[str, Result]:
    """Train with each hook in turn; rank 0's results."""
    return {
        name: symcomm.spawn(_train, ranks, (make, hook, steps), mode="threads")[0]
        for name, (make, hook) in CHOICES.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m symcomm.ddp.hooks.compare", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = compare(given.ranks, given.steps)
    plain = results["plain all-reduce"].loss
    print("| hook | kB a rank sends a step | bytes saved | final loss | against plain |")
    print("| --- | --- | --- | --- | --- |")
    for name, got in results.items():
        change = f"{100 * (got.loss / plain - 1):+.1f} %"
        print(f"| {name} | {got.kilobytes_sent:.1f} | {100 * got.saved:.1f} % | {got.loss:.4f} | {change} |")


if __name__ == "__main__":
    main()
