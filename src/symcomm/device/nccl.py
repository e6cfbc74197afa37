"""NCCL, through torch: between different GPUs, for tensors without gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import forward_ad
from torch.cuda import nccl
from torch.nn.parallel import comm as torch_comm


def recorded(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether autograd, in either mode, tracks one of these tensors. It cannot see what NCCL does."""
    grad = torch.is_grad_enabled()
    return any((grad and t.requires_grad) or forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def can_broadcast(tensor: torch.Tensor, devices: Sequence[torch.device]) -> bool:
    return (
        tensor.is_cuda
        and tensor.layout is torch.strided
        and not tensor.is_complex()
        and len(devices) > 1
        and tensor.device in devices
        and len(set(devices)) == len(devices)
        and all(d.type == "cuda" for d in devices)
        and not recorded([tensor])
    )


def broadcast(tensor: torch.Tensor, devices: Sequence[torch.device]) -> tuple[torch.Tensor, ...]:
    """A copy for each device, the tensor itself on its own. If torch's NCCL cannot do it, torch copies."""
    return tuple(torch_comm.broadcast(tensor, [d.index for d in devices]))


def can_add(tensors: Sequence[torch.Tensor], device: torch.device) -> bool:
    return (
        len(tensors) > 1
        and all(t.is_cuda for t in tensors)
        and any(t.device == device for t in tensors)
        and not tensors[0].is_complex()
        and not recorded(tensors)
        and nccl.is_available(tensors)
    )


def add(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum on ``device``, where one of the tensors is."""
    total = torch.empty_like(tensors[0], device=device)
    root = next(i for i, t in enumerate(tensors) if t.device == device)
    nccl.reduce(list(tensors), output=total, root=root)
    return total
