"""Reconfigurable groups, with the methods that torch 2.15 expects of a backend; they work on older versions too.

``init_process_group("symcomm", enable_reconfigure=True)`` makes a group without members. ``reconfigure`` exchanges the
core of a TorchGroup: the object stays, and with it what torch knows of the group.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from symcomm.group.call_hooks import HookCalls
from symcomm.group.interception import Interception
from symcomm.torch_backend import versions
from symcomm.torch_backend.call_hooks import TORCH_CALLS
from symcomm.torch_backend.engines import Engines
from symcomm.torch_backend.running import Running
from symcomm.torch_backend.work import DoneWork

if TYPE_CHECKING:
    from symcomm.group.reconfigure import ReconfigurableGroup


def wants_reconfigure(options: Any, backend_options: Any) -> bool:
    """Whether a new group is to start without members. torch's own options say so since 2.15."""
    return any(getattr(given, "enable_reconfigure", False) for given in (options, backend_options))


class EmptyCore(HookCalls):
    """The core of a group without members. It has the rank and size that torch was given, and hooks for later; all else
    is refused."""

    spans_hosts = is_usable = False
    sequence_number = 0

    def __init__(self, options: Any):
        from symcomm.group.reconfigure import ReconfigurableGroup  # which most groups never need

        self.name = str(options.group_id)
        self.rank, self.size = options.group_rank, options.group_size
        self.global_ranks = list(range(self.size))
        self._interception = Interception()  # of calls through torch's group: this object has none
        self.members = ReconfigurableGroup(self.name, options.timeout)
        self.set_timeout, self.destroy = self.members.set_timeout, self.members.destroy

    @property
    def timeout(self) -> float:
        return self.members.timeout

    def abort(self) -> None:
        """Nothing can be pending."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.members.current, name)  # which says that there is none


class Reconfigurable(Running):
    """Mixed into TorchGroup."""

    supports_reconfigure = True
    _store: Any
    _first_store: Any = None
    _members: ReconfigurableGroup | None = None

    def _membership(self) -> ReconfigurableGroup:
        """A group that was made with its members can be reconfigured as well."""
        from symcomm.group.reconfigure import ReconfigurableGroup

        if self._members is None:
            empty = isinstance(self.core, EmptyCore)
            self._members = self.core.members if empty else ReconfigurableGroup.of(self.core)
        return self._members

    def get_reconfigure_handle(self) -> str:
        """Identifies this process to others that may form a group with it; constant for the life of the group."""
        return self._membership().get_reconfigure_handle()

    def reconfigure(self, opts: Any) -> Any:
        """``opts``: ReconfigureOptions, or anything with uuid, handles and timeout. The work it returns is done."""
        begun = time.monotonic()
        members = self._membership()
        members.set_timeout(self.core.timeout)  # which may have been changed since
        core = members.reconfigure(opts.uuid, opts.handles, opts.timeout)
        self._adopt(core, opts.uuid)
        return DoneWork([], "reconfigure", time.monotonic() - begun)

    def _end_membership(self) -> None:
        if self._members is not None:
            self._members.destroy()
        self._first_store = None

    def _adopt(self, core: Any, uuid: int) -> None:
        """Replace the core."""
        if isinstance(self.core, EmptyCore):
            core.take_over_hooks(self.core)
        self.core = core
        self._operations_before = core.sequence_number
        core.interception.add_facade(self, TORCH_CALLS)
        for engine in self._engines.made():  # they serve the old members
            engine.abort()
        self._engines = Engines(self)
        self._first_store = self._first_store or self._store
        self._store = dist.PrefixStore(f"reconfigured/{uuid}", self._first_store)  # keys of the old engines stay there
        if self._debug_checks is not None:
            self._debug_checks.close()
        self._coalescing, self._debug_checks = None, None
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            self.enable_debug_checks()
        self._set_plain()
        if self in c10d._world.pg_group_ranks:
            c10d._world.pg_group_ranks[self] = {rank: rank for rank in range(core.size)}
        if versions.HAS_PYTHON_BACKENDS:
            from symcomm.torch_backend.cpp_backend import install_cpp_backend

            group: Any = self
            install_cpp_backend(group, ["cpu", *self._engines.device_types()])  # which knows the new rank and size
