"""Eager collectives across hosts: the data travels with the hosts' arrival messages.

Ranks hand their data to their host's leader in shared memory. Leaders exchange one message with each other host, and
share the result with their ranks. So hosts synchronize and move all data in one trip, and every byte leaves a host once
for each host that needs it. At the end all ranks wait for their leader: by then every rank has arrived.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from symcomm import collectives
from symcomm._core import native
from symcomm.collectives.chunks import starts_of
from symcomm.hierarchical.levels import Levels
from symcomm.hierarchical.operation import Operation
from symcomm.hierarchical.topology import LEADER
from symcomm.types import DType

Data = bytes | bytearray


def barrier(op: Operation) -> None:
    op.synchronize()


def all_reduce(op: Operation, source: int, target: int, count: int, dtype: DType, levels: Levels) -> None:
    """Every host's leader combines the results of all hosts."""
    _combine(op, source, target, count, levels, range(len(op.layout.hosts)))
    op.local(collectives.broadcast, [target], [target], count, dtype, LEADER)


def reduce(op: Operation, source: int, target: int, count: int, dtype: DType, levels: Levels, root: int) -> None:
    """The leader of the root's host combines the results of all hosts, and passes the result to the root."""
    layout, nbytes = op.layout, count * dtype.itemsize
    home = layout.host_of[root]
    result = target if layout.rank == root else op.borrow(nbytes)
    _combine(op, source, result, count, levels, [home])
    if layout.host == home:
        _pass(op, LEADER, layout.local_of[root], result, target, nbytes)
    else:
        op.release()


def _combine(op: Operation, source: int, target: int, count: int, levels: Levels, hosts: Sequence[int]) -> None:
    """Combine all ranks' values into ``target`` of the leaders of ``hosts``."""
    layout, kept = op.layout, levels.kept
    nbytes = count * kept.itemsize
    own = op.borrow(nbytes)  # the target must not change before all have arrived
    mine, outs = levels.begin(op, source, count), [own] if layout.is_leader else []
    op.arrive(collectives.reduce, [mine], outs, count, kept, levels.inner, LEADER)
    if not layout.is_leader:
        return
    due = dict.fromkeys(layout.others, nbytes) if layout.host in hosts else {}
    received = op.exchange_arrivals({h: _read(own, nbytes) for h in hosts if h != layout.host}, due)
    if layout.host in hosts:
        order = [own if h == layout.host else _address_of(received[h]) for h in range(len(layout.hosts))]
        levels.combine(op, target, order, count)


def broadcast(op: Operation, address: int, count: int, dtype: DType, root: int) -> None:
    layout, nbytes = op.layout, count * dtype.itemsize
    home = layout.host_of[root]
    if layout.host == home:
        op.arrive(collectives.broadcast, [address], [address], count, dtype, layout.local_of[root])
        if layout.is_leader:
            op.exchange_arrivals(dict.fromkeys(layout.others, _read(address, nbytes)))
        op.release()
        return
    op.arrive()
    if layout.is_leader:
        received = op.exchange_arrivals({}, {home: nbytes})[home]
        _copy(address, _address_of(received), nbytes)
    op.local(collectives.broadcast, [address], [address], count, dtype, LEADER)


def all_gather(op: Operation, source: int, targets: Sequence[int], counts: Sequence[int], dtype: DType) -> None:
    layout, sizes = op.layout, [n * dtype.itemsize for n in counts]
    here = tuple(sizes[r] for r in layout.here)
    outs = [targets[r] for r in layout.here] if layout.is_leader else []
    op.arrive(collectives.gather, [source], outs, here, DType.UINT8, LEADER)
    if layout.is_leader:
        own = b"".join(map(_view, outs, here))
        due = {h: sum(sizes[r] for r in layout.hosts[h]) for h in layout.others}
        for host, received in op.exchange_arrivals(dict.fromkeys(layout.others, own), due).items():
            ranks = layout.hosts[host]
            _unpack(_address_of(received), [targets[r] for r in ranks], [sizes[r] for r in ranks])
    whole = _pack(op, targets, sizes) if layout.is_leader else _contiguous(op, targets, sizes)
    op.local(collectives.broadcast, [whole], [whole], sum(sizes), DType.UINT8, LEADER)
    _unpack(whole, targets, sizes)


def reduce_scatter(
    op: Operation, sources: Sequence[int], target: int, counts: Sequence[int], dtype: DType, levels: Levels
) -> None:
    """Each host's leader combines the pieces that all hosts have for its ranks."""
    layout, kept, sizes = op.layout, levels.kept, [n * levels.kept.itemsize for n in counts]
    here, own = tuple(counts[r] * dtype.itemsize for r in layout.here), op.borrow(sum(sizes))
    whole, starts = _pack(op, sources, [n * dtype.itemsize for n in counts]), _addresses(own, sizes)
    whole, outs = levels.begin(op, whole, sum(counts)), [own] if layout.is_leader else []
    op.arrive(collectives.reduce, [whole], outs, sum(counts), kept, levels.inner, LEADER)
    pieces: list[int] = []
    if layout.is_leader:
        parts = [b"".join(_view(starts[r], sizes[r]) for r in ranks) for ranks in layout.hosts]
        result = bytearray(parts[layout.host])
        received = op.exchange_arrivals({h: parts[h] for h in layout.others}, dict.fromkeys(layout.others, len(result)))
        order = [_address_of(result if h == layout.host else received[h]) for h in range(len(layout.hosts))]
        levels.combine(op, _address_of(result), order, sum(counts[r] for r in layout.here))
        pieces = _addresses(_address_of(result), here)
    op.local(collectives.scatter, pieces, [target], here, DType.UINT8, LEADER)


def gather(op: Operation, source: int, targets: Sequence[int], nbytes: int, root: int) -> None:
    """``targets``: where the root puts each rank's piece; empty elsewhere."""
    layout = op.layout
    home, here = layout.host_of[root], (nbytes,) * len(layout.here)
    if layout.host != home:
        outs = _borrow_pieces(op, here) if layout.is_leader else []
        op.arrive(collectives.gather, [source], outs, here, DType.UINT8, LEADER)
        if layout.is_leader:
            op.exchange_arrivals({home: _read(outs[0], sum(here))})
        op.release()
        return
    outs = [targets[r] for r in layout.here] if targets else []
    op.arrive(collectives.gather, [source], outs, here, DType.UINT8, layout.local_of[root])
    away = layout.away
    sizes = [nbytes] * len(away)
    due = {h: nbytes * len(layout.hosts[h]) for h in layout.others}
    arrived = b"".join(op.exchange_arrivals({}, due).values()) if layout.is_leader else b""
    room = _address_of(arrived) if layout.is_leader or layout.rank != root else op.borrow(sum(sizes))
    _pass(op, LEADER, layout.local_of[root], _address_of(arrived), room, sum(sizes))
    if layout.rank == root:
        _unpack(room, [targets[r] for r in away], sizes)


def scatter(op: Operation, sources: Sequence[int], target: int, nbytes: int, root: int) -> None:
    """``sources``: the root's piece for each rank; empty elsewhere."""
    layout = op.layout
    home, here = layout.host_of[root], (nbytes,) * len(layout.here)
    pieces: list[int] = []
    if layout.host != home:
        op.arrive()
        received = op.exchange_arrivals({}, {home: sum(here)})[home] if layout.is_leader else b""
        pieces = _addresses(_address_of(received), here) if layout.is_leader else []
        op.local(collectives.scatter, pieces, [target], here, DType.UINT8, LEADER)
        return
    away = layout.away
    own = _pack(op, [sources[r] for r in away], [nbytes] * len(away)) if sources else 0
    room = op.borrow(nbytes * len(away)) if layout.is_leader and layout.rank != root else own
    _pass(op, layout.local_of[root], LEADER, own, room, nbytes * len(away), first=True)
    if layout.is_leader:
        starts = dict(zip(away, starts_of([nbytes] * len(away)), strict=True))
        op.exchange_arrivals(
            {h: _read(room + starts[layout.hosts[h][0]], nbytes * len(layout.hosts[h])) for h in layout.others}
        )
    pieces = [sources[r] for r in layout.here] if sources else []
    op.local(collectives.scatter, pieces, [target], here, DType.UINT8, layout.local_of[root])


def _pass(op: Operation, giver: int, taker: int, source: int, target: int, nbytes: int, first: bool = False) -> None:
    """Copy from one rank of this host to another, while all wait. ``first``: in the arrival step."""
    if giver == taker or not nbytes:
        op.arrive() if first else op.release()
        return
    sizes = tuple(nbytes if i == taker else 0 for i in range(len(op.layout.here)))
    pieces = [source] * len(sizes) if op.layout.local == giver else []
    (op.arrive if first else op.local)(collectives.scatter, pieces, [target], sizes, DType.UINT8, giver)


def all_to_all(
    op: Operation, sources: Sequence[int], targets: Sequence[int], matrix: Callable[[int, int], int]
) -> None:
    """``matrix(i, j)``: bytes that rank i has for rank j. Leaders exchange the pieces between hosts; meanwhile each
    host's ranks exchange theirs."""
    layout, me, here, away = op.layout, op.layout.rank, op.layout.here, op.layout.away
    rows = {i: [matrix(i, j) for j in away] for i in here}
    columns = {j: [matrix(i, j) for i in away] for j in here}
    own, sizes = _pack(op, [sources[r] for r in away], rows[me]), tuple(sum(row) for row in rows.values())
    places = _borrow_pieces(op, sizes) if layout.is_leader else []
    op.arrive(collectives.gather, [own], places, sizes, DType.UINT8, LEADER)
    if layout.is_leader:
        op.send_arrivals(_by_receiver(op, places, rows))
    local = tuple(tuple(matrix(i, j) for j in here) for i in here)
    op.local(collectives.all_to_all, [sources[r] for r in here], [targets[r] for r in here], local, DType.UINT8, True)
    due = {h: sum(matrix(i, j) for i in layout.hosts[h] for j in here) for h in layout.others if layout.is_leader}
    arrived = _columns(op, op.receive_arrivals(due), columns) if layout.is_leader else b""
    outs, sizes = [targets[r] for r in away], tuple(sum(column) for column in columns.values())
    pieces = _addresses(_address_of(arrived), sizes) if layout.is_leader else []
    whole = _contiguous(op, outs, columns[me])
    op.local(collectives.scatter, pieces, [whole], sizes, DType.UINT8, LEADER)
    _unpack(whole, outs, columns[me])


def _by_receiver(op: Operation, places: Sequence[int], rows: dict[int, list[int]]) -> dict[int, bytes]:
    """The pieces of this host's ranks, whose rows are at these places, for each other host: one receiver after the
    other, and for each receiver in the order of senders."""
    pieces = [list(map(_view, _addresses(place, row), row)) for place, row in zip(places, rows.values(), strict=True)]
    columns = iter(zip(*pieces, strict=True))  # in the order of layout.away
    return {h: b"".join(piece for _ in op.layout.hosts[h] for piece in next(columns)) for h in op.layout.others}


def _columns(op: Operation, received: dict[int, Data], columns: dict[int, list[int]]) -> Data:
    """The pieces of other hosts for this host's ranks: one receiver after the other, and for each receiver in the order
    of senders. Those of a single host are in that order already."""
    if len(received) == 1:
        return next(iter(received.values()))
    found: dict[int, list[memoryview]] = {j: [] for j in columns}
    first = 0
    for host in op.layout.others:
        last = first + len(op.layout.hosts[host])
        sizes = [sum(column[first:last]) for column in columns.values()]
        view = memoryview(received[host])
        for j, start, nbytes in zip(columns, starts_of(sizes), sizes, strict=True):
            found[j].append(view[start : start + nbytes])
        first = last
    return b"".join(part for parts in found.values() for part in parts)


# --- memory -------------------------------------------------------------------------------------------------------


def _addresses(address: int, sizes: Sequence[int]) -> list[int]:
    """The addresses of consecutive pieces of these sizes."""
    return [address + start for start in starts_of(sizes)]


def _read(address: int, nbytes: int) -> bytes:
    return native.peek(address, nbytes) if nbytes else b""


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address))


def _address_of(data: Data) -> int:
    """The address of ``data``, valid while the caller holds it."""
    if isinstance(data, bytearray):
        return ctypes.addressof(ctypes.c_char.from_buffer(data)) if data else 0
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def _copy(target: int, source: int, nbytes: int) -> None:
    if nbytes and target != source:
        ctypes.memmove(target, source, nbytes)


def _borrow_pieces(op: Operation, sizes: Sequence[int]) -> list[int]:
    """Scratch memory for consecutive pieces."""
    return _addresses(op.borrow(sum(sizes)), sizes)


def _contiguous(op: Operation, addresses: Sequence[int], sizes: Sequence[int]) -> int:
    """An address where all pieces fit, one after the other: their own if they lie so, or scratch memory."""
    adjoin = all(a + n == b for a, b, n in zip(addresses, addresses[1:], sizes, strict=False))
    return addresses[0] if adjoin else op.borrow(sum(sizes))


def _pack(op: Operation, addresses: Sequence[int], sizes: Sequence[int]) -> int:
    """The address of the pieces, made contiguous."""
    whole = _contiguous(op, addresses, sizes)
    for address, start, nbytes in zip(addresses, starts_of(sizes), sizes, strict=True):
        _copy(whole + start, address, nbytes)
    return whole


def _unpack(whole: int, addresses: Sequence[int], sizes: Sequence[int]) -> None:
    """The inverse of ``_pack``."""
    for address, start, nbytes in zip(addresses, starts_of(sizes), sizes, strict=True):
        _copy(address, whole + start, nbytes)
