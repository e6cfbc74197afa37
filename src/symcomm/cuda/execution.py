"""How requests are executed on a GPU's streams: what each needs, and what goes into the stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from symcomm.collectives.plan import Collective
from symcomm.collectives.select import signature_count
from symcomm.cuda.failure import CudaFailures, explain_cuda_errors
from symcomm.cuda.tensor_views import tensor_view, tensor_view_list
from symcomm.group.facade import SUM, Collectives
from symcomm.group.p2p import ANY_SOURCE
from symcomm.group.refusal import Settled
from symcomm.group.request import Request, Views, addresses_of, plain_op
from symcomm.group.work import Timeout
from symcomm.ops import numbers_of
from symcomm.types import RedOpType

[_ALL_REDUCE] = numbers_of("all_reduce")


class CudaSignature(NamedTuple):
    """What ranks compare before anything happens."""

    collective: Collective
    elements: int
    dtype: int = 0
    redop: int = 0
    root: int = 0


class HostsStep(NamedTuple):
    """What the core runs before anything goes into a stream."""

    plan: Any
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    timeout_ns: int
    batch: Any


class Move(NamedTuple):
    """What one request comes to."""

    need: int  # bytes of a half staging area that it can make use of
    enqueue: Callable[[int, list[int] | None], None]  # (stream, where all ranks' symmetric tensors are)
    symmetric: Any = None  # the tensor that peers may use in tensor_view
    may_be_direct: bool = False  # whether all ranks ask for that
    cached: bool = False  # whether the next call of this kind may take the short way


def device_views(device: int) -> Views:
    """How tensors on one GPU are looked at."""

    def read(call: str, name: str, tensor: Any) -> Any:
        return tensor_view(call, name, tensor, device)

    def write(call: str, name: str, tensor: Any) -> Any:
        return tensor_view(call, name, tensor, device, True)

    def read_list(call: str, name: str, tensors: Any, length: int) -> list[Any]:
        return tensor_view_list(call, name, tensors, length, device)

    def write_list(call: str, name: str, tensors: Any, length: int) -> list[Any]:
        return tensor_view_list(call, name, tensors, length, device, True)

    return Views(read, write, read_list, write_list)


class CudaExecution(Collectives):
    """Mixed into CudaGroup."""

    core: Any
    failures: CudaFailures
    collectives: Any
    messages: Any
    limits: Any
    prefers_one_shot: bool
    _collectives_for: Callable[[int], Any]
    _perform: Callable[..., Any]
    _captures: Callable[[], bool]
    _capture: Callable[..., None]
    _run_fast_path: Callable[[Any, Any], bool]
    _add_fast_path: Callable[..., None]
    pending: Any

    def all_reduce(self, tensor: Any, op: Any = SUM, async_op: bool = False, timeout: Timeout = None) -> Any:
        """Combine ``tensor`` over all ranks, in place."""
        if async_op is False and timeout is None:
            try:
                if self._run_fast_path(tensor, plain_op(op)):
                    return None
            except RuntimeError as error:
                self.failures.raise_cause(error, "all_reduce")
        return super().all_reduce(tensor, op, async_op, timeout)

    @explain_cuda_errors
    def execute(self, request: Request, async_op: bool, timeout: Timeout) -> Any:
        """Meet the others, and put what was asked for into a stream."""
        refusal = request.ask_autograd()
        request.keep_apart(self.rank, self.size)
        op, signature = request.op, self._signature(request)
        if self._captures():
            return self._capture(request, signature, async_op, timeout)
        move = _MOVES[op.plan](self, request)
        work = self._perform(request, signature, move, async_op, timeout)
        if op.number == _ALL_REDUCE and move.cached and move.symmetric is not None:
            [tensor], collectives = request.result, self._collectives_for(move.need)
            assert request.key is not None
            with Settled():
                self._add_fast_path(tensor, request.key[0], signature, request.dtype, collectives, move.may_be_direct)
        if refusal is not None:
            raise refusal
        return work

    def refuse(self, error: Exception) -> None:
        """Ranks meet in the core for operations on the GPU, too."""
        self.core.refuse(error)

    def _signature(self, request: Request) -> CudaSignature:
        op, elements = request.op, signature_count(request.counts(self.size)) if request.op.plan != "barrier" else 0
        collective = Collective[op.plan.upper()]
        return CudaSignature(collective, elements, request.dtype, request.redop if op.reduces else 0, request.root)

    def _agree_on_splits(self, timeout: Timeout, call: str, sent: Sequence[int], got: Sequence[int]) -> Any:
        """The hosts meet for this one once they have met for all operations before, so that it comes in its order."""
        for work in list(self.pending):
            work.await_queued(None)
        return self.core._agree_on_splits(timeout, call, sent, got)

    def _kernel(self, collectives: Any, request: Request, targets: int = 1) -> RedOpType:
        """How to combine. A kernel that cannot be had is refused here, before anybody meets."""
        how = RedOpType.SUM if request.redop is RedOpType.PREMUL_SUM else request.redop
        collectives.kernel(request.dtype, how, self.size, targets)
        return how

    def _slots(self, nbytes: int) -> int:
        """Bytes of a half staging area in which every rank has a slot of ``nbytes``."""
        return (nbytes + 16) * self.size

    def _is_large(self, nbytes: int) -> bool:
        return nbytes > self.limits.direct_bytes

    # --- messages ---------------------------------------------------------------------------------------------

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


def _pieces(views: Sequence[Any], counts: Sequence[int], listed: bool | None) -> list[int | None]:
    """As ``addresses_of``; None each where there is no tensor."""
    return list(addresses_of(views, counts, listed)) or [None] * len(counts)


# --- one for each family of collectives --------------------------------------------------------------------------


def _all_reduce(group: CudaExecution, r: Request) -> Move:
    [source], [out] = r.inputs, r.outputs
    count, dtype, nbytes = out.count, out.dtype, out.nbytes
    collectives = group._collectives_for(nbytes)
    how = group._kernel(collectives, r)
    one_shot = nbytes * group.size <= group.limits.one_shot_bytes or group.size == 1
    if not one_shot:
        collectives.kernel(dtype, how, group.size, group.size)

    def enqueue(stream: int, symmetric: list[int] | None) -> None:
        if group.size == 1:
            collectives.combine(dtype, how, [source.address], [out.address], count, stream)
        elif symmetric is not None:
            collectives.reduce_in_place(dtype, how, symmetric, count, stream)
        elif one_shot:
            collectives.reduce_small(dtype, how, source.address, out.address, count, stream)
        elif group.prefers_one_shot:
            collectives.reduce_one_shot(dtype, how, source.address, out.address, count, stream)
        else:
            collectives.reduce_two_shot(dtype, how, source.address, out.address, count, stream)

    in_place = out if source is out and out.target is None else None
    least = group.limits.direct_reduce_bytes
    may_be_direct = group.size > 1 and (not one_shot if least is None else nbytes > least)
    return Move(nbytes, enqueue, in_place, may_be_direct, one_shot)


def _reduce(group: CudaExecution, r: Request) -> Move:
    [source] = r.inputs
    collectives = group._collectives_for(source.nbytes)
    how = group._kernel(collectives, r)
    target = r.outputs[0].address if r.outputs else None

    def enqueue(stream: int, _: Any) -> None:
        if group.size == 1:
            collectives.combine(r.dtype, how, [source.address], [target], r.sizes, stream)
        else:
            collectives.reduce_one_shot(r.dtype, how, source.address, target, r.sizes, stream)

    return Move(source.nbytes, enqueue)


def _reduce_scatter(group: CudaExecution, r: Request) -> Move:
    [out], sources = r.outputs, r.inputs
    need = group._slots(max(r.sizes) * r.dtype.itemsize)
    collectives = group._collectives_for(need)
    how = group._kernel(collectives, r)
    pieces = _pieces(sources, r.sizes, r.op.listed)

    def enqueue(stream: int, symmetric: list[int] | None) -> None:
        if group.size == 1:
            collectives.combine(r.dtype, how, pieces, [out.address], out.count, stream)
        elif symmetric is not None:
            collectives.reduce_scatter_direct(r.dtype, how, symmetric, out.count, out.address, stream)
        else:
            collectives.reduce_scatter(r.dtype, how, pieces, list(r.sizes), out.address, stream)

    if r.op.listed:
        return Move(need, enqueue)
    in_place = sources[0] if r.redop is not RedOpType.PREMUL_SUM else None
    return Move(need, enqueue, in_place, group._is_large(sources[0].nbytes))


def _spread(group: CudaExecution, source: Any, sizes: Sequence[int], targets: Sequence[Any], direct: bool) -> Move:
    """Rank q shows its ``sizes[q]`` bytes to all; ``targets[q]``: where I want them."""
    collectives = group._collectives_for(max(sizes))

    def enqueue(stream: int, symmetric: list[int] | None) -> None:
        if group.size == 1:
            if targets[0] is not None:
                collectives.copy(targets[0], source.address, source.nbytes, stream)
        elif symmetric is not None:
            collectives.all_gather_direct(symmetric, sizes, targets, stream)
        else:
            collectives.all_gather(source.address, sizes, targets, stream)

    return Move(max(sizes), enqueue, source, direct)


def _broadcast(group: CudaExecution, r: Request) -> Move:
    [view] = r.inputs
    sizes = [view.nbytes if q == r.root else 0 for q in range(group.size)]
    targets = [view.address if q == r.root and group.rank != r.root else None for q in range(group.size)]
    return _spread(group, view, sizes, targets, False)


def _all_gather(group: CudaExecution, r: Request) -> Move:
    [source] = r.inputs
    sizes = [n * r.dtype.itemsize for n in r.sizes]
    direct = not r.op.listed and group._is_large(source.nbytes)
    return _spread(group, source, sizes, _pieces(r.outputs, r.sizes, r.op.listed), direct)


def _gather(group: CudaExecution, r: Request) -> Move:
    [source] = r.inputs
    return _spread(group, source, [source.nbytes] * group.size, _pieces(r.outputs, r.sizes, r.op.listed), False)


def _exchange(group: CudaExecution, sources: Sequence[Any], matrix: Sequence[Any], targets: Sequence[Any]) -> Move:
    """Rank i has ``matrix[i][j]`` bytes for rank j."""
    need = group._slots(max(map(max, matrix)))
    collectives = group._collectives_for(need)

    def enqueue(stream: int, _: Any) -> None:
        if group.size > 1:
            collectives.all_to_all(sources, matrix, targets, stream)
        elif sources[0] is not None and targets[0] is not None:
            collectives.copy(targets[0], sources[0], matrix[0][0], stream)

    return Move(need, enqueue)


def _scatter(group: CudaExecution, r: Request) -> Move:
    [out], size = r.outputs, group.size
    matrix = [[out.nbytes if i == r.root else 0] * size for i in range(size)]
    targets = [out.address if i == r.root else None for i in range(size)]
    return _exchange(group, _pieces(r.inputs, r.sizes, True), matrix, targets)


def _all_to_all(group: CudaExecution, r: Request) -> Move:
    counts = [[r.sizes] * group.size] * group.size if isinstance(r.sizes, int) else r.sizes
    sources = _pieces(r.inputs, counts[group.rank], r.op.listed)
    targets = _pieces(r.outputs, [row[group.rank] for row in counts], r.op.listed)
    return _exchange(group, sources, [[n * r.dtype.itemsize for n in row] for row in counts], targets)


def _barrier(group: CudaExecution, r: Request) -> Move:
    """What later comes into any rank's stream begins when what all ranks had in theirs before is done."""
    barrier = group.collectives.barrier
    return Move(0, lambda stream, _: barrier(stream))


_MOVES: dict[str, Callable[[CudaExecution, Request], Move]] = {
    "all_reduce": _all_reduce, "reduce": _reduce, "reduce_scatter": _reduce_scatter, "broadcast": _broadcast,
    "all_gather": _all_gather, "gather": _gather, "scatter": _scatter, "all_to_all": _all_to_all, "barrier": _barrier,
}  # fmt: skip
