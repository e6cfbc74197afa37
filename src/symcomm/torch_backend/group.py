"""TorchGroup: a ``torch.distributed.ProcessGroup`` whose every operation runs on ours.

torch calls some operations by several names, depending on its version and on the caller (Python, the C++ Reducer,
functional collectives); the end of the class lists them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from symcomm import errors
from symcomm._core import native
from symcomm.group import hooks
from symcomm.group.failure import call_site, explain
from symcomm.group.p2p import ANY_SOURCE
from symcomm.group.process_group import ProcessGroup
from symcomm.group.request import to_redop
from symcomm.ops import CACHED, numbers_of
from symcomm.torch_backend import checks, lists, torch_patches, values, versions
from symcomm.torch_backend.arguments import is_async, once_each, one_list, redop_of, root_of, seconds_of, sort_out
from symcomm.torch_backend.bootstrap import join_group
from symcomm.torch_backend.call_hooks import TORCH_CALLS
from symcomm.torch_backend.checks import single
from symcomm.torch_backend.engines import Engines
from symcomm.torch_backend.lifecycle import Lifecycle
from symcomm.torch_backend.newer_torch import NewerTorch
from symcomm.torch_backend.options_layout import ASYNC, UNKNOWN, install, read_options
from symcomm.torch_backend.p2p import exchange
from symcomm.torch_backend.profile import Span, describe, is_profiling
from symcomm.torch_backend.reconfigure import Reconfigurable
from symcomm.torch_backend.sparse import all_reduce_sparse
from symcomm.torch_backend.torch_patches.functional_collectives import register_work
from symcomm.torch_backend.work import AllOf, DoneWork, TorchWork, WorkInfo, done, late, op_type_of

if TYPE_CHECKING:
    from symcomm.torch_backend.debug_checks import DebugChecks

__all__ = ["TorchGroup"]

Options: Any = Backend.Options
install()
_ALL_REDUCE, _REDUCE, _BROADCAST, _BARRIER = numbers_of("all_reduce", "reduce", "broadcast", "barrier")
_REDUCE_SCATTER_SINGLE, _REDUCE_SCATTER = numbers_of("reduce_scatter_single", "reduce_scatter")
_ALL_GATHER_SINGLE, _ALL_GATHER = numbers_of("all_gather_single", "all_gather")
_GATHER, _GATHER_SINGLE, _SCATTER = numbers_of("gather", "gather_single", "scatter")
[_ALL_TO_ALL_SINGLE] = numbers_of("all_to_all_single")
SMALL = 4096  # elements; an operation of that size takes about as long as handing it to a thread


def _is_small(tensors: Any) -> bool:
    """Whether this is a small operation of the group itself: other engines carry tensors of other devices."""
    if not isinstance(tensors, (list, tuple)):
        return tensors is not None and tensors.is_cpu and tensors.numel() <= SMALL
    return bool(tensors) and tensors[0].is_cpu and tensors[0].numel() * len(tensors) <= SMALL


def _first(lists: Any) -> Any:
    return lists[0] if lists and isinstance(lists, (list, tuple)) else None


class TorchGroup(Reconfigurable, Lifecycle, NewerTorch, dist.ProcessGroup):
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
        label: str = "",
        check: Callable[[], None] | None = None,
    ):
        """``label``: what messages and traces call the group, where ``name`` is a number that torch gave it. ``check``:
        raises once a rank that others wait for cannot come, where ``global_ranks`` do not say who they are."""
        super().__init__(rank, size)
        self._store = store
        self._global_ranks = global_ranks
        self.options = options if options is not None else Options("symcomm", timeout)
        self._is_default = bool(label)
        if core is None:
            core = join_group(store, rank, size, timeout, label or name, global_ranks, check)
            hooks.joined(core, store)
        self._operations_before = core.sequence_number
        self.core = core
        self._name, self._label = name, label
        self._desc = ""
        self._coalescing: list[Any] | None = None
        self._splits = 0
        self._hook: Any = None
        self._debug_checks: DebugChecks | None = None
        self.takes_fast_path = not core.spans_hosts
        self._used_for_symmetric_memory = False
        self._engines = Engines(self)
        self._map: dict[str, str] = {}
        self._intercepted = False
        core.interception.add_facade(self, TORCH_CALLS)
        torch_patches.apply(*torch_patches.AT_FIRST_GROUP)
        self.watchers = 0  # of torch's hooks, see torch_patches/cpp_hooks.py
        if versions.HAS_PYTHON_BACKENDS:
            from symcomm.torch_backend.cpp_backend import install_cpp_backend

            install_cpp_backend(self, ["cpu", *self._engines.device_types()])

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    # --- running ----------------------------------------------------------------------------------------------

    def _call(
        self, name: str, *args: Any, options: Any, timeout: Any = None, inputs: Sequence[Any] = (),
        result: Sequence[Any] = (), label: str = "",
    ) -> Any:  # fmt: skip
        """Run our collective of that name and wrap its work for torch, which may call it ``label``. Tensors of other
        devices go to their engine."""
        tensors = inputs or result
        group: Any = self.core
        if tensors and not tensors[0].is_cpu:
            device = tensors[0].device
            group = self._engines.ours(device)
            if group is None:
                return self._engines.forward(name, args, options, timeout, device)
        method, name = getattr(group, name), label or name
        if self._debug_checks is not None:
            self._debug_checks.check(name, inputs, result)
        if not is_profiling():
            return self._run_as_torch_work(name, method, args, options, timeout, result)
        splits = (args[3], args[2]) if name == "all_to_all" and len(args) == 4 else ((), ())
        span = self._span(name, inputs, result, splits=splits, is_async=is_async(options))
        try:
            work = self._run_as_torch_work(name, method, args, options, timeout, result)
        except BaseException:
            span.close()
            raise
        return work.profiled(span)

    def _run_as_torch_work(
        self,
        name: str,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        options: Any,
        timeout: Any,
        result: Sequence[Any],
    ) -> Any:
        asynchronous = is_async(options) or self._coalescing is not None
        begun, seconds = time.monotonic(), seconds_of(options, timeout)
        limit = seconds or self.core.timeout
        try:
            inner = method(*args, async_op=asynchronous, timeout=seconds)
        except (errors.DeadlineError, errors.RankFailedError) as error:
            raise late(error, limit, time.monotonic() - begun) from error.__cause__
        work: Any
        if inner is None:
            work = DoneWork(list(result), name, time.monotonic() - begun)
        else:
            work = TorchWork(inner, list(result), name, limit)
            work.numbers_from = self._operations_before
            if self._coalescing is not None:
                self._coalescing.append(work)
            elif versions.ACCEPTS_IN_FLIGHT_INPUTS():
                register_work(work, result)
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
            work.inner.add_done_callback(ended)

    def _span(self, name: str, inputs: Sequence[Any], outputs: Sequence[Any], **more: Any) -> Span:
        """The profiler's event for one operation, with the fields that torch's own backends report."""
        return Span(name, inputs, describe(self.core, (self._name, self._desc), inputs, outputs, **more))

    def _fast_path(self, call: int, source: Any, target: Any, opts: Any) -> Any:
        """Run a call of a kind seen before in the core alone; None: it has to take the long path.

        This is for calls that block, and for small asynchronous ones that all ranks have already reached: running those
        at once is faster than handing them to a thread."""
        if not self.takes_fast_path:
            return None
        core = self.core
        status = native.run_cached_options(core.handle, call, opts, source, target, core.timeout_ns)
        if status == 0:
            return done
        detail = None
        if status == UNKNOWN:
            status, detail = read_options(call, opts)
            if status == 0:
                status = native.run_cached(core.handle, call, detail, source, target, core.timeout_ns)
        if status == ASYNC:
            small = _is_small(source if target is None else target)
            return self._run_inline(call, detail, source, target, opts) if small and core.may_run_inline() else None
        if status > 0:
            try:
                core.raise_failure(status, CACHED[call].name)
            except errors.DeadlineError as error:
                raise late(error, core.timeout, core.timeout) from None
        return done if status == 0 else None

    def _run_inline(self, call: int, detail: Any, source: Any, target: Any, opts: Any) -> Any:
        """Run an asynchronous call here; None as above. ``wait()`` raises its failure. ``detail`` is None where the
        core reads ``opts``."""
        core, begun = self.core, time.monotonic()
        if detail is None:
            status = native.run_cached_options(core.handle, call, opts, source, target, core.timeout_ns, True)
        else:
            status = native.run_cached(core.handle, call, detail, source, target, core.timeout_ns)
        if status < 0:
            return None
        result = list(target) if isinstance(target, (list, tuple)) else [] if target is None else [target]
        work = DoneWork(result, CACHED[call].name, time.monotonic() - begun)
        if status:
            error = core.fail_with_status(status, work._call, call_site(3), None, explain)
            work.failed(late(error, core.timeout, time.monotonic() - begun))
        return work

    def _set_plain(self) -> None:
        """Whether calls may take the short path."""
        self.takes_fast_path = (
            not self.core.spans_hosts and self._coalescing is None and self._hook is None and self._debug_checks is None
        ) and not self._intercepted

    def set_intercepted(self, is_intercepted: bool) -> None:
        """Whether every call must be visible: those that C++ makes bypass the methods that hooks see."""
        self._intercepted = is_intercepted
        self._set_plain()

    def enable_debug_checks(self) -> None:
        """Have ranks compare their calls before they make them. Collective."""
        from symcomm.torch_backend.debug_checks import DebugChecks

        self._debug_checks = DebugChecks(self)
        self._set_plain()

    def _other_than_cpu(self, device: Any) -> Any:
        """The engine for a device that is not the CPU."""
        if device is None or values.device("device", device).type == "cpu" or self._engines.is_ours(device):
            return None
        return self._engines.on("_coalescing_manager", device)

    # --- reductions -------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        is_plain = op is None and timeout is None
        if is_plain and (work := self._fast_path(_ALL_REDUCE, tensors, tensors, opts)) is not None:
            return work
        opts, _, op, timeout = sort_out("allreduce", {"tensors": tensors}, opts, op=op, timeout=timeout)
        redop = redop_of(opts, op)
        if isinstance(tensors, (list, tuple)) and len(tensors) != 1:
            return lists.all_reduce(self.core, tensors, redop, seconds_of(opts, timeout))
        tensor = single("all_reduce", tensors, "tensor list")
        if tensor.is_sparse and tensor.is_cpu:
            all_reduce_sparse(self.core, tensor, to_redop("all_reduce", redop)[0], seconds_of(opts, timeout))
            return DoneWork([tensor])
        result = [tensor]
        return self._call("all_reduce", tensor, redop, options=opts, timeout=timeout, inputs=result, result=result)

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Any:
        sort_out("allreduce_coalesced", {"tensors": tensors}, opts)
        checks.all_reduce_coalesced(tensors)
        args = (once_each(tensors), redop_of(opts))
        return self._call("all_reduce_coalesced", *args, options=opts, inputs=tensors, result=tensors)

    def reduce(self, tensors: Any, opts: Any = None, root: Any = None, op: Any = None, timeout: Any = None) -> Any:
        is_plain = root is None and op is None and timeout is None
        if is_plain and (work := self._fast_path(_REDUCE, tensors, tensors, opts)) is not None:
            return work
        given = {"tensors": tensors}
        opts, root, op, timeout = sort_out("reduce", given, opts, root=root, op=op, timeout=timeout)
        origin, redop = root_of(opts, root), redop_of(opts, op)
        checks.root_rank("reduce", origin, self.core.size)
        tensor = single("reduce", tensors, "tensor list")
        checks.root_tensor("reduce", opts, 1)
        args = (tensor, origin, redop)
        return self._call("reduce", *args, options=opts, timeout=timeout, inputs=[tensor], result=[tensor])

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> Any:
        output, pieces = (
            single("reduce_scatter", output_tensors, "output tensor list"),
            one_list("reduce_scatter", "inputs", input_tensors),
        )
        if op is None and timeout is None:
            work = self._fast_path(_REDUCE_SCATTER, pieces, output, opts)
            if work is not None:
                return work
        given = {"output_tensors": output_tensors, "input_tensors": input_tensors}
        opts, _, op, timeout = sort_out("reduce_scatter", given, opts, op=op, timeout=timeout)
        args = (output, pieces, redop_of(opts, op))
        return self._call("reduce_scatter", *args, options=opts, timeout=timeout, inputs=pieces, result=[output])

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        if (work := self._fast_path(_REDUCE_SCATTER_SINGLE, input, output, opts)) is not None:
            return work
        sort_out("reduce_scatter_single", {"output": output, "input": input}, opts)
        return self._call(
            "reduce_scatter_single", output, input, redop_of(opts), options=opts, inputs=[input], result=[output]
        )

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Any:
        sort_out("reduce_scatter_single_coalesced", {"outputs": outputs, "inputs": inputs}, opts)
        args = (outputs, inputs, redop_of(opts))
        return self._call("reduce_scatter_coalesced", *args, options=opts, inputs=inputs, result=outputs)

    # --- copies -----------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, root: Any = None, timeout: Any = None) -> Any:
        is_plain = root is None and timeout is None
        if is_plain and (work := self._fast_path(_BROADCAST, tensors, tensors, opts)) is not None:
            return work
        opts, root, _, timeout = sort_out("broadcast", {"tensors": tensors}, opts, root=root, timeout=timeout)
        origin = root_of(opts, root)
        if isinstance(tensors, (list, tuple)) and len(tensors) != 1:
            return lists.broadcast(self.core, tensors, origin, opts, seconds_of(opts, timeout))
        tensor = single("broadcast", tensors, "tensor list")
        checks.root_rank("broadcast", origin, self.core.size)
        checks.root_tensor("broadcast", opts, 1)
        result = [tensor]
        return self._call("broadcast", tensor, origin, options=opts, timeout=timeout, inputs=result, result=result)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        if timeout is None and output_tensors and isinstance(output_tensors, (list, tuple)):
            work = self._fast_path(_ALL_GATHER, input_tensors, output_tensors[0], opts)
            if work is not None:
                return work
        given = {"output_tensors": output_tensors, "input_tensors": input_tensors}
        opts, _, _, timeout = sort_out("allgather", given, opts, timeout=timeout)
        tensors = input_tensors if isinstance(input_tensors, (list, tuple)) else [input_tensors]
        outputs = checks.all_gather_lists(output_tensors, tensors, self.core.size)
        if len(tensors) > 1:
            return lists.all_gather(self.core, outputs, tensors, seconds_of(opts, timeout))
        tensor, places = tensors[0], outputs[0]
        # dist.all_gather takes outputs of any size; direct calls of the group are held to what torch's groups take.
        checks.alike("all_gather", places, tensor, sizes=opts is None)
        return self._call("all_gather", places, tensor, options=opts, timeout=timeout, inputs=[tensor], result=places)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        if (work := self._fast_path(_ALL_GATHER_SINGLE, input, output, opts)) is not None:
            return work
        sort_out("all_gather_single", {"output": output, "input": input}, opts)
        return self._call("all_gather_single", output, input, options=opts, inputs=[input], result=[output])

    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Any:
        sort_out("all_gather_single_coalesced", {"outputs": outputs, "inputs": inputs}, opts)
        return self._call("all_gather_coalesced", outputs, inputs, options=opts, inputs=inputs, result=outputs)

    def allgather_coalesced(self, output_lists: Sequence[Any], input_list: Sequence[Any], opts: Any = None) -> Any:
        sort_out("allgather_coalesced", {"output_lists": output_lists, "input_list": input_list}, opts)
        checks.all_gather_coalesced(output_lists, input_list, self.core.size)

        args = (output_lists, input_list)
        result = [t for one_rank in output_lists for t in one_rank]
        label = "all_gather_coalesced"
        return self._call("all_gather_lists", *args, options=opts, inputs=input_list, result=result, label=label)

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: Any = None, timeout: Any = None
    ) -> Any:
        if root is None and timeout is None:
            work = self._fast_path(_GATHER, input_tensors, _first(output_tensors), opts)
            if work is not None:
                return work
        given = {"output_tensors": output_tensors, "input_tensors": input_tensors}
        opts, root, _, timeout = sort_out("gather", given, opts, root=root, timeout=timeout)
        origin = root_of(opts, root)
        places, tensor = checks.gather(output_tensors, input_tensors, origin, self.core.rank, self.core.size)
        args = (places or None, tensor, origin)
        return self._call("gather", *args, options=opts, timeout=timeout, inputs=[tensor], result=places)

    def gather_single(self, output: Any, input: Any, opts: Any = None, root: Any = None, timeout: Any = None) -> Any:
        call = "gather_single"
        opts, root, _, timeout = sort_out(call, {"output": output, "input": input}, opts, root=root, timeout=timeout)
        origin = root_of(opts, root)
        target = output if self.core.rank == origin else None  # torch's callers pass an empty tensor elsewhere
        if root is None and timeout is None:
            work = self._fast_path(_GATHER_SINGLE, input, target, opts)
            if work is not None:
                return work
        checks.root_rank(call, origin, self.core.size)
        args, result = (target, input, origin), [] if target is None else [target]
        return self._call(call, *args, options=opts, timeout=timeout, inputs=[input], result=result)

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: Any = None, timeout: Any = None
    ) -> Any:
        if root is None and timeout is None:
            work = self._fast_path(_SCATTER, _first(input_tensors), output_tensors, opts)
            if work is not None:
                return work
        given = {"output_tensors": output_tensors, "input_tensors": input_tensors}
        opts, root, _, timeout = sort_out("scatter", given, opts, root=root, timeout=timeout)
        origin = root_of(opts, root)
        tensor, pieces = checks.scatter(output_tensors, input_tensors, origin, self.core.rank, self.core.size)
        args = (tensor, pieces or None, origin)
        return self._call("scatter", *args, options=opts, timeout=timeout, inputs=pieces, result=[tensor])

    def alltoall(self, output_tensors: Sequence[Any], input_tensors: Sequence[Any], opts: Any = None) -> Any:
        sort_out("alltoall", {"output_tensors": output_tensors, "input_tensors": input_tensors}, opts)
        args = (list(output_tensors), list(input_tensors))
        checks.all_to_all(*args, self.core.size)
        return self._call("all_to_all", *args, options=opts, inputs=input_tensors, result=output_tensors)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any,
        input_split_sizes: Any,
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        if timeout is None and not output_split_sizes and not input_split_sizes:
            work = self._fast_path(_ALL_TO_ALL_SINGLE, input, output, opts)
            if work is not None:
                return work
        given = {"output": output, "input": input}
        given |= {"output_split_sizes": output_split_sizes, "input_split_sizes": input_split_sizes}
        opts, _, _, timeout = sort_out("all_to_all_single", given, opts, timeout=timeout)
        args = (output, input, list(output_split_sizes), list(input_split_sizes))
        checks.splits(*args, self.core.size)
        given = {"inputs": [input], "result": [output], "label": "all_to_all"}
        return self._call("all_to_all_single", *args, options=opts, timeout=timeout, **given)

    # --- messages ---------------------------------------------------------------------------------------------

    def _message(self, name: str, start: Callable[..., Any], tensors: Any, *args: Any) -> Any:
        if not isinstance(tensors, (list, tuple)) or not all(isinstance(t, torch.Tensor) for t in tensors):
            raise errors.wrong_type(name, "tensors", tensors, "a list of one tensor")
        tensor = single(name, tensors, "tensor list")
        if not tensor.is_cpu:
            messages = self._engines.messages(tensor.device)
            if messages is None:
                return self._engines.message(name, tensor, args)
            start = getattr(messages, start.__name__)
        ways = (self.core.rank, args[0]) if name == "send" else (args[0], self.core.rank)
        span = self._span(name, [tensor], [tensor], message=ways, is_async=True) if is_profiling() else None
        try:
            work = TorchWork(start(tensor, *args), [tensor], name, self.core.timeout)
        except BaseException:
            if span is not None:
                span.close()
            raise
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work.profiled(span) if span is not None else work

    def send(self, tensors: Any, dstRank: int, tag: int) -> Any:
        if self.takes_fast_path and (work := exchange(self.core, True, tensors, dstRank, tag)) is not None:
            return work
        return self._message("send", self.core.isend, tensors, dstRank, tag)

    def recv(self, tensors: Any, srcRank: int, tag: int) -> Any:
        if self.takes_fast_path and (work := exchange(self.core, False, tensors, srcRank, tag)) is not None:
            return work
        return self._message("recv", self.core.irecv, tensors, srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        if self.takes_fast_path and (work := exchange(self.core, False, tensors, ANY_SOURCE, tag)) is not None:
            return work
        return self._message("recvAnySource", self.core.irecv, tensors, ANY_SOURCE, tag)

    # --- synchronisation --------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        if timeout is None and (work := self._fast_path(_BARRIER, None, None, opts)) is not None:
            return work
        opts, _, _, timeout = sort_out("barrier", {}, opts, timeout=timeout)
        return self._call("barrier", options=opts, timeout=timeout)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Ours, with messages that begin with the text that scripts written for Gloo look for."""
        values.flag("monitored_barrier: wait_all_ranks", wait_all_ranks)
        timeout = values.optional(values.duration, "monitored_barrier: timeout", timeout)
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
        if (other := self._other_than_cpu(device)) is not None:
            other._start_coalescing(device)
        else:
            self._coalescing = []
            self._set_plain()

    def end_coalescing(self, device: Any = None) -> Any:
        if (other := self._other_than_cpu(device)) is not None:
            return other._end_coalescing(device)
        works, self._coalescing = self._coalescing or [], None
        self._set_plain()
        return AllOf(works) if works else done

    # Other names for the same: those of torch 2.10 to 2.12, and those that C++ looks up.
    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single
