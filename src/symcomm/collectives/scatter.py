"""scatter: rank k ends with the k-th of the root's tensors, or the k-th piece of its one tensor.

streamed   the root stages the others' pieces chunk by chunk, everybody copies its own out
direct     everybody copies its piece out of the root's symmetric tensor
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from symcomm.collectives.chunks import SLOTS, Pieces, Simple, Sizes, copy, ring, stream, stream_chunk
from symcomm.collectives.plan import ALL, FIRST_SIGNAL, At, Need, Plan, Signal, Space, Step, Wait

if TYPE_CHECKING:
    from symcomm.collectives.select import Limits

IN, OUT, STAGE, PEER_IN = Space.IN, Space.OUT, Space.STAGE, Space.PEER_IN


def streamed_scatter(plan: Plan, pieces: Pieces, limits: Limits) -> None:
    """A slot holds one chunk for each rank but the root."""
    me, root, world = plan.rank, plan.root, plan.world
    lanes = world - 1
    chunk = stream_chunk(max(pieces.sizes), limits, lanes)

    def staged(reader: int) -> At:
        return At(STAGE, root, (reader - (reader > root)) * chunk, lanes * chunk, SLOTS)

    def put(now: Sizes) -> list[Simple]:
        others = ring(world, me)[:-1] if me == root else []
        return [step for q in others for step in copy(staged(q), pieces.at(IN, q, chunk), now[q])]

    def get(now: Sizes) -> list[Simple]:
        return copy(At(OUT, 0, 0, chunk), pieces.at(IN, me, chunk) if me == root else staged(me), now[me])

    stream(plan, pieces.sizes, chunk, put, get, [ALL if me == root else root])
    plan.name = "streamed"


def direct_scatter(plan: Plan, pieces: Pieces) -> tuple[list[Step], list[Need]]:
    """Only the root's tensor is touched by others, so only the root has to wait."""
    me, root = plan.rank, plan.root
    needs = [Need.INPUT if rank == root else Need.NOTHING for rank in range(plan.world)]
    if me == root:
        return [*copy(At(OUT), pieces.at(IN, me), pieces.sizes[me]), Wait(ALL, FIRST_SIGNAL)], needs
    return [*copy(At(OUT), At(PEER_IN, root, pieces.starts[me]), pieces.sizes[me]), Signal(FIRST_SIGNAL)], needs
