"""all_gather: every rank ends with every rank's tensor, as pieces of one output or as a list.

streamed   every rank stages its tensor chunk by chunk, all copy the chunks out
direct     every rank copies out of its peers' symmetric inputs

The input may be the rank's own piece of the output: that copy is then onto itself, which is nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from symcomm.collectives.chunks import Pieces, Simple, Sizes, copy, finish, ring, stage, stream
from symcomm.collectives.plan import ALL, At, Copy, Need, Plan, Space, Step

if TYPE_CHECKING:
    from symcomm.collectives.select import Limits

IN, OUT, PEER_IN = Space.IN, Space.OUT, Space.PEER_IN


def streamed_all_gather(plan: Plan, pieces: Pieces, limits: Limits) -> None:
    """A slot holds one chunk: all peers read the same one."""
    me, world = plan.rank, plan.world
    cut, lanes = stage(plan, [(rank, [size]) for rank, size in enumerate(pieces.sizes)], limits)
    mine = At(IN, 0, 0, cut.chunk(pieces.sizes[me]))

    def put(now: Sizes) -> list[Simple]:
        """Also into my own output, while the chunk is in the cache."""
        return [Copy((lanes[me].at(), pieces.at(OUT, me, cut)), mine, now[me])] if now[me] else []

    def get(now: Sizes) -> list[Simple]:
        steps: list[Simple] = []
        for rank in ring(world, me)[:-1]:
            steps += copy(pieces.at(OUT, rank, cut), lanes[rank].at(), now[rank])
        return steps

    stream(plan, cut, pieces.sizes, put, get, [ALL])
    plan.name = "streamed"


def direct_all_gather(plan: Plan, pieces: Pieces) -> tuple[list[Step], list[Need]]:
    me = plan.rank
    steps: list[Step] = []
    for rank in ring(plan.world, me)[:-1]:
        steps += copy(pieces.at(OUT, rank), At(PEER_IN, rank), pieces.sizes[rank])
    own = copy(pieces.at(OUT, me), At(IN), pieces.sizes[me])
    return steps + finish(own), [Need.INPUT if size else Need.NOTHING for size in pieces.sizes]
