"""Runs the calls of a TorchGroup: in the core alone if possible, otherwise on our group or on another engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from symcomm import errors
from symcomm.group.failure import call_site
from symcomm.group.refusal import Refusals
from symcomm.group.work import Batch
from symcomm.ops import BY_NAME, CACHED, Op
from symcomm.torch_backend import checks, values, versions
from symcomm.torch_backend.arguments import Given, is_async, read_arguments
from symcomm.torch_backend.checks import single
from symcomm.torch_backend.debug_checks import DebugChecks
from symcomm.torch_backend.engines import Engines
from symcomm.torch_backend.options_layout import ASYNC, UNKNOWN, read_options
from symcomm.torch_backend.overloads import signature_of
from symcomm.torch_backend.profile import Span, describe, is_profiling
from symcomm.torch_backend.python_group import CompletionHook, Names
from symcomm.torch_backend.torch_patches.functional_collectives import register_work
from symcomm.torch_backend.work import AllOf, DoneWork, QueuedWork, TorchWork, done, late, op_type_of

# Torch has one name for two operations of ours.
_TORCH_NAMES = {"all_to_all_single": "all_to_all", "all_gather_lists": "all_gather_coalesced"}
_NESTED_OUTPUTS, _NESTED_INPUTS = ("all_gather", "gather"), ("reduce_scatter", "scatter")  # torch passes [[tensors]]


def _single(tensors: Any) -> Any:
    """torch's lists of one are tensors to the core."""
    return tensors[0] if isinstance(tensors, (list, tuple)) and len(tensors) == 1 else tensors


def _flat(tensors: Any) -> list[Any]:
    """A call's tensors, which may be one, a list of lists, or none."""
    if tensors is None:
        return []
    if not isinstance(tensors, (list, tuple)):
        return [tensors]
    return [t for each in tensors for t in each] if tensors and isinstance(tensors[0], (list, tuple)) else list(tensors)


def _dispatched(op: Op, inputs: list[Any], outputs: list[Any]) -> list[Any]:
    """The tensors whose device decides what torch calls: all but those in lists of lists. If one is a meta tensor,
    which has no values, the call does nothing."""
    sides = ([] if op.name in _NESTED_INPUTS else inputs, [] if op.name in _NESTED_OUTPUTS else outputs)
    return [tensor for side in sides for tensor in side]


# --- TorchGroup's methods ---------------------------------------------------------------------------------------------


def operation(name: str, prepare: Callable[..., Any]) -> Callable[..., Any]:
    """TorchGroup's method for an operation, by our name of it. ``prepare`` checks its arguments, see operations.py.

    A call of a kind seen before runs in the core alone; if it is asynchronous, the core queues it."""
    op = BY_NAME[name]
    form = _FORMS.get(name, _of_two) if op.number >= 0 else _uncached
    method: Any = form(op, prepare)
    method.__name__, method.__qualname__ = op.torch, f"TorchGroup.{op.torch}"
    method.__signature__ = signature_of(op.torch)
    return method


# One function for each way to pass tensors. Each calls the core itself: one Python frame more costs a tenth of a call.


def _uncached(op: Op, prepare: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **named: Any) -> Any:
        return self.calls.run_new(op, prepare, args, named)

    return call


def _in_place(op: Op, prepare: Callable[..., Any]) -> Callable[..., Any]:
    number = op.number

    def call(self: Any, tensors: Any = None, opts: Any = None, *more: Any, **named: Any) -> Any:
        calls = self.calls
        handle = calls.handle
        if more or named or handle is None:
            return calls.run_new(op, prepare, (tensors, opts, *more), named)
        status = handle.run_cached_options(number, opts, tensors, tensors)
        return done if status == 0 else calls.go_on(op, prepare, status, (tensors, opts), opts, tensors, tensors)

    return call


def _of_two(op: Op, prepare: Callable[..., Any]) -> Callable[..., Any]:
    number, is_rooted = op.number, op.rooted
    nested_output, nested_input = op.name in _NESTED_OUTPUTS, op.name in _NESTED_INPUTS

    def call(self: Any, output: Any = None, input: Any = None, opts: Any = None, *more: Any, **named: Any) -> Any:
        calls = self.calls
        handle = calls.handle
        if more or named or handle is None:
            return calls.run_new(op, prepare, (output, input, opts, *more), named)
        source, target = input, output
        if nested_output:
            target = output[0] if isinstance(output, (list, tuple)) and output else None
        elif nested_input:
            source = input[0] if isinstance(input, (list, tuple)) and input else None
        elif is_rooted and getattr(opts, "rootRank", None) != calls.core.rank:  # torch passes an empty output
            target = None
        status = handle.run_cached_options(number, opts, source, target)
        return done if status == 0 else calls.go_on(op, prepare, status, (output, input, opts), opts, source, target)

    return call


def _with_splits(op: Op, prepare: Callable[..., Any]) -> Callable[..., Any]:
    number = op.number

    def call(
        self: Any, output: Any = None, input: Any = None, output_split_sizes: Any = None, input_split_sizes: Any = None,
        opts: Any = None, *more: Any, **named: Any,
    ) -> Any:  # fmt: skip
        calls = self.calls
        handle = calls.handle
        args = (output, input, output_split_sizes, input_split_sizes, opts)
        are_lists = type(output_split_sizes) is type(input_split_sizes) is list
        if more or named or handle is None or not are_lists or output_split_sizes or input_split_sizes:
            return calls.run_new(op, prepare, (*args, *more), named)
        status = handle.run_cached_options(number, opts, input, output)
        return done if status == 0 else calls.go_on(op, prepare, status, args, opts, input, output)

    return call


def _of_none(op: Op, prepare: Callable[..., Any]) -> Callable[..., Any]:
    number = op.number

    def call(self: Any, opts: Any = None, timeout: Any = None) -> Any:
        calls = self.calls
        handle = calls.handle
        if timeout is not None or handle is None:
            return calls.run_new(op, prepare, (opts, timeout), {})
        status = handle.run_cached_options(number, opts, None, None)
        return done if status == 0 else calls.go_on(op, prepare, status, (opts,), opts, None, None)

    return call


_FORMS = {
    **dict.fromkeys(("all_reduce", "reduce", "broadcast"), _in_place),
    "all_to_all_single": _with_splits,
    "barrier": _of_none,
}


# --- calls ------------------------------------------------------------------------------------------------------------


class Calls:
    """The calls of one TorchGroup.

    ``handle`` is the core's handle of our group; None while something outside the core must see the calls."""

    def __init__(self, core: Any, engines: Engines, names: Names, completion: CompletionHook):
        self.core = core
        self.debug_checks: DebugChecks | None = None
        self._engines, self._names, self._completion = engines, names, completion
        self._before = core.sequence_number  # how many operations torch did not request
        self._coalescing: list[Any] | None = None  # works since start_coalescing()
        self._batch: Batch | None = None  # of the same works
        self._is_intercepted = False
        self.choose_path()

    def choose_path(self) -> None:
        """Decide whether the core alone may run calls; called whenever one of these facts changes."""
        watched = self._is_intercepted or self._completion.hook is not None or self.debug_checks is not None
        is_alone = not self.core.spans_hosts and self._coalescing is None and not watched
        self.handle = self.core.handle if is_alone else None

    def set_intercepted(self, is_intercepted: bool) -> None:
        """Say whether hooks must see every call: calls that the core alone runs bypass them."""
        self._is_intercepted = is_intercepted
        self.choose_path()

    def enable_debug_checks(self) -> None:
        """Have ranks compare their calls before they make them. Collective."""
        self.debug_checks = DebugChecks(self.core)
        self.choose_path()

    def close(self) -> None:
        if self.debug_checks is not None:
            self.debug_checks.close()

    def refuse(self, error: Exception) -> None:
        """Tell the others that this rank makes no call, and why; with debug checks, before they compare theirs."""
        (self.core if self.debug_checks is None else self.debug_checks).refuse(error)

    def _compare(self, name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        if self.debug_checks is not None:
            self.debug_checks.check(name, inputs, outputs)

    @property
    def sequence_number(self) -> int:
        return self.core.sequence_number - self._before

    # --- calls seen before ------------------------------------------------------------------------------------

    def go_on(
        self,
        op: Op,
        prepare: Callable[..., Any],
        status: int,
        args: tuple[Any, ...],
        opts: Any,
        source: Any,
        target: Any,
    ) -> Any:
        """Go on with a call that the core was asked to run; it returned ``status``."""
        if status == ASYNC:
            work = self._queue(op.number, opts, source, target)
        else:
            work = self._run_seen(op.number, status, opts, source, target)
        return self.run_new(op, prepare, args, {}) if work is None else work

    def _run_seen(self, number: int, status: int, opts: Any, source: Any, target: Any) -> Any:
        """Run a call of a kind seen before. Returns None if it must take the slow path."""
        core, detail = self.core, None
        if status == UNKNOWN:
            status, detail = read_options(number, opts)
            if status == 0:
                status = core.handle.run_cached(number, detail, _single(source), _single(target))
        if status == ASYNC:
            return self._queue(number, opts if detail is None else detail, source, target)
        if status > 0:
            try:
                raise core.state.fail_with_status(status, CACHED[number].name, call_site(2), None)
            except errors.DeadlineError as error:
                raise late(error, core.timeout, core.timeout) from None
        return done if status == 0 else None

    def _queue(self, number: int, detail: Any, source: Any, target: Any) -> Any:
        """Have the core queue an asynchronous call. Returns None as _run_seen does."""
        core, name = self.core, CACHED[number].name
        inner = core.executor.call_seen(number, detail, source, target, True, name)
        if inner == -1:
            return None
        work = QueuedWork(inner, core.state.timeout_ns, self._before)
        if versions.ACCEPTS_IN_FLIGHT_INPUTS():
            register_work(work, work.outputs)
        return work

    def _as_torch_work(self, inner: Any, result: list[Any], name: str, limit: float) -> TorchWork:
        work = TorchWork(inner, result, name, limit)
        work.numbers_from = self._before
        if self._coalescing is not None:
            self._coalescing.append(work)
        elif versions.ACCEPTS_IN_FLIGHT_INPUTS():
            register_work(work, result)
        return work

    # --- all others -------------------------------------------------------------------------------------------

    def run_new(self, op: Op, prepare: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Check a call, run it where its tensors are, and wrap its work for torch."""
        core = self.core
        with Refusals(self):
            tensors, given = read_arguments(op.torch, args, named)
            prepared = prepare(core, given, *tensors)
            if not callable(prepared):
                # The caller's tensors: one may be listed twice. A rank that is not the root has none.
                result = _flat(tensors[0]) if prepared and prepared[0] is not None else []
                inputs = _flat(prepared[1]) if op.inputs and op.outputs else result
                device = next((t.device for t in (inputs or result)[:1] if not t.is_cpu), None)
                if any(t.is_meta for t in _dispatched(op, inputs, result)) and not self._engines.carries("meta"):
                    return DoneWork(result, op.name)
                group: Any = core if device is None else self._engines.ours(device)
        if callable(prepared):
            self._compare(op.name, _flat(tensors[-1]), _flat(tensors[0]))
            return prepared()
        if group is None:
            return self._engines.forward(op.name, prepared, given.options, given.timeout, device)
        method, name = getattr(group, op.name), _TORCH_NAMES.get(op.name, op.name)
        self._compare(name, inputs, result)
        if not is_profiling():
            return self._run_as_torch_work(name, method, prepared, given, result)
        splits = (prepared[3], prepared[2]) if op.name == "all_to_all_single" else ((), ())
        span = self._span(name, inputs, result, splits=splits, is_async=is_async(given.options))
        try:
            work = self._run_as_torch_work(name, method, prepared, given, result)
        except BaseException:
            span.close()
            raise
        return work.profiled(span)

    def _run_as_torch_work(
        self, name: str, method: Callable[..., Any], args: tuple[Any, ...], given: Given, result: list[Any]
    ) -> Any:
        asynchronous = is_async(given.options) if self._coalescing is None else self._batch
        begun, seconds = time.monotonic(), given.seconds
        limit = seconds or self.core.timeout
        try:
            inner = method(*args, async_op=asynchronous, timeout=seconds)
        except (errors.DeadlineError, errors.RankFailedError) as error:
            raise late(error, limit, time.monotonic() - begun) from error.__cause__
        work: Any
        if inner is None:
            work = DoneWork(result, name, time.monotonic() - begun)
        else:
            work = self._as_torch_work(inner, result, name, limit)
        if self._completion.hook is not None:
            ended = self._completion.teller(op_type_of(name), self.core.sequence_number, time.monotonic() - begun)
            work.add_done_callback(ended)
        return work

    def _span(self, name: str, inputs: Sequence[Any], outputs: Sequence[Any], **more: Any) -> Span:
        """The profiler's event for one operation, with the fields that torch's own backends report."""
        return Span(name, inputs, describe(self.core, (self._names.name, self._names.desc), inputs, outputs, **more))

    def message(self, name: str, start: str, tensors: Any, *args: Any) -> Any:
        """Send or receive with the method ``start`` of our group."""
        if not isinstance(tensors, (list, tuple)) or not all(isinstance(t, torch.Tensor) for t in tensors):
            raise errors.wrong_type(name, "tensors", tensors, "a list of one tensor")
        tensor = single(name, tensors, "tensor list")
        checks.tag(name, args[-1])
        if tensor.is_meta and not self._engines.carries("meta"):
            return DoneWork([tensor], name)
        messages = self.core if tensor.is_cpu else self._engines.messages(tensor.device)
        if messages is None:
            return self._engines.message(name, tensor, args)
        ways = (self.core.rank, args[0]) if name == "send" else (args[0], self.core.rank)
        span = self._span(name, [tensor], [tensor], message=ways, is_async=True) if is_profiling() else None
        try:
            work = TorchWork(getattr(messages, start)(tensor, *args), [tensor], name, self.core.timeout)
        except BaseException:
            if span is not None:
                span.close()
            raise
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work.profiled(span) if span is not None else work

    # --- several at once --------------------------------------------------------------------------------------

    def _other_than_cpu(self, device: Any) -> Any:
        """The engine for a device that is not the CPU."""
        if device is None or values.device("device", device).type == "cpu" or self._engines.is_ours(device):
            return None
        return self._engines.on("_coalescing_manager", device)

    def start_coalescing(self, device: Any) -> None:
        if (other := self._other_than_cpu(device)) is not None:
            other._start_coalescing(device)
        else:
            self._coalescing, self._batch = [], Batch()
            self.choose_path()

    def end_coalescing(self, device: Any) -> Any:
        if (other := self._other_than_cpu(device)) is not None:
            return other._end_coalescing(device)
        works, self._coalescing, self._batch = self._coalescing or [], None, None
        self.choose_path()
        return AllOf(works) if works else done

    def wait_for_pending(self) -> None:
        for work in list(self.core.pending):
            work.wait()
