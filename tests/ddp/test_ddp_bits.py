"""DistributedDataParallel and its hooks add gradients as one tree over ranks: bit for bit that of NumPy."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import symcomm
from symcomm.collectives.tree import combine
from symcomm.ddp.hooks import BlockwiseState, CastState, blockwise_hook, cast_hook
from tests.support.ddp_jobs import dressed

pytestmark = [pytest.mark.torch_versions, pytest.mark.long]

COUNT = 600  # parameters of each of two layers
BF16, FP16 = torch.bfloat16, torch.float16


class Weights(nn.Module):
    """The gradient of each weight is what is passed in."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(COUNT, dtype=dtype)) for _ in "ab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.cat(tuple(self.parts)) * x).sum()


def gradient(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of sizes so different that another order of additions gives other bits."""
    draw = np.random.Generator(np.random.PCG64(rank))
    values = draw.standard_normal(2 * COUNT) * np.exp2(draw.integers(-9, 6, 2 * COUNT))
    return torch.from_numpy(values.astype(np.float32)).to(dtype)


def averaged(group: Any, hook: Any, dtype: torch.dtype) -> torch.Tensor:
    torch_group = dressed(group)
    kind = symcomm.DistributedDataParallel
    model = kind(Weights(dtype), process_group=torch_group, bucket_cap_mb=0.001)
    if isinstance(hook, str):
        model._register_builtin_comm_hook(getattr(torch.distributed.BuiltinCommHookType, hook))
    elif hook is not None:
        model.register_comm_hook(*hook(torch_group))
    for _ in range(2):  # the second time in buckets that were rebuilt
        model.zero_grad()
        model(gradient(group.rank, dtype)).backward()
    assert len(model.reducer.buckets) == 2
    return torch.cat([p.grad for p in model.module.parts])


def tree(shares: list[torch.Tensor]) -> torch.Tensor:
    """The sum of ``shares``, by NumPy: 16-bit floats in float32, and rounded once."""
    small = shares[0].dtype in (BF16, FP16)
    arrays = [(share.float() if small else share).numpy() for share in shares]
    return torch.from_numpy(combine(np.add, arrays)).to(shares[0].dtype)


def plainly(shares: list[torch.Tensor]) -> torch.Tensor:
    """PyTorch multiplies by 1 / ranks first; so do we."""
    return tree([share * (1.0 / len(shares)) for share in shares])


def divided(shares: list[torch.Tensor]) -> torch.Tensor:
    return tree([share / len(shares) for share in shares])


def cast(shares: list[torch.Tensor]) -> torch.Tensor:
    """Divided, and then rounded."""
    return tree([(share / len(shares)).to(BF16) for share in shares]).float()


def compressed(dtype: torch.dtype) -> Any:
    """PyTorch's hooks round first, and divide then."""
    return lambda shares: tree([share.to(dtype) / len(shares) for share in shares]).float()


def blockwise(shares: list[torch.Tensor]) -> torch.Tensor:
    codec, world, means = BLOCKWISE().codec, len(shares), []
    for flats in zip(*(share.split(COUNT) for share in shares), strict=True):  # of one bucket
        blocks, block = codec.shape(COUNT, world)
        padded = [nn.functional.pad(f, (0, world * blocks * block - COUNT)).view(world, blocks, block) for f in flats]
        mean = tree([codec.unpack(codec.pack(values), blocks, torch.float32) for values in padded]) / world
        means.append(codec.unpack(codec.pack(mean), blocks, torch.float32).view(-1)[:COUNT])
    return torch.cat(means)


BLOCKWISE = partial(BlockwiseState, torch.int8, 64, error_feedback=False)
F32 = torch.float32
# hook, dtype of gradients, what is expected
CASES: dict[str, tuple[Any, torch.dtype, Any]] = {
    "no hook": (None, F32, plainly),
    "float64": (None, torch.float64, plainly),
    "bfloat16": (None, BF16, plainly),
    "ALLREDUCE": ("ALLREDUCE", F32, divided),
    "FP16_COMPRESS": ("FP16_COMPRESS", F32, compressed(FP16)),
    "allreduce_hook": (lambda group: (group, default_hooks.allreduce_hook), F32, divided),
    "bf16_compress_hook": (lambda group: (group, default_hooks.bf16_compress_hook), F32, compressed(BF16)),
    "cast_hook": (lambda group: (CastState(BF16, group, error_feedback=False), cast_hook), F32, cast),
    "blockwise_hook": (lambda group: (BLOCKWISE(process_group=group), blockwise_hook), F32, blockwise),
}


@pytest.mark.parametrize("ranks", [4, 5])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_tree_over_ranks(name: str, ranks: int):
    hook, dtype, reference = CASES[name]
    wanted = reference([gradient(rank, dtype) for rank in range(ranks)])
    for got in symcomm.spawn(averaged, ranks, (hook, dtype), mode="threads", deadline=60):
        assert torch.equal(got, wanted)


def test_another_order_would_be_seen():
    shares = [gradient(rank) / 4 for rank in range(4)]
    assert not torch.equal(tree(shares), ((shares[0] + shares[1]) + shares[2]) + shares[3])
