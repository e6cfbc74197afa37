"""broadcast, scatter and gather under the names of torch's own extension module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from symcomm.device import copies
from symcomm.device.coalesce import broadcast_coalesced as _broadcast_coalesced

__all__ = [
    "_broadcast", "_broadcast_coalesced", "_broadcast_out", "_gather", "_gather_out", "_scatter", "_scatter_out",
]  # fmt: skip


def _broadcast(tensor: torch.Tensor, devices: Sequence[Any]) -> list[torch.Tensor]:
    return list(copies.broadcast(tensor, devices))


def _broadcast_out(tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(copies.broadcast(tensor, out=out))


def _scatter(
    tensor: torch.Tensor, devices: Sequence[Any], chunk_sizes: Sequence[int] | None, dim: int, streams: Any = None
) -> list[torch.Tensor]:
    return list(copies.scatter(tensor, devices, chunk_sizes, dim, streams))


def _scatter_out(
    tensor: torch.Tensor, out: Sequence[torch.Tensor], dim: int, streams: Any = None
) -> list[torch.Tensor]:
    return list(copies.scatter(tensor, dim=dim, streams=streams, out=out))


def _gather(tensors: Sequence[torch.Tensor], dim: int, destination_index: Any = None) -> torch.Tensor:
    return copies.gather(tensors, dim, destination_index)


def _gather_out(tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    return copies.gather(tensors, dim, out=out)
