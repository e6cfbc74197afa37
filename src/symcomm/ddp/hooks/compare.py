"""``python -m symcomm.ddp.hooks.compare``: what each hook saves and what it costs in loss, measured on a small model.

Each hook trains the same model on the same data from the same seed; ranks are threads of this process. A network learns
what another one, with fixed random weights, makes of random inputs. The loss is taken at the end, on data that was not
trained on.

``--bucket 25`` measures the processor time of each hook for one bucket of that many megabytes (float32) instead.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import symcomm
from symcomm.ddp import hooks
from symcomm.ddp.hooks._state import HookState

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
    "DiLoCo, every 10": (lambda m: hooks.DiLoCoState(m.parameters(), 10, lr=0.7, momentum=0.5), hooks.local_sgd_hook),
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
    teacher = torch.Generator().manual_seed(7)
    inner, outer = torch.randn(DIM, 16, generator=teacher), torch.randn(16, 4, generator=teacher)
    x = torch.randn(count, DIM, generator=source)
    return x, (x @ inner * (2 / DIM**0.5)).tanh() @ outer / 2


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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
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


class _OneBucket:
    """A bucket of one square matrix, to time hooks with."""

    def __init__(self, megabytes: float):
        side = max(1, int((megabytes * 250_000) ** 0.5))
        self.parameter = nn.Parameter(torch.zeros(side, side))
        self.gradient = torch.randn(side * side)

    def buffer(self) -> torch.Tensor:
        return self.gradient

    def gradients(self) -> list[torch.Tensor]:
        return [self.gradient.view(self.parameter.shape)]

    def parameters(self) -> list[Any]:
        return [self.parameter]

    def is_last(self) -> bool:
        return True


def _time(group: Any, make: Make, megabytes: float) -> float:
    """Milliseconds of processor time that a rank spends on one bucket: the least of 5, after one to warm up.

    Processor time, since elapsed time says little on a machine that others use, too.
    """
    bucket = _OneBucket(megabytes)
    state = make(nn.ParameterList([bucket.parameter]))
    if isinstance(state, hooks.PowerSGDState):
        state.start = 0
    times = []
    for _ in range(6):
        bucket.gradient.normal_()
        group.barrier()
        begun = time.process_time()
        state.average(bucket).wait()
        group.barrier()
        times.append(1e3 * (time.process_time() - begun) / group.size)  # all ranks are in this process
    return min(times[1:])


def _print_times(ranks: int, megabytes: float) -> None:
    print(f"| hook | processor ms of a rank for a bucket of {megabytes:g} MB |")
    print("| --- | --- |")
    for name, (make, hook) in CHOICES.items():
        if hook is not hooks.local_sgd_hook:
            taken = symcomm.spawn(_time, ranks, (make, megabytes), mode="threads")
            print(f"| {name} | {max(taken):.0f} |")


def _print_losses(ranks: int, steps: int) -> None:
    results = compare(ranks, steps)
    plain = results["plain all-reduce"].loss
    print("| hook | kB a rank sends a step | bytes saved | final loss | against plain |")
    print("| --- | --- | --- | --- | --- |")
    for name, got in results.items():
        change = f"{round(100 * (got.loss / plain - 1), 1) + 0.0:+.1f} %"  # + 0.0: no minus before a zero
        print(f"| {name} | {got.kilobytes_sent:.1f} | {100 * got.saved:.1f} % | {got.loss:.4f} | {change} |")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m symcomm.ddp.hooks.compare", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--bucket", type=float, metavar="MB", help="time one bucket of this size instead")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.bucket is not None:
        _print_times(given.ranks, given.bucket)
    else:
        _print_losses(given.ranks, given.steps)


if __name__ == "__main__":
    main()
