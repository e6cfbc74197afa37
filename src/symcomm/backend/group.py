"""TorchGroup: a ``torch.distributed.ProcessGroup`` whose every operation runs on ours.

torch calls some operations by several names, depending on its version and on who calls (Python, the C++ Reducer,
functional collectives); the end of the class lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from symcomm import collectives, errors
from symcomm._core import native
from symcomm.backend import lists
from symcomm.backend.arguments import is_async, one, one_list, redop_of, root_of, seconds_of
from symcomm.backend.profile import Span, is_profiling
from symcomm.backend.sparse import all_reduce_sparse
from symcomm.backend.work import AllOf, DoneWork, TorchWork, done
from symcomm.group.buffers import torch_dtypes
from symcomm.group.calls import to_redop
from symcomm.group.failure import call_site, explain
from symcomm.group.process_group import ProcessGroup
from symcomm.memory.share import Exchange
from symcomm.types import RedOpType

__all__ = ["TorchGroup"]

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
        self.core = core
        self._name = name
        self._desc = ""
        self._coalescing: list[Any] | None = None
        self._known: dict[Any, Any] = {}  # plans of blocking calls, by what the caller passed
        self._splits = 0
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
            return self._dressed(method, args, options, timeout, result)
        span = self._span(name, inputs, result)
        try:
            work = self._dressed(method, args, options, timeout, result)
        except BaseException:
            span.close()
            raise
        return work.profiled(span)

    def _dressed(
        self, method: Callable[..., Any], args: tuple, options: Any, timeout: Any, result: Sequence[Any]
    ) -> Any:
        asynchronous = is_async(options) or self._coalescing is not None
        inner = method(*args, async_op=asynchronous, timeout=seconds_of(options, timeout))
        if inner is None:
            return DoneWork(list(result))
        work = TorchWork(inner, list(result))
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _span(self, name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> Span:
        """The profiler's event for one operation, with what torch's own backends tell about theirs."""
        facts = {
            "dtype": str(inputs[0].dtype).removeprefix("torch.") if inputs else "",
            "In msg nelems": sum(t.numel() for t in inputs),
            "Out msg nelems": sum(t.numel() for t in outputs),
            "Group size": self.core.size,
            "Process Group Name": self._name,
            "Process Group Description": self._desc,
            "Process Group Ranks": str(self.core.global_ranks),
        }
        return Span(name, inputs, facts)

    def _run_known(self, key: Any, opts: Any, source: Any, target: Any) -> bool:
        """Run a blocking call whose plan is known, with nothing but the core; False: it has to go the long way."""
        plan = self._known.get(key)
        if plan is None or self._coalescing is not None or is_profiling() or opts.timeout > _NO_TIMEOUT:
            return False
        if not source.is_contiguous() or not source.is_cpu or source.is_neg():
            return False
        address = place = source.data_ptr()
        if target is not source:
            if not target.is_contiguous() or not target.is_cpu or target.is_neg():
                return False
            place = target.data_ptr()
        core = self.core
        status = native.run(core._handle, plan, address, place, core._timeout_ns)
        if status:
            raise core._failed(status, key[0], call_site(3), 0.0, explain)
        return True

    def _know(self, key: Any, tensor: Any, build: Callable[..., Any], *args: Any) -> None:
        """Let the next blocking call like this one take the short way."""
        if len(self._known) > 4096:
            self._known.clear()
        if not tensor.is_complex():  # those may be conjugate views, which need a look each time
            self._known[key] = self.core._plan(build, *args)

    # --- reductions -------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        if type(tensors) is list and len(tensors) > 1:
            return lists.all_reduce(self.core, tensors, redop_of(opts, op), seconds_of(opts, timeout))
        tensor, redop = one("all_reduce", "tensors", tensors), redop_of(opts, op)
        blocking = timeout is None and not is_async(opts)
        if blocking:
            key = ("all_reduce", tensor.dtype, tensor.numel(), redop)
            if self._run_known(key, opts, tensor, tensor):
                return done
        if tensor.is_sparse:
            all_reduce_sparse(self.core, tensor, to_redop("all_reduce", redop)[0], seconds_of(opts, timeout))
            return DoneWork([tensor])
        result = [tensor]
        call = self.core.all_reduce
        work = self._call(
            "all_reduce", call, tensor, redop, options=opts, timeout=timeout, inputs=result, result=result
        )
        if blocking and type(redop) is RedOpType:
            args = (tensor.numel(), torch_dtypes()[tensor.dtype], redop)
            self._know(key, tensor, collectives.all_reduce, *args)
        return work

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Any:
        call = self.core.all_reduce_coalesced
        return self._call(
            "all_reduce_coalesced", call, tensors, redop_of(opts), options=opts, inputs=tensors, result=tensors
        )

    def reduce(self, tensors: Any, opts: Any = None, root: Any = None, op: Any = None, timeout: Any = None) -> Any:
        tensor = one("reduce", "tensors", tensors)
        args = (tensor, root_of(opts, root), redop_of(opts, op))
        return self._call(
            "reduce", self.core.reduce, *args, options=opts, timeout=timeout, inputs=[tensor], result=[tensor]
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        output, pieces = one("reduce_scatter", "output_tensors", outputs), one_list("reduce_scatter", "inputs", inputs)
        args = (output, pieces, redop_of(opts, op))
        call = self.core.reduce_scatter
        return self._call("reduce_scatter", call, *args, options=opts, timeout=timeout, inputs=pieces, result=[output])

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        blocking, redop = not is_async(opts), redop_of(opts)
        if blocking:
            key = ("reduce_scatter_single", input.dtype, input.numel(), output.dtype, output.numel(), redop)
            if self._run_known(key, opts, input, output):
                return done
        call = self.core.reduce_scatter_single
        work = self._call(
            "reduce_scatter_single", call, output, input, redop, options=opts, inputs=[input], result=[output]
        )
        if blocking and type(redop) is RedOpType:
            args = ((output.numel(),) * self.core.size, torch_dtypes()[input.dtype], redop)
            self._know(key, input, collectives.reduce_scatter, *args)
        return work

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Any:
        call = self.core.reduce_scatter_coalesced
        args = (outputs, inputs, redop_of(opts))
        return self._call("reduce_scatter_coalesced", call, *args, options=opts, inputs=inputs, result=outputs)

    # --- copies -----------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, root: Any = None, timeout: Any = None) -> Any:
        origin = root_of(opts, root)
        if type(tensors) is list and len(tensors) > 1:
            return lists.broadcast(self.core, tensors, origin, opts, seconds_of(opts, timeout))
        tensor = one("broadcast", "tensors", tensors)
        blocking = timeout is None and not is_async(opts)
        if blocking:
            key = ("broadcast", tensor.dtype, tensor.numel(), origin)
            if self._run_known(key, opts, tensor, tensor):
                return done
        result = [tensor]
        call = self.core.broadcast
        work = self._call(
            "broadcast", call, tensor, origin, options=opts, timeout=timeout, inputs=result, result=result
        )
        if blocking:
            self._know(key, tensor, collectives.broadcast, tensor.numel(), torch_dtypes()[tensor.dtype], origin)
        return work

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        if type(inputs) is list and len(inputs) > 1:
            return lists.all_gather(self.core, outputs, inputs, seconds_of(opts, timeout))
        tensor, places = one("all_gather", "input_tensors", inputs), one_list("all_gather", "output_tensors", outputs)
        call = self.core.all_gather
        return self._call(
            "all_gather", call, places, tensor, options=opts, timeout=timeout, inputs=[tensor], result=places
        )

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        blocking = not is_async(opts)
        if blocking:
            key = ("all_gather_single", input.dtype, input.numel(), output.dtype, output.numel())
            if self._run_known(key, opts, input, output):
                return done
        call = self.core.all_gather_single
        work = self._call("all_gather_single", call, output, input, options=opts, inputs=[input], result=[output])
        if blocking:
            args = ((input.numel(),) * self.core.size, torch_dtypes()[input.dtype])
            self._know(key, input, collectives.all_gather, *args)
        return work

    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Any:
        call = self.core.all_gather_coalesced
        return self._call("all_gather_coalesced", call, outputs, inputs, options=opts, inputs=inputs, result=outputs)

    def allgather_coalesced(self, output_lists: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Any:
        def call(async_op: bool, timeout: Any) -> Any:
            work = None
            for k, tensor in enumerate(inputs):
                places = [one_rank[k] for one_rank in output_lists]
                work = self.core.all_gather(places, tensor, async_op=async_op, timeout=timeout)
            return work  # operations run in order, so the last speaks for all

        result = [t for one_rank in output_lists for t in one_rank]
        return self._call("all_gather_coalesced", call, options=opts, inputs=inputs, result=result)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, root: Any = None, timeout: Any = None) -> Any:
        tensor, places = one("gather", "input_tensors", inputs), one_list("gather", "output_tensors", outputs)
        args = (places or None, tensor, root_of(opts, root))
        return self._call(
            "gather", self.core.gather, *args, options=opts, timeout=timeout, inputs=[tensor], result=places
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, root: Any = None, timeout: Any = None) -> Any:
        tensor, pieces = one("scatter", "output_tensors", outputs), one_list("scatter", "input_tensors", inputs)
        args = (tensor, pieces or None, root_of(opts, root))
        return self._call(
            "scatter", self.core.scatter, *args, options=opts, timeout=timeout, inputs=pieces, result=[tensor]
        )

    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Any:
        args = (list(outputs), list(inputs))
        return self._call("all_to_all", self.core.all_to_all, *args, options=opts, inputs=inputs, result=outputs)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_splits: Any = None,
        input_splits: Any = None,
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        args = (output, input, list(output_splits or []), list(input_splits or []))
        call = self.core.all_to_all_single
        return self._call("all_to_all", call, *args, options=opts, timeout=timeout, inputs=[input], result=[output])

    # --- messages ---------------------------------------------------------------------------------------------

    def _message(self, name: str, start: Callable[..., Any], tensors: Any, *args: Any) -> TorchWork:
        tensor = one(name, "tensors", tensors)
        span = self._span(name, [tensor], [tensor]) if is_profiling() else None
        try:
            work = TorchWork(start(tensor, *args), [tensor])
        except BaseException:
            if span is not None:
                span.close()
            raise
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work.profiled(span) if span is not None else work

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        return self._message("send", self.core.isend, tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        return self._message("recv", self.core.irecv, tensors, peer, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._message("recvAnySource", self.core.irecv, tensors, -1, tag)

    # --- synchronisation --------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
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
    ) -> TorchGroup:
        """One group of all ``size`` ranks that come to ``store``, whatever groups they are in now.

        Ranks are given in the order in which they come."""
        rank = store.add("symcomm/merge", 1) - 1
        if rank >= size:
            raise errors.bad_argument("merge_remote_group", "size", size, f"at least {rank + 1}: that many have come")
        lifetime = timedelta(seconds=seconds_of(None, timeout) or self.core.timeout)
        group = TorchGroup(store, rank, size, lifetime, group_name or f"{self._name}/merged")
        group._desc = group_desc or ""
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

    def _has_hooks(self) -> bool:
        return False

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
