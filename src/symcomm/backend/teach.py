"""Functions of torch that refuse every backend but those they know by name, before they ask the group.

Each is replaced by one that does the work when the group is ours, and otherwise calls what was there. This module is
loaded while torch is being imported, so it imports nothing of ours but errors and versions until a group is made.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as _C
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from symcomm.backend import versions

__all__ = ["dist2_group", "errors_by_pytorchs_names", "teach"]


def teach() -> None:
    for name, known in versions.present(c10d, _OURS).items():
        taught = _taught(known, _OURS[name])
        setattr(c10d, name, taught)
        if hasattr(dist, name):  # private ones are in the module only
            setattr(dist, name, taught)
    versions.dist2_factories()["symcomm"] = dist2_group
    errors_by_pytorchs_names()
    _take_our_reduce_ops()
    _prefix_store()
    _init_process_group()
    _destroy_process_group()
    _keep_works_of_reducers()


def errors_by_pytorchs_names() -> None:
    """Scripts catch a store's exceptions by PyTorch's names, which ours then are, too."""
    from symcomm import errors

    for ours, theirs in (
        (errors.StoreDeadlineError, dist.DistStoreError),
        (errors.StoreConnectionError, dist.DistNetworkError),
        (errors.StoreAuthError, dist.DistNetworkError),
        (errors.QueueEmptyError, dist.QueueEmptyError),
    ):
        if not issubclass(ours, theirs):
            first, *others = ours.__bases__
            ours.__bases__ = (first, theirs, *others)  # others may be OSErrors, which come after RuntimeErrors


def _taught(known: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(known)
    def either(*args: Any, **kwargs: Any) -> Any:
        answer = ours(*args, **kwargs)
        return known(*args, **kwargs) if answer is NotImplemented else answer

    return either


def _take_our_reduce_ops() -> None:
    """Options objects of PyTorch take our operations: torch.distributed's functions put there what they are given.

    C++ makes an operation of a kind such as SUM, which is what most callers give. One that is made already saves more
    than looking for it costs: about half of the time that setting it takes."""
    theirs: Any = dist.ReduceOp
    kinds = [kind for name, kind in theirs.RedOpType.__members__.items() if name != "PREMUL_SUM"]
    made = {id(kind): theirs(kind) for kind in kinds}  # a kind is one object for ever, its class's attribute
    for name in ("AllreduceOptions", "AllreduceCoalescedOptions", "ReduceOptions", "ReduceScatterOptions"):
        options = getattr(_C, name)
        options.reduceOp = _taking_ours(options.reduceOp, made)


def _taking_ours(known: property, made: dict[int, Any]) -> property:
    set_known: Any = known.fset

    def set_op(options: Any, op: Any) -> None:
        try:
            set_known(options, made.get(id(op), op))
        except TypeError:
            types = sys.modules.get("symcomm.types")  # loaded by whoever made an operation of ours
            if types is None or not isinstance(op, types.ReduceOp):
                raise
            from symcomm.backend.reduce_ops import redop_for_torch

            set_known(options, redop_for_torch(op))

    return property(known.fget, set_op, doc=known.__doc__)


def _prefix_store() -> None:
    """Whatever takes a store puts a prefix before its keys first, which takes ours as well from now on."""
    known = dist.PrefixStore.__init__

    def lent(value: Any) -> Any:
        base = sys.modules.get("symcomm.store.base")  # loaded by whoever made a store of ours
        if base is None or not isinstance(value, base.Store):
            return value
        from symcomm.backend.stores import as_torch_store

        return as_torch_store(value)

    @functools.wraps(known)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        known(self, *map(lent, args), **{name: lent(value) for name, value in kwargs.items()})

    dist.PrefixStore.__init__ = make


def _init_process_group() -> None:
    """A rank that destroys a group and makes the next one before rank 0 does finds the server of the one that ends:
    when that goes away, it looks again."""
    known = c10d.init_process_group

    @functools.wraps(known)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        asked = inspect.signature(known).bind(*args, **kwargs).arguments
        if (life := sys.modules.get("symcomm.backend.life")) is not None:
            life.await_previous_group()
        end = time.monotonic() + (asked.get("timeout") or c10d.default_pg_timeout).total_seconds()
        while True:
            try:
                return known(*args, **kwargs)
            except dist.DistNetworkError:
                if asked.get("store") is not None or not _is_ours(asked.get("backend")) or time.monotonic() > end:
                    raise
                c10d._world.group_count = 0  # the next attempt's group has the same name, and so the same keys

    c10d.init_process_group = dist.init_process_group = init_process_group


def _destroy_process_group() -> None:
    """Stores that only the group's C++ half held go with it."""
    known = c10d.destroy_process_group

    @functools.wraps(known)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        try:
            return known(*args, **kwargs)
        finally:
            if (stores := sys.modules.get("symcomm.backend.stores")) is not None:
                stores.take_back()

    c10d.destroy_process_group = dist.destroy_process_group = destroy_process_group


def _is_ours(backend: Any) -> bool:
    """Whether init_process_group(backend) asks for us."""
    return backend is not None and "symcomm" in str(dist.Backend(str(backend)))


_kept: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _keep_works_of_reducers() -> None:
    """torch's Reducer is given the work that counts a joining model's ranks, and keeps only its C++ half. Without the
    Python half nobody would answer when it waits."""
    known = dist.Reducer._set_forward_pass_work_handle

    @functools.wraps(known)
    def keep(reducer: Any, work: Any, *args: Any, **kwargs: Any) -> None:
        _kept[reducer] = work
        known(reducer, work, *args, **kwargs)

    dist.Reducer._set_forward_pass_work_handle = keep


def _our(group: Any) -> Any:
    """``group``, or the default group, if it is ours and this rank is in it; else None."""
    target = group if group is not None else c10d._get_default_group()
    return target if getattr(target, "is_symcomm", False) else None


def _monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
    target = _our(group)
    if target is None:
        return NotImplemented
    if isinstance(timeout, (int, float)):
        timeout = timedelta(seconds=timeout)
    return target.monitored_barrier(timeout, wait_all_ranks)


def _set_timeout(timeout: timedelta, group: Any = None) -> Any:
    target = _our(group)
    return NotImplemented if target is None else target.set_timeout(timeout)


def _wrapper(wrapped_pg: Any, *_: Any, **__: Any) -> Any:
    """Our groups need no other around them for TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    if not getattr(wrapped_pg, "is_symcomm", False):
        return NotImplemented
    wrapped_pg.be_careful()
    return wrapped_pg


def _recorder(pg: Any, *_: Any, **__: Any) -> Any:
    """Our own recorder sees every call; torch's would send each of them through C++. Who wants it attaches it."""
    return None if getattr(pg, "is_symcomm", False) else NotImplemented


# --- groups from groups -----------------------------------------------------------------------------------------------


def _know(group: Any, backend: str, store: Any, desc: str, ranks: Sequence[int]) -> Any:
    """Have torch know ``group``. ``ranks``: each member's global rank."""
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


def _split_group(
    parent_pg: Any = None,
    split_ranks: Any = None,
    timeout: Any = None,
    pg_options: Any = None,
    group_desc: Any = None,
    backend: Any = None,
) -> Any:
    from symcomm import errors
    from symcomm.backend import versions

    parent = _our(parent_pg)
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
    return _know(group, str(backend or known_as), store, desc, mine)


def _check_part_of(wanted: str, has: str) -> None:
    """A child group may have fewer devices than its parent, each with the same backend."""
    from symcomm import errors

    theirs = str(c10d.BackendConfig(c10d.Backend(wanted))).split(",")
    if not set(theirs) <= set(has.split(",")):
        raise errors.bad_argument("split_group", "backend", wanted, f"a part of the parent group's ({has})")


def _shrink_group(ranks_to_exclude: Any, group: Any = None, shrink_flags: int = 0, pg_options: Any = None) -> Any:
    target = _our(group)
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
    return _know(smaller, backend, store, desc, range(len(stay)) if is_default else stay)


def _check_shrink(group: Any, exclude: Any, flags: Any) -> None:
    from symcomm import errors

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


# --- torch.distributed._dist2 -----------------------------------------------------------------------------------------


_dist2_groups = itertools.count(1)


def dist2_group(store: Any, rank: int, world_size: int, timeout: timedelta, device: Any, **options: Any) -> Any:
    from symcomm import errors
    from symcomm.backend.group import TorchGroup

    if options:
        raise errors.bad_argument("new_group", "options", sorted(options), "none: symcomm has no options of its own")
    return TorchGroup(store, rank, world_size, timeout, f"dist2:{next(_dist2_groups)}")


_OURS: dict[str, Callable[..., Any]] = {
    "monitored_barrier": _monitored_barrier,
    "split_group": _split_group,
    "shrink_group": _shrink_group,
    "_set_pg_timeout": _set_timeout,
    "_create_process_group_wrapper": _wrapper,
    "_maybe_attach_flight_recorder": _recorder,
}
