"""What collectives of few bytes do across hosts: what a host has to say travels with its arrival.

Ranks of a host hand it to their speaker in shared memory; speakers exchange one message with each other host; and what
it comes to is shared with the host. So hosts meet, and have moved everything, in one trip, and every byte leaves a
host once for each host that needs it. All ranks wait for their speaker in the end: by then every rank has come.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate

from symcomm import collectives
from symcomm._core import native
from symcomm.hierarchical.levels import Levels
from symcomm.hierarchical.operation import Operation
from symcomm.hierarchical.topology import SPEAKER
from symcomm.types import DType

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

Data = bytes | bytearray


def barrier(op: Operation) -> None:
    op.meet()


def all_reduce(op: Operation, source: int, target: int, count: int, dtype: DType, levels: Levels) -> None:
    """Every host's speaker combines the results of all hosts."""
    _combine(op, source, target, count, dtype, levels, range(len(op.layout.hosts)))
    op.local(collectives.broadcast, [target], [target], count, dtype, SPEAKER)


def reduce(op: Operation, source: int, target: int, count: int, dtype: DType, levels: Levels, root: int) -> None:
    """The speaker of the root's host does."""
    layout, nbytes = op.layout, count * dtype.itemsize
    home = layout.host_of[root]
    result = target if layout.rank == root else op.borrow(nbytes)
    _combine(op, source, result, count, dtype, levels, [home])
    if layout.host == home:
        _hand(op, SPEAKER, layout.local_of[root], result, target, nbytes)
    else:
        op.part()


def _combine(
    op: Operation, source: int, target: int, count: int, dtype: DType, levels: Levels, hosts: Sequence[int]
) -> None:
    """Into ``target`` of the speakers of ``hosts``."""
    layout, nbytes = op.layout, count * dtype.itemsize
    own = op.borrow(nbytes)  # the target stays as it is until all have come
    op.come(collectives.reduce, [source], [own] if layout.speaks else [], count, dtype, levels.inner, SPEAKER)
    if not layout.speaks:
        return
    due = dict.fromkeys(layout.others, nbytes) if layout.host in hosts else {}
    said = op.exchange({h: _read(own, nbytes) for h in hosts if h != layout.host}, due)
    if layout.host in hosts:
        order = [own if h == layout.host else _place(said[h]) for h in range(len(layout.hosts))]
        levels.combine(op, target, order, count, dtype)


def broadcast(op: Operation, address: int, count: int, dtype: DType, root: int) -> None:
    layout, nbytes = op.layout, count * dtype.itemsize
    home = layout.host_of[root]
    if layout.host == home:
        op.come(collectives.broadcast, [address], [address], count, dtype, layout.local_of[root])
        if layout.speaks:
            op.exchange(dict.fromkeys(layout.others, _read(address, nbytes)))
        op.part()
        return
    op.come()
    if layout.speaks:
        _write([address], [nbytes], op.exchange({}, {home: nbytes})[home])
    op.local(collectives.broadcast, [address], [address], count, dtype, SPEAKER)


def all_gather(op: Operation, source: int, targets: Sequence[int], counts: Sequence[int], dtype: DType) -> None:
    layout, sizes = op.layout, [n * dtype.itemsize for n in counts]
    here = tuple(sizes[r] for r in layout.here)
    outs = [targets[r] for r in layout.here] if layout.speaks else []
    op.come(collectives.gather, [source], outs, here, DType.UINT8, SPEAKER)
    if layout.speaks:
        own = b"".join(map(_view, outs, here))
        due = {h: sum(sizes[r] for r in layout.hosts[h]) for h in layout.others}
        for host, said in op.exchange(dict.fromkeys(layout.others, own), due).items():
            _write([targets[r] for r in layout.hosts[host]], [sizes[r] for r in layout.hosts[host]], said)
    whole = _together(op, targets, sizes) if layout.speaks else _room(op, targets, sizes)
    op.local(collectives.broadcast, [whole], [whole], sum(sizes), DType.UINT8, SPEAKER)
    _apart(whole, targets, sizes)


def reduce_scatter(
    op: Operation, sources: Sequence[int], target: int, counts: Sequence[int], dtype: DType, levels: Levels
) -> None:
    """A host's speaker combines what all hosts have for its ranks."""
    layout, sizes = op.layout, [n * dtype.itemsize for n in counts]
    here, own = tuple(sizes[r] for r in layout.here), op.borrow(sum(sizes))
    whole, starts = _together(op, sources, sizes), _from(own, sizes)
    op.come(collectives.reduce, [whole], [own] if layout.speaks else [], sum(counts), dtype, levels.inner, SPEAKER)
    pieces: list[int] = []
    if layout.speaks:
        parts = [b"".join(_view(starts[r], sizes[r]) for r in ranks) for ranks in layout.hosts]
        result = bytearray(parts[layout.host])
        said = op.exchange({h: parts[h] for h in layout.others}, dict.fromkeys(layout.others, len(result)))
        order = [_place(result if h == layout.host else said[h]) for h in range(len(layout.hosts))]
        levels.combine(op, _place(result), order, sum(counts[r] for r in layout.here), dtype)
        pieces = _from(_place(result), here)
    op.local(collectives.scatter, pieces, [target], here, DType.UINT8, SPEAKER)


def gather(op: Operation, source: int, targets: Sequence[int], nbytes: int, root: int) -> None:
    """``targets``: where the root puts each rank's piece; empty elsewhere."""
    layout = op.layout
    home, here = layout.host_of[root], (nbytes,) * len(layout.here)
    if layout.host != home:
        outs = _places(op, here) if layout.speaks else []
        op.come(collectives.gather, [source], outs, here, DType.UINT8, SPEAKER)
        if layout.speaks:
            op.exchange({home: _read(outs[0], sum(here))})
        op.part()
        return
    outs = [targets[r] for r in layout.here] if targets else []
    op.come(collectives.gather, [source], outs, here, DType.UINT8, layout.local_of[root])
    away = layout.away
    sizes = [nbytes] * len(away)
    due = {h: nbytes * len(layout.hosts[h]) for h in layout.others}
    came = b"".join(op.exchange({}, due).values()) if layout.speaks else b""
    room = _place(came) if layout.speaks or layout.rank != root else op.borrow(sum(sizes))
    _hand(op, SPEAKER, layout.local_of[root], _place(came), room, sum(sizes))
    if layout.rank == root:
        _apart(room, [targets[r] for r in away], sizes)


def scatter(op: Operation, sources: Sequence[int], target: int, nbytes: int, root: int) -> None:
    """``sources``: the root's piece for each rank; empty elsewhere."""
    layout = op.layout
    home, here = layout.host_of[root], (nbytes,) * len(layout.here)
    pieces: list[int] = []
    if layout.host != home:
        op.come()
        said = op.exchange({}, {home: sum(here)})[home] if layout.speaks else b""
        pieces = _from(_place(said), here) if layout.speaks else []
        op.local(collectives.scatter, pieces, [target], here, DType.UINT8, SPEAKER)
        return
    away = layout.away
    own = _together(op, [sources[r] for r in away], [nbytes] * len(away)) if sources else 0
    room = op.borrow(nbytes * len(away)) if layout.speaks and layout.rank != root else own
    _hand(op, layout.local_of[root], SPEAKER, own, room, nbytes * len(away), first=True)
    if layout.speaks:
        starts = dict(zip(away, _starts([nbytes] * len(away)), strict=True))
        op.exchange({h: _read(room + starts[layout.hosts[h][0]], nbytes * len(layout.hosts[h])) for h in layout.others})
    pieces = [sources[r] for r in layout.here] if sources else []
    op.local(collectives.scatter, pieces, [target], here, DType.UINT8, layout.local_of[root])


def _hand(op: Operation, giver: int, taker: int, source: int, target: int, nbytes: int, first: bool = False) -> None:
    """One rank of this host hands something to another, and all wait for both. ``first``: as they come."""
    if giver == taker or not nbytes:
        op.come() if first else op.part()
        return
    sizes = tuple(nbytes if i == taker else 0 for i in range(len(op.layout.here)))
    pieces = [source] * len(sizes) if op.layout.local == giver else []
    (op.come if first else op.local)(collectives.scatter, pieces, [target], sizes, DType.UINT8, giver)


def all_to_all(
    op: Operation, sources: Sequence[int], targets: Sequence[int], matrix: Callable[[int, int], int]
) -> None:
    """``matrix(i, j)``: bytes that rank i has for rank j. A speaker has what its host's ranks have for others, and gets
    what others have for them; meanwhile they exchange what is for each other."""
    layout, me, here, away = op.layout, op.layout.rank, op.layout.here, op.layout.away
    rows = {i: [matrix(i, j) for j in away] for i in here}
    columns = {j: [matrix(i, j) for i in away] for j in here}
    own, sizes = _together(op, [sources[r] for r in away], rows[me]), tuple(sum(row) for row in rows.values())
    places = _places(op, sizes) if layout.speaks else []
    op.come(collectives.gather, [own], places, sizes, DType.UINT8, SPEAKER)
    if layout.speaks:
        op.speak(_by_receiver(op, places, rows))
    local = tuple(tuple(matrix(i, j) for j in here) for i in here)
    op.local(collectives.all_to_all, [sources[r] for r in here], [targets[r] for r in here], local, DType.UINT8, True)
    due = {h: sum(matrix(i, j) for i in layout.hosts[h] for j in here) for h in layout.others if layout.speaks}
    came = _columns(op, op.hear(due), columns) if layout.speaks else b""
    outs, sizes = [targets[r] for r in away], tuple(sum(column) for column in columns.values())
    pieces = _from(_place(came), sizes) if layout.speaks else []
    whole = _room(op, outs, columns[me])
    op.local(collectives.scatter, pieces, [whole], sizes, DType.UINT8, SPEAKER)
    _apart(whole, outs, columns[me])


def _by_receiver(op: Operation, places: Sequence[int], rows: dict[int, list[int]]) -> dict[int, bytes]:
    """What this host's ranks, whose rows are at these places, have for each other host: one of its ranks after the
    other, and for each in the order of senders."""
    pieces = [list(map(_view, _from(place, row), row)) for place, row in zip(places, rows.values(), strict=True)]
    columns = iter(zip(*pieces, strict=True))  # in the order of ranks that are away
    return {h: b"".join(piece for _ in op.layout.hosts[h] for piece in next(columns)) for h in op.layout.others}


def _columns(op: Operation, said: dict[int, Data], columns: dict[int, list[int]]) -> Data:
    """What ranks of other hosts have for each of this one, one after the other, and for each in the order of senders.
    That of one host alone is in that order already."""
    if len(said) == 1:
        return next(iter(said.values()))
    found: dict[int, list[memoryview]] = {j: [] for j in columns}
    first = 0
    for host in op.layout.others:
        last = first + len(op.layout.hosts[host])
        sizes = [sum(column[first:last]) for column in columns.values()]
        view = memoryview(said[host])
        for j, start, nbytes in zip(columns, _starts(sizes), sizes, strict=True):
            found[j].append(view[start : start + nbytes])
        first = last
    return b"".join(part for parts in found.values() for part in parts)


# --- memory -------------------------------------------------------------------------------------------------------


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def _from(address: int, sizes: Sequence[int]) -> list[int]:
    """Where pieces of these sizes are that begin there, one after the other."""
    return [address + start for start in _starts(sizes)]


def _read(address: int, nbytes: int) -> bytes:
    return native.peek(address, nbytes) if nbytes else b""


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address))


def _place(data: Data) -> int:
    """Where it is; it stays there while somebody holds it."""
    if isinstance(data, bytearray):
        return ctypes.addressof(ctypes.c_char.from_buffer(data)) if data else 0
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def _write(targets: Sequence[int], sizes: Sequence[int], data: Data) -> None:
    """Pieces that come one after the other, each to its place."""
    first = _place(data)
    for target, start, nbytes in zip(targets, _starts(sizes), sizes, strict=True):
        _copy(target, first + start, nbytes)


def _copy(target: int, source: int, nbytes: int) -> None:
    if nbytes and target != source:
        ctypes.memmove(target, source, nbytes)


def _places(op: Operation, sizes: Sequence[int]) -> list[int]:
    """Borrowed memory for pieces, one after the other."""
    return _from(op.borrow(sum(sizes)), sizes)


def _room(op: Operation, addresses: Sequence[int], sizes: Sequence[int]) -> int:
    """Where all pieces have room as one: where they are, if they lie one after the other, or elsewhere."""
    adjoin = all(a + n == b for a, b, n in zip(addresses, addresses[1:], sizes, strict=False))
    return addresses[0] if adjoin else op.borrow(sum(sizes))


def _together(op: Operation, addresses: Sequence[int], sizes: Sequence[int]) -> int:
    """Pieces as one."""
    whole = _room(op, addresses, sizes)
    for address, start, nbytes in zip(addresses, _starts(sizes), sizes, strict=True):
        _copy(whole + start, address, nbytes)
    return whole


def _apart(whole: int, addresses: Sequence[int], sizes: Sequence[int]) -> None:
    """The way back."""
    for address, start, nbytes in zip(addresses, _starts(sizes), sizes, strict=True):
        _copy(address, whole + start, nbytes)
