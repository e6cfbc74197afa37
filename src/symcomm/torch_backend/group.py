"""TorchGroup: a ``torch.distributed.ProcessGroup`` whose every operation runs on ours.

torch calls some operations by several names, depending on its version and on the caller (Python, the C++ Reducer,
functional collectives); the end of the class lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from symcomm import errors
from symcomm.group import hooks
from symcomm.group.p2p import ANY_SOURCE
from symcomm.group.process_group import ProcessGroup
from symcomm.group.refusal import Refusals
from symcomm.ops import numbers_of
from symcomm.torch_backend import checks, lists, torch_patches, values, versions
from symcomm.torch_backend.arguments import once_each, one_list, seconds_of, sort_out
from symcomm.torch_backend.bootstrap import join_group
from symcomm.torch_backend.call_hooks import TORCH_CALLS
from symcomm.torch_backend.checks import single
from symcomm.torch_backend.engines import Engines
from symcomm.torch_backend.newer_torch import NewerTorch
from symcomm.torch_backend.options_layout import install
from symcomm.torch_backend.p2p import exchange
from symcomm.torch_backend.sparse import all_reduce_sparse
from symcomm.torch_backend.work import DoneWork

Options: Any = Backend.Options
install()
_ALL_REDUCE, _REDUCE, _BROADCAST, _BARRIER = numbers_of("all_reduce", "reduce", "broadcast", "barrier")
_REDUCE_SCATTER_SINGLE, _REDUCE_SCATTER = numbers_of("reduce_scatter_single", "reduce_scatter")
_ALL_GATHER_SINGLE, _ALL_GATHER = numbers_of("all_gather_single", "all_gather")
_GATHER, _GATHER_SINGLE, _SCATTER = numbers_of("gather", "gather_single", "scatter")
[_ALL_TO_ALL_SINGLE] = numbers_of("all_to_all_single")


def _first(lists: Any) -> Any:
    return lists[0] if isinstance(lists, (list, tuple)) and lists else None


def _is_empty(splits: Any) -> bool:
    return splits is None or (isinstance(splits, (list, tuple)) and not splits)


def _with_names(function: Any, **names: str) -> Any:
    """The same function, whose parameters have other names. One that calls it would cost every call."""
    code = function.__code__
    other = tuple(names.get(name, name) for name in code.co_varnames)
    return FunctionType(code.replace(co_varnames=other), function.__globals__, function.__name__, function.__defaults__)


class TorchGroup(NewerTorch, dist.ProcessGroup):
    """What ``init_process_group("symcomm")`` and ``new_group()`` give."""

    is_symcomm = True
    watchers = 0  # torch's hooks, see torch_patches/cpp_hooks.py

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
        self.options = options if options is not None else Options("symcomm", timeout)
        self._is_default = bool(label)
        if core is None:
            core = join_group(store, rank, size, timeout, label or name, global_ranks, check)
            hooks.joined(core, store)
        self._operations_before = core.sequence_number
        self.core = core
        self._name, self._label = name, label
        self.takes_fast_path = not core.spans_hosts
        self._engines = Engines(self)
        self._map = {}
        core.interception.add_facade(self, TORCH_CALLS)
        torch_patches.apply(*torch_patches.AT_FIRST_GROUP)
        if versions.HAS_PYTHON_BACKENDS:
            from symcomm.torch_backend.cpp_backend import install_cpp_backend

            install_cpp_backend(self, ["cpu", *self._engines.device_types()])

    # --- reductions -------------------------------------------------------------------------------------------

    # Behind the star: what another form of the call names its tensors, see overloads.py.

    def allreduce(
        self, tensors: Any = None, opts: Any = None, op: Any = None, timeout: Any = None, *, tensor: Any = None
    ) -> Any:
        is_plain = op is None and timeout is None
        if is_plain and (work := self._fast_path(_ALL_REDUCE, tensors, tensors, opts)) is not None:
            return work
        tensors = tensors if tensor is None else tensor
        with Refusals(self):
            given = sort_out("allreduce", [tensors], opts, op=op, timeout=timeout)
            several = isinstance(tensors, (list, tuple)) and len(tensors) != 1
            redop = given.redop
            tensor = None if several else single("all_reduce", tensors, "tensor list")
            is_sparse = not several and tensor.is_sparse and tensor.is_cpu
        if several:
            self._compare("all_reduce", tensors, tensors)
            return lists.all_reduce(self.core, tensors, redop, given.seconds)
        if is_sparse:
            self._compare("all_reduce", [tensor], [tensor])
            all_reduce_sparse(self.core, tensor, redop, given.seconds)
            return DoneWork([tensor])
        return self._call("all_reduce", given, tensor, redop)

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Any:
        with Refusals(self):
            given = sort_out("allreduce_coalesced", [tensors], opts)
            checks.all_reduce_coalesced(tensors)
            args = once_each(tensors), given.redop
        return self._call("all_reduce_coalesced", given, *args, result=tensors)

    def reduce(
        self, tensors: Any = None, opts: Any = None, root: Any = None, op: Any = None, timeout: Any = None, *,
        tensor: Any = None,
    ) -> Any:  # fmt: skip
        is_plain = root is None and op is None and timeout is None
        if is_plain and (work := self._fast_path(_REDUCE, tensors, tensors, opts)) is not None:
            return work
        tensors = tensors if tensor is None else tensor
        with Refusals(self):
            given = sort_out("reduce", [tensors], opts, root=root, op=op, timeout=timeout)
            checks.root_rank("reduce", given.root, self.core.size)
            tensor = single("reduce", tensors, "tensor list")
            checks.root_tensor("reduce", given.options, 1)
            args = tensor, given.root, given.redop
        return self._call("reduce", given, *args)

    def reduce_scatter(
        self, output_tensors: Any = None, input_tensors: Any = None, opts: Any = None, op: Any = None,
        timeout: Any = None, *, output: Any = None, input: Any = None,
    ) -> Any:  # fmt: skip
        if op is None and timeout is None and isinstance(output_tensors, (list, tuple)) and output_tensors:
            work = self._fast_path(_REDUCE_SCATTER, _first(input_tensors), output_tensors, opts)
            if work is not None:
                return work
        tensors = (output_tensors if output is None else output, input_tensors if input is None else input)
        with Refusals(self):
            place = single("reduce_scatter", tensors[0], "output tensor list")
            pieces = one_list("reduce_scatter", "inputs", tensors[1])
            given = sort_out("reduce_scatter", tensors, opts, op=op, timeout=timeout)
            args = place, pieces, given.redop
        return self._call("reduce_scatter", given, *args)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        if (work := self._fast_path(_REDUCE_SCATTER_SINGLE, input, output, opts)) is not None:
            return work
        with Refusals(self):
            given = sort_out("reduce_scatter_single", (output, input), opts)
            args = output, input, given.redop
        return self._call("reduce_scatter_single", given, *args)

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Any:
        with Refusals(self):
            given = sort_out("reduce_scatter_single_coalesced", (outputs, inputs), opts)
            args = outputs, inputs, given.redop
        return self._call("reduce_scatter_coalesced", given, *args)

    # --- copies -----------------------------------------------------------------------------------------------

    def broadcast(
        self, tensors: Any = None, opts: Any = None, root: Any = None, timeout: Any = None, *, tensor: Any = None
    ) -> Any:
        is_plain = root is None and timeout is None
        if is_plain and (work := self._fast_path(_BROADCAST, tensors, tensors, opts)) is not None:
            return work
        tensors = tensors if tensor is None else tensor
        with Refusals(self):
            given = sort_out("broadcast", [tensors], opts, root=root, timeout=timeout)
            count = len(tensors) if isinstance(tensors, (list, tuple)) else 1
            checks.root_rank("broadcast", given.root, self.core.size)
            checks.root_tensor("broadcast", given.options, count)
        if count != 1:
            self._compare("broadcast", tensors, tensors)
            return lists.broadcast(self.core, tensors, given.root, given.options, given.seconds)
        return self._call("broadcast", given, single("broadcast", tensors, "tensor list"), given.root)

    def allgather(
        self, output_tensors: Any, input_tensors: Any = None, opts: Any = None, timeout: Any = None, *,
        input_tensor: Any = None,
    ) -> Any:  # fmt: skip
        if timeout is None and isinstance(output_tensors, (list, tuple)) and output_tensors:
            work = self._fast_path(_ALL_GATHER, input_tensors, output_tensors[0], opts)
            if work is not None:
                return work
        input_tensors = input_tensors if input_tensor is None else input_tensor
        with Refusals(self):
            given = sort_out("allgather", (output_tensors, input_tensors), opts, timeout=timeout)
            inputs = input_tensors if isinstance(input_tensors, (list, tuple)) else [input_tensors]
            outputs = checks.all_gather_lists(output_tensors, inputs, self.core.size)
            # dist.all_gather takes places of any size; who calls the group itself is held to what torch's groups take.
            if len(inputs) == 1:
                checks.alike("all_gather", outputs[0], inputs[0], sizes=given.options is None)
        if len(inputs) > 1:
            self._compare("all_gather", inputs, outputs)
            return lists.all_gather(self.core, outputs, inputs, given.seconds)
        return self._call("all_gather", given, outputs[0], inputs[0])

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        if (work := self._fast_path(_ALL_GATHER_SINGLE, input, output, opts)) is not None:
            return work
        with Refusals(self):
            given = sort_out("all_gather_single", (output, input), opts)
        return self._call("all_gather_single", given, output, input)

    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Any:
        with Refusals(self):
            given = sort_out("all_gather_single_coalesced", (outputs, inputs), opts)
        return self._call("all_gather_coalesced", given, outputs, inputs)

    def allgather_coalesced(self, output_lists: Sequence[Any], input_list: Sequence[Any], opts: Any = None) -> Any:
        with Refusals(self):
            given = sort_out("allgather_coalesced", (output_lists, input_list), opts)
            checks.all_gather_coalesced(output_lists, input_list, self.core.size)
        return self._call("all_gather_lists", given, output_lists, input_list)

    def gather(
        self, output_tensors: Any, input_tensors: Any = None, opts: Any = None, root: Any = None, timeout: Any = None,
        *, input_tensor: Any = None,
    ) -> Any:  # fmt: skip
        is_plain = root is None and timeout is None
        if is_plain and (work := self._fast_path(_GATHER, input_tensors, _first(output_tensors), opts)) is not None:
            return work
        input_tensors = input_tensors if input_tensor is None else input_tensor
        with Refusals(self):
            given = sort_out("gather", (output_tensors, input_tensors), opts, root=root, timeout=timeout)
            places, tensor = checks.gather(output_tensors, input_tensors, given.root, self.core.rank, self.core.size)
        return self._call("gather", given, places or None, tensor, given.root)

    def gather_single(self, output: Any, input: Any, opts: Any = None, root: Any = None, timeout: Any = None) -> Any:
        if root is None and timeout is None and (at := getattr(opts, "rootRank", None)) is not None:
            target = output if self.core.rank == at else None  # torch's callers pass an empty tensor elsewhere
            if (work := self._fast_path(_GATHER_SINGLE, input, target, opts)) is not None:
                return work
        with Refusals(self):
            given = sort_out("gather_single", (output, input), opts, root=root, timeout=timeout)
            checks.root_rank("gather_single", given.root, self.core.size)
        target = output if self.core.rank == given.root else None
        return self._call("gather_single", given, target, input, given.root)

    def scatter(
        self, output_tensors: Any = None, input_tensors: Any = None, opts: Any = None, root: Any = None,
        timeout: Any = None, *, output_tensor: Any = None,
    ) -> Any:  # fmt: skip
        is_plain = root is None and timeout is None
        if is_plain and (work := self._fast_path(_SCATTER, _first(input_tensors), output_tensors, opts)) is not None:
            return work
        output_tensors = output_tensors if output_tensor is None else output_tensor
        with Refusals(self):
            given = sort_out("scatter", (output_tensors, input_tensors), opts, root=root, timeout=timeout)
            tensor, pieces = checks.scatter(output_tensors, input_tensors, given.root, self.core.rank, self.core.size)
        return self._call("scatter", given, tensor, pieces or None, given.root)

    def alltoall(self, output_tensors: Sequence[Any], input_tensors: Sequence[Any], opts: Any = None) -> Any:
        with Refusals(self):
            given = sort_out("alltoall", (output_tensors, input_tensors), opts)
            checks.all_to_all(output_tensors, input_tensors, self.core.size)
        return self._call("all_to_all", given, list(output_tensors), list(input_tensors))

    def all_to_all_single(
        self, output: Any, input: Any, output_split_sizes: Any, input_split_sizes: Any, opts: Any = None,
        timeout: Any = None,
    ) -> Any:  # fmt: skip
        if timeout is None and _is_empty(output_split_sizes) and _is_empty(input_split_sizes):
            work = self._fast_path(_ALL_TO_ALL_SINGLE, input, output, opts)
            if work is not None:
                return work
        with Refusals(self):
            given = sort_out(
                "all_to_all_single", (output, input, output_split_sizes, input_split_sizes), opts, timeout=timeout
            )
            args = (output, input, list(output_split_sizes), list(input_split_sizes))
            checks.splits(*args, self.core.size)
        return self._call("all_to_all_single", given, *args)

    # --- messages ---------------------------------------------------------------------------------------------

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
        with Refusals(self):
            given = sort_out("barrier", (), opts, timeout=timeout)
        return self._call("barrier", given)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Ours, with messages that begin with the text that scripts written for Gloo look for."""
        try:
            values.flag("monitored_barrier: wait_all_ranks", wait_all_ranks)
            timeout = values.optional(values.duration, "monitored_barrier: timeout", timeout)
            if timeout is not None and timedelta(0) <= timeout < timedelta(milliseconds=1):
                raise errors.DeadlineError(f"Rank {self.core.rank} timed out in monitoredBarrier after 0 ms.")
        except Exception as error:
            self.core.refuse_monitored_barrier(error)
            raise
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

    # Other names for the same: those of torch 2.10 to 2.12, and those that C++ looks up.
    _start_coalescing = NewerTorch.start_coalescing
    _end_coalescing = NewerTorch.end_coalescing
    _allgather_base = all_gather_single
    _reduce_scatter_base = _with_names(reduce_scatter_single, output="outputTensor", input="inputTensor")
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single
