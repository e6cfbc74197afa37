"""The collectives of a group across hosts: look at the tensors, check them, and hand their addresses on.

The calls, their arguments and their refusals are those of ProcessGroup (group/calls.py)."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from symcomm.collectives.plan import Collective
from symcomm.group.buffers import Buffer, keep_apart, write_buffer
from symcomm.group.calls import CollectiveCalls
from symcomm.group.work import Timeout, Work
from symcomm.hierarchical import eager, pipelined
from symcomm.hierarchical.levels import Levels
from symcomm.hierarchical.operation import Operation, Signature
from symcomm.hierarchical.pipelined import starts_of
from symcomm.hierarchical.topology import Layout
from symcomm.types import RedOpType

__all__ = ["HierarchicalCalls"]

Body = Callable[[Operation], None]


def _detail(numbers: Sequence[int]) -> int:
    """Sizes of pieces as one number, 0 where they are all the same."""
    return zlib.crc32(array("q", numbers).tobytes()) + 1 if len(set(numbers)) > 1 else 0


def _each(buffer: Buffer, counts: Sequence[int]) -> list[int]:
    """Addresses of pieces that lie one after the other."""
    return [buffer.address + start * buffer.dtype.itemsize for start in starts_of(counts)]


class HierarchicalCalls(CollectiveCalls):
    """Mixed into HierarchicalGroup."""

    layout: Layout
    _perform: Callable[..., Work | None]

    def _apart(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Sequence[Buffer]:
        """Inputs that no output lies on; nothing but a rank's own part may be in place."""
        return keep_apart(inputs, outputs, self.rank, self.size) if inputs and outputs else inputs

    # --- reductions -------------------------------------------------------------------------------------------

    def all_reduce(
        self, tensor: Any, op: Any = RedOpType.SUM, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """Combine ``tensor`` over all ranks, in place."""
        buffer = write_buffer("all_reduce", "tensor", tensor)
        redop, source = self._reduction("all_reduce", op, buffer)
        levels = Levels.of(redop, buffer.dtype, self.layout)
        signature = Signature(Collective.ALL_REDUCE, buffer.dtype, redop, 0, buffer.count)

        act = eager.all_reduce if self.layout.fits_eager(buffer.nbytes, is_whole=True) else pipelined.all_reduce

        def body(o: Operation) -> None:
            act(o, source.address, buffer.address, buffer.count, buffer.dtype, levels)

        return self._perform("all_reduce", signature, body, [source], [buffer], [tensor], async_op, timeout)

    def reduce(
        self, tensor: Any, root: int = 0, op: Any = RedOpType.SUM, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """Combine ``tensor`` over all ranks into ``root``'s; the others' stay as they are."""
        source, buffer, redop = self._of_reduce(tensor, root, op)
        levels = Levels.of(redop, buffer.dtype, self.layout)
        signature = Signature(Collective.REDUCE, buffer.dtype, redop, root, buffer.count)

        act = eager.reduce if self.layout.fits_eager(buffer.nbytes, is_whole=True) else pipelined.reduce

        def body(o: Operation) -> None:
            act(o, source.address, buffer.address, buffer.count, buffer.dtype, levels, root)

        outputs = [buffer] if self.rank == root else []
        return self._perform("reduce", signature, body, [source], outputs, [tensor], async_op, timeout)

    def reduce_scatter_single(
        self, output: Any, input: Any, op: Any = RedOpType.SUM, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """``input`` is one piece per rank, one after the other; rank k gets the combination of all k-th pieces."""
        call = "reduce_scatter_single"
        source, out, redop = self._of_reduce_scatter_single(call, output, input, op)
        counts = [out.count] * self.size
        [kept] = self._apart([source], [out])
        return self._reduce_scatter(call, [kept], _each(kept, counts), out, counts, redop, output, async_op, timeout)

    def reduce_scatter(
        self,
        output: Any,
        inputs: Sequence[Any],
        op: Any = RedOpType.SUM,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Like reduce_scatter_single, with a list of pieces; they may differ in size."""
        call = "reduce_scatter"
        pieces, out, redop = self._of_reduce_scatter(call, output, inputs, op)
        sources = self._apart(pieces, [out])
        addresses, counts = [s.address for s in sources], [p.count for p in pieces]
        return self._reduce_scatter(call, sources, addresses, out, counts, redop, output, async_op, timeout)

    def _reduce_scatter(
        self, call: str, sources: Sequence[Buffer], addresses: Sequence[int], out: Buffer, counts: Sequence[int],
        redop: RedOpType, output: Any, async_op: bool, timeout: Timeout,
    ) -> Work | None:  # fmt: skip
        levels = Levels.of(redop, out.dtype, self.layout)
        signature = Signature(Collective.REDUCE_SCATTER, out.dtype, redop, 0, sum(counts), _detail(counts))

        is_eager = self.layout.fits_eager(self.layout.largest_host_total(counts) * out.dtype.itemsize)
        act = eager.reduce_scatter if is_eager else pipelined.reduce_scatter

        def body(o: Operation) -> None:
            act(o, addresses, out.address, counts, out.dtype, levels)

        return self._perform(call, signature, body, sources, [out], [output], async_op, timeout)

    # --- copies -----------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Any, root: int = 0, async_op: bool = False, timeout: Timeout = None) -> Work | None:
        """Everybody's ``tensor`` becomes ``root``'s."""
        buffer = self._of_broadcast(tensor, root)
        signature = Signature(Collective.BROADCAST, buffer.dtype, 0, root, buffer.count)

        act = eager.broadcast if self.layout.fits_eager(buffer.nbytes, is_whole=True) else pipelined.broadcast

        def body(o: Operation) -> None:
            act(o, buffer.address, buffer.count, buffer.dtype, root)

        outputs = [] if self.rank == root else [buffer]
        return self._perform("broadcast", signature, body, [buffer], outputs, [tensor], async_op, timeout)

    def all_gather_single(
        self, output: Any, input: Any, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """``output`` becomes all ranks' ``input``, one after the other."""
        call = "all_gather_single"
        source, out = self._of_all_gather_single(call, output, input)
        counts = [source.count] * self.size
        return self._all_gather(call, source, [out], _each(out, counts), counts, [output], async_op, timeout)

    def all_gather(
        self, outputs: Sequence[Any], input: Any, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """``outputs[k]`` becomes rank k's ``input``; sizes may differ between ranks."""
        call = "all_gather"
        source, outs = self._of_all_gather(call, outputs, input)
        addresses, counts = [o.address for o in outs], [o.count for o in outs]
        return self._all_gather(call, source, outs, addresses, counts, outputs, async_op, timeout)

    def _all_gather(
        self, call: str, source: Buffer, outs: Sequence[Buffer], addresses: Sequence[int], counts: Sequence[int],
        result: Sequence[Any], async_op: bool, timeout: Timeout,
    ) -> Work | None:  # fmt: skip
        [kept] = self._apart([source], outs)
        signature = Signature(Collective.ALL_GATHER, source.dtype, 0, 0, sum(counts), _detail(counts))

        is_eager = self.layout.fits_eager(self.layout.largest_host_total(counts) * source.dtype.itemsize)
        act = eager.all_gather if is_eager else pipelined.all_gather

        def body(o: Operation) -> None:
            act(o, kept.address, addresses, counts, source.dtype)

        return self._perform(call, signature, body, [kept], outs, result, async_op, timeout)

    def gather(
        self, outputs: Sequence[Any] | None, input: Any, root: int = 0, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """At ``root``, ``outputs[k]`` becomes rank k's ``input``; the others pass None."""
        call = "gather"
        source, outs = self._of_gather(call, outputs, input, root)
        targets = [o.address for o in outs]
        return self._gather(call, source, outs, targets, root, outputs or [], async_op, timeout)

    def gather_single(
        self, output: Any, input: Any, root: int = 0, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """At ``root``, ``output`` becomes all ranks' ``input``, one after the other; the others pass None."""
        call = "gather_single"
        source, outs = self._of_gather_single(call, output, input, root)
        targets = _each(outs[0], [source.count] * self.size) if outs else []
        return self._gather(call, source, outs, targets, root, [output] if outs else [], async_op, timeout)

    def _gather(
        self, call: str, source: Buffer, outs: Sequence[Buffer], targets: Sequence[int], root: int,
        result: Sequence[Any], async_op: bool, timeout: Timeout,
    ) -> Work | None:  # fmt: skip
        signature = Signature(Collective.GATHER, source.dtype, 0, root, source.count * self.size)
        [kept] = self._apart([source], outs)
        is_eager = self.layout.fits_eager(source.nbytes * self.layout.widest)
        act = eager.gather if is_eager else pipelined.gather
        body: Body = partial(act, source=kept.address, targets=targets, nbytes=source.nbytes, root=root)
        return self._perform(call, signature, body, [kept], outs, result, async_op, timeout)

    def scatter(
        self, output: Any, inputs: Sequence[Any] | None, root: int = 0, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """Rank k's ``output`` becomes ``root``'s ``inputs[k]``; the others pass None."""
        call = "scatter"
        sources, out = self._of_scatter(call, output, inputs, root)
        signature = Signature(Collective.SCATTER, out.dtype, 0, root, out.count * self.size)
        kept = self._apart(sources, [out])
        is_eager = self.layout.fits_eager(out.nbytes * self.layout.widest)
        act = eager.scatter if is_eager else pipelined.scatter
        body: Body = partial(act, sources=[s.address for s in kept], target=out.address, nbytes=out.nbytes, root=root)
        return self._perform(call, signature, body, kept, [out], [output], async_op, timeout)

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
        """ScratchBuffer k of ``input`` goes to rank k; ``output`` collects what came, in rank order.

        Splits count rows of dimension 0, as in torch; without them the pieces are equal."""
        call = "all_to_all_single"
        source, out, sent, got = self._of_all_to_all_single(call, output, input, output_splits, input_splits)
        [kept] = self._apart([source], [out])
        uneven = output_splits or input_splits
        matrix = self._agree_on_splits(call, sent, got, timeout) if uneven else ()
        return self._all_to_all(
            call, [kept], _each(kept, sent), [out], _each(out, got), sent, matrix, [output], async_op, timeout
        )

    def all_to_all(
        self, outputs: Sequence[Any], inputs: Sequence[Any], async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """``inputs[k]`` goes to rank k, ``outputs[k]`` comes from rank k; sizes may differ."""
        call = "all_to_all"
        sources, outs, _ = self._of_all_to_all(call, outputs, inputs)
        sent = [s.count for s in sources]
        matrix = self._agree_on_splits(call, sent, [o.count for o in outs], timeout)
        kept = self._apart(sources, outs)
        places, targets = [s.address for s in kept], [o.address for o in outs]
        return self._all_to_all(call, kept, places, outs, targets, sent, matrix, outputs, async_op, timeout)

    def _all_to_all(
        self, call: str, sources: Sequence[Buffer], places: Sequence[int], outs: Sequence[Buffer],
        targets: Sequence[int], sent: Sequence[int], matrix: Sequence[Sequence[int]], result: Sequence[Any],
        async_op: bool, timeout: Timeout,
    ) -> Work | None:  # fmt: skip
        """``matrix``: everybody's counts; empty where all are the same."""
        dtype = outs[0].dtype
        item = dtype.itemsize
        flat = [n for row in matrix for n in row]
        total = sum(flat) if flat else sum(sent) * self.size
        signature = Signature(Collective.ALL_TO_ALL, dtype, 0, 0, total, _detail(flat))
        nbytes = (lambda i, j: matrix[i][j] * item) if matrix else (lambda i, j: sent[0] * item)
        rows = [self.layout.largest_host_total(row) for row in matrix] or [sent[0] * self.layout.widest] * self.size
        is_eager = self.layout.fits_eager(self.layout.largest_host_total(rows) * item)
        act = eager.all_to_all if is_eager else pipelined.all_to_all
        body: Body = partial(act, sources=places, targets=targets, matrix=nbytes)
        return self._perform(call, signature, body, sources, outs, result, async_op, timeout)

    # --- the rest ---------------------------------------------------------------------------------------------

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
        """The exchange of sizes that comes before some calls: an all_gather, whose plan for one host is not needed."""
        counts = plan
        addresses = _each(outputs[0], counts)
        return self._all_gather(call, inputs[0], outputs, addresses, counts, result, async_op, timeout)

    def _plan(self, build: Callable[..., Any], *args: Any) -> Any:
        """Only for ``_run``: the pieces' sizes."""
        return args[0]

    def barrier(self, async_op: bool = False, timeout: Timeout = None) -> Work | None:
        """Return once every rank has come."""
        return self._perform("barrier", Signature(Collective.BARRIER), eager.barrier, [], [], [], async_op, timeout)
