"""all_to_all: rank i sends its j-th piece to rank j, which keeps it as its i-th.

streamed   every rank stages its pieces for the others chunk by chunk, and copies out the chunks meant for it
direct     every rank copies its pieces out of its peers' symmetric inputs

``matrix[i][j]`` is what rank i sends to rank j, in bytes. Pairs that exchange nothing need no step.
"""

from __future__ import annotations

from symcomm.collectives.chunks import Pieces, Simple, Sizes, copy, finish, ring, stage, start_at_peer, stream
from symcomm.collectives.limits import Limits
from symcomm.collectives.plan import ALL, At, Need, Plan, Space, Step

IN, OUT, PEER_IN = Space.IN, Space.OUT, Space.PEER_IN
Matrix = tuple[tuple[int, ...], ...]


def streamed_all_to_all(plan: Plan, matrix: Matrix, listed: bool, limits: Limits) -> None:
    """A slot holds one chunk for each of the other ranks; all ranks take the same number of turns."""
    me, world = plan.rank, plan.world
    sends, receives = Pieces(matrix[me], listed), Pieces(tuple(row[me] for row in matrix), listed)
    cut, lanes = stage(plan, list(enumerate(matrix)), limits, skip_own=True)

    def put(now: Sizes) -> list[Simple]:
        others = ring(world, me)[:-1]
        return [step for q in others for step in copy(lanes[me].at(q), sends.at(IN, q, cut), now[q])]

    def get(now: Sizes) -> list[Simple]:
        steps: list[Simple] = []
        for rank in ring(world, me):
            source = sends.at(IN, me, cut) if rank == me else lanes[rank].at(me)
            steps += copy(receives.at(OUT, rank, cut), source, now[world + rank])
        return steps

    stream(plan, cut, [*sends.sizes, *receives.sizes], put, get, [ALL])


def direct_all_to_all(plan: Plan, matrix: Matrix, listed: bool) -> tuple[list[Step], list[Need]]:
    me = plan.rank
    receives = Pieces(tuple(row[me] for row in matrix), listed)
    steps: list[Step] = []
    for rank in ring(plan.world, me)[:-1]:
        source = At(PEER_IN, rank, start_at_peer(plan, matrix[rank], me))
        steps += copy(receives.at(OUT, rank), source, receives.sizes[rank])
    own = copy(receives.at(OUT, me), Pieces(matrix[me], listed).at(IN, me), receives.sizes[me])
    return steps + finish(own), [Need.INPUT if any(row) else Need.NOTHING for row in matrix]
