"""Which GPU a rank has, and whether ranks can reach each other's memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from symcomm import errors
from symcomm.errors import format_ranks
from symcomm.memory.hosts import boot_id

Result = TypeVar("Result")


def current(device: int) -> Any:
    """Makes ``device`` the current GPU inside a ``with``: the one for driver calls, and for streams without a name."""
    import torch

    return torch.cuda.device(device)


def on_its_device(method: Callable[..., Result]) -> Callable[..., Result]:
    """A decorator: the method runs with its object's GPU as the current one, whatever the caller's is."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **more: Any) -> Result:
        with current(self.device):
            return method(self, *args, **more)

    return run


def need_cuda(call: str) -> None:
    """Raise if torch has no CUDA or the machine no GPU."""
    import torch

    if torch.version.cuda is None:
        raise errors.ResourceError(
            f"{call}: this build of torch ({torch.__version__}) has no CUDA; install one from "
            "https://pytorch.org that has, or use CPU tensors."
        )
    if not torch.cuda.is_available():
        raise errors.ResourceError(f"{call}: torch finds no CUDA GPU on this machine; use CPU tensors.")


def describe(device: int) -> dict[str, Any]:
    """What other ranks must know of this rank's GPU."""
    import torch

    return {"gpu": str(torch.cuda.get_device_properties(device).uuid), "pid": os.getpid(), "host": boot_id()}


def check_reach(group: Any, device: int, everyone: Sequence[dict[str, Any]]) -> None:
    """Raise unless ranks are on one host, on the same GPU or on GPUs that can reach each other's memory."""
    import torch

    mine = everyone[group.rank]
    away = [r for r, info in enumerate(everyone) if info["host"] != mine["host"]]
    if away:
        raise errors.ResourceError(
            f"CUDA tensors on group {group.name!r}: ranks {format_ranks(away)} are on another host; "
            'use backend "cpu:symcomm,cuda:nccl" between hosts.'
        )
    here = {str(torch.cuda.get_device_properties(d).uuid): d for d in range(torch.cuda.device_count())}
    for rank, info in enumerate(everyone):
        other = here.get(info["gpu"])
        if other not in (None, device) and not torch.cuda.can_device_access_peer(device, other):
            raise errors.ResourceError(
                f"CUDA tensors on group {group.name!r}: cuda:{device} cannot reach the memory of rank {rank}'s GPU "
                f'(cuda:{other}); use backend "cpu:symcomm,cuda:nccl" for these.'
            )
