"""Registers the backend "symcomm" with torch.

torch loads this through the ``torch.backends`` entry point while it is being imported, so it stays light: the group's
code is loaded when the first group is made.

``SYMCOMM_REPLACE=gloo`` makes every request for Gloo give Symcomm instead, for scripts that name it.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

_REPLACES = "replace_gloo"


def create(options: Any, backend_options: Any = None) -> Any:
    """Called by torch on every member of a new group."""
    import torch.distributed as dist

    from symcomm.torch_backend import torch_patches, versions
    from symcomm.torch_backend.group import TorchGroup
    from symcomm.torch_backend.reconfigure import EmptyCore, wants_reconfigure

    versions.warn_if_untested()
    members = list(options.global_ranks_in_group) or None  # torch names none for the default group
    if _REPLACES in torch_patches.applied() and (members or range(options.group_size))[options.group_rank] == 0:
        from symcomm.torch_backend.torch_patches.replace_gloo import say_replaced

        say_replaced()
    empty: Any = EmptyCore(options) if wants_reconfigure(options, backend_options) else None
    group = TorchGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        str(options.group_id),
        members,
        backend_options,
        empty,
        label="" if members else "world",
    )
    if empty is None and dist.get_debug_level() == dist.DebugLevel.DETAIL:
        group.enable_debug_checks()
    return group


def autoload() -> None:
    """Called by torch when it starts. Does nothing in a build of torch without distributed."""
    import torch.distributed as dist

    if dist.is_available():
        register()


def register() -> None:
    """Make ``init_process_group("symcomm")`` work. Idempotent."""
    import torch.distributed as dist

    from symcomm.torch_backend import torch_patches

    if "SYMCOMM" in dist.Backend._plugins:
        return
    dist.Backend.register_backend("symcomm", create, extended_api=True, devices=["cpu", "cuda"])
    torch_patches.apply(*torch_patches.AT_IMPORT)
    if os.environ.get("SYMCOMM_HEAP"):
        torch_patches.apply("cpu_allocator")
    wanted = os.environ.get("SYMCOMM_REPLACE", "")
    if "gloo" in wanted.lower().split(","):
        torch_patches.apply(_REPLACES)
    elif wanted:
        warnings.warn(f"SYMCOMM_REPLACE must be gloo, got {wanted!r}: nothing is replaced.", stacklevel=2)
