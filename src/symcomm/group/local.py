"""How requests are executed where ranks share memory: a plan from the cache or from ``collectives``, and the core."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from symcomm import collectives, errors
from symcomm._core import native
from symcomm.collectives.plan import Plan
from symcomm.group.buffers import Buffer, keep_apart
from symcomm.group.facade import Collectives
from symcomm.group.failure import call_site, explain
from symcomm.group.request import Request
from symcomm.group.work import Timeout, Work, no_thread, to_ns

__all__ = ["LocalExecution"]

MOST_PLANS = 4096  # kept by a group; a program that needs more makes them anew


class LocalExecution(Collectives):
    """Mixed into ProcessGroup, which provides the core's handle, its arena and time-outs."""

    load_plan: Callable[[Plan], Any]
    _handle: native.Group
    _limits: Any
    _arena: Any
    _plans: dict[Any, Any]
    _pending: list[Work]
    _keep_lock: threading.Lock
    _failed: Callable[..., errors.SymcommError]
    _failure: errors.SymcommError | None
    _check_usable: Callable[[], None]

    def execute(self, request: Request, async_op: bool, timeout: Timeout) -> Work | None:
        """Run what was asked for, here and now or, with ``async_op``, in the group's thread."""
        op, plan = request.op, self._plan_of(request)
        if request.key is not None and op.number >= 0:
            native.cache_plan(self._handle, op.number, *request.key, plan, self._site(3))
        return self._run(request.call, plan, request.inputs, request.outputs, request.result, async_op, timeout)

    def _plan_of(self, request: Request) -> Any:
        op = request.op
        if op.plan == "barrier":
            return self._plan(_barrier)
        args = [request.sizes, request.dtype]
        if op.reduces:
            args.append(request.redop)
        if op.rooted:
            args.append(request.root)
        if op.listed is not None:
            args.append(op.listed)
        return self._plan(getattr(collectives, op.plan), *args)

    def _plan(self, build: Callable[..., Plan], *args: Any) -> Any:
        """The loaded plan for these arguments; plans are kept for the life of the group."""
        key = (build, args)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) > MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self.load_plan(build(self.rank, self.size, *args, limits=self._limits))
        return plan

    def _run(
        self, call: str, plan: Any, inputs: Sequence[Buffer], outputs: Sequence[Buffer], result: Sequence[Any],
        async_op: bool, timeout: Timeout,
    ) -> Work | None:  # fmt: skip
        timeout_ns = self._timeout_ns if timeout is None else to_ns(call, timeout)
        if inputs and outputs and inputs[0] is not outputs[0]:
            inputs = keep_apart(inputs, outputs, self.rank, self.size)
        if self._pending:
            self._refresh_copies([b for b in (*outputs, *inputs) if b.original is not None])
        ins = tuple([b.address for b in inputs])
        outs = tuple([b.address for b in outputs])
        if self._failure is not None:
            self._check_usable()
        if async_op:
            return self._submit(call, plan, inputs, outputs, result, (ins, outs), timeout_ns)
        started = time.monotonic()
        status = native.run(self._handle, plan, ins, outs, timeout_ns, self._site(4))
        if status:
            raise self._failed(status, call, call_site(3), time.monotonic() - started, explain)
        for buffer in outputs:
            if buffer.target is not None:
                buffer.finish()
        return None

    def _submit(
        self, call: str, plan: Any, inputs: Sequence[Buffer], outputs: Sequence[Buffer], result: Sequence[Any],
        addresses: tuple[Any, Any], timeout_ns: int,
    ) -> Work:  # fmt: skip
        site = call_site(4)
        work = Work(self, call, site, outputs, result, (inputs, plan))
        callback = work._copy_out_in_core if any(b.target is not None for b in outputs) else None
        where = self._arena.flight.site(site)
        self._keep(work)
        try:
            work._request = native.submit(self._handle, plan, *addresses, timeout_ns, where, callback)
        except OSError as error:
            self._pending.remove(work)
            raise no_thread("asynchronous operations", error) from None
        except BaseException:
            native.group_abort(self._handle)  # an interrupt: nobody knows whether it was submitted
            raise
        return work

    def _refresh_copies(self, copies: Sequence[Buffer]) -> None:
        """A copy of a tensor must hold what operations before this one make of it."""
        for copy in copies:
            before = [w for w in list(self._pending) if any(copy.touches(out) for out in w._outputs)]
            for work in before:
                work._poll(0)
            if before:
                copy.refresh()

    def _site(self, depth: int) -> int:
        """The caller's place, as the flight recorder knows it."""
        return self._arena.flight.site(call_site(depth + 1))

    def _keep(self, work: Work) -> None:
        """Before it is submitted: the core uses its tensors whether or not the caller keeps or ever gets ``work``."""
        pending = self._pending
        pending.append(work)
        if not self._keep_lock.acquire(blocking=False):
            return  # somebody looks already; it may be this very thread, which a signal handler interrupted
        try:
            # They end in order. One with callbacks is left to the watcher: those never run in a caller's thread.
            before = len(pending) - 1
            each = enumerate(itertools.islice(pending, before))
            del pending[: next((i for i, w in each if not w._settled and (w._callbacks or not w._poll(-1))), before)]
        finally:
            self._keep_lock.release()

    def _ended(self, status: int, call: str) -> None:
        """What the dispatch cache's run ended with: nothing to say, or why the operation failed."""
        if status:
            raise self._failed(status, call, call_site(2), None, explain)


def _barrier(rank: int, world: int, limits: Any) -> Plan:
    return collectives.barrier(rank, world)
