"""reduce_scatter: rank k ends with the combination, in rank order, of every rank's k-th piece.

streamed   every rank stages its pieces for the others, chunk by chunk, and combines the chunks meant for it
direct     rank k combines the k-th piece of all symmetric inputs into its own output

The output may be the rank's own piece of its input: nobody else reads that piece, and it is read as it is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from symcomm.collectives.chunks import SLOTS, Pieces, Simple, Sizes, copy, finish, ring, stream, stream_chunk
from symcomm.collectives.plan import ALL, At, Need, Plan, Reduce, Space, Step

if TYPE_CHECKING:
    from symcomm.collectives.select import Limits

IN, OUT, STAGE, PEER_IN = Space.IN, Space.OUT, Space.STAGE, Space.PEER_IN


def streamed_reduce_scatter(plan: Plan, pieces: Pieces, limits: Limits) -> None:
    """A slot holds one chunk for each of the other ranks."""
    me, world = plan.rank, plan.world
    lanes = world - 1
    chunk = stream_chunk(max(pieces.sizes), limits, lanes)

    def staged(owner: int, reader: int) -> At:
        lane = reader - (reader > owner)
        return At(STAGE, owner, lane * chunk, lanes * chunk, SLOTS)

    def put(now: Sizes) -> list[Simple]:
        others = ring(world, me)[:-1]
        return [step for q in others for step in copy(staged(me, q), pieces.at(IN, q, chunk), now[q])]

    def get(now: Sizes) -> list[Simple]:
        sources = tuple(pieces.at(IN, me, chunk) if r == me else staged(r, me) for r in range(world))
        return [Reduce((At(OUT, 0, 0, chunk),), sources, now[me])] if now[me] else []

    stream(plan, pieces.sizes, chunk, put, get, [ALL])
    plan.name = "streamed"


def direct_reduce_scatter(plan: Plan, pieces: Pieces) -> tuple[list[Step], list[Need]]:
    """Rank k alone reads the k-th pieces, so its output may be one of them."""
    start, length = pieces.starts[plan.rank], pieces.sizes[plan.rank]
    steps: list[Step] = []
    if length:
        sources = tuple(At(PEER_IN, rank, start) for rank in range(plan.world))
        steps.append(Reduce((At(OUT),), sources, length))
    return steps + finish(), [Need.INPUT] * plan.world
