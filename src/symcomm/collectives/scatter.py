"""scatter: rank k ends with the k-th of the root's tensors, or the k-th piece of its one tensor.

streamed   the root stages the others' pieces chunk by chunk, each rank copies its own out
direct     each rank copies its piece out of the root's symmetric tensor
"""

from __future__ import annotations

from symcomm.collectives.chunks import Pieces, Simple, Sizes, copy, ring, stage, start_at_peer, stream
from symcomm.collectives.limits import Limits
from symcomm.collectives.plan import ALL, FIRST_SIGNAL, At, Need, Plan, Signal, Space, Step, Wait

IN, OUT, PEER_IN = Space.IN, Space.OUT, Space.PEER_IN


def streamed_scatter(plan: Plan, pieces: Pieces, limits: Limits) -> None:
    """A slot holds one chunk for each rank but the root."""
    me, root, world = plan.rank, plan.root, plan.world
    cut, (lanes,) = stage(plan, [(root, pieces.sizes)], limits, skip_own=True)

    def put(now: Sizes) -> list[Simple]:
        others = ring(world, me)[:-1] if me == root else []
        return [step for q in others for step in copy(lanes.at(q), pieces.at(IN, q, cut), now[q])]

    def get(now: Sizes) -> list[Simple]:
        out = At(OUT, 0, 0, cut.chunk(pieces.sizes[me]))
        return copy(out, pieces.at(IN, me, cut) if me == root else lanes.at(me), now[me])

    stream(plan, cut, pieces.sizes, put, get, [ALL if me == root else root])


def direct_scatter(plan: Plan, pieces: Pieces) -> tuple[list[Step], list[Need]]:
    """Other ranks touch only the root's tensor, so only the root must wait."""
    me, root = plan.rank, plan.root
    needs = [Need.INPUT if rank == root else Need.NOTHING for rank in range(plan.world)]
    if me == root:
        return [*copy(At(OUT), pieces.at(IN, me), pieces.sizes[me]), Wait(ALL, FIRST_SIGNAL)], needs
    source = At(PEER_IN, root, start_at_peer(plan, pieces.sizes, me))
    return [*copy(At(OUT), source, pieces.sizes[me]), Signal(FIRST_SIGNAL)], needs
