"""What: when torch would make a group named "gloo", it makes one of ours. The name stays: asked for its backend, a
group or device answers "gloo". Two modules of torch allow less under that name, because Gloo can do less; they see our
own name.
Why: for scripts that name Gloo, compare names, and cannot be changed.
Versions: all. Applied only where SYMCOMM_REPLACE=gloo is set.
Undo: torch makes groups of Gloo's again.
"""

from __future__ import annotations

import functools
import sys
import threading
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from symcomm.torch_backend import versions
from symcomm.torch_backend.torch_patches.patch import our_group
from symcomm.undo import Undo, all_of, replace

# Under "gloo", all_to_all with gradients becomes a scatter from each rank, and hooks that overlap DDP with ZeRO raise.
TREAT_GLOO_APART = ("torch.distributed.nn.functional", "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook")


class _InMaking(threading.local):
    group = False  # whether this thread is making one


_in_making = _InMaking()


def apply() -> Undo:
    from symcomm.torch_backend.torch_patches import when_imported

    make, known_map = c10d._new_process_group_helper, c10d.BackendConfig.get_device_backend_map

    @functools.wraps(make)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        before, _in_making.group = _in_making.group, True
        try:
            return make(*args, **kwargs)
        finally:
            _in_making.group = before

    def device_backend_map(config: Any) -> dict[str, Any]:
        found = known_map(config)
        if not _in_making.group:
            return found
        return {device: dist.Backend("symcomm") if name == "gloo" else name for device, name in found.items()}

    factories = versions.dist2_factories()
    known_factories = dict(factories)
    if "gloo" in factories:
        factories["gloo"] = factories["symcomm"]
    return all_of(
        lambda: factories.update(known_factories),
        replace(c10d, "_new_process_group_helper", make_group),
        replace(c10d.BackendConfig, "get_device_backend_map", device_backend_map),
        when_imported.watch(TREAT_GLOO_APART),
    )


class _OwnName(ModuleType):
    """torch.distributed, except that ``get_backend`` of our groups is "symcomm"."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def get_backend(group: Any = None) -> Any:
        return dist.Backend("symcomm") if our_group(group) is not None else dist.get_backend(group)


def tell_own_name(module: Any) -> Undo:
    return replace(module, "dist", _OwnName("torch.distributed"))


@functools.cache  # once in a process
def say_replaced() -> None:
    print(
        "symcomm: SYMCOMM_REPLACE=gloo is set: groups asked of gloo are made by symcomm.", file=sys.stderr, flush=True
    )
