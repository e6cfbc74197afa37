"""TorchGroup: a ``torch.distributed.ProcessGroup`` whose every operation runs on ours.

torch calls some operations by several names, depending on its version and on who calls (Python, the C++ Reducer,
functional collectives); the end of the class lists them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReduceOp

from symcomm import errors
from symcomm._core import native
from symcomm.backend.arguments import is_async, one, redop_of, root_of, seconds_of, sort_out
from symcomm.backend.sparse import all_reduce_sparse
from symcomm.backend.work import DoneWork, TorchWork, WorkInfo, done, op_type_of
from symcomm.group.calls import to_redop
from symcomm.group.failure import call_site, explain
from symcomm.group.process_group import ProcessGroup
from symcomm.memory.share import Exchange

__all__ = ["TorchGroup"]

_alive: set[Any] = set()  # torch's registry holds groups weakly
_SUM = ReduceOp.SUM
_NO_TIMEOUT = timedelta(milliseconds=-1)


def _exchange_through(store: Any, rank: int, size: int, timeout: timedelta) -> Exchange:
    """Everybody's bytes through one of torch's stores. The first byte keeps values from being empty."""
    rounds = 0

    def exchange(item: bytes) -> list[bytes]:
        nonlocal rounds
        rounds += 1
        keys = [f"symcomm/{rounds}/{r}" for r in range(size)]
        store.set(keys[rank], b"." + item)
        try:
            store.wait(keys, timeout)
        except RuntimeError as error:
            missing = [r for r, key in enumerate(keys) if not store.check([key])]
            if not missing:
                raise
            raise errors.deadline("init_process_group", timeout.total_seconds(), missing=missing) from error
        return [store.get(key)[1:] for key in keys]

    return exchange


def merged_group(store: Any, size: int, timeout: timedelta, name: str) -> TorchGroup:
    """A group of the first ``size`` ranks that come to ``store``."""
    place = int(store.add("mergeGroupRank", 1)) - 1
    if place >= size:
        raise errors.bad_argument("merge_remote_group", "size", size, f"at least {place + 1}, as many as came")
    return TorchGroup(store, place, size, timeout, name)


class TorchGroup(dist.ProcessGroup):
    """What ``init_process_group("symcomm")`` and ``new_group()`` give."""

    is_symcomm = True

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
    ):
        super().__init__(rank, size)
        self._store = store
        self._global_ranks = global_ranks
        self.options = options
        if core is None:
            core = ProcessGroup(
                rank, size, _exchange_through(store, rank, size, timeout), name, timeout, None, global_ranks
            )
        self.core = core
        self._name = name
        self._desc = ""
        self._coalescing: list[Any] | None = None
        self._splits = 0
        self._hook: Any = None
        self._used_for_symmetric_memory = False
        _alive.add(self)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    # --- running ----------------------------------------------------------------------------------------------

    def _call(
        self, method: Callable[..., Any], *args: Any, options: Any, timeout: Any = None, result: Sequence[Any] = ()
    ) -> Any:
        """Run one of our collectives and dress its work for torch."""
        if torch.autograd._profiler_enabled():
            with torch.autograd.profiler.record_function(f"symcomm:{method.__name__}"):
                return self._dressed(method, args, options, timeout, result)
        return self._dressed(method, args, options, timeout, result)

    def _dressed(
        self, method: Callable[..., Any], args: tuple, options: Any, timeout: Any, result: Sequence[Any]
    ) -> Any:
        asynchronous = is_async(options) or self._coalescing is not None
        begun = time.monotonic()
        inner = method(*args, async_op=asynchronous, timeout=seconds_of(options, timeout))
        work: Any
        if inner is None:
            work = DoneWork(list(result), method.__name__, time.monotonic() - begun)
        else:
            work = TorchWork(inner, list(result), method.__name__)
            if self._coalescing is not None:
                self._coalescing.append(work)
        if self._hook is not None:
            self._tell(work, time.monotonic() - begun)
        return work

    def _tell(self, work: Any, ago: float) -> None:
        """Call the completion hook once the work has ended. ``ago``: seconds since it began."""
        hook, seq, now = self._hook, self.core.sequence_number, datetime.now()
        begun = now - timedelta(seconds=ago)

        def ended(_: Any = None) -> None:
            end = datetime.now()
            hook(WorkInfo(op_type_of(work._call), seq, begun, end, end - begun))

        if isinstance(work, DoneWork):
            ended()
        else:
            work._inner.add_done_callback(ended)

    def _register_on_completion_hook(self, hook: Callable[[WorkInfo], Any]) -> None:
        """``hook(WorkInfo)`` is called when an operation has ended, in whichever thread noticed it."""
        if not callable(hook):
            raise errors.bad_argument("_register_on_completion_hook", "hook", hook, "a function of one argument")
        if self._hook is not None:
            raise errors.CallerError("_register_on_completion_hook: a hook is registered already.")
        self._hook = hook

    def _has_hooks(self) -> bool:
        return self._hook is not None

    # --- reductions -------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        tensor = one("all_reduce", "tensors", tensors)
        if op is not None or timeout is not None:
            opts, _, op, timeout = sort_out(opts, op, timeout)
        redop = redop_of(opts, op)
        if opts is not None and timeout is None and tensor.is_cpu and not getattr(opts, "asyncOp", True):
            quick = self._quick_all_reduce(tensor, redop, opts)
            if quick is not None:
                return quick
        if tensor.is_sparse:
            all_reduce_sparse(self.core, tensor, to_redop("all_reduce", redop)[0], seconds_of(opts, timeout))
            return DoneWork([tensor])
        return self._call(self.core.all_reduce, tensor, redop, options=opts, timeout=timeout, result=[tensor])

    def _quick_all_reduce(self, tensor: Any, redop: Any, opts: Any) -> Any:
        """The blocking call of a plain tensor whose plan is known: nothing but the core."""
        core = self.core
        plan = core._plans.get((tensor.dtype, redop, tensor.numel()))
        if plan is None or not tensor.is_contiguous() or opts.timeout > _NO_TIMEOUT or self._coalescing is not None:
            return None
        if torch.autograd._profiler_enabled() or self._hook is not None:
            return None
        address = tensor.data_ptr()
        status = native.run(core._handle, plan, address, address, core._timeout_ns)
        if status:
            raise core._failed(status, "all_reduce", call_site(2), 0.0, explain)
        return done

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Any:
        call = self.core.all_reduce_coalesced
        return self._call(call, tensors, redop_of(opts), options=opts, result=tensors)

    def reduce(self, tensors: Any, opts: Any = None, root: Any = None, op: Any = None, timeout: Any = None) -> Any:
        tensor = one("reduce", "tensors", tensors)
        opts, root, op, timeout = sort_out(opts, root, op, timeout)
        args = (tensor, root_of(opts, root), redop_of(opts, op))
        return self._call(self.core.reduce, *args, options=opts, timeout=timeout, result=[tensor])

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> Any:
        output = one("reduce_scatter", "output_tensors", output_tensors)
        opts, _, op, timeout = sort_out(opts, op, timeout)
        pieces = input_tensors[0] if input_tensors and isinstance(input_tensors[0], (list, tuple)) else input_tensors
        args = (output, list(pieces), redop_of(opts, op))
        return self._call(self.core.reduce_scatter, *args, options=opts, timeout=timeout, result=[output])

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self._call(self.core.reduce_scatter_single, output, input, redop_of(opts), options=opts, result=[output])

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Any:
        call = self.core.reduce_scatter_coalesced
        return self._call(call, outputs, inputs, redop_of(opts), options=opts, result=outputs)

    # --- copies -----------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, root: Any = None, timeout: Any = None) -> Any:
        tensor = one("broadcast", "tensors", tensors)
        opts, root, _, timeout = sort_out(opts, root, timeout)
        return self._call(
            self.core.broadcast, tensor, root_of(opts, root), options=opts, timeout=timeout, result=[tensor]
        )

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        tensor = one("all_gather", "input_tensors", input_tensors)
        opts, _, _, timeout = sort_out(opts, timeout)
        places = (
            output_tensors[0] if output_tensors and isinstance(output_tensors[0], (list, tuple)) else output_tensors
        )
        return self._call(
            self.core.all_gather, list(places), tensor, options=opts, timeout=timeout, result=list(places)
        )

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self._call(self.core.all_gather_single, output, input, options=opts, result=[output])

    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Any:
        return self._call(self.core.all_gather_coalesced, outputs, inputs, options=opts, result=outputs)

    def allgather_coalesced(self, output_lists: Sequence[Any], input_list: Sequence[Any], opts: Any = None) -> Any:
        works = [self.allgather([[places[k] for places in output_lists]], [t], opts) for k, t in enumerate(input_list)]
        return works[-1] if works else done

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: Any = None, timeout: Any = None
    ) -> Any:
        tensor = one("gather", "input_tensors", input_tensors)
        opts, root, _, timeout = sort_out(opts, root, timeout)
        places = (
            output_tensors[0] if output_tensors and isinstance(output_tensors[0], (list, tuple)) else output_tensors
        )
        args = (list(places) or None, tensor, root_of(opts, root))
        return self._call(self.core.gather, *args, options=opts, timeout=timeout, result=list(places))

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: Any = None, timeout: Any = None
    ) -> Any:
        tensor = one("scatter", "output_tensors", output_tensors)
        opts, root, _, timeout = sort_out(opts, root, timeout)
        pieces = input_tensors[0] if input_tensors and isinstance(input_tensors[0], (list, tuple)) else input_tensors
        args = (tensor, list(pieces) or None, root_of(opts, root))
        return self._call(self.core.scatter, *args, options=opts, timeout=timeout, result=[tensor])

    def alltoall(self, output_tensors: Sequence[Any], input_tensors: Sequence[Any], opts: Any = None) -> Any:
        return self._call(
            self.core.all_to_all, list(output_tensors), list(input_tensors), options=opts, result=output_tensors
        )

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        opts, _, _, timeout = sort_out(opts, timeout)
        args = (output, input, list(output_split_sizes or []), list(input_split_sizes or []))
        return self._call(self.core.all_to_all_single, *args, options=opts, timeout=timeout, result=[output])

    # --- messages ---------------------------------------------------------------------------------------------

    def _message(self, work: Any, tensors: Any, call: str) -> TorchWork:
        dressed = TorchWork(work, list(tensors), call)
        if self._coalescing is not None:
            self._coalescing.append(dressed)
        return dressed

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        return self._message(self.core.isend(one("send", "tensors", tensors), dstRank, tag), tensors, "isend")

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        return self._message(self.core.irecv(one("recv", "tensors", tensors), srcRank, tag), tensors, "irecv")

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._message(self.core.irecv(one("recv", "tensors", tensors), -1, tag), tensors, "irecv")

    # --- synchronisation --------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        opts, _, _, timeout = sort_out(opts, timeout)
        return self._call(self.core.barrier, options=opts, timeout=timeout)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Ours, with the words that scripts written for Gloo look for at the start of the message."""
        if timeout is not None and timedelta(0) <= timeout < timedelta(milliseconds=1):
            raise errors.DeadlineError(f"Rank {self.core.rank} timed out in monitoredBarrier after 0 ms.")
        try:
            self.core.monitored_barrier(seconds_of(None, timeout), wait_all_ranks)
        except errors.DeadlineError as error:
            if self.core.rank == 0:
                who = ("Ranks " if wait_all_ranks else "Rank ") + ", ".join(map(str, error.missing))
                said = f"{who} failed to pass monitoredBarrier"
            else:
                said = (
                    f"Rank {self.core.rank} successfully reached monitoredBarrier, but received errors while waiting "
                    "for send/recv from rank 0"
                )
            raise errors.DeadlineError(f"{said}. {error}", error.missing) from error

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: Any = None) -> Any:
        works, self._coalescing = self._coalescing or [], None
        return _AllOf(works) if works else done

    # --- life -------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        self.core.abort()

    def shutdown(self) -> None:
        self.core.destroy()
        _alive.discard(self)

    def set_timeout(self, timeout: timedelta) -> None:
        self.core.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: Any = None,
        opts: Any = None,
        group_name: Any = None,
        group_desc: Any = None,
        *_: Any,
    ) -> Any:
        """A group of some of our ranks; every rank of this group calls it, those outside get None."""
        self._splits += 1
        name = group_name or f"{self._name}/split{self._splits}"
        core = self.core.new_group(list(ranks), name, seconds_of(None, timeout))
        if core is None:
            return None
        lifetime = timedelta(seconds=core.timeout)
        group = TorchGroup(self._store, core.rank, core.size, lifetime, name, core.global_ranks, opts, core)
        group._desc = group_desc or ""
        return group

    splitGroup = split_group

    def merge_remote_group(
        self, store: Any, size: int, timeout: Any = None, group_name: Any = None, group_desc: Any = None
    ) -> Any:
        """One group of all ranks that meet in ``store``: ``size`` in all, numbered in the order in which they come."""
        if not isinstance(size, int) or size < self.core.size:
            raise errors.bad_argument("merge_remote_group", "size", size, f"at least this group's {self.core.size}")
        lifetime = timeout or timedelta(seconds=self.core.timeout)
        group = merged_group(store, size, lifetime, group_name or f"{self._name}:merge")
        group._desc = group_desc or f"{self._desc}:merge"
        return group

    mergeRemoteGroup = merge_remote_group

    def shrink(self, ranks_to_exclude: Sequence[int] = (), *_: Any) -> TorchGroup:
        """The ranks that still live go on in a new group."""
        core = self.core.shrink()
        return TorchGroup(
            self._store, core.rank, core.size, timedelta(seconds=core.timeout), core.name, core.global_ranks, None, core
        )

    # --- facts ------------------------------------------------------------------------------------------------

    supports_splitting = True
    supports_coalescing = True
    supports_shrinking = True
    supports_time_estimate = False

    def getBackendName(self) -> str:
        return "symcomm"

    def _get_backend_name(self) -> str:
        return "symcomm"

    def name(self) -> str:
        return "symcomm"

    def getRank(self) -> int:
        return self.core.rank

    def getSize(self) -> int:
        return self.core.size

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = self.core.name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self.setGroupName(name)

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def get_group_store(self) -> Any:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self.core.sequence_number

    def _set_sequence_number_for_group(self) -> None:
        """Ours starts with the group, equal on all ranks."""

    def _get_backend(self, device: Any) -> TorchGroup:
        return self

    def supports_tensor_alloc(self, device: Any) -> bool:
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: Any, device: Any = "cpu") -> Any:
        """A tensor in symmetric memory, for buffers that collectives use again and again."""
        nbytes = size * torch.empty((), dtype=dtype).element_size()
        return torch.frombuffer(self.core._arena.buffer(max(nbytes, 1)), dtype=dtype, count=size)

    def memory_stats(self) -> dict[str, int]:
        return {"symmetric_used_bytes": self.core._arena.used_bytes}

    def _wait_for_pending_works(self) -> None:
        for work in list(self.core._pending):
            work.wait()

    @property
    def mem_allocator(self) -> Any:
        raise errors.CallerError("symcomm has no allocator for torch's memory pools; use allocate_tensor.")

    def suspend(self) -> None:
        raise errors.CallerError("symcomm has no memory of a device to give back; there is nothing to suspend.")

    def resume(self) -> None:
        raise errors.CallerError("symcomm has no memory of a device to give back; there is nothing to resume.")

    def setUsePgForSymmMemRendezvous(self, value: bool) -> None:
        """Our symmetric memory always meets through the group; the wish is only remembered."""
        self._used_for_symmetric_memory = bool(value)

    @property
    def use_pg_for_symm_mem_rendezvous(self) -> bool:
        return self._used_for_symmetric_memory

    @use_pg_for_symm_mem_rendezvous.setter
    def use_pg_for_symm_mem_rendezvous(self, value: bool) -> None:
        self.setUsePgForSymmMemRendezvous(value)

    def _enable_collectives_timing(self) -> None:
        """Nothing to switch on: times are kept in any case."""

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Nothing to do: ranks are connected once the group exists."""

    # Other names for the same: those of torch 2.10 to 2.12, and those that C++ looks up.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class _AllOf(DoneWork):
    """Several works as one."""

    def __init__(self, works: Sequence[Any]):
        super().__init__([t for w in works for t in w._tensors])
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def synchronize(self) -> None:
        self.wait()
