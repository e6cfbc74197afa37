"""all_to_all: rank i sends its j-th piece to rank j, which keeps it as its i-th.

streamed   every rank stages its pieces for the others chunk by chunk, and copies out the chunks meant for it
direct     every rank copies its pieces out of its peers' symmetric inputs

``matrix[i][j]`` is what rank i sends to rank j, in bytes. Pairs that exchange nothing cost no step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from symcomm.collectives.chunks import SLOTS, Pieces, Simple, Sizes, copy, finish, ring, stream, stream_chunk
from symcomm.collectives.plan import ALL, At, Need, Plan, Space, Step

if TYPE_CHECKING:
    from symcomm.collectives.select import Limits

IN, OUT, STAGE, PEER_IN = Space.IN, Space.OUT, Space.STAGE, Space.PEER_IN
Matrix = tuple[tuple[int, ...], ...]


def streamed_all_to_all(plan: Plan, matrix: Matrix, listed: bool, limits: Limits) -> None:
    """A slot holds one chunk for each of the other ranks. All ranks take as many turns as the longest piece needs."""
    me, world = plan.rank, plan.world
    sends, receives = Pieces(matrix[me], listed), Pieces(tuple(row[me] for row in matrix), listed)
    lanes = world - 1
    longest = max(map(max, matrix))
    chunk = stream_chunk(longest, limits, lanes)

    def staged(owner: int, reader: int) -> At:
        lane = reader - (reader > owner)
        return At(STAGE, owner, lane * chunk, lanes * chunk, SLOTS)

    def put(now: Sizes) -> list[Simple]:
        others = ring(world, me)[:-1]
        return [step for q in others for step in copy(staged(me, q), sends.at(IN, q, chunk), now[q])]

    def get(now: Sizes) -> list[Simple]:
        steps: list[Simple] = []
        for rank in ring(world, me):
            source = sends.at(IN, me, chunk) if rank == me else staged(rank, me)
            steps += copy(receives.at(OUT, rank, chunk), source, now[world + rank])
        return steps

    stream(plan, [*sends.sizes, *receives.sizes, longest], chunk, put, get, [ALL])
    plan.name = "streamed"


def direct_all_to_all(plan: Plan, matrix: Matrix, listed: bool) -> tuple[list[Step], list[Need]]:
    me = plan.rank
    receives = Pieces(tuple(row[me] for row in matrix), listed)
    steps: list[Step] = []
    for rank in ring(plan.world, me)[:-1]:
        source = At(PEER_IN, rank, sum(matrix[rank][:me]))
        steps += copy(receives.at(OUT, rank), source, receives.sizes[rank])
    own = copy(receives.at(OUT, me), Pieces(matrix[me], listed).at(IN, me), receives.sizes[me])
    return steps + finish(own), [Need.INPUT if any(row) else Need.NOTHING for row in matrix]
