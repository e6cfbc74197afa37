"""Tests that ask for a GPU per rank, run on the CPU.

Most of PyTorch's tests of DistributedDataParallel say ``.cuda(rank)`` and ``device_ids=[rank]``, though nothing in what
they check needs a GPU. Here every GPU is the CPU: devices in calls of torch are replaced, and what only steers GPUs
(streams, synchronize, set_device) does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["NEED_GPUS", "pretend_gpus"]

# What really needs one: SyncBatchNorm refuses the CPU, some ask the model where it is, one takes the CPU an hour.
NEED_GPUS = "SyncBatchNorm|sync_bn|ddp_inference|ddp_logging_data_gpu|ddp_device|ddp_uneven_inputs$"

CPU = torch.device("cpu")
_TAKE_NUMBERS = {torch.Tensor.to, torch.Tensor.cuda}  # calls whose plain numbers may be devices


def _on_cpu(item: Any, numbers: bool = False) -> Any:
    if isinstance(item, torch.device):
        return CPU
    if isinstance(item, str) and item.startswith("cuda"):
        return CPU
    if numbers and type(item) is int:
        return CPU
    return item


class _AllOnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        args = tuple(_on_cpu(a, func in _TAKE_NUMBERS) if i else a for i, a in enumerate(args))
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"], numbers=True)
        return func(*args, **kwargs)


class _Stream:
    """Stands for any stream or event."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _plain(decorated: Any) -> Any:
    return decorated


def pretend_gpus() -> None:
    """To be called before the suite is imported."""
    from torch.testing._internal import common_distributed

    common_distributed.skip_if_no_gpu = _plain
    for name in ("skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend", "require_backend_is_available"):
        setattr(common_distributed, name, lambda *_, **__: _plain)
    helper: Any = {rank: [rank] for rank in range(64)}
    common_distributed.init_multigpu_helper = lambda world_size, backend: helper
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    for module, names in ((torch.cuda, ("Stream", "Event", "device")), (torch, ("Stream", "Event"))):
        for name in names:
            setattr(module, name, type(name, (_Stream,), {}))  # a type each: torch.compile tells them apart
    torch.cuda.current_device = lambda: 0
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,misc,return-value]
    torch.cuda.current_stream = lambda *_: _Stream()  # type: ignore[assignment,misc,return-value]
    torch.accelerator.current_stream = lambda *_: _Stream()  # type: ignore[assignment,misc,return-value]
    parse = torch._C._nn._parse_to  # of Module.to(); nobody's mode is asked
    torch._C._nn._parse_to = lambda *args, **kwargs: parse(
        *[_on_cpu(a, numbers=True) for a in args], **{k: _on_cpu(v, k == "device") for k, v in kwargs.items()}
    )
    _AllOnCpu().__enter__()
