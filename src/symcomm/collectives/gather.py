"""gather: the root ends with every rank's tensor, as a list or as pieces of one output.

streamed   every other rank stages its tensor chunk by chunk, the root copies the chunks out
direct     the root copies out of its peers' symmetric inputs
"""

from __future__ import annotations

from symcomm.collectives.chunks import Pieces, Simple, Sizes, copy, ring, stage, stream
from symcomm.collectives.limits import Limits
from symcomm.collectives.plan import ALL, FIRST_SIGNAL, At, Need, Plan, Signal, Space, Step, Wait

IN, OUT, PEER_IN = Space.IN, Space.OUT, Space.PEER_IN


def streamed_gather(plan: Plan, pieces: Pieces, limits: Limits) -> None:
    """The root waits for all ranks; the others wait only for the root."""
    me, at_root = plan.rank, plan.rank == plan.root
    cut, lanes = stage(plan, [(rank, [size]) for rank, size in enumerate(pieces.sizes)], limits)
    mine = At(IN, 0, 0, cut.chunk(pieces.sizes[me]))

    def put(now: Sizes) -> list[Simple]:
        return [] if at_root else copy(lanes[me].at(), mine, now[me])

    def get(now: Sizes) -> list[Simple]:
        steps: list[Simple] = []
        for rank in ring(plan.world, me) if at_root else []:
            steps += copy(pieces.at(OUT, rank, cut), mine if rank == me else lanes[rank].at(), now[rank])
        return steps

    stream(plan, cut, pieces.sizes, put, get, [ALL if at_root else plan.root])


def direct_gather(plan: Plan, pieces: Pieces) -> tuple[list[Step], list[Need]]:
    """The root signals when it has read everything; until then the others do not change their tensors."""
    needs = [Need.INPUT if size and q != plan.root else Need.NOTHING for q, size in enumerate(pieces.sizes)]
    if plan.rank != plan.root:
        return [Wait(plan.root, FIRST_SIGNAL)], needs
    steps: list[Step] = []
    for rank in ring(plan.world, plan.root)[:-1]:
        steps += copy(pieces.at(OUT, rank), At(PEER_IN, rank), pieces.sizes[rank])
    own = copy(pieces.at(OUT, plan.root), At(IN), pieces.sizes[plan.root])
    return [*steps, Signal(FIRST_SIGNAL), *own], needs
