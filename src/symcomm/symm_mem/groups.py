"""Finds the group that a caller means: one of ours, one of torch's, the name of either, or None."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from symcomm import errors
from symcomm.group import registry
from symcomm.group.default import default_group, is_initialized, join_ranks
from symcomm.group.factory import make_group
from symcomm.group.process_group import DEFAULT_TIMEOUT, ProcessGroup
from symcomm.memory.arena import current_arena

_announced: dict[tuple[bytes, str], tuple[int, int, Any]] = {}  # (arena, name) -> rank, world size, store
_made: dict[tuple[bytes, str], ProcessGroup] = {}


def set_group_info(group_name: str, rank: int, world_size: int, store: Any) -> None:
    """Announce a group of that name; it is made when rendezvous() first needs it.

    Raises: BadArgumentError."""
    key = (current_arena().nonce, group_name)
    if key in _announced or registry.find(group_name) is not None:
        raise errors.bad_argument("set_group_info", "group_name", group_name, "a name that is not taken")
    if world_size < 1 or not 0 <= rank < world_size:
        raise errors.bad_argument("set_group_info", "rank and world_size", (rank, world_size), "a rank of that many")
    _announced[key] = (rank, world_size, store)


def of(group: Any = None) -> ProcessGroup:
    """The group of ours under ``group``: one that torch made with backend "symcomm", a name, or None for the default
    group. Its calls cost a microsecond; torch's functions take several before they call it.

    Raises: BadArgumentError."""
    return find_group("of", group)


def find_group(call: str, group: Any) -> ProcessGroup:
    """``group`` as one of ours, or an error that lists the known groups."""
    found = look_up(group)
    if found is not None:
        return found
    if group is None:
        return default_group()  # raises, since there is none
    if not isinstance(group, str):
        fix = 'make it with backend="symcomm"' if _is_torch_group(group) else ""
        raise errors.bad_argument(call, "group", type(group).__name__, "a ProcessGroup, its name, or None", fix)
    names = [repr(name) for name in registry.names()] or ["none yet"]
    raise errors.bad_argument(
        call, "group", group, f"the name of a group of this rank: {', '.join(names)}",
        "call symcomm.init(), new_group(name=...) or set_group_info() first",
    )  # fmt: skip


def look_up(group: Any) -> ProcessGroup | None:
    """``group`` as one of ours, or None if it is not on Symcomm."""
    if group is None:
        return default_group() if is_initialized() else _core_of(_torch_default())
    if not isinstance(group, str):
        return _core_of(group)
    return registry.find(group) or _announced_group(group) or _core_of(_torch_group(group))


def is_known(group_name: str) -> bool:
    """Whether a group of that name is on Symcomm, or can be made. Does not make it."""
    announced = (current_arena().nonce, group_name) in _announced
    return announced or registry.find(group_name) is not None or _core_of(_torch_group(group_name)) is not None


def _announced_group(name: str) -> ProcessGroup | None:
    """The group that set_group_info() announced, made on first use."""
    key = (current_arena().nonce, name)
    if key not in _announced:
        return None
    rank, world, store = _announced[key]
    from symcomm.store import PrefixStore

    meeting_place = PrefixStore(f"symm_mem/{name}", store)
    all_ranks = look_up(None)  # if it is of the same size, its ranks are the same
    check = None
    if all_ranks is not None and (all_ranks.rank, all_ranks.size) == (rank, world):
        check = all_ranks.watch(range(world), f"making group {name!r}")
    make = partial(make_group, name=name)
    _made[key] = join_ranks(meeting_place, rank, world, DEFAULT_TIMEOUT, make, check=check)
    return _made[key]


# --- torch's -----------------------------------------------------------------------------------------


def _core_of(group: Any) -> ProcessGroup | None:
    """A group of ours, or the one under a group of torch's: those are above this layer, and have a ``core``."""
    core = getattr(group, "core", group)
    if isinstance(core, ProcessGroup):
        return core
    if not hasattr(group, "_get_backend"):
        return None
    import torch

    try:  # a group with a backend for each kind of device
        core = getattr(group._get_backend(torch.device("cpu")), "core", None)
    except RuntimeError:
        return None
    return core if isinstance(core, ProcessGroup) else None


def _is_torch_group(group: Any) -> bool:
    dist = _torch_distributed()
    return dist is not None and isinstance(group, dist.ProcessGroup)


def _torch_distributed() -> Any:
    """torch.distributed, if the program has loaded it and this build has it."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() else None


def _torch_default() -> Any:
    dist = _torch_distributed()
    return dist.group.WORLD if dist is not None and dist.is_initialized() else None


def _torch_group(name: str) -> Any:
    dist = _torch_distributed()
    if dist is None:
        return None
    try:
        return dist.distributed_c10d._resolve_process_group(name)
    except RuntimeError:  # torch does not know the name either
        return None
