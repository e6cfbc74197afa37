"""Groups made from a TorchGroup: parts of it, several groups merged, or what is left of one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from symcomm import errors
from symcomm.group.process_group import ProcessGroup
from symcomm.torch_backend.arguments import seconds_of

MERGE_FAILED = "symcomm/merge/failed"  # a key of the store; another attempt uses another store


def derive(parent: Any, core: ProcessGroup | None, name: str, desc: str, options: Any = None) -> Any:
    """Our new group ``core`` as torch's, with its parent's store and device map; None on ranks outside it."""
    if core is None:
        return None
    store, lifetime = parent.get_group_store(), timedelta(seconds=core.timeout)
    group = type(parent)(store, core.rank, core.size, lifetime, name, core.global_ranks, options, core)
    group.describe(desc)
    group.devices_without_torch = parent.backends_by_device()
    return group


def next_split(parent: Any) -> str:
    parent.splits += 1
    return f"{parent.names.name}/split{parent.splits}"


def split_into(parent: Any, parts: Sequence[Sequence[int]], timeout: Any, options: Any) -> Any:
    """One group for each list of ranks, in the list's order."""
    core = parent.core
    mine = next((k for k, part in enumerate(parts) if core.rank in part), None)
    name = f"{next_split(parent)}.{mine}"
    place = 0 if mine is None else list(parts[mine]).index(core.rank)
    return derive(parent, core.split(mine, place, name, seconds_of(None, timeout)), name, "", options)


def shrink(parent: Any, exclude: Sequence[int], abort: bool, options: Any) -> Any:
    if not abort and parent.core.failure is None:
        with contextlib.suppress(errors.SymcommError):  # a failed operation is why shrink was called
            parent.calls.wait_for_pending()
    core = parent.core.shrink(exclude=list(exclude), abort=abort)
    return derive(parent, core, core.name, f"{parent.names.desc}:shrunk", options)


# --- merging ----------------------------------------------------------------------------------------------------------


def merge_check(core: ProcessGroup, store: Any) -> Callable[[], None]:
    """For a rendezvous in ``store`` of several groups: a function that raises once a rank of this group is gone, and
    tells the other groups, each of which watches its own. Survivors of a failed group are not watched."""
    watch = core.watch(range(core.size), "merge_remote_group()") if core.failure is None else None
    return partial(_check_merge, store, watch)


def _check_merge(store: Any, watch: Callable[[], None] | None) -> None:
    try:
        if watch is not None:
            watch()
    except errors.RankFailedError as error:
        with contextlib.suppress(RuntimeError, errors.SymcommError):  # the rank that is gone may have served the store
            store.set(MERGE_FAILED, str(error))
        raise
    why = b""
    with contextlib.suppress(RuntimeError, errors.SymcommError):
        why = bytes(store.get(MERGE_FAILED)) if store.check([MERGE_FAILED]) else b""
    if why:
        raise errors.RankFailedError(f"Another group that was to merge failed: {why.decode(errors='replace')}", [])


def merged(kind: Any, store: Any, size: int, timeout: timedelta, name: str, check: Callable[[], None]) -> Any:
    """A group, of class ``kind``, of the first ``size`` ranks that arrive in ``store``."""
    place = int(store.add("mergeGroupRank", 1)) - 1
    if place >= size:
        raise errors.bad_argument("merge_remote_group", "size", size, f"at least {place + 1}, as many as came")
    return kind(store, place, size, timeout, name, check=check)
