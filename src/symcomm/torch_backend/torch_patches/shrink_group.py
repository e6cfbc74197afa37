"""What: ``shrink_group`` asks groups of ours.
Why: torch refuses it to every backend but NCCL.
Versions: all that have it.
Undo: the function is torch's again.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from symcomm import errors
from symcomm.torch_backend.torch_patches.patch import add_to_world, ask_ours_first, our_group
from symcomm.undo import Undo


def apply() -> Undo:
    return ask_ours_first("shrink_group", _shrink_group)


def _shrink_group(ranks_to_exclude: Any, group: Any = None, shrink_flags: int = 0, pg_options: Any = None) -> Any:
    target = our_group(group)
    if target is None:
        return NotImplemented
    _check_shrink(target, ranks_to_exclude, shrink_flags)
    is_default = target is c10d._get_default_group()
    stay = [r for k, r in enumerate(c10d.get_process_group_ranks(target)) if k not in set(ranks_to_exclude)]
    smaller = target.shrink(ranks_to_exclude, shrink_flags, pg_options)
    smaller._set_group_name(f"{target.group_name}-{len(stay)}")
    backend, store = c10d._world.pg_map[target]
    if is_default:
        # Ranks get new numbers, which groups made with the old ones do not know.
        for other in [g for g in c10d._world.pg_map if g is not target]:
            other.abort()
        dist.destroy_process_group()
        c10d._update_default_pg(smaller)
    else:
        dist.destroy_process_group(target)
    desc = "default:shrunken" if is_default else smaller.group_desc
    return add_to_world(smaller, backend, store, desc, range(len(stay)) if is_default else stay)


def _check_shrink(group: Any, exclude: Any, flags: Any) -> None:
    call, size = "shrink_group", group.size()
    if not isinstance(exclude, list) or not all(isinstance(r, int) for r in exclude):
        raise TypeError(f"{call}: ranks_to_exclude must be a list of whole numbers, got {exclude!r}.")
    if not exclude or len(set(exclude)) != len(exclude) or not set(exclude) < set(range(size)):
        allowed = f"at least one rank of the group (0 to {size - 1}), not all of them, none twice"
        raise errors.bad_argument(call, "ranks_to_exclude", exclude, allowed)
    if flags not in (0, 1):
        raise errors.bad_argument(call, "shrink_flags", flags, "SHRINK_DEFAULT (0) or SHRINK_ABORT (1)")
    if group.rank() in exclude:
        raise errors.CallerError(
            f"{call}: rank {group.rank()} is in the exclusion list and must not call it; end that process instead."
        )
