"""A group's lifecycle and properties: how it ends, which groups are made from it, what torch may ask about it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from symcomm import errors
from symcomm.group.process_group import ProcessGroup
from symcomm.store.lease import root_of
from symcomm.torch_backend import checks, values
from symcomm.torch_backend.arguments import seconds_of
from symcomm.torch_backend.engines import device_map, named_map
from symcomm.torch_backend.reconfigure import Reconfigurable
from symcomm.torch_backend.work import WorkInfo

LAG = 10.0  # seconds that the others get to leave a group before this rank makes the next one
MERGE_FAILED = "symcomm/merge/failed"  # a key; another attempt uses another store
_previous: list[Callable[[float], None]] = []  # waits until all ranks have left the last default group


def await_previous_group() -> None:
    """Wait until rank 0 has left the last default group: its store's server could be mistaken for the next one's."""
    while _previous:
        _previous.pop()(LAG)


def _check_merge(store: Any, watch: Callable[[], None] | None) -> None:
    try:
        if watch is not None:
            watch()
    except errors.RankFailedError as error:
        with contextlib.suppress(RuntimeError, errors.SymcommError):  # it may have served the store
            store.set(MERGE_FAILED, str(error))
        raise
    why = b""
    with contextlib.suppress(RuntimeError, errors.SymcommError):
        why = bytes(store.get(MERGE_FAILED)) if store.check([MERGE_FAILED]) else b""
    if why:
        raise errors.RankFailedError(f"Another group that was to merge failed: {why.decode(errors='replace')}", [])


class GroupFacts:
    """Mixed into groups that torch asks for their name and store, and for a hook that is told of what has ended."""

    _store: Any
    _name = _desc = ""
    _hook: Any = None

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = values.text("_set_group_name", name)

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = values.text("_set_group_desc", desc)

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def get_group_store(self) -> Any:
        return self._store

    def _register_on_completion_hook(self, hook: Callable[[WorkInfo], Any]) -> None:
        """``hook(WorkInfo)`` is called when an operation of this group has ended, in whichever thread noticed it."""
        call = "_register_on_completion_hook"
        if not callable(hook):
            raise errors.wrong_type(call, "hook", hook, "a function of one argument")
        if self._hook is not None:
            raise errors.CallerError(f"{call}: a hook is registered already.")
        self._hook = hook

    def _has_hooks(self) -> bool:
        return self._hook is not None

    def _enable_collectives_timing(self) -> None:
        """Nothing to enable: times are always recorded."""


class Lifecycle(GroupFacts, Reconfigurable):
    """Mixed into TorchGroup, which has the collectives."""

    options: Any
    _label: str
    _map: dict[str, str]
    _is_default: bool
    _splits = 0
    _used_for_symmetric_memory = False

    # --- life -------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        self.core.abort()
        for engine in self._engines.made():
            engine.abort()

    def shutdown(self) -> None:
        """Leave, and release everything: an object that is still referenced keeps no store, memory or thread alive."""
        if self._debug_checks is not None:
            self._debug_checks.close()
        if self._meets_at_rank_0():
            if self.core.rank == 0:
                self.core.await_departures()
            else:
                _previous.append(self.core.departures())
        self.core.destroy()
        self._end_membership()
        self._engines.shutdown()
        self._store = None

    def _meets_at_rank_0(self) -> bool:
        """Whether the ranks' store ends when rank 0 has destroyed this group."""
        return (
            self._is_default
            and self._members is None  # reconfigurable groups rendezvous elsewhere
            and self.core.is_usable
            and isinstance(root_of(self._store), dist.TCPStore)
            and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        )

    def set_timeout(self, timeout: timedelta) -> None:
        timeout = values.duration("set_timeout: timeout", timeout)
        self.core.set_timeout(timeout)
        self.options._timeout = timeout
        for engine in self._engines.made():
            engine.set_timeout(timeout)

    _set_default_timeout = set_timeout

    # --- groups from this one ---------------------------------------------------------------------------------

    def _derived(self, core: ProcessGroup | None, name: str, desc: str, options: Any = None) -> Any:
        """Our new group ``core`` as torch's, with this one's store and device map; None on ranks outside it."""
        if core is None:
            return None
        lifetime = timedelta(seconds=core.timeout)
        make: Any = type(self)
        group = make(self._store, core.rank, core.size, lifetime, name, core.global_ranks, options, core)
        group._desc = desc
        group._map = self._devices()
        return group

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: Any = None,
        opts: Any = None,
        group_name: Any = None,
        group_desc: Any = None,
        *_: Any,
        device_types: Any = None,
    ) -> Any:
        """A group of some of our ranks. Collective; ranks outside the new group get None."""
        checks.split_group(ranks, timeout, opts, group_name, group_desc)
        self._splits += 1
        name = group_name or f"{self._name}/split{self._splits}"
        core = self.core.new_group(list(ranks), name, seconds_of(None, timeout))
        return self._derived(core, name, group_desc or "", opts)

    splitGroup = split_group

    def split_into(self, parts: Sequence[Sequence[int]], timeout: Any = None, options: Any = None) -> Any:
        """One group for each list of our ranks, in the list's order. Collective; None on ranks in no list."""
        self._splits += 1
        mine = next((k for k, part in enumerate(parts) if self.core.rank in part), None)
        name = f"{self._name}/split{self._splits}.{mine}"
        place = 0 if mine is None else list(parts[mine]).index(self.core.rank)
        core = self.core.split(mine, place, name, seconds_of(None, timeout))
        return self._derived(core, name, "", options)

    def merge_remote_group(
        self, store: Any, size: int, timeout: Any = None, group_name: Any = None, group_desc: Any = None
    ) -> Any:
        """One group of all ranks that meet in ``store``: ``size`` in all, numbered in order of arrival."""
        checks.merge_group(store, size, self.core.size, timeout, group_name, group_desc)
        lifetime = timeout or timedelta(seconds=self.core.timeout)
        group = self.merged(store, size, lifetime, group_name or f"{self._name}:merge", self.merge_check(store))
        group._desc = group_desc or f"{self._desc}:merge"
        return group

    mergeRemoteGroup = merge_remote_group

    def merge_check(self, store: Any) -> Callable[[], None]:
        """For a rendezvous of all ranks of this group in ``store``: raises once one of them is gone, and notifies the
        other groups, whose ranks watch their own. Survivors of a failed group are not checked."""
        watch = self.core.watch(range(self.core.size), "merge_remote_group()") if self.core.failure is None else None
        return partial(_check_merge, store, watch)

    @classmethod
    def merged(cls, store: Any, size: int, timeout: timedelta, name: str, check: Callable[[], None]) -> Any:
        """A group of the first ``size`` ranks that arrive in ``store``."""
        place = int(store.add("mergeGroupRank", 1)) - 1
        if place >= size:
            raise errors.bad_argument("merge_remote_group", "size", size, f"at least {place + 1}, as many as came")
        make: Any = cls
        return make(store, place, size, timeout, name, check=check)

    def shrink(self, ranks_to_exclude: Sequence[int] = (), shrink_flags: int = 0, opts_override: Any = None) -> Any:
        """The ranks that still live, without ``ranks_to_exclude``, go on in a new group; only they call this.

        ``shrink_flags`` 1 (torch's SHRINK_ABORT): what is still running on this group ends now, otherwise it may
        finish first. A group that has failed needs no flag."""
        abort = bool(shrink_flags) or not ranks_to_exclude
        if not abort and self.core.failure is None:
            with contextlib.suppress(errors.SymcommError):  # which is why shrink was called
                self._wait_for_pending_works()
        core = self.core.shrink(exclude=list(ranks_to_exclude), abort=abort)
        return self._derived(core, core.name, f"{self._desc}:shrunk", opts_override)

    # --- facts ------------------------------------------------------------------------------------------------

    supports_splitting = True
    supports_coalescing = True
    supports_shrinking = True

    def known_as(self) -> str:
        """The name that torch made this group under: also "gloo", where that is replaced."""
        known = str(c10d._world.pg_map.get(self, ("symcomm",))[0])
        return named_map(self).get("cpu", "symcomm") if ":" in known or known == "undefined" else known

    _get_backend_name = known_as

    def getBackendName(self) -> str:
        """For C++, which looks for Gloo's own class behind a group of that name."""
        return "symcomm"

    def name(self) -> str:
        """As in torch: the name of the torch backend that we replace, else "custom"."""
        known = self.known_as()
        return "custom" if known == "symcomm" else known

    def getRank(self) -> int:
        return self.core.rank

    def getSize(self) -> int:
        return self.core.size

    def setGroupName(self, name: str) -> None:
        super().setGroupName(name)
        if not self._label:
            self.core.name = name

    _set_group_name = setGroupName

    def _get_sequence_number_for_group(self) -> int:
        return self.core.sequence_number - self._operations_before

    def _set_sequence_number_for_group(self) -> None:
        """Ours starts with the group, equal on all ranks."""

    def _devices(self) -> dict[str, str]:
        """Device type -> backend name; a group that torch does not know has the map of the one it came from."""
        return device_map(self) or self._map

    def _get_backend(self, device: Any) -> Any:
        """This group, or the engine that carries tensors on ``device``."""
        asked = torch.device(device) if isinstance(device, str) else values.device("_get_backend: device", device)
        known = self._devices()
        if asked.type not in ("cpu", "cuda", *known):
            raise errors.CallerError(
                f"No backend type associated with device type {asked.type}: this group has {', '.join(known) or 'cpu'}."
            )
        if known.get(asked.type, "symcomm") == "symcomm":
            return self
        return self._engines.on("_get_backend", asked)._get_backend(asked)

    get_backend = _get_backend  # its name after torch 2.13

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(d) for d in ("cpu", *self._engines.device_types())]

    def create_device(self, hostname: str = "", interface: str = "", lazy_init: bool | None = None) -> None:
        """Accepted and ignored, for scripts that create a Gloo device: ranks share memory, not a network."""

    create_default_device = create_device

    def supports_tensor_alloc(self, device: Any) -> bool:
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: Any, device: Any = "cpu") -> Any:
        """A tensor in symmetric memory, for buffers that collectives use again and again."""
        if size == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = size * torch.empty((), dtype=dtype).element_size()
        return torch.frombuffer(self.core.arena.buffer(nbytes), dtype=dtype, count=size)

    supports_window = True

    def new_window(self, tensor: Any = None) -> Any:
        """One-sided puts and signals. Collective. Tensors on another engine's device go to that engine."""
        if tensor is not None and not tensor.is_cpu and not self._engines.is_ours(tensor.device):
            return self._engines.on("new_window", tensor.device).new_window(tensor)
        from symcomm.torch_backend.windows import new_torch_window

        return new_torch_window(self.core, tensor)

    def memory_stats(self) -> dict[str, int]:
        return {"symmetric_used_bytes": self.core.arena.used_bytes}

    def call_stats(self) -> dict[str, dict[str, int]]:
        """Which path this rank's calls on CPU tensors took; see ``symcomm.ProcessGroup.call_stats``."""
        return self.core.call_stats()

    def _wait_for_pending_works(self) -> None:
        for work in list(self.core.pending):
            work.wait()

    def _register_on_completion_hook(self, hook: Callable[[WorkInfo], Any]) -> None:
        super()._register_on_completion_hook(hook)
        self._set_plain()

    @property
    def mem_allocator(self) -> Any:
        raise errors.CallerError("symcomm has no allocator for torch's memory pools; use allocate_tensor.")

    def suspend(self) -> None:
        raise errors.CallerError("symcomm has no memory of a device to give back; there is nothing to suspend.")

    def resume(self) -> None:
        raise errors.CallerError("symcomm has no memory of a device to give back; there is nothing to resume.")

    def setUsePgForSymmMemRendezvous(self, value: bool) -> None:
        """Only stored: our symmetric memory always uses the group for its rendezvous."""
        self._used_for_symmetric_memory = bool(value)

    use_pg_for_symm_mem_rendezvous = property(
        lambda self: self._used_for_symmetric_memory, lambda self, value: self.setUsePgForSymmMemRendezvous(value)
    )

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Nothing to do: ranks are connected once the group exists."""
