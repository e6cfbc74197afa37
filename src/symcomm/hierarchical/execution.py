"""How requests are executed across hosts: signature, eager or pipelined algorithm, and the addresses it works on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from symcomm.collectives.plan import Collective
from symcomm.collectives.select import hash_sizes
from symcomm.group.facade import Collectives
from symcomm.group.request import Request, addresses_of
from symcomm.group.work import Timeout, Work
from symcomm.hierarchical import eager, pipelined
from symcomm.hierarchical.levels import Levels
from symcomm.hierarchical.operation import Operation, Signature
from symcomm.hierarchical.topology import Layout

Body = Callable[[Operation], None]


class HierarchicalExecution(Collectives):
    """Mixed into HierarchicalGroup."""

    layout: Layout
    _perform: Callable[..., Work | None]

    def execute(self, request: Request, async_op: bool, timeout: Timeout) -> Work | None:
        """Run what was asked for, here and now, or in the group's thread where that has something to run already."""
        refusal = request.ask_autograd()
        request.keep_apart(self.rank, self.size)
        body = _BODIES[request.op.plan](self.layout, request)
        work = self._perform(request, self._signature(request), body, async_op, timeout)
        if refusal is not None:
            raise refusal
        return work

    def _signature(self, request: Request) -> Signature:
        op = request.op
        collective = Collective[op.plan.upper()]
        if collective is Collective.BARRIER:
            return Signature(collective)
        counts = request.counts(self.size)
        redop = request.redop if op.reduces else 0
        return Signature(collective, request.dtype, redop, request.root, sum(counts), hash_sizes(counts))


# --- one for each family of collectives --------------------------------------------------------------------------


def _all_reduce(layout: Layout, r: Request) -> Body:
    [source], [out], levels = r.inputs, r.outputs, Levels.of(r.redop, r.dtype, layout)
    act = eager.all_reduce if layout.fits_eager(out.nbytes, is_whole=True) else pipelined.all_reduce
    return lambda o: act(o, source.address, out.address, r.sizes, r.dtype, levels)


def _reduce(layout: Layout, r: Request) -> Body:
    [source], levels = r.inputs, Levels.of(r.redop, r.dtype, layout)
    target = r.outputs[0].address if r.outputs else source.address
    act = eager.reduce if layout.fits_eager(source.nbytes, is_whole=True) else pipelined.reduce
    return lambda o: act(o, source.address, target, r.sizes, r.dtype, levels, r.root)


def _reduce_scatter(layout: Layout, r: Request) -> Body:
    [out], levels = r.outputs, Levels.of(r.redop, r.dtype, layout)
    addresses = addresses_of(r.inputs, r.sizes, r.op.listed)
    is_eager = layout.fits_eager(layout.largest_host_total(r.sizes) * r.dtype.itemsize)
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
    [out], sources = r.outputs, [source.address for source in r.inputs]
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
