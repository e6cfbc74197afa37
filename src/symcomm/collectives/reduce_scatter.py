"""reduce_scatter: rank k ends with the combination, in rank order, of every rank's k-th piece.

streamed   every rank stages its pieces for the others, chunk by chunk, and combines the chunks meant for it
direct     rank k combines the k-th piece of all symmetric inputs into its own output

The output may be the rank's own piece of its input: nobody else reads that piece, and it is read as it is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from symcomm.collectives.chunks import Pieces, Simple, Sizes, copy, finish, ring, stage, stream
from symcomm.collectives.plan import ALL, At, Need, Plan, Reduce, Space, Step

if TYPE_CHECKING:
    from symcomm.collectives.select import Limits

IN, OUT, PEER_IN = Space.IN, Space.OUT, Space.PEER_IN


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
    plan.name = "streamed"


def direct_reduce_scatter(plan: Plan, pieces: Pieces) -> tuple[list[Step], list[Need]]:
    """Rank k alone reads the k-th pieces, so its output may be one of them."""
    start, length = pieces.starts[plan.rank], pieces.sizes[plan.rank]
    steps: list[Step] = []
    if length:
        sources = tuple(At(PEER_IN, rank, start) for rank in range(plan.world))
        steps.append(Reduce((At(OUT),), sources, length))
    return steps + finish(), [Need.INPUT] * plan.world
