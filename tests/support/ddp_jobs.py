"""One small training with a communication hook, with threads as ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn

import symcomm.ddp
from symcomm.torch_backend.group import TorchGroup

DIM, WIDTH, STEPS = 16, 64, 60
INT8, FP8, BF16, FP16 = torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16


def dressed(group: Any) -> TorchGroup:
    """One of our groups as torch wants it."""
    lifetime = timedelta(seconds=30)
    return TorchGroup(None, group.rank, group.size, lifetime, group.name, group.global_ranks, None, group)


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same weights on every call, without touching the generator that all threads share."""
    source = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=source) / parameter.shape[-1] ** 0.5)
    return model.to(dtype)


def parallel(model: nn.Module, group: TorchGroup, kind: Any = None, **options: Any) -> nn.Module:
    """DistributedDataParallel with small buckets, so that there are several. ``kind``: the class, torch's by
    default."""
    kind = kind or nn.parallel.DistributedDataParallel
    return kind(model, process_group=group, bucket_cap_mb=0.004, **options)


def batch(data: torch.Generator, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, DIM, generator=data)
    y = torch.stack([x[:, :4].sum(1), x[:, 4] * x[:, 5], x[:, 6].sin(), x[:, 7].abs()], 1)
    return x.to(dtype), y.to(dtype)


def fixed_loss(model: nn.Module, dtype: torch.dtype = torch.float32) -> float:
    """The loss on data that is the same on every rank and in every run."""
    x, y = batch(torch.Generator().manual_seed(99), dtype)
    with torch.no_grad():
        return (model(x) - y).square().mean().item()


def nothing() -> None:
    """Called after a step of plain training."""


def train(
    model: nn.Module,
    rank: int,
    steps: int,
    after: Callable[[], Any] = nothing,
    dtype: torch.dtype = torch.float32,
    skip: int = 0,
) -> None:
    """``steps`` steps on this rank's data, beginning after ``skip`` batches of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank + 1)
    for step in range(skip + steps):
        x, y = batch(data, dtype)
        if step >= skip:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            after()


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def job(
    group: Any, make: Any, hook: Any, dtype: torch.dtype = torch.float32, steps: int = STEPS, kind: Any = None
) -> tuple:
    """One rank of a training run: final loss, weights, share of bytes saved, bytes sent and plain."""
    torch_group = dressed(group)
    model = small_model(dtype)
    wrapped = parallel(model, torch_group, kind)
    state = make(model, torch_group) if make is not None else None
    if state is not None:
        wrapped.register_comm_hook(state, hook)
    after = getattr(state, "step", nothing)
    train(wrapped, group.rank, steps, after, dtype)
    counted = (state.saved, state.bytes_sent, state.bytes_plain) if state is not None else (0.0, 0, 0)
    return fixed_loss(model, dtype), weights_of(model), *counted


def run(make: Any, hook: Any = None, n: int = 3, **options: Any) -> list[tuple]:
    return symcomm.spawn(lambda group: job(group, make, hook, **options), n, mode="threads", deadline=90)


class Bucket:
    """A GradBucket of parameters made on the spot: hooks need no more than this."""

    def __init__(self, parameters: list[Any], gradients: list[torch.Tensor], last: bool = True):
        self._parameters, self._last = parameters, last
        self._buffer = torch.cat([g.flatten() for g in gradients])
        pieces = self._buffer.split([g.numel() for g in gradients])
        self._gradients = [piece.view(g.shape) for piece, g in zip(pieces, gradients, strict=True)]

    def index(self) -> int:
        return 0

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients

    def parameters(self) -> list[Any]:
        return self._parameters

    def is_last(self) -> bool:
        return self._last
