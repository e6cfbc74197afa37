"""Makes our group of the ranks of a torch group, which meet in the store that torch passes."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from symcomm.group.factory import finish_meeting, make_group
from symcomm.group.process_group import ProcessGroup
from symcomm.store.handshake import Exchange, handshake


def store_prefix_of(members: Sequence[int] | None) -> str:
    """A prefix that tells groups apart by their members. Ranks of different groups count groups differently, so torch
    may give two groups the same name, and so the same prefix in the store."""
    return "symcomm" if members is None else f"symcomm/{zlib.crc32(repr(list(members)).encode()):x}"


def _watch(members: Sequence[int]) -> Callable[[], None] | None:
    """A function that raises once one of these ranks is gone; None unless torch's default group is ours."""
    default: Any = dist.group.WORLD if dist.is_initialized() else None
    world = getattr(default, "core", None)
    if world is None and default is not None:
        with contextlib.suppress(RuntimeError):  # it may have no backend for the CPU
            world = getattr(default._get_backend(torch.device("cpu")), "core", None)
    if not isinstance(world, ProcessGroup) or not set(members) <= set(world.global_ranks):
        return None
    return world.watch([world.global_ranks.index(r) for r in members], "new_group()")


def join_group(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    name: str,
    members: Sequence[int] | None,
    check: Callable[[], None] | None,
) -> Any:
    """Make our group of the ranks of a torch group. ``check`` raises once one of them cannot come any more."""

    def build(exchange: Exchange) -> Any:
        core = make_group(rank, size, exchange, name, timeout, None, members)
        finish_meeting(core, exchange)  # the rank that serves the store may exit
        return core

    call = "merge_remote_group" if check is not None else "init_process_group" if members is None else "new_group"
    if check is None and members is not None:
        check = _watch(members)
    return handshake(store, store_prefix_of(members), rank, size, timeout.total_seconds(), build, call, check=check)
