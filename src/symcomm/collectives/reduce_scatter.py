"""reduce_scatter: rank k ends with the combination, as the tree over ranks, of every rank's k-th piece.

streamed   every rank stages its pieces for the others, chunk by chunk, and combines the chunks meant for it
by-node    (nodes.py) for ranks of its place, a rank combines what its node has, then adds it to the result of its
           place in the nodes before; at the end each rank fetches its piece from the last node
direct     rank k combines the k-th piece of all symmetric inputs into its own output; by node, as above

The output may be the rank's own piece of its input: no other rank reads that piece, and it is read as it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from symcomm.collectives.chunks import (
    Pieces,
    Simple,
    Sizes,
    copy,
    finish,
    fixed,
    later,
    pipeline,
    ring,
    stage,
    start_at_peer,
    stream,
)
from symcomm.collectives.limits import Limits
from symcomm.collectives.nodes import NODE_SLOTS, Grid, combine_by_node, lane_bytes, wait_for
from symcomm.collectives.plan import ALL, FIRST_SIGNAL, At, Need, Plan, Reduce, Signal, Space, Step

IN, OUT, STAGE, PEER_IN = Space.IN, Space.OUT, Space.STAGE, Space.PEER_IN


def streamed_reduce_scatter(plan: Plan, pieces: Pieces, limits: Limits) -> None:
    """A slot holds one chunk for each of the other ranks."""
    me, world = plan.rank, plan.world
    cut, lanes = stage(plan, [(rank, pieces.sizes) for rank in range(world)], limits, skip_own=True)

    def put(now: Sizes) -> list[Simple]:
        others = ring(world, me)[:-1]
        return [step for q in others for step in copy(lanes[me].at(q), pieces.at(IN, q, cut), now[q])]

    def get(now: Sizes) -> list[Simple]:
        sources = tuple(pieces.at(IN, me, cut) if r == me else lanes[r].at(me) for r in range(world))
        return [Reduce((At(OUT, 0, 0, cut.chunk(pieces.sizes[me])),), sources, now[me])] if now[me] else []

    stream(plan, cut, pieces.sizes, put, get, [ALL])


def direct_reduce_scatter(plan: Plan, pieces: Pieces) -> tuple[list[Step], list[Need]]:
    """Only rank k reads the k-th pieces, so its output may be one of them."""
    start, length = start_at_peer(plan, pieces.sizes, plan.rank), pieces.sizes[plan.rank]
    steps: list[Step] = []
    if length:
        sources = tuple(At(PEER_IN, rank, start) for rank in range(plan.world))
        steps.append(Reduce((At(OUT),), sources, length))
    return steps + finish(), [Need.INPUT] * plan.world


@dataclass(frozen=True)
class _ByNode:
    """What one rank does in a turn. ``read(rank, piece)``: where it reads a piece of one of its node's ranks.

    Turn i of node g: combine chunk i-g of the pieces of my column, stage the next chunk, signal, wait for my column
    and, while they stage for me, for ``stagers``; then fetch a chunk of my own piece from the last node. What a turn
    stages is read before the second signal after it, so two slots. For what it combines, see Grid.slots.
    """

    me: int
    grid: Grid
    chunk: int
    lane: int  # of the staging area: from here on it has combined chunks, one for each node's piece
    read: Callable[[int, int], At]
    put: Callable[[int], list[Simple]]
    stagers: list[int]

    def combined(self, rank: int, node: int) -> At:
        slots = self.grid.slots
        return At(STAGE, rank, (self.lane * NODE_SLOTS + node * slots) * self.chunk, self.chunk, slots)

    def combine(self, size: int) -> list[Simple]:
        if not size:
            return []
        node, place = self.grid.of(self.me)
        here = sorted([self.me, *self.grid.beside(self.me)])
        steps: list[Simple] = []
        for other in range(self.grid.nodes):
            before = [self.combined(rank, other) for rank in self.grid.before(self.me)]
            is_mine = node == other == self.grid.nodes - 1
            partial = self.combined(self.me, other)
            target = At(OUT, 0, 0, self.chunk) if is_mine else partial
            own = tuple(self.read(rank, other * self.grid.width + place) for rank in here)
            steps += combine_by_node((target,), partial, own, before, size)
        return steps

    def fetch(self, size: int) -> list[Simple]:
        node, place = self.grid.of(self.me)
        last = self.grid.nodes - 1
        source = self.combined(last * self.grid.width + place, node)
        return copy(At(OUT, 0, 0, self.chunk), source, size) if node != last else []

    def turn(self, now: Sizes, following: Sizes | None) -> list[Simple]:
        node, last = self.grid.of(self.me)[0], self.grid.nodes - 1
        ahead = later(self.put(following[0]), 1 - node) if following else []
        stagers = self.stagers if following and following[0] else []
        ready: list[Simple] = [Signal(FIRST_SIGNAL, 1), *wait_for([*stagers, *self.grid.column(self.me)])]
        return [*later(self.combine(now[0]), -node), *ahead, *ready, *later(self.fetch(now[1]), -last)]

    def turns(self, nbytes: int) -> int:
        return -(-nbytes // self.chunk) + self.grid.nodes - 1

    def steps(self, nbytes: int) -> list[Step]:
        delays = [self.grid.of(self.me)[0], self.grid.nodes - 1]
        return pipeline([nbytes] * 2, [self.chunk] * 2, self.turns(nbytes), self.turn, delays)


def reduce_scatter_by_node(plan: Plan, pieces: Pieces, limits: Limits, grid: Grid) -> None:
    """All pieces have one size."""
    me, world, nbytes = plan.rank, plan.world, pieces.sizes[0]
    chunk = lane_bytes(nbytes, limits, world * NODE_SLOTS + grid.nodes * grid.slots, limits.chunk_bytes // grid.width)
    place = grid.of(me)[1]

    def of_input(piece: int) -> At:
        return At(IN, piece, 0, chunk) if pieces.listed else At(IN, 0, pieces.starts[piece], chunk)

    def read(rank: int, piece: int) -> At:
        return of_input(piece) if rank == me else At(STAGE, rank, piece * NODE_SLOTS * chunk, chunk, NODE_SLOTS)

    def put(size: int) -> list[Simple]:
        """Stage the pieces that other ranks of my node combine."""
        others = [piece for piece in ring(world, me) if grid.of(piece)[1] != place]
        targets = [(At(STAGE, me, piece * NODE_SLOTS * chunk, chunk, NODE_SLOTS), piece) for piece in others]
        return [step for target, piece in targets for step in copy(target, of_input(piece), size)]

    rank = _ByNode(me, grid, chunk, world, read, put, grid.beside(me))
    plan.head = list(fixed(put(min(nbytes, chunk)), 0)) if me < grid.width else []
    plan.staged = rank.steps(nbytes)
    plan.name = "by-node"


def direct_reduce_scatter_by_node(
    plan: Plan, pieces: Pieces, limits: Limits, grid: Grid
) -> tuple[list[Step], list[Need]]:
    """Only the rank itself reads those of its pieces that belong to its own place, so its output may be one of them."""
    me, nbytes = plan.rank, pieces.sizes[0]
    chunk = lane_bytes(nbytes, limits, grid.nodes * grid.slots, limits.chunk_bytes // grid.width)

    def read(rank: int, piece: int) -> At:
        return At(PEER_IN, rank, pieces.starts[piece], chunk)

    rank = _ByNode(me, grid, chunk, 0, read, lambda size: [], [])
    return [*rank.steps(nbytes), *finish(signal=FIRST_SIGNAL + rank.turns(nbytes))], [Need.INPUT] * plan.world
