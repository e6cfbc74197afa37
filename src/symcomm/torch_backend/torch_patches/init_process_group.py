"""What: ``init_process_group`` waits until rank 0 has left the previous group, and tries again if the store that it
found goes away.
Why: a rank that makes the next group earlier would find the previous group's server, which is about to end.
Versions: all.
Undo: the function is torch's again.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from symcomm.torch_backend import torch_patches
from symcomm.torch_backend.torch_patches.patch import replace_function
from symcomm.undo import Undo


def apply() -> Undo:
    known = c10d.init_process_group

    @functools.wraps(known)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        asked = inspect.signature(known).bind(*args, **kwargs).arguments
        if (life := sys.modules.get("symcomm.torch_backend.lifecycle")) is not None:
            life.await_previous_group()
        end = time.monotonic() + (asked.get("timeout") or c10d.default_pg_timeout).total_seconds()
        while True:
            try:
                return known(*args, **kwargs)
            except dist.DistNetworkError:
                if asked.get("store") is not None or not _is_ours(asked.get("backend")) or time.monotonic() > end:
                    raise
                c10d._world.group_count = 0  # the next attempt's group has the same name, and so the same keys

    return replace_function("init_process_group", init_process_group)


def _is_ours(backend: Any) -> bool:
    """Whether init_process_group(backend) asks for us."""
    ours = ("symcomm", "gloo") if "replace_gloo" in torch_patches.applied() else ("symcomm",)
    return backend is not None and any(name in str(dist.Backend(str(backend))) for name in ours)
