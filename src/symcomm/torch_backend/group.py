"""TorchGroup: a ``torch.distributed.ProcessGroup`` whose every operation runs on ours.

torch calls some methods by several names, depending on its version and on the caller (Python, the C++ Reducer,
functional collectives). The objects that a TorchGroup owns do the work::

    core            our process group
    calls           how calls run (running.py); what they hand to the core is in operations.py
    engines         what carries tensors on other devices
    names, completion   its name, and the hook that learns when operations end (python_group.py)
    membership      who is in it (reconfigure.py)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as torch_c10d
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d as c10d

from symcomm import errors
from symcomm.group import hooks
from symcomm.group.call_hooks import CallHooks, PostHook, PreHook
from symcomm.group.p2p import ANY_SOURCE
from symcomm.group.process_group import ProcessGroup
from symcomm.torch_backend import checks, derived, lifecycle, operations, torch_patches, values, versions
from symcomm.torch_backend.arguments import seconds_of
from symcomm.torch_backend.blocking import exchange, monitored_barrier
from symcomm.torch_backend.bootstrap import join_group
from symcomm.torch_backend.call_hooks import TORCH_CALLS, named_by_torch
from symcomm.torch_backend.cpp_backend import install_cpp_backend
from symcomm.torch_backend.engines import Engines, device_map, named_map
from symcomm.torch_backend.estimate import TimeEstimate
from symcomm.torch_backend.options_layout import install
from symcomm.torch_backend.python_group import Names, PythonGroup
from symcomm.torch_backend.reconfigure import Membership, number_anew
from symcomm.torch_backend.running import Calls, operation
from symcomm.torch_backend.work import DoneWork, WorkInfo

Options: Any = Backend.Options
install()


class TorchGroup(PythonGroup):
    """Made by ``init_process_group("symcomm")`` and ``new_group()``."""

    is_symcomm = True
    watchers = 0  # torch's hooks, see torch_patches/cpp_hooks.py
    splits = 0  # groups that were made of parts of this one
    core: Any  # a ProcessGroup, or an EmptyCore

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        global_ranks: Sequence[int] | None = None,
        options: Any = None,
        core: ProcessGroup | None = None,
        label: str = "",
        check: Callable[[], None] | None = None,
    ):
        """``label``: the group's name in messages and traces, if ``name`` is only torch's number. ``check``: raises
        once a rank can no longer come; needed only if ``global_ranks`` does not name the ranks."""
        super().__init__(rank, size, store, Names(name))
        self.options = options if options is not None else Options("symcomm", timeout)
        self._label = label  # only the default group has one
        self.devices_without_torch: dict[str, str] = {}
        self.membership = Membership(store)
        self._estimate = TimeEstimate()
        if core is None:
            core = join_group(store, rank, size, timeout, label or name, global_ranks, check)
            hooks.joined(core, store)
        torch_patches.apply(*torch_patches.AT_FIRST_GROUP)
        self._begin(core)

    def _begin(self, core: Any) -> None:
        """Make this the group of ``core``'s members."""
        self.core = core
        core.describe(self.names.desc)
        self.engines = Engines(self)
        self.calls = Calls(core, self.engines, self.names, self.completion)
        core.interception.add_facade(self, TORCH_CALLS)
        if versions.HAS_PYTHON_BACKENDS:
            install_cpp_backend(self, TorchGroup, ["cpu", *self.engines.device_types()])

    def describe(self, desc: str) -> None:
        super().describe(desc)
        self.core.describe(desc)

    # --- operations, by torch's names ---------------------------------------------------------------------------

    allreduce = operation("all_reduce", operations.all_reduce)
    allreduce_coalesced = operation("all_reduce_coalesced", operations.all_reduce_coalesced)
    reduce = operation("reduce", operations.reduce)
    reduce_scatter = operation("reduce_scatter", operations.reduce_scatter)
    reduce_scatter_single = operation("reduce_scatter_single", operations.with_redop)
    reduce_scatter_single_coalesced = operation("reduce_scatter_coalesced", operations.with_redop)
    broadcast = operation("broadcast", operations.broadcast)
    allgather = operation("all_gather", operations.all_gather)
    all_gather_single = operation("all_gather_single", operations.as_given)
    all_gather_single_coalesced = operation("all_gather_coalesced", operations.as_given)
    allgather_coalesced = operation("all_gather_lists", operations.all_gather_lists)
    gather = operation("gather", operations.gather)
    gather_single = operation("gather_single", operations.gather_single)
    scatter = operation("scatter", operations.scatter)
    alltoall = operation("all_to_all", operations.all_to_all)
    all_to_all_single = operation("all_to_all_single", operations.all_to_all_single)
    barrier = operation("barrier", operations.as_given)

    # Names of torch 2.10 to 2.12, and those that C++ looks up.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single

    def send(self, tensors: Any, dstRank: int, tag: int) -> Any:
        if self.calls.handle is not None and (work := exchange(self.core, True, tensors, dstRank, tag)) is not None:
            return work
        return self.calls.message("send", "isend", tensors, dstRank, tag)

    def recv(self, tensors: Any, srcRank: int, tag: int) -> Any:
        if self.calls.handle is not None and (work := exchange(self.core, False, tensors, srcRank, tag)) is not None:
            return work
        return self.calls.message("recv", "irecv", tensors, srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        if self.calls.handle is not None and (work := exchange(self.core, False, tensors, ANY_SOURCE, tag)) is not None:
            return work
        return self.calls.message("recvAnySource", "irecv", tensors, ANY_SOURCE, tag)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Ours; errors begin with the words that scripts written for Gloo look for."""
        monitored_barrier(self.core, timeout, wait_all_ranks)

    def start_coalescing(self, device: Any = None) -> None:
        self.calls.start_coalescing(device)

    def end_coalescing(self, device: Any = None) -> Any:
        return self.calls.end_coalescing(device)

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing

    def _wait_for_pending_works(self) -> None:
        self.calls.wait_for_pending()

    def enable_debug_checks(self) -> None:
        self.calls.enable_debug_checks()

    def refuse(self, error: Exception) -> None:
        """Tell the others that this rank makes no call, and why."""
        self.calls.refuse(error)

    # --- hooks and estimates: the core's, so that a call through either object is seen once ------------------------

    @property
    def call_hooks(self) -> CallHooks:
        return self.core.call_hooks

    def register_pre_hook(self, hook_id: int, hook: PreHook) -> None:
        super().register_pre_hook(hook_id, named_by_torch(hook))

    def register_post_hook(self, hook_id: int, hook: PostHook) -> None:
        super().register_post_hook(hook_id, named_by_torch(hook))

    def set_intercepted(self, is_intercepted: bool) -> None:
        self.calls.set_intercepted(is_intercepted)

    def _register_on_completion_hook(self, hook: Callable[[WorkInfo], Any]) -> None:
        super()._register_on_completion_hook(hook)
        self.calls.choose_path()

    supports_time_estimate = True
    _supports_time_estimate = True  # its name since torch 2.15

    def _start_time_estimate(self) -> None:
        """From now on collectives return at once, and leave their tensors as they are."""
        self._estimate.start(self.core)

    def _end_time_estimate(self) -> float:
        """Microseconds that the collectives since ``_start_time_estimate`` would have taken."""
        return self._estimate.end() * 1e6

    # --- life -------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        self.core.abort()
        self.engines.abort()

    def shutdown(self) -> None:
        """Leave, and release everything: this object may stay referenced, but keeps no store, memory or thread
        alive."""
        self.calls.close()
        met_in_store = self._label and not self.membership.may_change
        if met_in_store and self.core.is_usable and lifecycle.ends_with_rank_0(self.group_store):
            lifecycle.leave_in_order(self.core)
        self.core.destroy()
        self.membership.end()
        self.engines.shutdown()
        self.group_store = None

    def set_timeout(self, timeout: timedelta) -> None:
        timeout = values.duration("set_timeout: timeout", timeout)
        self.core.set_timeout(timeout)
        self.options._timeout = timeout
        self.engines.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Extend the time-out until the next operation has ended. Compilers add the time that a cache hit saved, which
        may be 0."""
        if timeout > timedelta(0):
            self.core.add_ephemeral_timeout(timeout)

    def get_error(self) -> Any:
        """The kind of error that ended the group, as torch names it; SUCCESS if none has."""
        kinds: Any = vars(torch_c10d)["ErrorType"]
        failure = self.core.failure
        if failure is None:
            return kinds.SUCCESS
        if isinstance(failure, errors.DeadlineError):
            return kinds.TIMEOUT
        return kinds.REMOTE_ERROR if isinstance(failure, errors.PeerError) else kinds.COMM_ERROR

    # --- members ----------------------------------------------------------------------------------------------

    supports_reconfigure = True

    def get_reconfigure_handle(self) -> str:
        """Identifies this process to others that may form a group with it; constant for the life of the group."""
        return self.membership.group(self.core).get_reconfigure_handle()

    def reconfigure(self, opts: Any) -> Any:
        """``opts``: ReconfigureOptions, or anything with uuid, handles and timeout. The work it returns is done."""
        begun = time.monotonic()
        core = self.membership.reconfigure(self.core, opts)
        self.engines.abort()  # they serve the old members
        self.calls.close()
        self.group_store = self.membership.store(opts.uuid)
        self._begin(core)
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            self.enable_debug_checks()
        number_anew(self)
        return DoneWork([], "reconfigure", time.monotonic() - begun)

    # --- groups from this one ---------------------------------------------------------------------------------

    supports_splitting = supports_shrinking = True

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
        next_name = derived.next_split(self)
        core = self.core.new_group(list(ranks), group_name or next_name, seconds_of(None, timeout))
        return derived.derive(self, core, group_name or next_name, group_desc or "", opts)

    splitGroup = split_group

    def split(self, store: Any, ranks: Sequence[int], opts: Any = None) -> Any:
        """A group of some of our ranks, in this order. Collective; ranks outside it get None.

        The rendezvous uses this group, so ``store`` is not needed."""
        timeout = getattr(opts, "_timeout", None)
        return self.split_group(list(ranks), timeout, opts, getattr(opts, "group_name", None) or None)

    def split_into(self, parts: Sequence[Sequence[int]], timeout: Any = None, options: Any = None) -> Any:
        """One group for each list of our ranks, in the list's order. Collective; None on ranks in no list."""
        return derived.split_into(self, parts, timeout, options)

    def merge_remote_group(
        self, store: Any, size: int, timeout: Any = None, group_name: Any = None, group_desc: Any = None
    ) -> Any:
        """One group of all ranks that meet in ``store``: ``size`` in all, numbered in order of arrival."""
        checks.merge_group(store, size, self.core.size, timeout, group_name, group_desc)
        lifetime = timeout or timedelta(seconds=self.core.timeout)
        check = derived.merge_check(self.core, store)
        group = derived.merged(type(self), store, size, lifetime, group_name or f"{self.names.name}:merge", check)
        group.describe(group_desc or f"{self.names.desc}:merge")
        return group

    mergeRemoteGroup = merge_remote_group

    def merge(self, store: Any, opts: Any, rank: int, size: int) -> Any:
        """A group of the ``size`` ranks that meet in ``store``; the caller is number ``rank`` of them."""
        if not isinstance(size, int) or not isinstance(rank, int) or not 0 <= rank < size:
            raise errors.bad_argument("merge", "rank", rank, f"one of the {size} ranks that meet, 0 to {size} - 1")
        timeout = getattr(opts, "_timeout", None) or timedelta(seconds=self.core.timeout)
        name = getattr(opts, "group_name", None) or f"{self.names.name}:merge"
        check = derived.merge_check(self.core, store)
        return type(self)(store, rank, size, timeout, name, list(range(size)), opts, check=check)

    def shrink(self, ranks_to_exclude: Sequence[int] = (), shrink_flags: int = 0, opts_override: Any = None) -> Any:
        """The ranks that still live, without ``ranks_to_exclude``, go on in a new group; only they call this.

        ``shrink_flags`` 1 (torch's SHRINK_ABORT) ends what still runs on this group; otherwise that may finish first. A
        group that has failed needs no flag."""
        abort = bool(shrink_flags) or not ranks_to_exclude
        return derived.shrink(self, ranks_to_exclude, abort, opts_override)

    # --- facts ------------------------------------------------------------------------------------------------

    supports_coalescing = False  # as Gloo: batch_isend_irecv returns a work for each message

    def known_as(self) -> str:
        """The name by which torch made this group; "gloo" where we replace Gloo."""
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

    def _set_group_uid(self, uid: str) -> None:
        """Ignored: groups are identified by their names."""

    def _get_sequence_number_for_group(self) -> int:
        return self.calls.sequence_number

    def _set_sequence_number_for_group(self) -> None:
        """Ours starts with the group, equal on all ranks."""

    def memory_stats(self) -> dict[str, int]:
        return {"symmetric_used_bytes": self.core.arena.used_bytes}

    def call_stats(self) -> dict[str, dict[str, int]]:
        """Which path this rank's calls on CPU tensors took; see ``symcomm.ProcessGroup.call_stats``."""
        return self.core.call_stats()

    def copy_stats(self) -> dict[str, dict[str, int]]:
        """How its bytes went, and why some were copied; see ``symcomm.ProcessGroup.copy_stats``."""
        return self.core.copy_stats()

    # --- devices and memory -----------------------------------------------------------------------------------

    def backends_by_device(self) -> dict[str, str]:
        """Device type -> backend name; a group that torch does not know has the map of the one it came from."""
        return device_map(self) or self.devices_without_torch

    def _get_backend(self, device: Any) -> Any:
        """This group, or the engine that carries tensors on ``device``."""
        asked = torch.device(device) if isinstance(device, str) else values.device("_get_backend: device", device)
        known = self.backends_by_device()
        if asked.type not in ("cpu", "cuda", *known):
            raise errors.CallerError(
                f"No backend type associated with device type {asked.type}: this group has {', '.join(known) or 'cpu'}."
            )
        if known.get(asked.type, "symcomm") == "symcomm":
            return self
        return self.engines.on("_get_backend", asked)._get_backend(asked)

    get_backend = _get_backend  # its name after torch 2.13

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(d) for d in ("cpu", *self.engines.device_types())]

    def create_device(self, hostname: str = "", interface: str = "", lazy_init: bool | None = None) -> None:
        """Accepted and ignored, for scripts that create a Gloo device: ranks share memory, not a network."""

    create_default_device = create_device

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Nothing to do: ranks are connected once the group exists."""

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
        """A window for one-sided puts and signals. Collective. Tensors on another engine's device go to that engine."""
        if tensor is not None and not tensor.is_cpu and not self.engines.is_ours(tensor.device):
            return self.engines.on("new_window", tensor.device).new_window(tensor)
        from symcomm.torch_backend.windows import new_torch_window  # few programs need it

        return new_torch_window(self.core, tensor)

    @property
    def mem_allocator(self) -> Any:
        raise errors.CallerError("symcomm has no allocator for torch's memory pools; use allocate_tensor.")

    def suspend(self) -> None:
        raise errors.CallerError("symcomm has no memory of a device to give back; there is nothing to suspend.")

    def resume(self) -> None:
        raise errors.CallerError("symcomm has no memory of a device to give back; there is nothing to resume.")

    _used_for_symmetric_memory = False

    def setUsePgForSymmMemRendezvous(self, value: bool) -> None:
        """Only stored: our symmetric memory always uses the group for its rendezvous."""
        self._used_for_symmetric_memory = bool(value)

    use_pg_for_symm_mem_rendezvous = property(
        lambda self: self._used_for_symmetric_memory, lambda self, value: self.setUsePgForSymmMemRendezvous(value)
    )
