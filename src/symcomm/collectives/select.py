"""Chooses the algorithm of a call: one function per collective, which makes one rank's plan.

Counts are elements here and bytes inside the algorithms. Whether a plan has a direct form, and how its chunks are cut,
depends only on what ranks compare when they arrive, so the plans of all ranks fit together.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from symcomm.collectives.all_gather import (
    all_gather_by_node,
    direct_all_gather,
    direct_all_gather_by_node,
    streamed_all_gather,
)
from symcomm.collectives.all_reduce import direct_all_reduce, one_shot, two_shot
from symcomm.collectives.all_to_all import direct_all_to_all, streamed_all_to_all
from symcomm.collectives.broadcast import (
    broadcast_by_node,
    direct_broadcast,
    direct_broadcast_by_node,
    direct_broadcast_of_two,
    streamed_broadcast,
)
from symcomm.collectives.by_node import by_node, direct_by_node
from symcomm.collectives.chunks import Pieces
from symcomm.collectives.gather import direct_gather, streamed_gather
from symcomm.collectives.limits import Limits
from symcomm.collectives.nodes import Grid, can_go_on, grid_of
from symcomm.collectives.plan import At, Collective, Copy, Need, Plan, Reduce, Space, Step
from symcomm.collectives.reduce import direct_reduce
from symcomm.collectives.reduce_scatter import (
    direct_reduce_scatter,
    direct_reduce_scatter_by_node,
    reduce_scatter_by_node,
    streamed_reduce_scatter,
)
from symcomm.collectives.scatter import direct_scatter, streamed_scatter
from symcomm.types import ITEMSIZE

__all__ = [
    "Limits", "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "elements_of", "gather", "reduce",
    "reduce_scatter", "scatter",
]  # fmt: skip

DEFAULT = Limits()

Direct = tuple[list[Step], list[Need]]

HASHED = 1 << 62  # marks a count that encodes more than a number
_hashed: dict[int, Sequence[int] | str] = {}  # what this process's hashes stand for, for errors
MOST_HASHED = 1024
MOST_WORDS = 160  # characters of a list of sizes in an error
ON_DEVICE = 1 << 61  # marks a count of elements in a GPU's memory: such a call must not meet one in host memory
WITH_INFOS = 1 << 60  # flipped in a count if ranks also show each other GPU memory: such calls must not meet others


def signature_count(counts: Sequence[int], listed: bool = False) -> int:
    """The number that ranks compare: the total, with a hash in its upper half if there is more to compare.

    ``listed``: the input is a list of tensors. One of different sizes has no direct form, so it must not meet one that
    has.
    """
    total, code = sum(counts), hash_sizes(counts, listed)
    return HASHED | code << 32 | total & 0xFFFFFFFF if code else total


def custom_count(what: Sequence[object], total: int, told: str) -> int:
    """The number that ranks compare for a user's own plan. ``what``: all that ranks must agree on; ``told``: the words
    for it in errors."""
    return HASHED | _hash(repr(what).encode(), told) << 32 | total & 0xFFFFFFFF


def hash_sizes(sizes: Sequence[int], listed: bool = False) -> int:
    """A number of 29 bits for sizes that differ; 0 if they are all the same."""
    return _hash(array("q", [*sizes, listed]).tobytes(), sizes) if len(set(sizes)) > 1 else 0


def _hash(what: bytes, told: Sequence[int] | str) -> int:
    code = zlib.crc32(what) % 0x1FFFFFFF + 1
    if len(_hashed) >= MOST_HASHED:
        _hashed.clear()
    _hashed[code] = told
    return code


def elements_of(count: int) -> int:
    """The total in a plan's ``count``, for people (modulo 2**32 where it carries a hash)."""
    return count & 0xFFFFFFFF if count & HASHED else count & ~(ON_DEVICE | WITH_INFOS)


def sizes_in(count: int) -> str:
    """A plan's ``count`` in words: the total, or the sizes of all pieces if this process has made their hash."""
    return sizes_of_hash(count >> 32 & 0x1FFFFFFF if count & HASHED else 0) or str(elements_of(count))


def sizes_of_hash(code: int) -> str:
    """``[5, 5, 4]``, or ``[5 (63 times), 4]``; empty if this process does not know the hash."""
    told = _hashed.get(code, "")
    if isinstance(told, str):
        return told
    runs = [(size, len(list(run))) for size, run in itertools.groupby(told)]
    words = ", ".join(f"{size} ({n} times)" if n > 3 else ", ".join([str(size)] * n) for size, n in runs)
    return words and f"[{words if len(words) <= MOST_WORDS else words[:MOST_WORDS] + '...'}]"


def _offer_direct(plan: Plan, nbytes: int, limits: Limits, direct: Callable[..., Direct], *args: Any) -> None:
    """Add the direct form. Peers read a symmetric tensor at its one address. A list of tensors of one size counts as
    one tensor if they lie one after another; any other has an address for each. The core finds out."""
    if nbytes >= limits.direct_bytes:
        plan.direct, plan.needs = direct(plan, *args)
        plan.apart = plan.piece_bytes > 0 and direct in (direct_all_to_all, direct_reduce_scatter, direct_scatter)


def _offer_attached(plan: Plan, sizes: Sequence[int], least: int, limits: Limits, large: bool) -> None:
    """Let the direct form also serve ordinary tensors, read out of peers' memory, if all pieces are of one size.
    ``large``: even those that do not fit in the cache."""
    if plan.direct is not None and len(set(sizes)) == 1 and sizes[0] >= least and plan.world >= limits.attach_ranks:
        plan.attach_bytes, plan.attach_large = sizes[0], large


def _space_out(plan: Plan, sizes: Sequence[int], listed: bool) -> None:
    """Set how far apart peers find the pieces of a list. If all are of one size, ranks with a list and ranks with one
    tensor may meet; otherwise a list has its own signature."""
    plan.piece_bytes = max(sizes) if listed or len(set(sizes)) == 1 else 0


def _alone(plan: Plan, nbytes: int, combine: bool = False) -> Plan:
    """A world of one: the result is the input. A reduction still runs, because AVG or bool may change the values."""
    plan.name, plan.why = "alone", "the world has one rank"
    if nbytes:
        source, target = At(Space.IN), At(Space.OUT)
        plan.staged = [Reduce((target,), (source,), nbytes) if combine else Copy((target,), source, nbytes)]
    return plan


def _prefer_one_shot(plan: Plan, nbytes: int, limits: Limits) -> bool:
    if _is_one_shot(plan, nbytes, limits, "one_shot_extra"):
        return True
    if plan.world == 2:
        plan.why = f"{nbytes} bytes, two ranks: two_rank_variant is {limits.two_rank_variant}"
        return limits.two_rank_variant == "one_shot"
    return False


def _is_one_shot(plan: Plan, nbytes: int, limits: Limits, field: str) -> bool:
    extra, most = nbytes * (plan.world - 2), getattr(limits, field)
    small = nbytes <= limits.one_shot_bytes
    if small and extra > most:
        plan.why = f"{nbytes} bytes, {extra} more to read > {field} {most}"
        return False
    plan.why = f"{nbytes} bytes {'<=' if small else '>'} one_shot_bytes {limits.one_shot_bytes}"
    return small


def _nodes(plan: Plan, nbytes: int, limits: Limits, field: str = "node_bytes", subtrees: bool = False) -> Grid | None:
    """The ranks by node, if a call of that size should go by node. ``subtrees``: because it combines."""
    least = getattr(limits, field)
    grid = grid_of(limits.nodes, limits.node_ranks, subtrees) if nbytes >= least else None
    if grid is not None:
        plan.why = f"{nbytes} bytes >= {field} {least}, {grid.nodes} nodes of {grid.width} ranks"
    return grid


def _turns(nbytes: int, limits: Limits) -> str:
    return f"{nbytes} bytes {'<=' if nbytes <= limits.chunk_bytes else '>'} chunk_bytes {limits.chunk_bytes}"


def all_reduce(rank: int, world: int, count: int, dtype: int, redop: int, limits: Limits = DEFAULT) -> Plan:
    plan = Plan(Collective.ALL_REDUCE, rank, world, count, dtype, redop)
    nbytes = count * ITEMSIZE[dtype]
    if world == 1:
        return _alone(plan, nbytes, combine=True)
    if can_go_on(dtype, redop) and (grid := _nodes(plan, nbytes, limits, subtrees=True)) is not None:
        by_node(plan, nbytes, limits, grid)
        _offer_direct(plan, nbytes, limits, direct_by_node, nbytes, limits, grid)
        return plan
    choice = one_shot if _prefer_one_shot(plan, nbytes, limits) else two_shot
    choice(plan, nbytes, limits)
    _offer_direct(plan, nbytes, limits, direct_all_reduce, nbytes)
    return plan


def reduce(rank: int, world: int, count: int, dtype: int, redop: int, root: int, limits: Limits = DEFAULT) -> Plan:
    plan = Plan(Collective.REDUCE, rank, world, count, dtype, redop, root)
    nbytes = count * ITEMSIZE[dtype]
    if world == 1:
        return _alone(plan, nbytes, combine=True)
    small = _is_one_shot(plan, nbytes, limits, "root_extra")
    choice = one_shot if small or world == 2 else two_shot  # 2 ranks, 16 MiB: 1.69 ms, 1.95 two-shot
    plan.why += f", {world} ranks"
    choice(plan, nbytes, limits, root)
    _offer_direct(plan, nbytes, limits, direct_reduce, nbytes)
    return plan


def reduce_scatter(
    rank: int,
    world: int,
    counts: tuple[int, ...],
    dtype: int,
    redop: int,
    listed: bool = False,
    limits: Limits = DEFAULT,
) -> Plan:
    """``counts[q]``: elements of rank q's output. With ``listed`` the input is one tensor per rank."""
    plan = Plan(Collective.REDUCE_SCATTER, rank, world, signature_count(counts, listed), dtype, redop)
    pieces = Pieces(tuple(n * ITEMSIZE[dtype] for n in counts), listed)
    if world == 1:
        return _alone(plan, sum(pieces.sizes), combine=True)
    foldable = len(set(counts)) == 1 and can_go_on(dtype, redop)
    _space_out(plan, pieces.sizes, listed)
    if foldable and (grid := _nodes(plan, sum(pieces.sizes), limits, "node_scatter_bytes", True)) is not None:
        reduce_scatter_by_node(plan, pieces, limits, grid)
        _offer_direct(plan, sum(pieces.sizes), limits, direct_reduce_scatter_by_node, pieces, limits, grid)
        return plan
    streamed_reduce_scatter(plan, pieces, limits)
    plan.why = _turns(max(pieces.sizes) * (world - 1), limits)
    _offer_direct(plan, sum(pieces.sizes), limits, direct_reduce_scatter, pieces)
    return plan


def all_gather(
    rank: int, world: int, counts: tuple[int, ...], dtype: int, listed: bool = False, limits: Limits = DEFAULT
) -> Plan:
    """``counts[q]``: elements of rank q's input. With ``listed`` the output is one tensor per rank."""
    plan = Plan(Collective.ALL_GATHER, rank, world, signature_count(counts), dtype)
    pieces = Pieces(tuple(n * ITEMSIZE[dtype] for n in counts), listed)
    if world == 1:
        return _alone(plan, sum(pieces.sizes))
    if len(set(counts)) == 1 and (grid := _nodes(plan, sum(pieces.sizes), limits)) is not None:
        all_gather_by_node(plan, pieces, limits, grid)
        if not listed:
            _offer_direct(plan, max(pieces.sizes), limits, direct_all_gather_by_node, pieces, grid)
        return plan
    streamed_all_gather(plan, pieces, limits)
    plan.why = _turns(max(pieces.sizes), limits)
    _offer_direct(plan, max(pieces.sizes), limits, direct_all_gather, pieces)
    _offer_attached(plan, pieces.sizes, limits.attach_gather_bytes, limits, large=False)
    return plan


def broadcast(rank: int, world: int, count: int, dtype: int, root: int, limits: Limits = DEFAULT) -> Plan:
    plan = Plan(Collective.BROADCAST, rank, world, count, dtype, root=root)
    nbytes = count * ITEMSIZE[dtype]
    if world == 1:
        return _alone(plan, 0)
    if (grid := _nodes(plan, nbytes, limits)) is not None:
        broadcast_by_node(plan, nbytes, limits, grid)
        _offer_direct(plan, nbytes, limits, direct_broadcast_by_node, nbytes, grid)
        return plan
    streamed_broadcast(plan, nbytes, limits)
    plan.why = _turns(nbytes, limits)
    _offer_direct(plan, nbytes, limits, direct_broadcast_of_two if world == 2 else direct_broadcast, nbytes)
    return plan


def gather(
    rank: int, world: int, counts: tuple[int, ...], dtype: int, root: int, listed: bool = True, limits: Limits = DEFAULT
) -> Plan:
    """``counts[q]``: elements of rank q's input. With ``listed`` the root's output is one tensor per rank."""
    plan = Plan(Collective.GATHER, rank, world, signature_count(counts), dtype, root=root)
    pieces = Pieces(tuple(n * ITEMSIZE[dtype] for n in counts), listed)
    if world == 1:
        return _alone(plan, sum(pieces.sizes))
    streamed_gather(plan, pieces, limits)
    plan.why = _turns(max(pieces.sizes), limits)
    _offer_direct(plan, max(pieces.sizes), limits, direct_gather, pieces)
    return plan


def scatter(
    rank: int, world: int, counts: tuple[int, ...], dtype: int, root: int, listed: bool = True, limits: Limits = DEFAULT
) -> Plan:
    """``counts[q]``: elements of rank q's output. With ``listed`` the root's input is one tensor per rank."""
    plan = Plan(Collective.SCATTER, rank, world, signature_count(counts, listed), dtype, root=root)
    pieces = Pieces(tuple(n * ITEMSIZE[dtype] for n in counts), listed)
    if world == 1:
        return _alone(plan, sum(pieces.sizes))
    streamed_scatter(plan, pieces, limits)
    plan.why = _turns(max(pieces.sizes) * (world - 1), limits)
    _space_out(plan, pieces.sizes, listed)
    _offer_direct(plan, max(pieces.sizes), limits, direct_scatter, pieces)
    _offer_attached(plan, pieces.sizes, limits.attach_scatter_bytes, limits, large=True)
    return plan


def all_to_all(
    rank: int,
    world: int,
    matrix: int | tuple[tuple[int, ...], ...],
    dtype: int,
    listed: bool = False,
    limits: Limits = DEFAULT,
) -> Plan:
    """``matrix[i][j]``: elements that rank i sends to rank j; one number when all are the same.

    With ``listed`` the input and the output are one tensor per rank.
    """
    rows = ((matrix,) * world,) * world if isinstance(matrix, int) else matrix
    count = signature_count([n for row in rows for n in row], listed)
    plan = Plan(Collective.ALL_TO_ALL, rank, world, count, dtype)
    in_bytes = tuple(tuple(n * ITEMSIZE[dtype] for n in row) for row in rows)
    if world == 1:
        return _alone(plan, in_bytes[0][0])
    streamed_all_to_all(plan, in_bytes, listed, limits)
    plan.why = _turns(max(map(max, in_bytes)) * (world - 1), limits)
    sizes = [n for row in in_bytes for n in row]
    _space_out(plan, sizes, listed)
    _offer_direct(plan, max(map(sum, in_bytes)), limits, direct_all_to_all, in_bytes, listed)
    _offer_attached(plan, sizes, limits.attach_bytes, limits, large=world <= limits.attach_large_ranks)
    return plan


def barrier(rank: int, world: int) -> Plan:
    """No rank goes on before all have arrived. The arrival itself does that, so the plan has no steps."""
    return Plan(Collective.BARRIER, rank, world, 0, name="arrival", why="arriving is the whole barrier")
