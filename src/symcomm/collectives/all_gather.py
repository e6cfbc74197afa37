"""all_gather: every rank ends with every rank's tensor, as pieces of one output or as a list.

streamed   every rank stages its tensor chunk by chunk, all copy the chunks out
by-node    (nodes.py) ranks of its node do the same; in another node one rank, of the same place, copies the chunk, and
           the others take it from there
direct     every rank copies out of its peers' symmetric inputs; by node, the rank of the same place in another node
           copies it into all outputs there

The input may be the rank's own piece of the output: then that copy is onto itself, and does nothing.
"""

from __future__ import annotations

from symcomm.collectives.chunks import Pieces, Simple, Sizes, copy, finish, fixed, later, pipeline, ring, stage, stream
from symcomm.collectives.limits import Limits
from symcomm.collectives.nodes import NODE_SLOTS, Grid, lane_bytes, wait_for
from symcomm.collectives.plan import ALL, FIRST_SIGNAL, At, Copy, Need, Plan, Signal, Space, Step

IN, OUT, STAGE, PEER_IN, PEER_OUT = Space.IN, Space.OUT, Space.STAGE, Space.PEER_IN, Space.PEER_OUT


def streamed_all_gather(plan: Plan, pieces: Pieces, limits: Limits) -> None:
    """A slot holds one chunk: all peers read the same one."""
    me, world = plan.rank, plan.world
    cut, lanes = stage(plan, [(rank, [size]) for rank, size in enumerate(pieces.sizes)], limits)
    mine = At(IN, 0, 0, cut.chunk(pieces.sizes[me]))

    def put(now: Sizes) -> list[Simple]:
        """Stage a chunk, and copy it into my own output while it is in the cache."""
        return [Copy((lanes[me].at(), pieces.at(OUT, me, cut)), mine, now[me])] if now[me] else []

    def get(now: Sizes) -> list[Simple]:
        steps: list[Simple] = []
        for rank in ring(world, me)[:-1]:
            steps += copy(pieces.at(OUT, rank, cut), lanes[rank].at(), now[rank])
        return steps

    stream(plan, cut, pieces.sizes, put, get, [ALL])


def direct_all_gather(plan: Plan, pieces: Pieces) -> tuple[list[Step], list[Need]]:
    me = plan.rank
    steps: list[Step] = []
    for rank in ring(plan.world, me)[:-1]:
        steps += copy(pieces.at(OUT, rank), At(PEER_IN, rank), pieces.sizes[rank])
    own = copy(pieces.at(OUT, me), At(IN), pieces.sizes[me])
    return steps + finish(own), [Need.INPUT if size else Need.NOTHING for size in pieces.sizes]


def all_gather_by_node(plan: Plan, pieces: Pieces, limits: Limits, grid: Grid) -> None:
    """Turn i: take chunk i of my node's ranks and of my column's, stage chunk i+1, signal, wait for both; then collect
    what other ranks of my node took from their columns. All pieces have one size.

    A chunk is staged in one turn and read in the next; a chunk is fetched before a signal and read before the next one.
    So two slots, each for a chunk and for one of each other node.
    """
    me, nbytes = plan.rank, pieces.sizes[0]
    chunk = lane_bytes(nbytes, limits, grid.nodes * NODE_SLOTS, limits.chunk_bytes)
    beside, column = grid.beside(me), grid.column(me)

    def staged(rank: int, lane: int = 0) -> At:
        """Lane 0: a rank's own chunk; lane k: that of the rank of its place k nodes further."""
        return At(STAGE, rank, lane * NODE_SLOTS * chunk, chunk, NODE_SLOTS)

    def out(rank: int) -> At:
        return At(OUT, rank, 0, chunk) if pieces.listed else At(OUT, 0, pieces.starts[rank], chunk)

    def put(size: int) -> list[Simple]:
        return [Copy((staged(me), out(me)), At(IN, 0, 0, chunk), size)] if size else []

    def get(size: int) -> list[Simple]:
        far: list[Simple] = [Copy((staged(me, k), out(rank)), staged(rank), size) for k, rank in enumerate(column, 1)]
        return far + [Copy((out(rank),), staged(rank), size) for rank in beside]

    def collect(size: int) -> list[Simple]:
        fetched = [(rank, k, far) for rank in beside for k, far in enumerate(grid.column(rank), 1)]
        return [Copy((out(far),), staged(rank, k), size) for rank, k, far in fetched]

    def turn(now: Sizes, following: Sizes | None) -> list[Simple]:
        steps = get(now[0]) + (later(put(following[0]), 1) if following else [])
        ready = wait_for(column) if following else []
        return [*steps, Signal(FIRST_SIGNAL, 1), *wait_for(beside), *collect(now[0]), *ready]

    plan.head = list(fixed(put(min(nbytes, chunk)), 0))
    plan.staged = pipeline([nbytes], [chunk], -(-nbytes // chunk), turn)
    plan.name = "by-node"


def direct_all_gather_by_node(plan: Plan, pieces: Pieces, grid: Grid) -> tuple[list[Step], list[Need]]:
    """Each output is one tensor, because other ranks write into it."""
    me = plan.rank
    steps: list[Step] = []
    for rank in grid.beside(me):
        steps += copy(pieces.at(OUT, rank), At(PEER_IN, rank), pieces.sizes[rank])
    for rank in grid.column(me):
        outputs = tuple(At(PEER_OUT, peer, pieces.starts[rank]) for peer in (me, *grid.beside(me)))
        steps += [Copy(outputs, At(PEER_IN, rank), pieces.sizes[rank])]
    own = copy(pieces.at(OUT, me), At(IN), pieces.sizes[me])
    return steps + finish(own), [Need.INPUT | Need.OUTPUT] * plan.world
