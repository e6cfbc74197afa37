"""Reconfigurable groups, with the methods that torch 2.15 expects of a backend; they work on older versions too.

``init_process_group("symcomm", enable_reconfigure=True)`` makes a group without members. ``reconfigure`` exchanges the
core of a TorchGroup. The object stays, and so does what torch knows of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from symcomm.group.call_hooks import CallHooks
from symcomm.group.interception import Interception

if TYPE_CHECKING:
    from symcomm.group.reconfigure import ReconfigurableGroup


def _reconfigurable() -> type[ReconfigurableGroup]:
    from symcomm.group.reconfigure import ReconfigurableGroup  # most groups never need it

    return ReconfigurableGroup


def wants_reconfigure(options: Any, backend_options: Any) -> bool:
    """Whether a new group starts without members, by our options or, since torch 2.15, by torch's."""
    return any(getattr(given, "enable_reconfigure", False) for given in (options, backend_options))


class EmptyCore:
    """The core of a group without members. It has the rank and size that torch was told, keeps hooks for later, and
    refuses everything else."""

    spans_hosts = is_usable = False
    sequence_number = 0
    handle = None

    def __init__(self, options: Any):
        self.name = str(options.group_id)
        self.rank, self.size = options.group_rank, options.group_size
        self.global_ranks = list(range(self.size))
        self.interception = Interception()  # of torch's group: this object makes no calls
        self.call_hooks = CallHooks(self.interception)
        self.members = _reconfigurable()(self.name, options.timeout)
        self.set_timeout, self.destroy = self.members.set_timeout, self.members.destroy

    @property
    def timeout(self) -> float:
        return self.members.timeout

    def abort(self) -> None:
        """Nothing can be pending."""

    def describe(self, description: str) -> None:
        """Nothing is recorded."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.members.current, name)  # raises: the group has no members


class Membership:
    """Who is in a TorchGroup, and how that changes. A group that was made with members can be reconfigured too."""

    def __init__(self, store: Any):
        self._group: ReconfigurableGroup | None = None  # made when it is first needed
        self._store = store  # the group's first one

    @property
    def may_change(self) -> bool:
        return self._group is not None

    def group(self, core: Any) -> ReconfigurableGroup:
        """The reconfigurable group whose members ``core`` has now."""
        if self._group is None:
            self._group = core.members if isinstance(core, EmptyCore) else _reconfigurable().of(core)
        return self._group

    def reconfigure(self, core: Any, opts: Any) -> Any:
        """The core of the new members, with the hooks of the old one."""
        members = self.group(core)
        members.set_timeout(core.timeout)  # it may have changed
        new = members.reconfigure(opts.uuid, opts.handles, opts.timeout)
        if isinstance(core, EmptyCore):
            core.call_hooks.move_to(new.call_hooks)
        return new

    def store(self, uuid: int) -> Any:
        """For the engines of the new members: the keys of the old ones stay in the first store."""
        return dist.PrefixStore(f"reconfigured/{uuid}", self._store)

    def end(self) -> None:
        if self._group is not None:
            self._group.destroy()
        self._store = None


def number_anew(group: Any) -> None:
    """Tell torch the ranks of a group that was reconfigured."""
    if group in c10d._world.pg_group_ranks:
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(group.core.size)}
