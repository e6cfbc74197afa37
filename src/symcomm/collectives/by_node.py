"""all_reduce on a machine whose memory is divided among nodes (NUMA): each byte crosses from one node to the next once.

by-node    turn by turn, each node a chunk behind the one before it:
           combine   rank i of a node combines slice i of a chunk: what the node before has of it, then its own ranks'
           fetch     when the last node has the result, rank i of each other node copies slice i of it, once
           collect   ranks take the other slices from ranks of their own node
direct     the same straight on symmetric tensors; what a node has of a slice lies in an output meanwhile

Nodes go on from each other in rank order, so sources are combined in the order 0..W-1 as everywhere, and the result
has the same bits. That holds where a result so far can be stored: not for 16-bit floats, whose sums are rounded once
at the end, nor for averages. Ranks of a node must follow each other, and nodes have equally many.

With W ranks on two nodes a two-shot all_reduce moves W times the tensor between them, this twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from symcomm.collectives.chunks import (
    LINE,
    Simple,
    Sizes,
    copy,
    finish,
    fixed,
    later,
    pipeline,
    ring,
    shard,
    too_small,
    up,
)
from symcomm.collectives.plan import ALL, FIRST_SIGNAL, At, Copy, Need, Plan, Reduce, Signal, Space, Step, Wait
from symcomm.types import DType, RedOpType

if TYPE_CHECKING:
    from symcomm.collectives.select import Limits

__all__ = ["Grid", "by_node", "direct_by_node", "grid_of"]

IN, OUT, STAGE, PEER_IN, PEER_OUT = Space.IN, Space.OUT, Space.STAGE, Space.PEER_IN, Space.PEER_OUT
NODE_SLOTS = 2

# What has been combined so far can be stored and combined on.
_STORABLE = frozenset({DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128, *range(DType.FLOAT16)})
_FOLDING = frozenset(RedOpType) - {RedOpType.AVG, RedOpType.PREMUL_SUM}


@dataclass(frozen=True)
class Grid:
    """Ranks by node: rank ``node * width + place``."""

    nodes: int
    width: int

    def of(self, rank: int) -> tuple[int, int]:
        return divmod(rank, self.width)

    def beside(self, rank: int) -> list[int]:
        """The ranks of its node, in order."""
        first = rank - rank % self.width
        return list(range(first, first + self.width))


def grid_of(nodes: Sequence[int], dtype: int, redop: int) -> Grid | None:
    """The ranks by node (``nodes[r]``: rank r's), or None where this algorithm cannot be used."""
    count = len(set(nodes))
    if count < 2 or min(nodes) < 0 or dtype not in _STORABLE or redop not in _FOLDING or len(nodes) % count:
        return None
    width = len(nodes) // count
    blocks = [set(nodes[start : start + width]) for start in range(0, len(nodes), width)]
    return Grid(count, width) if width > 1 and all(len(block) == 1 for block in blocks) else None


def by_node(plan: Plan, nbytes: int, limits: Limits, grid: Grid) -> None:
    """Turn i of node g: combine chunk i-g, stage the next, signal, wait for all; then fetch and collect.

    What is staged or combined in a turn is read in the next, and both end with a wait for all: two slots each.
    What is fetched after the wait of one turn is read after the wait of the next: two slots.
    """
    me, last = plan.rank, grid.nodes - 1
    node, place = grid.of(me)
    chunk = _chunk(nbytes, limits, grid)
    slice_bytes = chunk // grid.width

    def staged(rank: int, start: int) -> At:
        return At(STAGE, rank, start, chunk, NODE_SLOTS)

    def combined(rank: int) -> At:
        return At(STAGE, rank, NODE_SLOTS * chunk, slice_bytes, NODE_SLOTS)

    def fetched(rank: int) -> At:
        return At(STAGE, rank, NODE_SLOTS * (chunk + slice_bytes), slice_bytes, NODE_SLOTS)

    def put(size: int) -> list[Simple]:
        start, length = shard(size, grid.width, place)
        end = start + length
        return copy(staged(me, 0), At(IN, 0, 0, chunk), start) + copy(
            staged(me, end), At(IN, 0, end, chunk), size - end
        )

    def combine(size: int) -> list[Simple]:
        start, length = shard(size, grid.width, place)
        so_far = (combined(me - grid.width),) if node else ()
        own = tuple(At(IN, 0, start, chunk) if r == me else staged(r, start) for r in grid.beside(me))
        outs = (At(OUT, 0, start, chunk),) if node == last else ()
        return [Reduce((*outs, combined(me)), so_far + own, length)] if length else []

    def fetch(size: int) -> list[Simple]:
        start, length = shard(size, grid.width, place)
        source = combined(last * grid.width + place)
        return [Copy((fetched(me), At(OUT, 0, start, chunk)), source, length)] if length else []

    def collect(size: int) -> list[Simple]:
        steps: list[Simple] = []
        for other in ring(grid.width, place)[:-1]:
            start, length = shard(size, grid.width, other)
            rank = me - place + other
            steps += copy(At(OUT, 0, start, chunk), combined(rank) if node == last else fetched(rank), length)
        return steps

    def turn(now: Sizes, following: Sizes | None) -> list[Simple]:
        if following is None:  # what the others have fetched is all that is left
            own = [Wait(rank, FIRST_SIGNAL, 1) for rank in grid.beside(me) if rank != me]
            return [Signal(FIRST_SIGNAL, 1), *own, *later(collect(now[2]), -grid.nodes)] if node != last else []
        steps = later(combine(now[0]), -node) + later(put(following[0]), 1 - node)
        steps += [Signal(FIRST_SIGNAL, 1), Wait(ALL, FIRST_SIGNAL, 1)]
        if node == last:
            return steps + later(collect(now[1]), -last)
        return steps + later(collect(now[2]), -grid.nodes) + later(fetch(now[1]), -last)

    if node == 0:
        plan.head = list(fixed(put(min(nbytes, chunk)), 0))
    turns = -(-nbytes // chunk) + grid.nodes
    plan.staged = pipeline([nbytes] * 3, [chunk] * 3, turns, turn, [node, last, grid.nodes])
    plan.name = "by-node"


def _chunk(nbytes: int, limits: Limits, grid: Grid) -> int:
    """Bytes that a turn moves. A slot has room for a chunk and two slices of it; slices start at cache lines."""
    room = limits.stage_bytes // NODE_SLOTS * grid.width // (grid.width + 2)
    lines = LINE * grid.width
    most = max(min(limits.chunk_bytes, room) // lines, 1) * lines
    if most > room:
        raise too_small(limits.stage_bytes, (lines + 2 * LINE) * NODE_SLOTS)
    return up(-(-nbytes // -(-nbytes // most)), lines)


def direct_by_node(plan: Plan, nbytes: int, limits: Limits, grid: Grid) -> tuple[list[Step], list[Need]]:
    """Slice i of a node's tensors is read and written by its rank i alone, but for what the i-th ranks of other nodes
    read of it later: so in place is safe, and only those wait for each other before the end."""
    me, last = plan.rank, grid.nodes - 1
    node, place = grid.of(me)
    lines = LINE * grid.width
    most = max(limits.chunk_bytes // lines, 1) * lines
    chunk = up(-(-nbytes // -(-nbytes // most)), lines)

    def outputs(start: int) -> tuple[At, ...]:
        others = [me - place + other for other in ring(grid.width, place)[:-1]]
        return tuple(At(PEER_OUT, rank, start, chunk) for rank in (me, *others))

    def combine(size: int) -> list[Simple]:
        start, length = shard(size, grid.width, place)
        so_far = (At(PEER_OUT, me - grid.width, start, chunk),) if node else ()
        own = tuple(At(PEER_IN, rank, start, chunk) for rank in grid.beside(me))
        return [Reduce(outputs(start)[: None if node == last else 1], so_far + own, length)] if length else []

    def fetch(size: int) -> list[Simple]:
        start, length = shard(size, grid.width, place)
        return [Copy(outputs(start), At(PEER_OUT, last * grid.width + place, start, chunk), length)] if length else []

    def turn(now: Sizes, following: Sizes | None) -> list[Simple]:
        before = [Wait(me - grid.width, FIRST_SIGNAL - 1, 1)] if node else []  # has combined the chunk in its last turn
        ready = [Wait(last * grid.width + place, FIRST_SIGNAL, 1)]
        combining, fetching = combine(now[0]), fetch(now[1]) if node != last else []
        steps = [*before, *later(combining, -node)] if combining else []
        return [*steps, Signal(FIRST_SIGNAL, 1), *([*ready, *later(fetching, -last)] if fetching else [])]

    turns = -(-nbytes // chunk) + last
    steps = pipeline([nbytes] * 2, [chunk] * 2, turns, turn, [node, last])
    return [*steps, *finish(signal=FIRST_SIGNAL + turns)], [Need.INPUT | Need.OUTPUT] * plan.world
