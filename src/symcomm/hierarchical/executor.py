"""Executes requests across hosts. A request becomes a signature, which ranks compare, and a body: an eager or a
pipelined algorithm on the addresses of its tensors. Operations of a group run one after another, in their caller's
thread or in the group's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.collectives.plan import Collective
from symcomm.collectives.select import hash_sizes
from symcomm.group.executor import HostExecutor
from symcomm.group.failure import Site, call_site, format_site, with_sizes
from symcomm.group.refusal import Settled, pack
from symcomm.group.request import Request, addresses_of
from symcomm.group.work import Batch, Timeout, Work, to_ns
from symcomm.hierarchical import eager, pipelined
from symcomm.hierarchical.failure import HierarchicalState, OperationRefused, OperationStopped
from symcomm.hierarchical.levels import Levels
from symcomm.hierarchical.operation import Operation, Parts, Signature
from symcomm.hierarchical.topology import Layout
from symcomm.hierarchical.work import HierarchicalWork, Runner

LAST_STEP = 10.0  # seconds for a failed operation to end; it waits for no other rank any more

Body = Callable[[Operation], None]


class HierarchicalExecutor(HostExecutor):
    """Runs the requests of a group across hosts. ``parts``: what operations work with."""

    state: HierarchicalState

    def __init__(self, state: HierarchicalState, parts: Parts):
        super().__init__(state)
        self._parts = parts
        self.submitted = 0  # operations that callers have started
        self.runner = Runner()
        self._turn = threading.RLock()  # held by the thread that performs an operation
        self._operating_thread = 0
        self._abandoned: list[Any] = []  # operations and tensors whose memory the engine may still write to

    # --- requests ---------------------------------------------------------------------------------------------

    def execute(self, request: Request, async_op: Any, timeout: Timeout) -> Work | None:
        """Run the request here, or in the group's thread if that is busy already."""
        refusal, state = request.ask_autograd(), self.state
        request.keep_apart(state.rank, state.size)
        body = _BODIES[request.op.plan](self._parts.layout, request)
        work = self._start(request, body, async_op, timeout)
        if refusal is not None:
            raise refusal
        return work

    def _start(self, request: Request, body: Body, async_op: Any, timeout: Timeout) -> Work | None:
        state, call, written = self.state, request.call, request.written
        seconds = (state.timeout_ns if timeout is None else to_ns(call, timeout)) / 1e9
        batch = async_op if isinstance(async_op, Batch) else None
        state.check_usable()
        if self._operating_thread == threading.get_ident():
            raise errors.nested(call, state.name)
        signature, site, buffers = self._signature(request), call_site(3), (*request.inputs, *request.outputs)
        queued = bool(async_op) or not self._is_idle()
        self.submitted += 1
        native.change_tensors(written)

        def act() -> None:
            with self._turn:
                if queued:  # operations before this one may have changed tensors that were copied
                    for buffer in buffers:
                        buffer.refresh()
                self._operating_thread = threading.get_ident()
                try:
                    self._operate(call, signature, body, seconds, site, buffers, batch)
                finally:
                    self._operating_thread, self.state.since = 0, 0.0
            for buffer in request.outputs:
                with Settled():
                    buffer.finish()
            if queued:  # the caller may have saved its tensors for backward meanwhile
                native.change_tensors(written)

        if not queued:
            act()
            return None
        work = HierarchicalWork(state, self.submitted, call, site, act, request.outputs, request.result)
        work.kept = buffers
        self.keep(work)
        try:
            self.runner.submit(work)
        except errors.ResourceError:
            self.pending.remove(work)
            self.submitted -= 1  # the refusal that follows takes the number
            raise
        if async_op:
            return work
        work.wait()
        return None

    def _signature(self, request: Request) -> Signature:
        op = request.op
        collective = Collective[op.plan.upper()]
        if collective is Collective.BARRIER:
            return Signature(collective)
        counts = request.counts(self.state.size)
        redop = request.redop if op.reduces else 0
        return Signature(collective, request.dtype, redop, request.root, sum(counts), hash_sizes(counts))

    # --- operations -------------------------------------------------------------------------------------------

    def _operate(
        self, call: str, signature: Signature, body: Body, seconds: float, site: Site, buffers: Any,
        batch: Batch | None,
    ) -> None:  # fmt: skip
        """Perform an operation, with the turn held. ``buffers``: what ``body`` works on."""
        state, parts = self.state, self._parts
        state.check_usable()
        if batch is not None and batch.refused is not None:  # an operation of the same call
            raise batch.refused
        begun = time.monotonic()
        seq = state.doing[0] + 1
        words = with_sizes(call, signature.collective) or signature.words()
        state.doing, state.since = (seq, words, format_site(site)), begun
        what = f"{call} #{seq} on group {state.name!r}"
        operation = Operation(parts, signature, seq, seconds, state.arena.flight.site(site))
        try:
            body(operation)
        except OperationRefused as refusal:
            operation.end()
            raise parts.refusals.found(refusal, what, batch) from None
        except OperationStopped:
            self._abandoned.append((operation, buffers))
            raise state.fail_operation(what, time.monotonic() - begun) from None
        except BaseException:  # interrupted, or a bug: this rank is out of step with the others
            self._abandoned.append((operation, buffers))
            parts.failures.abort()
            state.fail_operation(what, time.monotonic() - begun)
            raise
        operation.end()

    def refuse(self, error: Exception) -> None:
        """In the next operation's turn: here, or in the group's thread if that is busy already."""
        state, site = self.state, call_site(2)
        if state.failure is not None or self._operating_thread == threading.get_ident():
            return
        words = format_site(site)
        told = pack(state.rank, error, words)

        def act() -> None:
            with self._turn:
                self._tell_refusal(told, words, state.arena.flight.site(site))

        self.submitted += 1
        if self._is_idle():
            act()
        else:
            self.keep(work := HierarchicalWork(state, self.submitted, "refusal", site, act))
            self.runner.submit(work)

    def _tell_refusal(self, told: bytes, words: str, site: int) -> None:
        """Tell the ranks of this host, whose first step finds it, and the leaders of the others."""
        state = self.state
        seq = state.doing[0] + 1
        state.doing = (seq, "a call that it refused", words)
        state.handle.refuse(told, state.timeout_ns, site)
        self._parts.refusals.tell(seq, told)

    def _is_idle(self) -> bool:
        return all(work.is_completed() for work in list(self.pending))

    @property
    def is_operating(self) -> bool:
        """Whether a thread of this rank performs an operation, or has one queued."""
        return bool(self._operating_thread) or any(not work.settled for work in list(self.pending))

    def await_turn(self) -> None:
        """After a failure: return when the operation that another thread performs has ended."""
        if self._turn.acquire(timeout=LAST_STEP):
            self._turn.release()


# --- one for each family of collectives --------------------------------------------------------------------------


def _all_reduce(layout: Layout, r: Request) -> Body:
    [source], [out], levels = r.inputs, r.outputs, Levels.of(r.redop, r.dtype, layout)
    is_eager = layout.fits_eager(r.sizes * levels.kept.itemsize, is_whole=True)
    act = eager.all_reduce if is_eager else pipelined.all_reduce
    return lambda o: act(o, source.address, out.address, r.sizes, r.dtype, levels)


def _reduce(layout: Layout, r: Request) -> Body:
    [source], levels = r.inputs, Levels.of(r.redop, r.dtype, layout)
    target = r.outputs[0].address if r.outputs else source.address
    is_eager = layout.fits_eager(r.sizes * levels.kept.itemsize, is_whole=True)
    act = eager.reduce if is_eager else pipelined.reduce
    return lambda o: act(o, source.address, target, r.sizes, r.dtype, levels, r.root)


def _reduce_scatter(layout: Layout, r: Request) -> Body:
    [out], levels = r.outputs, Levels.of(r.redop, r.dtype, layout)
    addresses = addresses_of(r.inputs, r.sizes, r.op.listed)
    is_eager = layout.fits_eager(layout.largest_host_total(r.sizes) * levels.kept.itemsize)
    act = eager.reduce_scatter if is_eager else pipelined.reduce_scatter
    return lambda o: act(o, addresses, out.address, r.sizes, r.dtype, levels)


def _broadcast(layout: Layout, r: Request) -> Body:
    [view] = r.inputs
    act = eager.broadcast if layout.fits_eager(view.nbytes, is_whole=True) else pipelined.broadcast
    return lambda o: act(o, view.address, r.sizes, r.dtype, r.root)


def _all_gather(layout: Layout, r: Request) -> Body:
    [source] = r.inputs
    targets = addresses_of(r.outputs, r.sizes, r.op.listed)
    is_eager = layout.fits_eager(layout.largest_host_total(r.sizes) * r.dtype.itemsize)
    act = eager.all_gather if is_eager else pipelined.all_gather
    return lambda o: act(o, source.address, targets, r.sizes, r.dtype)


def _gather(layout: Layout, r: Request) -> Body:
    [source] = r.inputs
    targets = addresses_of(r.outputs, r.sizes, r.op.listed)
    act = eager.gather if layout.fits_eager(source.nbytes * layout.widest) else pipelined.gather
    return partial(act, source=source.address, targets=targets, nbytes=source.nbytes, root=r.root)


def _scatter(layout: Layout, r: Request) -> Body:
    [out], sources = r.outputs, addresses_of(r.inputs, r.sizes, r.listed)
    act = eager.scatter if layout.fits_eager(out.nbytes * layout.widest) else pipelined.scatter
    return partial(act, sources=sources, target=out.address, nbytes=out.nbytes, root=r.root)


def _all_to_all(layout: Layout, r: Request) -> Body:
    rank, size, item = layout.rank, layout.size, r.dtype.itemsize
    matrix = [[r.sizes] * size] * size if isinstance(r.sizes, int) else r.sizes
    rows = [layout.largest_host_total(row) for row in matrix]
    act = eager.all_to_all if layout.fits_eager(layout.largest_host_total(rows) * item) else pipelined.all_to_all
    sources = addresses_of(r.inputs, matrix[rank], r.op.listed)
    targets = addresses_of(r.outputs, [row[rank] for row in matrix], r.op.listed)
    return partial(act, sources=sources, targets=targets, matrix=lambda i, j: matrix[i][j] * item)


def _barrier(layout: Layout, r: Request) -> Body:
    return eager.barrier


_BODIES: dict[str, Callable[[Layout, Request], Body]] = {
    "all_reduce": _all_reduce, "reduce": _reduce, "reduce_scatter": _reduce_scatter, "broadcast": _broadcast,
    "all_gather": _all_gather, "gather": _gather, "scatter": _scatter, "all_to_all": _all_to_all, "barrier": _barrier,
}  # fmt: skip
