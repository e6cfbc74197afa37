"""Tells torch that there is a backend named "symcomm".

torch loads this through the ``torch.backends`` entry point while it is being imported, so nothing heavy happens here:
the group's code is loaded when the first group is made.

``SYMCOMM_REPLACE=gloo`` makes every request for Gloo give Symcomm instead, for scripts that name it.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from typing import Any

__all__ = ["autoload", "register"]


def create(options: Any, backend_options: Any = None) -> Any:
    """Called by torch on every member of a new group."""
    import torch.distributed as dist

    from symcomm.backend import inductor, versions
    from symcomm.backend.functional import install
    from symcomm.backend.group import TorchGroup
    from symcomm.backend.reconfigure import EmptyCore, wants_reconfigure
    from symcomm.backend.recorder import show_ours

    versions.warn_if_untested()
    members = list(options.global_ranks_in_group) or None  # torch names none for the default group
    if _replaced and (members or range(options.group_size))[options.group_rank] == 0:
        _say_replaced()
    install()
    show_ours()
    inductor.when_loaded()
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
        group.be_careful()
    return group


def autoload() -> None:
    """What torch calls when it starts. Does nothing in a build of torch without distributed."""
    import torch.distributed as dist

    if dist.is_available():
        register()


def register() -> None:
    """Make ``init_process_group("symcomm")`` work. Harmless when called twice."""
    import torch.distributed as dist

    from symcomm.backend.teach import teach

    if "SYMCOMM" in dist.Backend._plugins:
        return
    dist.Backend.register_backend("symcomm", create, extended_api=True, devices=["cpu", "cuda"])
    teach()
    wanted = os.environ.get("SYMCOMM_REPLACE", "")
    if "gloo" in wanted.lower().split(","):
        _replace_gloo()
    elif wanted:
        warnings.warn(f"SYMCOMM_REPLACE must be gloo, got {wanted!r}: nothing is replaced.", stacklevel=2)


_replaced: list[str] = []  # backends whose groups we make


@functools.cache  # once a process
def _say_replaced() -> None:
    print(
        "symcomm: SYMCOMM_REPLACE=gloo is set: groups asked of gloo are made by symcomm.", file=sys.stderr, flush=True
    )


def _replace_gloo() -> None:
    """Every place where torch turns a name into a backend goes through Backend(name), but for the newest interface."""
    import torch.distributed as dist

    from symcomm.backend.versions import dist2_factories

    make = dist.Backend.__new__

    def rename(cls: Any, name: str) -> Any:
        if isinstance(name, str):
            name = ",".join(
                ":".join("symcomm" if word.lower() == "gloo" else word for word in part.split(":"))
                for part in name.split(",")
            )
        return make(cls, name)

    _replaced.append("gloo")
    dist.Backend.__new__ = staticmethod(rename)
    for device, name in dist.Backend.default_device_backend_map.items():
        if name == "gloo":
            dist.Backend.default_device_backend_map[device] = "symcomm"
    factories = dist2_factories()
    if "gloo" in factories:
        factories["gloo"] = factories["symcomm"]
