"""What: ``split_group`` asks groups of ours.
Why: torch refuses it to backends that it does not know how to split.
Versions: all that have it; since 2.15 ranks keep the order in which they are named.
Undo: the function is torch's again.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import distributed_c10d as c10d

from symcomm import errors
from symcomm.torch_backend import versions
from symcomm.torch_backend.torch_patches.patch import add_to_world, ask_ours_first, our_group
from symcomm.undo import Undo


def apply() -> Undo:
    return ask_ours_first("split_group", _split_group)


def _split_group(
    parent_pg: Any = None,
    split_ranks: Any = None,
    timeout: Any = None,
    pg_options: Any = None,
    group_desc: Any = None,
    backend: Any = None,
) -> Any:
    parent = our_group(parent_pg)
    if parent is None:
        return NotImplemented
    everybody = c10d.get_process_group_ranks(parent)
    flat = [r for part in split_ranks or [] for r in part]
    if not flat or not all(split_ranks) or len(set(flat)) != len(flat) or not set(flat) <= set(range(len(everybody))):
        raise errors.bad_argument(
            "split_group", "split_ranks", split_ranks,
            f"lists of ranks of the parent group (0 to {len(everybody) - 1}), none of them empty, no rank twice",
        )  # fmt: skip
    if backend is not None:
        _check_part_of(str(backend), c10d.get_backend_config(parent))
    parts = split_ranks if versions.SPLIT_KEEPS_ORDER else [sorted(part) for part in split_ranks]
    group = parent.split_into(parts, timeout, pg_options)
    if group is None:
        return c10d.GroupMember.NON_GROUP_MEMBER if versions.SPLIT_KEEPS_ORDER else None
    desc = group_desc if group_desc is not None else f"{parent.group_desc}:split"
    mine = [everybody[r] for r in next(part for part in parts if parent.rank() in part)]
    known_as, store = c10d._world.pg_map[parent]
    return add_to_world(group, str(backend or known_as), store, desc, mine)


def _check_part_of(wanted: str, has: str) -> None:
    """A child group may serve fewer kinds of devices than its parent, each with the same backend."""
    theirs = str(c10d.BackendConfig(c10d.Backend(wanted))).split(",")
    if not set(theirs) <= set(has.split(",")):
        raise errors.bad_argument("split_group", "backend", wanted, f"a part of the parent group's ({has})")
