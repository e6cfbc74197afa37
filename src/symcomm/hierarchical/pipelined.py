"""Pipelined collectives across hosts: symmetric memory on each host, the engine between hosts.

Large tensors are processed chunk by chunk, each chunk by a generator. A generator first posts its receives from other
hosts. Then Operation.pipeline synchronizes the ranks, and from there each ``yield`` waits for the network while other
chunks proceed.

    all_reduce, reduce, broadcast      each lane carries its share of a chunk: L ranks of a host send at once
    all_gather, reduce_scatter         each piece goes once to each other host, or comes from it once
    gather, scatter, all_to_all        straight from one rank to the other

Small tensors have algorithms of their own (eager.py).

Values are combined as the tree over the ranks of each host, then as the tree over hosts, so all ranks get the same
bits. They are the bits that a single host gets if each host's ranks are a subtree there, and partial results are kept
in the type in which they are added (levels.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from symcomm import collectives
from symcomm.collectives.chunks import starts_of
from symcomm.hierarchical.engines.base import Transfer
from symcomm.hierarchical.levels import Levels
from symcomm.hierarchical.operation import Chunk, Operation
from symcomm.hierarchical.topology import Layout, split_evenly
from symcomm.types import DType

# Bytes of a tensor that make a chunk. One run each at 1 Gbit/s, 2 x 2 ranks, 2 loaded cores, 3 to 6 chunks
# under way: 1 MiB made 54 % of the link's speed from 32 MiB, 2 MiB 67 %, 4 MiB 74 and 77 %, 8 MiB 79 %; from 8 MiB, 4
# MiB was best.
CHUNK = 4 << 20


def chunks_of(count: int, dtype: DType, parts: int = 1) -> Iterator[tuple[int, int]]:
    """(first element, number of elements) of each chunk, the same on all hosts. ``parts``: tensors that share one."""
    size = max(1, CHUNK // (dtype.itemsize * parts))
    for start in range(0, count, size):
        yield start, min(size, count - start)


# --- through lanes ------------------------------------------------------------------------------------------------


def _lane_counts(layout: Layout, count: int) -> tuple[int, ...]:
    """The elements of a chunk for each rank of this host. Ranks without a lane get none."""
    return (*split_evenly(count, layout.lanes), *[0] * (len(layout.here) - layout.lanes))


def all_reduce(op: Operation, source: int, target: int, count: int, dtype: DType, levels: Levels) -> None:
    reduce(op, source, target, count, dtype, levels, None)


def reduce(op: Operation, source: int, target: int, count: int, dtype: DType, levels: Levels, root: int | None) -> None:
    """``root``: the rank that gets the result; None: all of them."""
    item = dtype.itemsize
    op.pipeline(
        _reduce_chunk(op, source + start * item, target + start * item, size, dtype, levels, root)
        for start, size in chunks_of(count, levels.kept)
    )


def _reduce_chunk(
    op: Operation, source: int, target: int, count: int, dtype: DType, levels: Levels, root: int | None
) -> Chunk:
    layout = op.layout
    homes = range(len(layout.hosts)) if root is None else [layout.host_of[root]]
    counts = _lane_counts(layout, count)
    mine = counts[layout.local]
    piece = op.borrow(mine * levels.kept.itemsize)
    result = levels.room(op, piece, mine)
    across = _combine_across(op, piece, result, mine, levels, homes)
    yield next(across)
    _scatter_here(op, source, piece, counts, levels)
    yield from across
    if root is None:
        op.local(collectives.all_gather, [result], [target], counts, dtype)
    elif layout.host in homes:
        outs = [target] if layout.rank == root else []
        op.local(collectives.gather, [result], outs, counts, dtype, layout.local_of[root], False)
    levels.done(op, (result, piece))
    op.give_back(piece)


def _scatter_here(op: Operation, source: int, piece: int, counts: Sequence[int], levels: Levels) -> None:
    """Each lane gets its part of a chunk, combined over this host's ranks."""
    kept = levels.begin(op, source, sum(counts))
    op.local(collectives.reduce_scatter, [kept], [piece], counts, levels.kept, levels.inner)
    levels.done(op, (kept, source))


def _combine_across(op: Operation, piece: int, result: int, count: int, levels: Levels, hosts: Sequence[int]) -> Chunk:
    """Combine the lane's piece over all hosts. ``hosts`` get the result, which may go where the piece is."""
    if not op.layout.has_lane:
        for _ in range(2 if len(op.layout.hosts) == 2 else 3):  # as often as ranks with a lane yield
            yield None
    elif len(op.layout.hosts) == 2:
        yield from _swap(op, piece, result, count, levels, hosts)
    else:
        sizes = split_evenly(count, len(op.layout.hosts))  # of the shares that the hosts combine
        yield from _reduce_shares(op, piece, result, starts_of(sizes), sizes, levels)
        yield _collect_shares(op, result, starts_of(sizes), sizes, levels.dtype, hosts)


def _swap(op: Operation, piece: int, result: int, count: int, levels: Levels, hosts: Sequence[int]) -> Chunk:
    """Two hosts send each other all that ``hosts`` need: no more bytes than any other algorithm, and half the waits."""
    layout, nbytes = op.layout, count * levels.kept.itemsize
    other = layout.others[0]
    theirs, peer = op.borrow(nbytes), layout.lane(other)
    expected = op.expect([(peer, theirs, nbytes)] if layout.host in hosts else [])
    yield None
    yield op.start([(peer, piece, nbytes)] if other in hosts else [], expected)
    if layout.host in hosts:
        order = [piece, theirs] if layout.host == 0 else [theirs, piece]
        levels.combine(op, result, order, count)
    op.give_back(theirs)


def _reduce_shares(
    op: Operation, piece: int, result: int, starts: Sequence[int], sizes: Sequence[int], levels: Levels
) -> Chunk:
    """Each host combines its share of the piece: it gets that share from each other host, and sends them theirs."""
    layout, item = op.layout, levels.kept.itemsize
    mine = sizes[layout.host]
    came = op.borrow(mine * item * len(layout.others))
    places = {h: came + k * mine * item for k, h in enumerate(layout.others)}
    expected = op.expect((layout.lane(h), places[h], mine * item) for h in layout.others)
    yield None
    yield op.start([(layout.lane(h), piece + starts[h] * item, sizes[h] * item) for h in layout.others], expected)
    own = piece + starts[layout.host] * item
    order = [places.get(h, own) for h in range(len(layout.hosts))]
    levels.combine(op, result + starts[layout.host] * levels.dtype.itemsize, order, mine)
    op.give_back(came)


def _collect_shares(
    op: Operation, piece: int, starts: Sequence[int], sizes: Sequence[int], dtype: DType, hosts: Sequence[int]
) -> Transfer | None:
    """Send this host's share to ``hosts``; if this host is one of them, get the others' shares."""
    layout, item = op.layout, dtype.itemsize
    me = layout.host
    sends = [(layout.lane(h), piece + starts[me] * item, sizes[me] * item) for h in hosts if h != me]
    receives = [(layout.lane(h), piece + starts[h] * item, sizes[h] * item) for h in layout.others]
    return op.start(sends, op.expect(receives if me in hosts else []))


def broadcast(op: Operation, address: int, count: int, dtype: DType, root: int) -> None:
    item = dtype.itemsize
    op.pipeline(
        _broadcast_chunk(op, address + start * item, size, dtype, root) for start, size in chunks_of(count, dtype)
    )


def _broadcast_chunk(op: Operation, address: int, count: int, dtype: DType, root: int) -> Chunk:
    """The root's host gets the chunk from the root. It sends each other host a share; these send each other theirs."""
    layout, item = op.layout, dtype.itemsize
    home = layout.host_of[root]
    counts = _lane_counts(layout, count)
    piece, mine = address + starts_of(counts)[layout.local] * item, counts[layout.local]
    away = [h for h in range(len(layout.hosts)) if h != home]
    sizes = split_evenly(mine, len(away))
    share = {
        h: (piece + start * item, size * item) for h, start, size in zip(away, starts_of(sizes), sizes, strict=True)
    }
    me, lane = layout.host, layout.has_lane
    if me == home:
        yield None
        op.local(collectives.broadcast, [address], [address], count, dtype, layout.local_of[root])
        yield op.start([(layout.lane(h), *share[h]) for h in away] if lane else [])
        return
    expected = op.expect([(layout.lane(home), *share[me])] if lane else [])
    yield None
    yield op.start([], expected)
    if len(away) > 1:
        peers = [h for h in away if h != me] if lane else []
        expected = op.expect((layout.lane(h), *share[h]) for h in peers)
        yield op.start([(layout.lane(h), *share[me]) for h in peers], expected)
    op.local(collectives.all_gather, [piece], [address], counts, dtype)


# --- a piece for each rank ----------------------------------------------------------------------------------------


def _window(counts: Sequence[int], start: int, size: int) -> list[int]:
    """How many of each rank's elements lie in a window of ``size`` elements."""
    return [max(0, min(n - start, size)) for n in counts]


def all_gather(op: Operation, source: int, targets: Sequence[int], counts: Sequence[int], dtype: DType) -> None:
    """``targets[r]``: where rank r's ``counts[r]`` elements go."""
    item = dtype.itemsize
    op.pipeline(
        _all_gather_chunk(op, source + at * item, [t + at * item for t in targets], _window(counts, at, size), dtype)
        for at, size in chunks_of(max(counts), dtype)
    )


def _all_gather_chunk(op: Operation, source: int, targets: Sequence[int], counts: Sequence[int], dtype: DType) -> Chunk:
    """Each rank sends its piece to one rank of each other host, which shares it with that host."""
    layout, item = op.layout, dtype.itemsize
    me, here = layout.rank, layout.here
    held = [r for h in layout.others for r in layout.hosts[h] if layout.holder(layout.host, r) == me]
    expected = op.expect((r, targets[r], counts[r] * item) for r in held)
    yield None
    transfer = op.start([(layout.holder(h, me), source, counts[me] * item) for h in layout.others], expected)
    _share(op, here, source, targets, counts, dtype)
    yield transfer
    for host in layout.others:
        for ranks in layout.waves(host):
            held_one = targets[ranks[layout.local]] if layout.local < len(ranks) else targets[me]
            _share(op, ranks, held_one, targets, counts, dtype)


def _share(
    op: Operation, ranks: Sequence[int], source: int, targets: Sequence[int], counts: Sequence[int], dtype: DType
) -> None:
    """The i-th rank of this host has ``ranks[i]``'s piece, and all of them get it."""
    sizes, outs = _in_places(op, ranks, counts, targets)
    op.local(collectives.all_gather, [source], outs, sizes, dtype, True)


def _in_places(
    op: Operation, ranks: Sequence[int], counts: Sequence[int], addresses: Sequence[int]
) -> tuple[tuple[int, ...], list[int]]:
    """Counts and addresses of the pieces of ``ranks``, one for each rank of this host; empty for ranks left over."""
    spare = len(op.layout.here) - len(ranks)
    return (*[counts[r] for r in ranks], *[0] * spare), [addresses[r] for r in (*ranks, *[op.layout.rank] * spare)]


def reduce_scatter(
    op: Operation, sources: Sequence[int], target: int, counts: Sequence[int], dtype: DType, levels: Levels
) -> None:
    """``sources[r]``: this rank's piece for rank r, of ``counts[r]`` elements."""
    item = dtype.itemsize
    op.pipeline(
        _reduce_scatter_chunk(
            op, [s + at * item for s in sources], target + at * item, _window(counts, at, size), levels
        )
        for at, size in chunks_of(max(counts), levels.kept, parts=op.layout.widest)
    )


def _reduce_scatter_chunk(
    op: Operation, given: Sequence[int], target: int, counts: Sequence[int], levels: Levels
) -> Chunk:
    """Each host combines its pieces for ranks of other hosts and sends them there; each rank combines what comes."""
    layout, item = op.layout, levels.kept.itemsize
    me, mine = layout.rank, counts[layout.rank]
    came = {h: op.borrow(mine * item) for h in layout.others}
    expected = op.expect((layout.holder(h, me), came[h], mine * item) for h in layout.others)
    yield None
    sources = [levels.begin(op, source, n) for source, n in zip(given, counts, strict=True)]
    sends, lent = [], []
    for host in layout.others:
        for ranks in layout.waves(host):
            to = ranks[layout.local] if layout.local < len(ranks) else None
            nbytes = counts[to] * item if to is not None else 0
            lent.append(op.borrow(nbytes))
            _combine_here(op, ranks, sources, lent[-1], counts, levels)
            if to is not None:
                sends.append((to, lent[-1], nbytes))
    transfer = op.start(sends, expected)
    own = op.borrow(mine * item)
    _combine_here(op, layout.here, sources, own, counts, levels)
    levels.done(op, *zip(sources, given, strict=True))
    yield transfer
    levels.combine(op, target, [came.get(h, own) for h in range(len(layout.hosts))], mine)
    for piece in (*lent, *came.values(), own):
        op.give_back(piece)


def _combine_here(
    op: Operation, ranks: Sequence[int], sources: Sequence[int], target: int, counts: Sequence[int], levels: Levels
) -> None:
    """The i-th rank of this host gets the combination of all its ranks' pieces for ``ranks[i]``."""
    sizes, ins = _in_places(op, ranks, counts, sources)
    op.local(collectives.reduce_scatter, ins, [target], sizes, levels.kept, levels.inner, True)


# --- from one rank to another -------------------------------------------------------------------------------------


def gather(op: Operation, source: int, targets: Sequence[int], nbytes: int, root: int) -> None:
    """``targets``: where the root puts each rank's piece; empty elsewhere."""
    layout = op.layout
    if layout.host != layout.host_of[root]:
        op.finish(op.synchronize(sends=[(root, source, nbytes)]))
        return
    expected = op.expect((r, targets[r], nbytes) for r in layout.away) if layout.rank == root else None
    outs, counts = [targets[r] for r in layout.here] if targets else [], (nbytes,) * len(layout.here)
    here = (collectives.gather, [source], outs, counts, DType.UINT8, layout.local_of[root])
    op.finish(op.synchronize(*here, expected=expected))


def scatter(op: Operation, sources: Sequence[int], target: int, nbytes: int, root: int) -> None:
    """``sources``: the root's piece for each rank; empty elsewhere."""
    layout = op.layout
    if layout.host != layout.host_of[root]:
        op.finish(op.synchronize(expected=op.expect([(root, target, nbytes)])))
        return
    sends = [(r, sources[r], nbytes) for r in layout.away] if layout.rank == root else []
    ins, counts = [sources[r] for r in layout.here] if sources else [], (nbytes,) * len(layout.here)
    here = (collectives.scatter, ins, [target], counts, DType.UINT8, layout.local_of[root])
    op.finish(op.synchronize(*here, sends=sends))


def all_to_all(
    op: Operation, sources: Sequence[int], targets: Sequence[int], matrix: Callable[[int, int], int]
) -> None:
    """``matrix(i, j)``: bytes that rank i sends to rank j."""
    layout = op.layout
    me, here, away = layout.rank, layout.here, layout.away
    expected = op.expect((r, targets[r], matrix(r, me)) for r in away)
    rows = tuple(tuple(matrix(i, j) for j in here) for i in here)
    ins, outs = [sources[r] for r in here], [targets[r] for r in here]
    sends = [(r, sources[r], matrix(me, r)) for r in away]
    op.finish(
        op.synchronize(collectives.all_to_all, ins, outs, rows, DType.UINT8, True, sends=sends, expected=expected)
    )
