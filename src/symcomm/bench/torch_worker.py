"""What workers that run programs of torch share: how their ranks meet, what they write, how steps are timed."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from symcomm.bench.worker import GROUP_TIMEOUT


def read_plan() -> dict[str, Any]:
    """The plan for a rank that runs all of it by itself; see plans.py."""
    faulthandler.register(signal.SIGUSR1, 2, all_threads=False)  # asks where this rank is
    plan: dict[str, Any] = json.loads(sys.argv[-1])
    return plan


def say(what: Any) -> None:
    """Rank 0 writes for all: progress in words, or results as JSON."""
    if os.environ["RANK"] == "0":
        print(what if isinstance(what, str) else json.dumps(what), flush=True)


def join(backend: str, args: SimpleNamespace, store: Any = None) -> Any:
    """torch.distributed with its default group, whose ranks have met in ``store``, or in their file."""
    import torch.distributed as dist

    from symcomm.torch_backend.register import register

    register()
    dist.init_process_group(
        backend, store=store or dist.FileStore(args.store, args.world), rank=args.rank, world_size=args.world,
        timeout=timedelta(seconds=GROUP_TIMEOUT),
    )  # fmt: skip
    return dist


def data_parallel(ours: bool, module: Any) -> Any:
    """Symcomm's, or torch's with gradients in the buckets, torch's faster mode."""
    if ours:
        from symcomm.ddp import DistributedDataParallel

        return DistributedDataParallel(module)
    from torch.nn import parallel

    return parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)


def time_steps(barrier: Callable[[], Any], step: Callable[[], Any], steps: int) -> dict[str, list[float]]:
    """Seconds of each step; a first one is not counted."""
    gc.collect()
    barrier()
    step()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds}
