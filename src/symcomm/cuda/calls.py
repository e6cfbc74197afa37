"""The collectives of a CudaGroup: the names, arguments and meaning of a process group's, on CUDA tensors.

Every call looks at its tensors, checks them, says what it needs, and hands over what is to be put into the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from symcomm import errors
from symcomm._core import native
from symcomm.collectives.plan import Collective
from symcomm.collectives.select import signature_count
from symcomm.cuda.tensor_views import TensorView, check_same_dtype, tensor_view, tensor_view_list
from symcomm.group.arguments import to_redop
from symcomm.group.p2p import ANY_SOURCE
from symcomm.group.work import Timeout
from symcomm.types import DType, RedOpType

__all__ = ["CudaCalls", "CudaSignature"]


class CudaSignature(NamedTuple):
    """What ranks compare before anything happens."""

    collective: Collective
    elements: int
    dtype: int = 0
    redop: int = 0
    root: int = 0


class CudaCalls:
    """Mixed into CudaGroup."""

    rank: int
    size: int
    device: int
    core: Any
    collectives: Any
    limits: Any
    prefers_one_shot: bool
    _collectives_for: Callable[[int], Any]
    _perform: Callable[..., Any]
    _run_fast_path: Callable[[Any, Any], bool]
    _cache_fast_path: Callable[..., None]

    # --- reductions -------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, op: Any = RedOpType.SUM, async_op: bool = False, timeout: Timeout = None) -> Any:
        """Combine ``tensor`` over all ranks, in place."""
        if not async_op and timeout is None and self._run_fast_path(tensor, op):
            return None
        out = tensor_view("all_reduce", "tensor", tensor, self.device, True)
        nbytes = out.nbytes
        count, dtype, collectives = out.count, out.dtype, self._collectives_for(nbytes)
        redop, how, source = self._reduction("all_reduce", op, out, collectives)
        one_shot = nbytes * self.size <= self.limits.one_shot_bytes or self.size == 1
        if not one_shot:
            collectives.kernel(dtype, how, self.size, self.size)

        def enqueue(stream: int, symmetric: list[int] | None) -> None:
            if self.size == 1:
                collectives.combine(dtype, how, [source.address], [out.address], count, stream)
            elif symmetric is not None:
                collectives.reduce_in_place(dtype, how, symmetric, count, stream)
            elif one_shot:
                collectives.reduce_small(dtype, how, source.address, out.address, count, stream)
            elif self.prefers_one_shot:
                collectives.reduce_one_shot(dtype, how, source.address, out.address, count, stream)
            else:
                collectives.reduce_two_shot(dtype, how, source.address, out.address, count, stream)

        in_place = out if source is out and out.target is None else None
        signature = CudaSignature(Collective.ALL_REDUCE, count, dtype, redop)
        work = self._perform(
            "all_reduce", signature, nbytes, enqueue, [out], [tensor], (source, out), async_op, timeout, in_place,
            not one_shot,
        )  # fmt: skip
        if one_shot and in_place is not None:
            self._cache_fast_path(tensor, op, signature, dtype, collectives)
        return work

    def _reduction(
        self, call: str, op: Any, source: TensorView, collectives: Any
    ) -> tuple[RedOpType, RedOpType, TensorView]:
        """The operation, how to combine, and what to read: for PREMUL_SUM the input times its factor, in a stand-in."""
        redop, factor = to_redop(call, op)
        if not native.reduce_defined(source.dtype, redop):
            raise errors.bad_argument(call, "op", redop.name, f"one that is defined for {source.dtype.label}")
        how = RedOpType.SUM if redop is RedOpType.PREMUL_SUM else redop
        collectives.kernel(source.dtype, how, self.size, 1)
        if redop is how:
            return redop, how, source
        if factor is None:
            raise errors.bad_argument(call, "op", "PREMUL_SUM without a factor", "made by make_premul_sum(factor)")
        return redop, how, tensor_view(call, "tensor", (source.owner * factor).to(source.owner.dtype), self.device)

    def reduce(
        self, tensor: Any, root: int = 0, op: Any = RedOpType.SUM, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Combine ``tensor`` over all ranks into ``root``'s; the others' stay as they are."""
        self.core._check_root("reduce", root)
        is_root = self.rank == root
        out = tensor_view("reduce", "tensor", tensor, self.device, is_root)
        collectives = self._collectives_for(out.nbytes)
        redop, how, source = self._reduction("reduce", op, out, collectives)
        target = out.address if is_root else None

        def enqueue(stream: int, _: Any) -> None:
            if self.size == 1:
                collectives.combine(out.dtype, how, [source.address], [out.address], out.count, stream)
            else:
                collectives.reduce_one_shot(out.dtype, how, source.address, target, out.count, stream)

        signature = CudaSignature(Collective.REDUCE, out.count, out.dtype, redop, root)
        outputs = [out] if is_root else []
        return self._perform(
            "reduce", signature, out.nbytes, enqueue, outputs, [tensor], (source, out), async_op, timeout
        )

    def reduce_scatter_single(
        self, output: Any, input: Any, op: Any = RedOpType.SUM, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """``input`` is one piece per rank, one after the other; rank k gets the combination of all k-th pieces."""
        call = "reduce_scatter_single"
        given = tensor_view(call, "input", input, self.device)
        out = tensor_view(call, "output", output, self.device, True)
        check_same_dtype(call, [given, out])
        self.core._check_count(call, "input", given.count, out.count * self.size, f"{self.size} times output's")
        collectives = self._collectives_for(self._slots(out.nbytes))
        redop, how, source = self._reduction(call, op, given, collectives)
        dtype, count = out.dtype, out.count
        pieces = [source.address + q * out.nbytes for q in range(self.size)]

        def enqueue(stream: int, symmetric: list[int] | None) -> None:
            if self.size == 1:
                collectives.combine(dtype, how, pieces, [out.address], count, stream)
            elif symmetric is not None:
                collectives.reduce_scatter_direct(dtype, how, symmetric, count, out.address, stream)
            else:
                collectives.reduce_scatter(dtype, how, pieces, [count] * self.size, out.address, stream)

        signature = CudaSignature(Collective.REDUCE_SCATTER, source.count, dtype, redop)
        in_place = source if source is given else None
        return self._perform(
            call, signature, self._slots(out.nbytes), enqueue, [out], [output], (source, out), async_op, timeout,
            in_place, self._is_large(source.nbytes),
        )  # fmt: skip

    def reduce_scatter(
        self, output: Any, inputs: Sequence[Any], op: Any = RedOpType.SUM, async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:  # fmt: skip
        """Like reduce_scatter_single, with a list of pieces; they may differ in size."""
        call = "reduce_scatter"
        out, pieces = tensor_view(call, "output", output, self.device, True), self._list(call, "inputs", inputs)
        check_same_dtype(call, [out, *pieces])
        self.core._check_count(call, "output", out.count, pieces[self.rank].count, f"that of inputs[{self.rank}]")
        counts = [piece.count for piece in pieces]
        need = self._slots(max(counts) * out.dtype.itemsize)
        collectives = self._collectives_for(need)
        reductions = [self._reduction(call, op, piece, collectives) for piece in pieces]
        redop, how, _ = reductions[0]
        sources = [source for _, _, source in reductions]

        def enqueue(stream: int, _: Any) -> None:
            where = [s.address for s in sources]
            if self.size == 1:
                collectives.combine(out.dtype, how, where, [out.address], out.count, stream)
            else:
                collectives.reduce_scatter(out.dtype, how, where, counts, out.address, stream)

        signature = CudaSignature(Collective.REDUCE_SCATTER, signature_count(counts), out.dtype, redop)
        return self._perform(call, signature, need, enqueue, [out], [output], (sources, out), async_op, timeout)

    # --- copies -----------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Any, root: int = 0, async_op: bool = False, timeout: Timeout = None) -> Any:
        """Everybody's ``tensor`` becomes ``root``'s."""
        self.core._check_root("broadcast", root)
        is_root = self.rank == root
        it = tensor_view("broadcast", "tensor", tensor, self.device, not is_root)
        sizes = [it.nbytes if q == root else 0 for q in range(self.size)]
        targets = [it.address if q == root and not is_root else None for q in range(self.size)]
        signature = CudaSignature(Collective.BROADCAST, it.count, it.dtype, root=root)
        return self._all_gather(
            "broadcast", signature, it, sizes, targets, [] if is_root else [it], [tensor], async_op, timeout
        )

    def _all_gather(
        self, call: str, signature: CudaSignature, source: TensorView, sizes: Sequence[int],
        targets: Sequence[int | None],
        outputs: Sequence[TensorView], result: Sequence[Any], async_op: bool, timeout: Timeout,
        may_be_direct: bool = False,
    ) -> Any:  # fmt: skip
        """Rank q shows its ``sizes[q]`` bytes to all; ``targets[q]``: where I want them."""
        collectives = self._collectives_for(max(sizes))

        def enqueue(stream: int, symmetric: list[int] | None) -> None:
            if self.size == 1:
                if targets[0] is not None:
                    collectives.copy(targets[0], source.address, source.nbytes, stream)
            elif symmetric is not None:
                collectives.all_gather_direct(symmetric, sizes, targets, stream)
            else:
                collectives.all_gather(source.address, sizes, targets, stream)

        return self._perform(
            call, signature, max(sizes), enqueue, outputs, result, (source, outputs), async_op, timeout, source,
            may_be_direct,
        )  # fmt: skip

    def all_gather_single(self, output: Any, input: Any, async_op: bool = False, timeout: Timeout = None) -> Any:
        """``output`` becomes all ranks' ``input``, one after the other."""
        call = "all_gather_single"
        source = tensor_view(call, "input", input, self.device)
        out = tensor_view(call, "output", output, self.device, True)
        check_same_dtype(call, [source, out])
        self.core._check_count(call, "output", out.count, source.count * self.size, f"{self.size} times input's")
        targets = [out.address + q * source.nbytes for q in range(self.size)]
        signature = CudaSignature(Collective.ALL_GATHER, out.count, source.dtype)
        return self._all_gather(
            call, signature, source, [source.nbytes] * self.size, targets, [out], [output], async_op, timeout,
            self._is_large(source.nbytes),
        )  # fmt: skip

    def all_gather(self, outputs: Sequence[Any], input: Any, async_op: bool = False, timeout: Timeout = None) -> Any:
        """``outputs[k]`` becomes rank k's ``input``; sizes may differ between ranks."""
        call = "all_gather"
        source, outs = tensor_view(call, "input", input, self.device), self._list(call, "outputs", outputs, True)
        dtype = check_same_dtype(call, [source, *outs])
        self.core._check_count(call, "input", source.count, outs[self.rank].count, f"that of outputs[{self.rank}]")
        signature = CudaSignature(Collective.ALL_GATHER, signature_count([o.count for o in outs]), dtype)
        sizes, targets = [o.nbytes for o in outs], [o.address for o in outs]
        return self._all_gather(call, signature, source, sizes, targets, outs, outputs, async_op, timeout)

    def gather(
        self, outputs: Sequence[Any] | None, input: Any, root: int = 0, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """At ``root``, ``outputs[k]`` becomes rank k's ``input``; the others pass None."""
        call = "gather"
        self.core._check_root(call, root)
        source = tensor_view(call, "input", input, self.device)
        is_root = self.rank == root
        outs = self._list(call, "outputs", outputs, True) if is_root else []
        if not is_root:
            self.core._refuse_list(call, "outputs", outputs)
        dtype = check_same_dtype(call, [source, *outs])
        for k, out in enumerate(outs):
            self.core._check_count(call, f"outputs[{k}]", out.count, source.count, "input's")
        signature = CudaSignature(Collective.GATHER, source.count * self.size, dtype, root=root)
        targets: list[int | None] = [o.address for o in outs] or [None] * self.size
        return self._all_gather(
            call, signature, source, [source.nbytes] * self.size, targets, outs, outputs or [], async_op, timeout
        )

    def gather_single(
        self, output: Any, input: Any, root: int = 0, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """At ``root``, ``output`` becomes all ranks' ``input``, one after the other; the others pass None."""
        call = "gather_single"
        self.core._check_root(call, root)
        source = tensor_view(call, "input", input, self.device)
        outs = [tensor_view(call, "output", output, self.device, True)] if self.rank == root else []
        if not outs and output is not None:
            raise errors.bad_argument(
                call, "output", f"a tensor on rank {self.rank}", "given on the root only", "pass None elsewhere"
            )
        dtype = check_same_dtype(call, [source, *outs])
        for out in outs:
            self.core._check_count(call, "output", out.count, source.count * self.size, f"{self.size} times input's")
        signature = CudaSignature(Collective.GATHER, source.count * self.size, dtype, root=root)
        targets = [outs[0].address + q * source.nbytes if outs else None for q in range(self.size)]
        return self._all_gather(
            call, signature, source, [source.nbytes] * self.size, targets, outs, [output] if outs else [], async_op,
            timeout,
        )  # fmt: skip

    def scatter(
        self, output: Any, inputs: Sequence[Any] | None, root: int = 0, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Rank k's ``output`` becomes ``root``'s ``inputs[k]``; the others pass None."""
        call = "scatter"
        self.core._check_root(call, root)
        out = tensor_view(call, "output", output, self.device, True)
        is_root = self.rank == root
        pieces = self._list(call, "inputs", inputs) if is_root else []
        if not is_root:
            self.core._refuse_list(call, "inputs", inputs)
        dtype = check_same_dtype(call, [out, *pieces])
        for k, piece in enumerate(pieces):
            self.core._check_count(call, f"inputs[{k}]", piece.count, out.count, "output's")
        matrix = [[out.nbytes if i == root else 0] * self.size for i in range(self.size)]
        signature = CudaSignature(Collective.SCATTER, out.count * self.size, dtype, root=root)
        sources: list[int | None] = [p.address for p in pieces] or [None] * self.size
        targets = [out.address if i == root else None for i in range(self.size)]
        return self._all_to_all(call, signature, sources, matrix, targets, pieces, [out], [output], async_op, timeout)

    # --- all to all -------------------------------------------------------------------------------------------

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None, async_op: bool = False, timeout: Timeout = None,
    ) -> Any:  # fmt: skip
        """Piece k of ``input`` goes to rank k; ``output`` collects what came, in rank order.

        Splits count rows of dimension 0, as in torch; without them the pieces are equal."""
        call = "all_to_all_single"
        source = tensor_view(call, "input", input, self.device)
        out = tensor_view(call, "output", output, self.device, True)
        dtype = check_same_dtype(call, [source, out])
        sent = self.core._split_counts(call, "input", input, source.count, input_splits)
        got = self.core._split_counts(call, "output", output, out.count, output_splits)
        if not output_splits and not input_splits:
            self.core._check_count(call, "output", out.count, source.count, "input's")
            matrix: Sequence[Sequence[int]] = [sent] * self.size
        else:
            self._drain()
            matrix = self.core._agree_on_splits(call, sent, got, timeout)
        item = dtype.itemsize
        sources = [source.address + sum(sent[:j]) * item for j in range(self.size)]
        targets = [out.address + sum(got[:i]) * item for i in range(self.size)]
        signature = self._all_to_all_signature(matrix, dtype)
        nbytes = [[n * item for n in row] for row in matrix]
        return self._all_to_all(call, signature, sources, nbytes, targets, [source], [out], [output], async_op, timeout)

    def all_to_all(
        self, outputs: Sequence[Any], inputs: Sequence[Any], async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """``inputs[k]`` goes to rank k, ``outputs[k]`` comes from rank k; sizes may differ."""
        call = "all_to_all"
        pieces, outs = self._list(call, "inputs", inputs), self._list(call, "outputs", outputs, True)
        dtype = check_same_dtype(call, [*pieces, *outs])
        self._drain()
        matrix = self.core._agree_on_splits(call, [p.count for p in pieces], [o.count for o in outs], timeout)
        nbytes = [[n * dtype.itemsize for n in row] for row in matrix]
        sources, targets = [p.address for p in pieces], [o.address for o in outs]
        signature = self._all_to_all_signature(matrix, dtype)
        return self._all_to_all(call, signature, sources, nbytes, targets, pieces, outs, outputs, async_op, timeout)

    def _all_to_all_signature(self, matrix: Sequence[Sequence[int]], dtype: DType) -> CudaSignature:
        return CudaSignature(Collective.ALL_TO_ALL, signature_count([n for row in matrix for n in row]), dtype)

    def _all_to_all(
        self, call: str, signature: CudaSignature, sources: Sequence[int | None], matrix: Sequence[Sequence[int]],
        targets: Sequence[int | None], inputs: Sequence[TensorView], outputs: Sequence[TensorView],
        result: Sequence[Any],
        async_op: bool, timeout: Timeout,
    ) -> Any:  # fmt: skip
        """Rank i has ``matrix[i][j]`` bytes for rank j."""
        need = self._slots(max(map(max, matrix)))
        collectives = self._collectives_for(need)

        def enqueue(stream: int, _: Any) -> None:
            if self.size == 1:
                if sources[0] is not None and targets[0] is not None:
                    collectives.copy(targets[0], sources[0], matrix[0][0], stream)
            else:
                collectives.all_to_all(sources, matrix, targets, stream)

        return self._perform(call, signature, need, enqueue, outputs, result, (inputs, outputs), async_op, timeout)

    # --- several at once --------------------------------------------------------------------------------------

    def all_reduce_coalesced(
        self, tensors: Sequence[Any], op: Any = RedOpType.SUM, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """all_reduce of several tensors; operations run in order, so the last work speaks for all."""
        return self._in_order([(self.all_reduce, (t, op)) for t in tensors], async_op, timeout)

    def all_gather_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        pairs = zip(outputs, inputs, strict=True)
        return self._in_order([(self.all_gather_single, pair) for pair in pairs], async_op, timeout)

    def all_gather_lists(
        self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """``outputs[r][k]`` becomes rank r's ``inputs[k]``."""
        calls = [(self.all_gather, ([one[k] for one in outputs], t)) for k, t in enumerate(inputs)]
        return self._in_order(calls, async_op, timeout)

    def reduce_scatter_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], op: Any = RedOpType.SUM, async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:  # fmt: skip
        pairs = zip(outputs, inputs, strict=True)
        return self._in_order([(self.reduce_scatter_single, (*pair, op)) for pair in pairs], async_op, timeout)

    def _in_order(self, calls: Sequence[tuple[Callable[..., Any], Any]], async_op: bool, timeout: Timeout) -> Any:
        if not calls:
            return self.barrier(async_op, timeout)
        return [method(*args, async_op=async_op, timeout=timeout) for method, args in calls][-1]

    # --- the rest ---------------------------------------------------------------------------------------------

    def barrier(self, async_op: bool = False, timeout: Timeout = None) -> Any:
        """What later comes into any rank's stream begins when what all ranks had in theirs before is done."""
        signature = CudaSignature(Collective.BARRIER, 0)
        enqueue = self.collectives.barrier
        return self._perform(
            "barrier", signature, 0, lambda stream, _: enqueue(stream), [], [], None, async_op, timeout
        )

    # --- messages ---------------------------------------------------------------------------------------------

    messages: Any

    def send(self, tensor: Any, peer: int, tag: int = 0, timeout: Timeout = None) -> None:
        """``tensor`` may be changed, by what comes later in the current stream, when this returns."""
        self.messages.send(tensor, peer, tag, timeout)

    def recv(self, tensor: Any, peer: int = ANY_SOURCE, tag: int = 0, timeout: Timeout = None) -> int:
        """Fill ``tensor`` from ``peer`` (or from whoever sends first); returns the sender's rank."""
        return self.messages.recv(tensor, peer, tag, timeout)

    def isend(self, tensor: Any, peer: int, tag: int = 0) -> Any:
        return self.messages.isend(tensor, peer, tag)

    def irecv(self, tensor: Any, peer: int = ANY_SOURCE, tag: int = 0) -> Any:
        return self.messages.irecv(tensor, peer, tag)

    def batch(self, messages: Sequence[Any]) -> list[Any]:
        """Start several sends and receives at once."""
        return self.messages.batch(messages)

    # --- help -------------------------------------------------------------------------------------------------

    def _list(self, call: str, name: str, tensors: Any, write: bool = False) -> list[TensorView]:
        return tensor_view_list(call, name, tensors, self.size, self.device, write)

    def _slots(self, nbytes: int) -> int:
        """Bytes of a half staging area in which every rank has a slot of ``nbytes``."""
        return (nbytes + 16) * self.size

    def _is_large(self, nbytes: int) -> bool:
        return nbytes > self.limits.direct_bytes

    def _drain(self) -> None:
        """Wait until the hosts have synchronized for all operations before, so that one more collective comes in its
        order."""
        for work in list(self._pending):
            work._await_queued(None)

    _pending: Any
