"""Helpers for patches of torch.distributed; those for every change of torch are in ``symcomm.undo``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from symcomm.torch_backend import versions
from symcomm.undo import Undo, all_of, replace


def replace_function(name: str, value: Any) -> Undo:
    """Replace a function of torch.distributed; private ones are in its inner module only."""
    owners = [owner for owner in (c10d, dist) if name in vars(owner)]
    return all_of(*(replace(owner, name, value) for owner in owners))


def ask_ours_first(name: str, ours: Callable[..., Any]) -> Undo:
    """Make a function of torch.distributed, if this version has it, ask ``ours`` first. That returns NotImplemented for
    calls that it does not handle."""
    known = versions.present(c10d, [name]).get(name)
    if known is None:
        return all_of()

    @functools.wraps(known)
    def either(*args: Any, **kwargs: Any) -> Any:
        answer = ours(*args, **kwargs)
        return known(*args, **kwargs) if answer is NotImplemented else answer

    return replace_function(name, either)


def our_group(group: Any) -> Any:
    """``group``, or the default group, if it is ours and this rank is in it; else None."""
    target = group if group is not None else c10d._get_default_group()
    return target if getattr(target, "is_symcomm", False) else None


def add_to_world(group: Any, backend: str, store: Any, desc: str, ranks: Sequence[int]) -> Any:
    """Register ``group`` with torch. ``ranks``: each member's global rank."""
    name = group.group_name
    group._set_group_desc(desc)
    c10d._world.pg_map[group] = (backend, store)
    c10d._world.pg_names[group] = name
    c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(backend)))
    c10d._world.pg_group_ranks[group] = {r: k for k, r in enumerate(ranks)}
    c10d._world.pg_to_tag[group] = f"ptd:{name}"
    for tag in ("", f"ptd:{name}"):
        c10d._world.tags_to_pg.setdefault(tag, []).append(group)
    c10d._register_process_group(name, group)
    return group
