"""all_reduce by node (nodes.py): each byte crosses from one node to the next once.

staged     turn by turn, each node a chunk behind the one before it:
           combine   rank i of a node combines slice i of a chunk: its own ranks', then the result of nodes before
           fetch     when the last node has the result, rank i of each other node copies slice i of it, once
           collect   ranks take the other slices from ranks of their own node
direct     the same straight on symmetric tensors; a node's partial slice lies in an output meanwhile

With W ranks on two nodes, a two-shot all_reduce moves the tensor between them W times, this one twice.
"""

from __future__ import annotations

from symcomm.collectives.chunks import Simple, Sizes, copy, finish, fixed, later, pipeline, shard, up
from symcomm.collectives.limits import LINE, Limits
from symcomm.collectives.nodes import NODE_SLOTS, Grid, chunk_in, combine_by_node, wait_for
from symcomm.collectives.plan import ALL, FIRST_SIGNAL, At, Copy, Need, Plan, Signal, Space, Step, Wait

IN, OUT, STAGE, PEER_IN, PEER_OUT = Space.IN, Space.OUT, Space.STAGE, Space.PEER_IN, Space.PEER_OUT


def by_node(plan: Plan, nbytes: int, limits: Limits, grid: Grid) -> None:
    """The staging area has slots for chunks, for slices that are combined, and for slices that are fetched."""
    slices = (grid.width + 1) * NODE_SLOTS + grid.slots
    chunk = chunk_in(limits.stage_bytes * grid.width // slices, nbytes, limits, grid.width, slices)
    rank = _Staged(plan.rank, grid, chunk)
    if rank.node == 0:
        plan.head = list(fixed(rank.put(min(nbytes, chunk)), 0))
    turns = -(-nbytes // chunk) + grid.nodes
    delays = [rank.node, rank.last, grid.nodes]  # of combining, of fetching, of collecting what was fetched
    plan.staged = pipeline([nbytes] * 3, [chunk] * 3, turns, rank.turn, delays)
    plan.name = "by-node"


class _Staged:
    """What one rank does in a turn.

    Turn i of node g: combine chunk i-g, stage the next, signal, wait for all; then collect and fetch.
    What is staged in a turn is read in the next, and both end with a wait for all: two slots. What is combined may be
    read some turns later: Grid.slots says how many slots that takes. What is fetched after the wait of one turn is read
    after the wait of the next: two slots.
    """

    def __init__(self, rank: int, grid: Grid, chunk: int):
        self.me, self.grid, self.chunk = rank, grid, chunk
        self.node, self.place = grid.of(rank)
        self.last = grid.nodes - 1
        self.slice = chunk // grid.width

    def staged(self, rank: int, start: int) -> At:
        return At(STAGE, rank, start, self.chunk, NODE_SLOTS)

    def combined(self, rank: int) -> At:
        return At(STAGE, rank, NODE_SLOTS * (self.chunk + self.slice), self.slice, self.grid.slots)

    def fetched(self, rank: int) -> At:
        return At(STAGE, rank, NODE_SLOTS * self.chunk, self.slice, NODE_SLOTS)

    def put(self, size: int) -> list[Simple]:
        """Stage all but my own slice."""
        start, length = shard(size, self.grid.width, self.place)
        end = start + length
        before = copy(self.staged(self.me, 0), At(IN, 0, 0, self.chunk), start)
        return before + copy(self.staged(self.me, end), At(IN, 0, end, self.chunk), size - end)

    def combine(self, size: int) -> list[Simple]:
        start, length = shard(size, self.grid.width, self.place)
        before = [self.combined(rank) for rank in self.grid.before(self.me)]
        here = sorted([self.me, *self.grid.beside(self.me)])
        own = tuple(At(IN, 0, start, self.chunk) if r == self.me else self.staged(r, start) for r in here)
        outs = (At(OUT, 0, start, self.chunk),) if self.node == self.last else ()
        mine = self.combined(self.me)
        return [*combine_by_node((*outs, mine), mine, own, before, length)] if length else []

    def fetch(self, size: int) -> list[Simple]:
        start, length = shard(size, self.grid.width, self.place)
        source = self.combined(self.last * self.grid.width + self.place)
        return [Copy((self.fetched(self.me), At(OUT, 0, start, self.chunk)), source, length)] if length else []

    def collect(self, size: int) -> list[Simple]:
        steps: list[Simple] = []
        for rank in self.grid.beside(self.me):
            start, length = shard(size, self.grid.width, self.grid.of(rank)[1])
            source = self.combined(rank) if self.node == self.last else self.fetched(rank)
            steps += copy(At(OUT, 0, start, self.chunk), source, length)
        return steps

    def turn(self, now: Sizes, following: Sizes | None) -> list[Simple]:
        if following is None:  # only what the other nodes have fetched is left
            end: list[Simple] = [Signal(FIRST_SIGNAL, 1), *wait_for(self.grid.beside(self.me))]
            return [*end, *later(self.collect(now[2]), -self.grid.nodes)] if self.node != self.last else []
        steps = later(self.combine(now[0]), -self.node) + later(self.put(following[0]), 1 - self.node)
        steps += [Signal(FIRST_SIGNAL, 1), Wait(ALL, FIRST_SIGNAL, 1)]
        if self.node == self.last:
            return steps + later(self.collect(now[1]), -self.last)
        return steps + later(self.collect(now[2]), -self.grid.nodes) + later(self.fetch(now[1]), -self.last)


def direct_by_node(plan: Plan, nbytes: int, limits: Limits, grid: Grid) -> tuple[list[Step], list[Need]]:
    """Only rank i of a node reads and writes slice i of its tensors, except that the i-th ranks of other nodes read it
    later. So in place is safe, and only those ranks wait for each other before the end."""
    me, last = plan.rank, grid.nodes - 1
    node, place = grid.of(me)
    lines = LINE * grid.width
    chunk = up(min(limits.chunk_bytes, nbytes), lines)

    def outputs(start: int) -> tuple[At, ...]:
        return tuple(At(PEER_OUT, rank, start, chunk) for rank in (me, *grid.beside(me)))

    def combine(size: int) -> list[Simple]:
        start, length = shard(size, grid.width, place)
        before = [At(PEER_OUT, rank, start, chunk) for rank in grid.before(me)]
        own = tuple(At(PEER_IN, rank, start, chunk) for rank in sorted([me, *grid.beside(me)]))
        outs = outputs(start)
        return [*combine_by_node(outs if node == last else outs[:1], outs[0], own, before, length)] if length else []

    def fetch(size: int) -> list[Simple]:
        start, length = shard(size, grid.width, place)
        return [Copy(outputs(start), At(PEER_OUT, last * grid.width + place, start, chunk), length)] if length else []

    def turn(now: Sizes, following: Sizes | None) -> list[Simple]:
        before: list[Simple] = []
        if node:
            before.append(Wait(me - grid.width, FIRST_SIGNAL - 1, 1))  # it combined the chunk in its last turn
        combining, fetching = combine(now[0]), fetch(now[1]) if node != last else []
        steps = later(combining, -node)
        if combining:
            steps[1:1] = before
        ready = wait_for([last * grid.width + place]) if fetching else []
        return [*steps, Signal(FIRST_SIGNAL, 1), *ready, *later(fetching, -last)]

    turns = -(-nbytes // chunk) + last
    steps = pipeline([nbytes] * 2, [chunk] * 2, turns, turn, [node, last])
    return [*steps, *finish(signal=FIRST_SIGNAL + turns)], [Need.INPUT | Need.OUTPUT] * plan.world
