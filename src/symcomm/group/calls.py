"""The collectives of a process group.

Every call does the same five things: look at the tensors, check them, pick the plan, run it, finish the outputs.
A blocking call of a kind seen before, on plain torch tensors, has a short way: ``native.again()`` looks at them, finds
the plan and runs it in one call.
"""

from __future__ import annotations

import enum
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from symcomm import collectives, errors
from symcomm._core import native
from symcomm.collectives.plan import Plan
from symcomm.group.arguments import Arguments
from symcomm.group.buffers import Buffer, keep_apart, write_buffer
from symcomm.group.failure import call_site, explain
from symcomm.group.work import Timeout, Work, no_thread, to_ns
from symcomm.types import DType, RedOpType


class Kind(enum.IntEnum):
    """Names under which native.again() knows a call."""

    ALL_REDUCE = 0
    REDUCE = 1
    REDUCE_SCATTER_SINGLE = 2
    BROADCAST = 3
    ALL_GATHER_SINGLE = 4
    ALL_TO_ALL_SINGLE = 5  # quick.c knows this number
    ALL_GATHER = 6
    GATHER = 7
    SCATTER = 8
    BARRIER = 9
    GATHER_SINGLE = 10
    REDUCE_SCATTER = 11

    @property
    def label(self) -> str:
        return self.name.lower()


_ALL_REDUCE, _REDUCE, _REDUCE_SCATTER, _BROADCAST, _ALL_GATHER, _ALL_TO_ALL = list(Kind)[:6]
_ALL_GATHER_LIST, _GATHER, _SCATTER, _BARRIER, _GATHER_SINGLE, _REDUCE_SCATTER_LIST = list(Kind)[6:]


def rooted(root: Any, op: Any) -> Any:
    """Root and operation as one number, where both are numbers."""
    return root << 8 | op if type(root) is int and type(op) is RedOpType else None


def _or_none(tensors: Any) -> Any:
    """None for an empty list too: some callers pass one where they are not the root."""
    return None if type(tensors) is list and not tensors else tensors


class CollectiveCalls(Arguments):
    """Mixed into ProcessGroup, which provides rank, size, name, the core's handle and time-outs."""

    name: str
    _handle: native.Group
    _timeout_ns: int
    _plans: dict[Any, Any]
    _pending: list[Work]
    _keep_lock: threading.Lock
    _failed: Callable[..., errors.SymcommError]
    _failure: errors.SymcommError | None
    _check_usable: Callable[[], None]

    # --- running ----------------------------------------------------------------------------------------------

    def _plan(self, build: Callable[..., Plan], *args: Any) -> Any:
        """The loaded plan for these arguments; plans are kept for the life of the group."""
        key = (build, args)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) > 4096:
                self._plans.clear()
            plan = self._plans[key] = self.load_plan(build(self.rank, self.size, *args, limits=self._limits))
        return plan

    load_plan: Callable[[Plan], Any]
    _limits: Any
    _arena: Any

    def _run(
        self,
        call: str,
        plan: Any,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        result: Sequence[Any],
        async_op: bool,
        timeout: Timeout,
    ) -> Work | None:
        timeout_ns = self._timeout_ns if timeout is None else to_ns(call, timeout)
        if inputs and outputs and inputs[0] is not outputs[0]:
            inputs = keep_apart(inputs, outputs, self.rank, self.size)
        if self._pending:
            self._refresh_copies([b for b in (*outputs, *inputs) if b.original is not None])
        ins = tuple([b.address for b in inputs])
        outs = tuple([b.address for b in outputs])
        if self._failure is not None:
            self._check_usable()
        if not async_op:
            started = time.monotonic()
            status = native.run(self._handle, plan, ins, outs, timeout_ns, self._site(3))
            if status:
                raise self._failed(status, call, call_site(2), time.monotonic() - started, explain)
            for buffer in outputs:
                if buffer.target is not None:
                    buffer.finish()
            return None
        site = call_site(2)
        work = Work(self, call, site, outputs, result, (inputs, plan))
        callback = work._copy_out_in_core if any(b.target is not None for b in outputs) else None
        where = self._arena.flight.site(site)
        self._keep(work)
        try:
            work._request = native.submit(self._handle, plan, ins, outs, timeout_ns, where, callback)
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
        """What native.again() found: nothing to say, or why the operation failed."""
        if status:
            raise self._failed(status, call, call_site(3), None, explain)

    # --- reductions -------------------------------------------------------------------------------------------

    def all_reduce(
        self, tensor: Any, op: Any = RedOpType.SUM, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """Combine ``tensor`` over all ranks, in place.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        if not async_op and timeout is None:
            status = native.again(self._handle, _ALL_REDUCE, op, tensor, tensor, self._timeout_ns)
            if status >= 0:
                self._ended(status, "all_reduce")
                return None
        buffer = write_buffer("all_reduce", "tensor", tensor)
        redop, source = self._reduction("all_reduce", op, buffer)
        plan = self._plan(collectives.all_reduce, buffer.count, buffer.dtype, redop)
        if redop is not RedOpType.PREMUL_SUM:
            native.remember(self._handle, _ALL_REDUCE, op, tensor, tensor, plan, self._site(2))
        return self._run("all_reduce", plan, [source], [buffer], [tensor], async_op, timeout)

    def reduce(
        self, tensor: Any, root: int = 0, op: Any = RedOpType.SUM, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """Combine ``tensor`` over all ranks into ``root``'s; the others' stay as they are.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        if not async_op and timeout is None:
            status = native.again(self._handle, _REDUCE, rooted(root, op), tensor, tensor, self._timeout_ns)
            if status >= 0:
                self._ended(status, "reduce")
                return None
        source, buffer, redop = self._of_reduce(tensor, root, op)
        plan = self._plan(collectives.reduce, buffer.count, buffer.dtype, redop, root)
        if redop is not RedOpType.PREMUL_SUM:
            native.remember(self._handle, _REDUCE, rooted(root, op), tensor, tensor, plan, self._site(2))
        return self._run("reduce", plan, [source], [buffer] if self.rank == root else [], [tensor], async_op, timeout)

    def reduce_scatter_single(
        self, output: Any, input: Any, op: Any = RedOpType.SUM, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """``input`` is one piece per rank, one after the other; rank k gets the combination of all k-th pieces.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        call = "reduce_scatter_single"
        if not async_op and timeout is None:
            status = native.again(self._handle, _REDUCE_SCATTER, op, input, output, self._timeout_ns)
            if status >= 0:
                self._ended(status, "reduce_scatter_single")
                return None
        source, out, redop = self._of_reduce_scatter_single(call, output, input, op)
        plan = self._plan(collectives.reduce_scatter, (out.count,) * self.size, out.dtype, redop)
        if redop is not RedOpType.PREMUL_SUM:
            native.remember(self._handle, _REDUCE_SCATTER, op, input, output, plan, self._site(2))
        return self._run(call, plan, [source], [out], [output], async_op, timeout)

    def reduce_scatter(
        self,
        output: Any,
        inputs: Sequence[Any],
        op: Any = RedOpType.SUM,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Like reduce_scatter_single, with a list of pieces; they may differ in size.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        call = "reduce_scatter"
        if not async_op and timeout is None:
            status = native.again(self._handle, _REDUCE_SCATTER_LIST, op, inputs, output, self._timeout_ns)
            if status >= 0:
                self._ended(status, call)
                return None
        sources, out, redop = self._of_reduce_scatter(call, output, inputs, op)
        counts = tuple([s.count for s in sources])
        plan = self._plan(collectives.reduce_scatter, counts, out.dtype, redop, True)
        if redop is not RedOpType.PREMUL_SUM:
            native.remember(self._handle, _REDUCE_SCATTER_LIST, op, inputs, output, plan, self._site(2))
        return self._run(call, plan, sources, [out], [output], async_op, timeout)

    # --- copies -----------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Any, root: int = 0, async_op: bool = False, timeout: Timeout = None) -> Work | None:
        """Everybody's ``tensor`` becomes ``root``'s.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        if not async_op and timeout is None:
            status = native.again(self._handle, _BROADCAST, root, tensor, tensor, self._timeout_ns)
            if status >= 0:
                self._ended(status, "broadcast")
                return None
        buffer = self._of_broadcast(tensor, root)
        plan = self._plan(collectives.broadcast, buffer.count, buffer.dtype, root)
        native.remember(self._handle, _BROADCAST, root, tensor, tensor, plan, self._site(2))
        return self._run("broadcast", plan, [buffer], [buffer], [tensor], async_op, timeout)

    def all_gather_single(
        self, output: Any, input: Any, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """``output`` becomes all ranks' ``input``, one after the other.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        call = "all_gather_single"
        if not async_op and timeout is None:
            status = native.again(self._handle, _ALL_GATHER, 0, input, output, self._timeout_ns)
            if status >= 0:
                self._ended(status, call)
                return None
        source, out = self._of_all_gather_single(call, output, input)
        plan = self._plan(collectives.all_gather, (source.count,) * self.size, source.dtype)
        native.remember(self._handle, _ALL_GATHER, 0, input, output, plan, self._site(2))
        return self._run(call, plan, [source], [out], [output], async_op, timeout)

    def all_gather(
        self, outputs: Sequence[Any], input: Any, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """``outputs[k]`` becomes rank k's ``input``; sizes may differ between ranks.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        call = "all_gather"
        if not async_op and timeout is None:
            status = native.again(self._handle, _ALL_GATHER_LIST, 0, input, outputs, self._timeout_ns)
            if status >= 0:
                self._ended(status, call)
                return None
        source, outs = self._of_all_gather(call, outputs, input)
        plan = self._plan(collectives.all_gather, tuple([o.count for o in outs]), source.dtype, True)
        native.remember(self._handle, _ALL_GATHER_LIST, 0, input, outputs, plan, self._site(2))
        return self._run(call, plan, [source], outs, outputs, async_op, timeout)

    def gather(
        self, outputs: Sequence[Any] | None, input: Any, root: int = 0, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """At ``root``, ``outputs[k]`` becomes rank k's ``input``; the others pass None.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        call = "gather"
        if not async_op and timeout is None:
            status = native.again(self._handle, _GATHER, root, input, _or_none(outputs), self._timeout_ns)
            if status >= 0:
                self._ended(status, call)
                return None
        source, outs = self._of_gather(call, outputs, input, root)
        plan = self._plan(collectives.gather, (source.count,) * self.size, source.dtype, root)
        native.remember(self._handle, _GATHER, root, input, _or_none(outputs), plan, self._site(2))
        return self._run(call, plan, [source], outs, outputs or [], async_op, timeout)

    def gather_single(
        self, output: Any, input: Any, root: int = 0, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """At ``root``, ``output`` becomes all ranks' ``input``, one after the other; the others pass None.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        call = "gather_single"
        if not async_op and timeout is None:
            status = native.again(self._handle, _GATHER_SINGLE, root, input, output, self._timeout_ns)
            if status >= 0:
                self._ended(status, call)
                return None
        source, outs = self._of_gather_single(call, output, input, root)
        plan = self._plan(collectives.gather, (source.count,) * self.size, source.dtype, root, False)
        native.remember(self._handle, _GATHER_SINGLE, root, input, output, plan, self._site(2))
        return self._run(call, plan, [source], outs, [] if output is None else [output], async_op, timeout)

    def scatter(
        self, output: Any, inputs: Sequence[Any] | None, root: int = 0, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """Rank k's ``output`` becomes ``root``'s ``inputs[k]``; the others pass None.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        call = "scatter"
        if not async_op and timeout is None:
            status = native.again(self._handle, _SCATTER, root, _or_none(inputs), output, self._timeout_ns)
            if status >= 0:
                self._ended(status, call)
                return None
        sources, out = self._of_scatter(call, output, inputs, root)
        plan = self._plan(collectives.scatter, (out.count,) * self.size, out.dtype, root)
        native.remember(self._handle, _SCATTER, root, _or_none(inputs), output, plan, self._site(2))
        return self._run(call, plan, sources, [out], [output], async_op, timeout)

    # --- all to all -------------------------------------------------------------------------------------------

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Piece k of ``input`` goes to rank k; ``output`` collects what came, in rank order.

        Splits count rows of dimension 0, as in torch; without them the pieces are equal.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        call = "all_to_all_single"
        even = not output_splits and not input_splits
        if even and not async_op and timeout is None:
            status = native.again(self._handle, _ALL_TO_ALL, 0, input, output, self._timeout_ns)
            if status >= 0:
                self._ended(status, call)
                return None
        source, out, sent, got = self._of_all_to_all_single(call, output, input, output_splits, input_splits)
        if even:
            plan = self._plan(collectives.all_to_all, sent[0], source.dtype)
            native.remember(self._handle, _ALL_TO_ALL, 0, input, output, plan, self._site(2))
        else:
            plan = self._plan(collectives.all_to_all, self._agree_on_splits(call, sent, got, timeout), source.dtype)
        return self._run(call, plan, [source], [out], [output], async_op, timeout)

    def all_to_all(
        self, outputs: Sequence[Any], inputs: Sequence[Any], async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """``inputs[k]`` goes to rank k, ``outputs[k]`` comes from rank k; sizes may differ.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        call = "all_to_all"
        sources, outs, dtype = self._of_all_to_all(call, outputs, inputs)
        matrix = self._agree_on_splits(call, [s.count for s in sources], [o.count for o in outs], timeout)
        plan = self._plan(collectives.all_to_all, matrix, dtype, True)
        return self._run(call, plan, sources, outs, outputs, async_op, timeout)

    def _agree_on_splits(
        self, call: str, sent: Sequence[int], got: Sequence[int], timeout: Timeout
    ) -> tuple[tuple[int, ...], ...]:
        """Everybody's split sizes, so that each rank knows where in a peer's input its piece lies."""
        import array

        mine = array.array("q", [*sent, *got])
        everyone = array.array("q", bytes(8 * len(mine) * self.size))
        plan = self._plan(collectives.all_gather, (len(mine),) * self.size, DType.INT64)
        a, b = (Buffer(x.buffer_info()[0], len(x), DType.INT64, x) for x in (mine, everyone))
        self._run(call, plan, [a], [b], [], False, timeout)
        rows = [everyone[2 * self.size * r : 2 * self.size * (r + 1)] for r in range(self.size)]
        for i in range(self.size):
            for j in range(self.size):
                if rows[i][j] != rows[j][self.size + i]:
                    raise errors.BadArgumentError(
                        f"{call}: rank {i} sends {rows[i][j]} elements to rank {j}, "
                        f"which expects {rows[j][self.size + i]}; make input and output splits agree."
                    )
        return tuple(tuple(row[: self.size]) for row in rows)

    # --- the rest ---------------------------------------------------------------------------------------------

    def barrier(self, async_op: bool = False, timeout: Timeout = None) -> Work | None:
        """Return once every rank has come.

        Raises: CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        if not async_op and timeout is None:
            status = native.again(self._handle, _BARRIER, 0, None, None, self._timeout_ns)
            if status >= 0:
                self._ended(status, "barrier")
                return None
        plan = self._plans.get("barrier")
        if plan is None:
            plan = self._plans["barrier"] = self.load_plan(collectives.barrier(self.rank, self.size))
        native.remember(self._handle, _BARRIER, 0, None, None, plan, self._site(2))
        return self._run("barrier", plan, [], [], [], async_op, timeout)

    def all_gather_bytes(self, item: bytes, timeout: Timeout = None) -> list[bytes]:
        """Everybody's bytes, of any length, in rank order."""
        import array

        length = array.array("q", [len(item)])
        lengths = array.array("q", bytes(8 * self.size))
        plan = self._plan(collectives.all_gather, (1,) * self.size, DType.INT64)
        a, b = (Buffer(x.buffer_info()[0], len(x), DType.INT64, x) for x in (length, lengths))
        self._run("all_gather_bytes", plan, [a], [b], [], False, timeout)
        mine, everyone = array.array("B", item), array.array("B", bytes(sum(lengths)))
        plan = self._plan(collectives.all_gather, tuple(lengths), DType.UINT8)
        a, b = (Buffer(x.buffer_info()[0], len(x), DType.UINT8, x) for x in (mine, everyone))
        self._run("all_gather_bytes", plan, [a], [b], [], False, timeout)
        ends = [sum(lengths[: r + 1]) for r in range(self.size)]
        return [everyone[end - n : end].tobytes() for end, n in zip(ends, lengths, strict=True)]
