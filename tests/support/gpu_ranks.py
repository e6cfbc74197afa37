"""Ranks with a GPU: how they share it, and how they become a group on it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from symcomm.errors import SymcommError
from tests.support.ranks import START

torch = pytest.importorskip("torch")


@contextlib.contextmanager
def sharing(mps: bool) -> Iterator[None]:
    """Ranks started in here use the GPU at the same time, or take turns.

    The driver's library looks for MPS when it is loaded: a process that was forked later would not find it."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if mps:
            from symcomm.launcher.mps import multi_process_service

            try:
                found = stack.enter_context(multi_process_service())
            except SymcommError as error:
                pytest.skip(f"no MPS here: {error}")
            for name, value in found.items():
                patch.setenv(name, value)
            patch.setenv(START, "spawn")
        yield


def join(rank: int, world: int, store: str, timeout: float = 30) -> Any:
    from symcomm.cuda.driver import driver
    from symcomm.cuda.group import device_group
    from symcomm.group.default import init

    torch.cuda.set_device(0)
    assert driver().has_mps(0) == ("CUDA_MPS_PIPE_DIRECTORY" in os.environ), "MPS is not used as the test says"
    core = init(rank=rank, world_size=world, init_method=f"file://{store}", timeout=timeout)
    gpu = device_group(core, 0)
    gpu.all_reduce(torch.ones(4, device="cuda"))
    gpu.synchronize()
    core.barrier()
    return gpu


def join_torch(rank: int, world: int, store: str) -> Any:
    import torch.distributed as dist

    from symcomm.torch_backend.register import register

    os.environ["LOCAL_RANK"] = "0"
    register()
    torch.cuda.set_device(0)
    dist.init_process_group(
        "symcomm", rank=rank, world_size=world, init_method=f"file://{store}", timeout=timedelta(seconds=40)
    )
    return dist
