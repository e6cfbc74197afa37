"""How calls of a TorchGroup run: by the core alone where they can, otherwise on one of our groups or another engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import torch

from symcomm import errors
from symcomm.group.failure import call_site, explain
from symcomm.group.refusal import Refusals
from symcomm.group.work import Batch
from symcomm.ops import BY_NAME, CACHED, Op
from symcomm.torch_backend import checks, values, versions
from symcomm.torch_backend.arguments import Given, is_async
from symcomm.torch_backend.checks import single
from symcomm.torch_backend.engines import Engines
from symcomm.torch_backend.options_layout import ASYNC, UNKNOWN, read_options
from symcomm.torch_backend.profile import Span, describe, is_profiling
from symcomm.torch_backend.torch_patches.functional_collectives import register_work
from symcomm.torch_backend.work import AllOf, DoneWork, TorchWork, WorkInfo, done, late, op_type_of

if TYPE_CHECKING:
    from symcomm.torch_backend.debug_checks import DebugChecks

# Torch has one name for two operations of ours.
_TORCH_NAMES = {"all_to_all_single": "all_to_all", "all_gather_lists": "all_gather_coalesced"}
SMALL = 4096  # elements; an operation of that size takes about as long as handing it to a thread


def _single(tensors: Any) -> Any:
    """torch's lists of one are tensors to the core."""
    return tensors[0] if isinstance(tensors, (list, tuple)) and len(tensors) == 1 else tensors


def _is_small(tensors: Any) -> bool:
    """Whether this is a small operation of the group itself: other engines carry tensors of other devices."""
    first = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
    if not isinstance(first, torch.Tensor) or not first.is_cpu:
        return False
    return first.numel() * (len(tensors) if first is not tensors else 1) <= SMALL


def _flat(tensors: Any) -> list[Any]:
    """A call's tensors, which may be one, a list of lists, or none."""
    if tensors is None:
        return []
    if not isinstance(tensors, (list, tuple)):
        return [tensors]
    return [t for each in tensors for t in each] if tensors and isinstance(tensors[0], (list, tuple)) else list(tensors)


_NESTED_OUTPUTS, _NESTED_INPUTS = ("all_gather", "gather"), ("reduce_scatter", "scatter")


def _dispatched(op: Op, inputs: list[Any], outputs: list[Any]) -> list[Any]:
    """The tensors whose device decides what torch calls: not those that it passes in lists of lists. Nothing is done
    where one has no values (meta), and the call returns."""
    sides = ([] if op.name in _NESTED_INPUTS else inputs, [] if op.name in _NESTED_OUTPUTS else outputs)
    return [tensor for side in sides for tensor in side]


class Running:
    """Mixed into TorchGroup, which has the operations."""

    core: Any  # a ProcessGroup; takes_fast_path: a LocalGroup
    takes_fast_path: bool
    _name: str
    _desc: str
    _devices: Callable[[], dict[str, str]]
    _operations_before: int
    _engines: Engines
    _coalescing: list[Any] | None = None  # works since start_coalescing()
    _batch: Batch | None = None  # what they have in common
    _hook: Any = None
    _debug_checks: DebugChecks | None = None
    _intercepted = False

    def _call(self, name: str, given: Given, *args: Any, result: Sequence[Any] | None = None) -> Any:
        """Run our collective of that name and wrap its work for torch. Tensors of other devices go to their engine."""
        op = BY_NAME[name]
        with Refusals(self):
            result = list(result) if result is not None else _flat(args[0]) if args else []
            inputs = _flat(args[1]) if op.inputs and op.outputs else result
            group: Any = self.core
            device = next((t.device for t in (inputs or result)[:1] if not t.is_cpu), None)
            is_meta = any(t.is_meta for t in _dispatched(op, inputs, result)) and "meta" not in self._devices()
            if device is not None and not is_meta:
                group = self._engines.ours(device)
        if is_meta:
            return DoneWork(result, name)
        if group is None:
            return self._engines.forward(name, args, given.options, given.timeout, device)
        method, name = getattr(group, name), _TORCH_NAMES.get(name, name)
        self._compare(name, inputs, result)
        if not is_profiling():
            return self._run_as_torch_work(name, method, args, given, result)
        splits = (args[3], args[2]) if name == "all_to_all" and len(args) == 4 else ((), ())
        span = self._span(name, inputs, result, splits=splits, is_async=is_async(given.options))
        try:
            work = self._run_as_torch_work(name, method, args, given, result)
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
            work = TorchWork(inner, result, name, limit)
            work.numbers_from = self._operations_before
            if self._coalescing is not None:
                self._coalescing.append(work)
            elif versions.ACCEPTS_IN_FLIGHT_INPUTS():
                register_work(work, result)
        if self._hook is not None:
            self._tell(work, time.monotonic() - begun)
        return work

    def refuse(self, error: Exception) -> None:
        """Tell the others that this rank makes no call, and why: before they have compared theirs, where they do."""
        (self.core if self._debug_checks is None else self._debug_checks).refuse(error)

    def _compare(self, name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        if self._debug_checks is not None:
            self._debug_checks.check(name, inputs, outputs)

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
        status = core.handle.run_cached_options(call, opts, source, target)
        if status == 0:
            return done
        detail = None
        if status == UNKNOWN:
            status, detail = read_options(call, opts)
            if status == 0:
                status = core.handle.run_cached(call, detail, _single(source), _single(target))
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
            status = core.handle.run_cached_options(call, opts, source, target, True)
        else:
            status = core.handle.run_cached(call, detail, _single(source), _single(target))
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

    def _message(self, name: str, start: Callable[..., Any], tensors: Any, *args: Any) -> Any:
        if not isinstance(tensors, (list, tuple)) or not all(isinstance(t, torch.Tensor) for t in tensors):
            raise errors.wrong_type(name, "tensors", tensors, "a list of one tensor")
        tensor = single(name, tensors, "tensor list")
        checks.tag(name, args[-1])
        if tensor.is_meta and "meta" not in self._devices():
            return DoneWork([tensor], name)
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

    def start_coalescing(self, device: Any = None) -> None:
        if (other := self._other_than_cpu(device)) is not None:
            other._start_coalescing(device)
        else:
            self._coalescing, self._batch = [], Batch()
            self._set_plain()

    def end_coalescing(self, device: Any = None) -> Any:
        if (other := self._other_than_cpu(device)) is not None:
            return other._end_coalescing(device)
        works, self._coalescing, self._batch = self._coalescing or [], None, None
        self._set_plain()
        return AllOf(works) if works else done
