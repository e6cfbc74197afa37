"""Executors run the requests of a group.

LocalExecutor serves ranks that share memory. It finds the plan of a request in its cache or has ``collectives`` make
it, and the core runs the plan, at once or in the group's own thread. The executors across hosts (symcomm.hierarchical)
and on GPUs (symcomm.cuda) are its siblings."""

from __future__ import annotations

import array
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from symcomm import collectives, errors
from symcomm._core import native
from symcomm.collectives.plan import Plan
from symcomm.collectives.select import Limits, elements_of
from symcomm.group.buffers import Buffer
from symcomm.group.custom_plans import CustomCall
from symcomm.group.failure import call_site, format_site
from symcomm.group.refusal import Refusals, Settled, pack
from symcomm.group.request import Request, Splits
from symcomm.group.state import GroupState
from symcomm.group.work import FollowingWork, Timeout, Work, batch_of, to_ns
from symcomm.types import DType

MOST_PLANS = 4096  # kept by a group; a program that needs more makes them anew
FIRST_STAGE = 16 << 10  # bytes of a staging half that the first call that stages anything reserves; then it doubles
_DEBUG = "plan" in os.environ.get("SYMCOMM_DEBUG", "").split(",")  # print which plans are loaded, and why

Buffers = tuple[Sequence[Buffer], Sequence[Buffer]]  # inputs, and outputs


class Executor(ABC):
    """Runs the requests of one group."""

    @abstractmethod
    def execute(self, request: Request, async_op: Any, timeout: Timeout) -> Any:
        """Run the request; with ``async_op``, while the caller goes on."""

    @abstractmethod
    def refuse(self, error: Exception) -> None:
        """Take the next operation's number, and tell the others that this rank makes no call, and why."""

    @abstractmethod
    def all_gather_array(
        self, call: str, mine: array.array[Any], dtype: DType, timeout: Timeout, sizes: tuple[int, ...] | None = None
    ) -> array.array[Any]:
        """All ranks' arrays in host memory, one after the other. ``sizes``: their lengths, where they differ."""

    def agree(self, async_op: bool, timeout: Timeout, splits: Splits) -> Any:
        """The elements from each rank to each; ``splits`` itself if the call does not wait for the others' answers."""
        return splits.agreed(self.all_gather_array(splits.call, splits.mine, DType.INT64, timeout))


class HostExecutor(Executor):
    """Runs requests on tensors in host memory, whatever connects the ranks. Keeps plans, and works under way."""

    def __init__(self, state: GroupState):
        self.state = state
        self.pending: list[Work] = []
        self._keep_lock = threading.Lock()
        self._plans: dict[Any, Any] = {}

    def run_plan(
        self, name: str, plan: Plan, inputs: Any, outputs: Any, async_op: Any, timeout: Timeout
    ) -> Work | None:
        """Run a plan of the caller's own: only ranks that share memory can."""
        raise errors.ResourceError(
            f"{name}: the ranks of group {self.state.name!r} are on several hosts, and a plan works in memory that "
            "ranks share; use a group of one host's ranks."
        )

    def all_gather_array(
        self, call: str, mine: array.array[Any], dtype: DType, timeout: Timeout, sizes: tuple[int, ...] | None = None
    ) -> array.array[Any]:
        sizes = sizes or (len(mine),) * self.state.size
        everyone = array.array(mine.typecode, bytes(mine.itemsize * sum(sizes)))
        self.execute(gather_of(call, mine, everyone, dtype, sizes), False, timeout)
        return everyone

    def kept_plan(self, key: Any, make: Callable[[], Any]) -> Any:
        """The plan that ``make()`` returned for this key; plans are kept for the life of the group."""
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) > MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = make()
        return plan

    def keep(self, work: Work) -> None:
        """Hold ``work`` until it has ended; called before it is submitted. The core uses its tensors whether or not the
        caller keeps the work, or ever gets it."""
        pending = work.pending = self.pending
        pending.append(work)
        if not self._keep_lock.acquire(blocking=False):
            return  # another thread does the rest, or this very one, which a signal handler interrupted
        try:
            # Works end in order. One with callbacks is left to the watcher: callbacks never run in a caller's thread.
            native.drop_ended(pending)
            while (first := next(iter(pending), work)) is not work and not first.callbacks and first.is_completed():
                native.drop_ended(pending)
        finally:
            self._keep_lock.release()

    def after_fork(self) -> None:
        """In a forked child: a thread of the parent may have held the lock."""
        self._keep_lock = threading.Lock()


def gather_of(
    call: str, mine: array.array[Any], everyone: array.array[Any], dtype: DType, sizes: tuple[int, ...]
) -> Request:
    """The request that gathers all ranks' arrays in ``everyone``."""
    source, out = (Buffer(a.buffer_info()[0], len(a), dtype, a) for a in (mine, everyone))
    return Request("all_gather_single", [source], [out], [], sizes, dtype, call=call)


class LocalExecutor(native.SeenCalls, HostExecutor):
    """For ranks that share memory. ``stage``: where this rank's staging area begins in its arena.

    The core makes calls of a kind seen before (``call_seen``)."""

    def __init__(self, state: GroupState, limits: Limits, stage: int):
        HostExecutor.__init__(self, state)
        self._bind(state.handle, state, Work, state.arena.flight.site)
        self.limits, self._stage = limits, stage
        self._reserved = 0  # bytes of each half of the staging area

    # --- plans ------------------------------------------------------------------------------------------------

    def load_plan(self, plan: Plan) -> Any:
        """``plan`` as the core runs it. Its staging memory is reserved here, so that running out of memory is an error
        at this line. A group that stages nothing reserves none."""
        if _DEBUG and plan.why:
            what = f"{plan.collective.label} rank {plan.rank}/{plan.world} count {elements_of(plan.count)}"
            print(f"symcomm plan: {what}: {plan.name} ({plan.why})", file=sys.stderr, flush=True)
        loaded = native.make_plan(plan.encode())
        self._reserve_stage(native.plan_stage_bytes(loaded))
        return loaded

    def _reserve_stage(self, nbytes: int) -> None:
        """Make the pages of ``nbytes`` of each half of this rank's staging area exist."""
        if nbytes <= self._reserved:
            return
        half = self.limits.stage_bytes
        reach = min(half, max(FIRST_STAGE, 1 << (nbytes - 1).bit_length()))
        for start in (0, half):
            self.state.arena.reserve(self._stage + start, reach)
        self.state.handle.reserved(reach)
        self._reserved = max(self._reserved, reach)

    def cached_plan(self, build: Callable[..., Plan], *args: Any, shards: int = 0) -> Any:
        """The loaded plan for these arguments. ``shards``: what ranks compare in the place of a root."""

        def load() -> Any:
            plan = build(self.state.rank, self.state.size, *args, limits=self.limits)
            return self.load_plan(replace(plan, root=shards) if shards else plan)

        return self.kept_plan((build, args, shards), load)

    def _plan_of(self, request: Request) -> Any:
        op = request.op
        if op.plan == "barrier":
            return self.cached_plan(_barrier)
        args = [request.sizes, request.dtype]
        if op.reduces:
            args.append(request.redop)
        if op.rooted:
            args.append(request.root)
        if request.listed is not None:
            args.append(request.listed)
        return self.cached_plan(getattr(collectives, op.plan), *args, shards=0 if op.rooted else request.root)

    # --- running ----------------------------------------------------------------------------------------------

    def execute(self, request: Request, async_op: Any, timeout: Timeout) -> Work | None:
        if isinstance(request.sizes, Splits):
            return self._execute_agreed(request, request.sizes, async_op, timeout)
        refusal = request.ask_autograd()
        state, op, plan = self.state, request.op, self._plan_of(request)
        if request.key is not None and op.number >= 0:
            state.handle.cache_plan(op.number, *request.key, plan, self.site_number(3), request.effects)
        request.keep_apart(state.rank, state.size)
        buffers = request.inputs, request.outputs
        work = self._run(request.call, plan, buffers, request.written, request.result, async_op, timeout)
        if refusal is not None:
            raise refusal
        return work

    def agree(self, async_op: bool, timeout: Timeout, splits: Splits) -> Any:
        return splits if async_op else super().agree(async_op, timeout, splits)

    def _execute_agreed(self, request: Request, splits: Splits, async_op: Any, timeout: Timeout) -> Work:
        """An asynchronous call of two operations. In the first, ranks tell each other the sizes on which the plan of
        the second depends. The thread that runs the second makes its plan."""
        state, site = self.state, call_site(2)
        refusal = request.ask_autograd()
        request.keep_apart(state.rank, state.size)
        timeout_ns = state.timeout_ns if timeout is None else to_ns(request.call, timeout)
        if self.pending:
            self._refresh_copies([b for b in (*request.outputs, *request.inputs) if b.original is not None])
        everyone = array.array("q", bytes(8 * len(splits.mine) * state.size))
        sizes = (len(splits.mine),) * state.size
        first = self.execute(gather_of(request.call, splits.mine, everyone, DType.INT64, sizes), async_op, timeout)
        assert first is not None  # it is asynchronous

        def prepare() -> Any:
            try:
                request.sizes = splits.agreed(everyone)
            except errors.BadArgumentError as error:
                return work.refuse(error)  # on every rank
            try:
                plan = self._plan_of(request)
            except Exception as error:
                work.refuse(error)
                return pack(state.rank, error, format_site(site))
            work.kept = (*work.kept, plan)
            return plan, _places(request.inputs), tuple([b.address for b in request.outputs])

        work = FollowingWork(state, request.call, site, request.result)
        work.first, work.outputs = first, request.outputs
        work.kept = (request.inputs, request.written, prepare)
        submit = partial(state.handle.submit_after, work, first, prepare, timeout_ns, state.arena.flight.site(site))
        self._queue(work, batch_of(async_op), partial(submit, request.written))
        if refusal is not None:
            raise refusal
        return work

    def run_plan(
        self, name: str, plan: Plan, inputs: Any, outputs: Any, async_op: Any, timeout: Timeout
    ) -> Work | None:
        with Refusals(self):
            ranks = self.state.rank, self.state.size
            own = CustomCall(ranks, self.limits.stage_bytes, name, plan, inputs, outputs)
            checked, loaded = self.kept_plan(own.key, lambda: own.load(self.load_plan))
            own.check_tensors(checked)
            written = tuple([buffer.written for buffer in own.outputs])
            return self._run(name, loaded, (own.inputs, own.outputs), written, own.result, async_op, timeout)

    def _run(
        self, call: str, plan: Any, buffers: Buffers, written: tuple[Any, ...], result: Sequence[Any], async_op: Any,
        timeout: Timeout,
    ) -> Work | None:  # fmt: skip
        """``written``: the tensors that autograd has to know were written."""
        state, (inputs, outputs) = self.state, buffers
        timeout_ns = state.timeout_ns if timeout is None else to_ns(call, timeout)
        if self.pending:
            self._refresh_copies([b for b in (*outputs, *inputs) if b.original is not None])
        ins = _places(inputs)
        outs = tuple([b.address for b in outputs])
        if state.failure is not None:
            state.check_usable()
        if async_op:
            return self._submit(call, plan, buffers, written, result, (ins, outs), timeout_ns, batch_of(async_op))
        started = time.monotonic()
        status = state.handle.run(plan, ins, outs, timeout_ns, self.site_number(3), written)
        if status:
            raise state.fail_with_status(status, call, call_site(3), time.monotonic() - started)
        for buffer in outputs:
            if buffer.target is not None:
                with Settled():
                    buffer.finish()
        return None

    def _submit(
        self, call: str, plan: Any, buffers: Buffers, written: tuple[Any, ...], result: Sequence[Any],
        addresses: tuple[Any, Any], timeout_ns: int, batch: Any,
    ) -> Work:  # fmt: skip
        state, site, (inputs, outputs) = self.state, call_site(4), buffers
        work = Work(state, call, site, result)
        work.outputs, work.kept = outputs, (inputs, written, plan)
        where = state.arena.flight.site(site)
        self._queue(work, batch, partial(state.handle.submit, work, plan, *addresses, timeout_ns, where, written))
        return work

    def _queue(self, work: Work, batch: Any, submit: Callable[[Any, Any], Any]) -> None:
        """``submit(callback, batch)`` hands the operation of ``work`` to the core."""
        callback = work.copy_out_in_core if any(b.target is not None for b in work.outputs) else None
        self.keep(work)
        try:
            submit(callback, batch)
        except OSError as error:
            self.pending.remove(work)
            raise errors.no_thread("asynchronous operations", error) from None
        except BaseException:
            self.state.handle.abort()  # an interrupt: the operation may have been submitted, or not
            raise

    def _refresh_copies(self, copies: Sequence[Buffer]) -> None:
        """Copy tensors again that pending operations write, once those have ended."""
        for copy in copies:
            before = [w for w in list(self.pending) if w.writes(copy)]
            for work in before:
                work.wait_until(None)
            if before:
                copy.refresh()

    def site_number(self, depth: int) -> int:
        """The number by which the flight recorder knows the caller's file and line."""
        return self.state.arena.flight.site(call_site(depth + 1))

    def refuse(self, error: Exception) -> None:
        state = self.state
        if state.size > 1 and state.failure is None:
            site = call_site(2)
            told = pack(state.rank, error, format_site(site))
            state.handle.refuse(told, state.timeout_ns, state.arena.flight.site(site))


def _places(inputs: Sequence[Buffer]) -> tuple[int, ...]:
    """The addresses. For an empty tensor of a list, that of another: peers use the list if they reach every address."""
    some = next((b.address for b in inputs if b.count), 0)
    return tuple([b.address if b.count else some for b in inputs])


def _barrier(rank: int, world: int, limits: Any) -> Plan:
    return collectives.barrier(rank, world)
