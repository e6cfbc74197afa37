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
from symcomm.hosts.layout import SPEAKER
from symcomm.hosts.levels import Levels
from symcomm.hosts.operation import Operation
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
    said = op.exchange({h: _read(own, nbytes) for h in hosts if h != layout.host})
    if layout.host in hosts:
        order = [own if h == layout.host else _place(said[h]) for h in range(len(layout.hosts))]
        levels.combine(op, target, order, count, dtype)


def broadcast(op: Operation, address: int, count: int, dtype: DType, root: int) -> None:
    layout, nbytes = op.layout, count * dtype.itemsize
    home = layout.host_of[root]
    if layout.host == home:
        _tell(
            op, root,
            lambda: dict.fromkeys(layout.others, _read(address, nbytes)),
            lambda: op.come(collectives.broadcast, [address], [address], count, dtype, layout.local_of[root]),
        )  # fmt: skip
        op.part()
        return
    op.come()
    if layout.speaks:
        _write([address], [nbytes], op.exchange({})[home])
    op.local(collectives.broadcast, [address], [address], count, dtype, SPEAKER)


def _tell(op: Operation, root: int, say: Callable[[], dict[int, bytes]], come: Callable[[], None]) -> None:
    """On the root's host, whose ranks ``come`` and whose speaker then has to ``say`` what the root has. A root that is
    the speaker has it before: what is large leaves then."""
    knows = op.layout.speaks and op.layout.rank == root
    left = op.ahead(say()) if knows else {}
    come()
    if op.layout.speaks:
        op.exchange(left if knows else say())


def all_gather(op: Operation, source: int, targets: Sequence[int], counts: Sequence[int], dtype: DType) -> None:
    layout, sizes = op.layout, [n * dtype.itemsize for n in counts]
    here = tuple(sizes[r] for r in layout.here)
    outs = [targets[r] for r in layout.here] if layout.speaks else []
    op.come(collectives.gather, [source], outs, here, DType.UINT8, SPEAKER)
    if layout.speaks:
        own = b"".join(map(_view, outs, here))
        for host, said in op.exchange(dict.fromkeys(layout.others, own)).items():
            _write([targets[r] for r in layout.hosts[host]], [sizes[r] for r in layout.hosts[host]], said)
    whole = _together(op, targets, sizes) if layout.speaks else _room(op, targets, sizes)
    op.local(collectives.broadcast, [whole], [whole], sum(sizes), DType.UINT8, SPEAKER)
    _apart(whole, targets, sizes)


def reduce_scatter(
    op: Operation, sources: Sequence[int], target: int, counts: Sequence[int], dtype: DType, levels: Levels
) -> None:
    """A host's speaker combines what all hosts have for its ranks."""
    layout, sizes = op.layout, [n * dtype.itemsize for n in counts]
    own = op.borrow(sum(sizes))
    whole, starts = _together(op, sources, sizes), [own + start for start in _starts(sizes)]
    op.come(collectives.reduce, [whole], [own] if layout.speaks else [], sum(counts), dtype, levels.inner, SPEAKER)
    pieces: list[int] = []
    if op.layout.speaks:
        parts = [b"".join(_view(starts[r], sizes[r]) for r in ranks) for ranks in layout.hosts]
        result = bytearray(parts[layout.host])
        said = op.exchange({h: parts[h] for h in layout.others})
        order = [_place(result if h == layout.host else said[h]) for h in range(len(layout.hosts))]
        levels.combine(op, _place(result), order, sum(counts[r] for r in layout.here), dtype)
        pieces = [_place(result) + start for start in _starts([sizes[r] for r in layout.here])]
    here = tuple(sizes[r] for r in layout.here)
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
    came = b"".join(op.exchange({}).values()) if layout.speaks else b""
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
        said = op.exchange({})[home] if layout.speaks else b""
        pieces = [_place(said) + start for start in _starts(here)] if layout.speaks else []
        op.local(collectives.scatter, pieces, [target], here, DType.UINT8, SPEAKER)
        return
    away = layout.away
    own = _together(op, [sources[r] for r in away], [nbytes] * len(away)) if sources else 0
    room = op.borrow(nbytes * len(away)) if layout.speaks and layout.rank != root else own
    starts = dict(zip(away, _starts([nbytes] * len(away)), strict=True))
    _tell(
        op, root,
        lambda: {h: _read(room + starts[r[0]], nbytes * len(r)) for h, r in enumerate(layout.hosts) if h != home},
        lambda: _hand(op, layout.local_of[root], SPEAKER, own, room, nbytes * len(away), first=True),
    )  # fmt: skip
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
        op.speak(_rows_by_host(op, places, rows))
    local = tuple(tuple(matrix(i, j) for j in here) for i in here)
    op.local(collectives.all_to_all, [sources[r] for r in here], [targets[r] for r in here], local, DType.UINT8, True)
    pieces = _columns(op, op.hear(), columns) if layout.speaks else []
    outs, sizes = [targets[r] for r in away], tuple(sum(column) for column in columns.values())
    whole = _room(op, outs, columns[me])
    op.local(collectives.scatter, [_place(p) for p in pieces], [whole], sizes, DType.UINT8, SPEAKER)
    _apart(whole, outs, columns[me])


def _rows_by_host(op: Operation, places: Sequence[int], rows: dict[int, list[int]]) -> dict[int, bytes]:
    """Of each row, which is at its place, the part for each other host's ranks."""
    said, at = {}, list(places)
    first = 0
    for host in op.layout.others:
        last = first + len(op.layout.hosts[host])
        sizes = [sum(row[first:last]) for row in rows.values()]
        said[host] = b"".join(map(_view, at, sizes))
        at, first = [a + n for a, n in zip(at, sizes, strict=True)], last
    return said


def _columns(op: Operation, said: dict[int, Data], columns: dict[int, list[int]]) -> list[bytearray]:
    """What ranks of other hosts have for each of this one, in their order. ``said[h]``: row by row, those of host h."""
    found: dict[int, list[memoryview]] = {j: [] for j in columns}
    number = dict(zip(op.layout.away, range(op.layout.size), strict=False))
    for host in op.layout.others:
        view, at = memoryview(said[host]), 0
        for i in op.layout.hosts[host]:
            for j, sizes in columns.items():
                found[j].append(view[at : at + sizes[number[i]]])
                at += sizes[number[i]]
    return [bytearray(b"").join(parts) for parts in found.values()]


# --- memory -------------------------------------------------------------------------------------------------------


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


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
    first = op.borrow(sum(sizes))
    return [first + start for start in _starts(sizes)]


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
