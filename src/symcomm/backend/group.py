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
from torch._C._distributed_c10d import Backend

from symcomm import errors
from symcomm._core import native
from symcomm.backend import lists
from symcomm.backend.arguments import is_async, one, one_list, redop_of, root_of, seconds_of, sort_out
from symcomm.backend.profile import Span, describe, is_profiling
from symcomm.backend.sparse import all_reduce_sparse
from symcomm.backend.work import AllOf, DoneWork, TorchWork, WorkInfo, done, op_type_of
from symcomm.group.calls import Kind, to_redop
from symcomm.group.process_group import ProcessGroup
from symcomm.memory.share import Exchange

__all__ = ["TorchGroup", "merged_group"]

_alive: set[Any] = set()  # torch's registry holds groups weakly
Options: Any = Backend.Options
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
        self.options = options if options is not None else Options("symcomm", timeout)
        if core is None:
            core = ProcessGroup(
                rank, size, _exchange_through(store, rank, size, timeout), name, timeout, None, global_ranks
            )
            core.barrier()  # nobody reads the store any more, so its host may leave
        self._operations_before = core.sequence_number
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
        self,
        name: str,
        method: Callable[..., Any],
        *args: Any,
        options: Any,
        timeout: Any = None,
        inputs: Sequence[Any] = (),
        result: Sequence[Any] = (),
    ) -> Any:
        """Run one of our collectives and dress its work for torch."""
        if not is_profiling():
            return self._dressed(name, method, args, options, timeout, result)
        splits = (args[3], args[2]) if name == "all_to_all" and len(args) == 4 else ((), ())
        span = self._span(name, inputs, result, splits=splits, is_async=is_async(options))
        try:
            work = self._dressed(name, method, args, options, timeout, result)
        except BaseException:
            span.close()
            raise
        return work.profiled(span)

    def _dressed(
        self, name: str, method: Callable[..., Any], args: tuple, options: Any, timeout: Any, result: Sequence[Any]
    ) -> Any:
        asynchronous = is_async(options) or self._coalescing is not None
        begun = time.monotonic()
        inner = method(*args, async_op=asynchronous, timeout=seconds_of(options, timeout))
        work: Any
        if inner is None:
            work = DoneWork(list(result), name, time.monotonic() - begun)
        else:
            work = TorchWork(inner, list(result), name)
            if self._coalescing is not None:
                self._coalescing.append(work)
        if self._hook is not None:
            self._tell(work, time.monotonic() - begun)
        return work

    def _tell(self, work: Any, ago: float) -> None:
        """Call the completion hook once the work has ended. ``ago``: seconds since it began."""
        hook, seq, begun = self._hook, self.core.sequence_number, datetime.now() - timedelta(seconds=ago)

        def ended() -> None:
            end = datetime.now()
            hook(WorkInfo(op_type_of(work._call), seq, begun, end, end - begun))

        if isinstance(work, DoneWork):
            ended()
        else:
            work._inner.add_done_callback(ended)

    def _span(self, name: str, inputs: Sequence[Any], outputs: Sequence[Any], **more: Any) -> Span:
        """The profiler's event for one operation, with what torch's own backends tell about theirs."""
        return Span(name, inputs, describe(self.core, (self._name, self._desc), inputs, outputs, **more))

    def _again(self, call: Kind, detail: Any, source: Any, target: Any, opts: Any) -> bool:
        """Run a blocking call of a kind seen before, with nothing but the core; False: it has to go the long way."""
        if (
            opts is None
            or is_async(opts)
            or self._coalescing is not None
            or is_profiling()
            or self._hook is not None
            or opts.timeout > _NO_TIMEOUT
        ):
            return False
        core = self.core
        status = native.again(core._handle, call, detail, source, target, core._timeout_ns)
        if status > 0:
            core._ended(status, call.label)
        return status == 0

    # --- reductions -------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        if op is not None or timeout is not None:
            opts, _, op, timeout = sort_out(opts, op, timeout)
        if type(tensors) is list and len(tensors) > 1:
            return lists.all_reduce(self.core, tensors, redop_of(opts, op), seconds_of(opts, timeout))
        tensor, redop = one("all_reduce", "tensors", tensors), redop_of(opts, op)
        if timeout is None and self._again(Kind.ALL_REDUCE, redop, tensor, tensor, opts):
            return done
        if tensor.is_sparse:
            all_reduce_sparse(self.core, tensor, to_redop("all_reduce", redop)[0], seconds_of(opts, timeout))
            return DoneWork([tensor])
        result = [tensor]
        call = self.core.all_reduce
        return self._call(
            "all_reduce", call, tensor, redop, options=opts, timeout=timeout, inputs=result, result=result
        )

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Any:
        call = self.core.all_reduce_coalesced
        return self._call(
            "all_reduce_coalesced", call, tensors, redop_of(opts), options=opts, inputs=tensors, result=tensors
        )

    def reduce(self, tensors: Any, opts: Any = None, root: Any = None, op: Any = None, timeout: Any = None) -> Any:
        tensor = one("reduce", "tensors", tensors)
        opts, root, op, timeout = sort_out(opts, root, op, timeout)
        args = (tensor, root_of(opts, root), redop_of(opts, op))
        return self._call(
            "reduce", self.core.reduce, *args, options=opts, timeout=timeout, inputs=[tensor], result=[tensor]
        )

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> Any:
        output, pieces = (
            one("reduce_scatter", "output_tensors", output_tensors),
            one_list("reduce_scatter", "inputs", input_tensors),
        )
        opts, _, op, timeout = sort_out(opts, op, timeout)
        args = (output, pieces, redop_of(opts, op))
        call = self.core.reduce_scatter
        return self._call("reduce_scatter", call, *args, options=opts, timeout=timeout, inputs=pieces, result=[output])

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        redop = redop_of(opts)
        if self._again(Kind.REDUCE_SCATTER_SINGLE, redop, input, output, opts):
            return done
        call = self.core.reduce_scatter_single
        return self._call(
            "reduce_scatter_single", call, output, input, redop, options=opts, inputs=[input], result=[output]
        )

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Any:
        call = self.core.reduce_scatter_coalesced
        args = (outputs, inputs, redop_of(opts))
        return self._call("reduce_scatter_coalesced", call, *args, options=opts, inputs=inputs, result=outputs)

    # --- copies -----------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, root: Any = None, timeout: Any = None) -> Any:
        if root is not None or timeout is not None:
            opts, root, _, timeout = sort_out(opts, root, timeout)
        origin = root_of(opts, root)
        if type(tensors) is list and len(tensors) > 1:
            return lists.broadcast(self.core, tensors, origin, opts, seconds_of(opts, timeout))
        tensor = one("broadcast", "tensors", tensors)
        if timeout is None and self._again(Kind.BROADCAST, origin, tensor, tensor, opts):
            return done
        result = [tensor]
        call = self.core.broadcast
        return self._call(
            "broadcast", call, tensor, origin, options=opts, timeout=timeout, inputs=result, result=result
        )

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        opts, _, _, timeout = sort_out(opts, timeout)
        if type(input_tensors) is list and len(input_tensors) > 1:
            return lists.all_gather(self.core, output_tensors, input_tensors, seconds_of(opts, timeout))
        tensor, places = (
            one("all_gather", "input_tensors", input_tensors),
            one_list("all_gather", "output_tensors", output_tensors),
        )
        call = self.core.all_gather
        return self._call(
            "all_gather", call, places, tensor, options=opts, timeout=timeout, inputs=[tensor], result=places
        )

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        if self._again(Kind.ALL_GATHER_SINGLE, 0, input, output, opts):
            return done
        call = self.core.all_gather_single
        return self._call("all_gather_single", call, output, input, options=opts, inputs=[input], result=[output])

    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Any:
        call = self.core.all_gather_coalesced
        return self._call("all_gather_coalesced", call, outputs, inputs, options=opts, inputs=inputs, result=outputs)

    def allgather_coalesced(self, output_lists: Sequence[Any], input_list: Sequence[Any], opts: Any = None) -> Any:
        def call(async_op: bool, timeout: Any) -> Any:
            work = None
            for k, tensor in enumerate(input_list):
                places = [one_rank[k] for one_rank in output_lists]
                work = self.core.all_gather(places, tensor, async_op=async_op, timeout=timeout)
            return work  # operations run in order, so the last speaks for all

        result = [t for one_rank in output_lists for t in one_rank]
        return self._call("all_gather_coalesced", call, options=opts, inputs=input_list, result=result)

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: Any = None, timeout: Any = None
    ) -> Any:
        tensor, places = (
            one("gather", "input_tensors", input_tensors),
            one_list("gather", "output_tensors", output_tensors),
        )
        opts, root, _, timeout = sort_out(opts, root, timeout)
        args = (places or None, tensor, root_of(opts, root))
        return self._call(
            "gather", self.core.gather, *args, options=opts, timeout=timeout, inputs=[tensor], result=places
        )

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: Any = None, timeout: Any = None
    ) -> Any:
        tensor, pieces = (
            one("scatter", "output_tensors", output_tensors),
            one_list("scatter", "input_tensors", input_tensors),
        )
        opts, root, _, timeout = sort_out(opts, root, timeout)
        args = (tensor, pieces or None, root_of(opts, root))
        return self._call(
            "scatter", self.core.scatter, *args, options=opts, timeout=timeout, inputs=pieces, result=[tensor]
        )

    def alltoall(self, output_tensors: Sequence[Any], input_tensors: Sequence[Any], opts: Any = None) -> Any:
        args = (list(output_tensors), list(input_tensors))
        return self._call(
            "all_to_all", self.core.all_to_all, *args, options=opts, inputs=input_tensors, result=output_tensors
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
        call = self.core.all_to_all_single
        return self._call("all_to_all", call, *args, options=opts, timeout=timeout, inputs=[input], result=[output])

    # --- messages ---------------------------------------------------------------------------------------------

    def _message(self, name: str, start: Callable[..., Any], tensors: Any, *args: Any) -> TorchWork:
        tensor = one(name, "tensors", tensors)
        ways = (self.core.rank, args[0]) if name == "send" else (args[0], self.core.rank)
        span = self._span(name, [tensor], [tensor], message=ways, is_async=True) if is_profiling() else None
        try:
            work = TorchWork(start(tensor, *args), [tensor], name)
        except BaseException:
            if span is not None:
                span.close()
            raise
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work.profiled(span) if span is not None else work

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        return self._message("send", self.core.isend, tensors, dstRank, tag)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        return self._message("recv", self.core.irecv, tensors, srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._message("recvAnySource", self.core.irecv, tensors, -1, tag)

    # --- synchronisation --------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        opts, _, _, timeout = sort_out(opts, timeout)
        return self._call("barrier", self.core.barrier, options=opts, timeout=timeout)

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

    def start_coalescing(self, device: Any = None) -> None:
        self._coalescing = []

    def end_coalescing(self, device: Any = None) -> Any:
        works, self._coalescing = self._coalescing or [], None
        return AllOf(works) if works else done

    # --- life -------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        self.core.abort()

    def shutdown(self) -> None:
        self.core.destroy()
        _alive.discard(self)

    def set_timeout(self, timeout: timedelta) -> None:
        self.core.set_timeout(timeout)
        self.options._timeout = timeout

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
        return self.core.sequence_number - self._operations_before

    def _set_sequence_number_for_group(self) -> None:
        """Ours starts with the group, equal on all ranks."""

    def _get_backend(self, device: Any) -> TorchGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

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

    def _register_on_completion_hook(self, hook: Callable[[WorkInfo], Any]) -> None:
        """``hook(WorkInfo)`` is called when a collective has ended, in whichever thread noticed it."""
        if not callable(hook):
            raise errors.bad_argument("_register_on_completion_hook", "hook", hook, "a function of one argument")
        if self._hook is not None:
            raise errors.CallerError("_register_on_completion_hook: a hook is registered already.")
        self._hook = hook

    def _has_hooks(self) -> bool:
        return self._hook is not None

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
    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
