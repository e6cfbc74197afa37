"""broadcast: every rank ends with the root's tensor.

streamed   the root stages its tensor chunk by chunk, all copy the chunks out
direct     all copy out of the root's symmetric tensor

The root's tensor is read and never written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from symcomm.collectives.chunks import Simple, Sizes, copy, stage, stream
from symcomm.collectives.plan import ALL, FIRST_SIGNAL, At, Need, Plan, Signal, Space, Step, Wait

if TYPE_CHECKING:
    from symcomm.collectives.select import Limits

IN, OUT, PEER_IN = Space.IN, Space.OUT, Space.PEER_IN


def streamed_broadcast(plan: Plan, nbytes: int, limits: Limits) -> None:
    """The root waits for everybody, everybody else only for the root."""
    at_root = plan.rank == plan.root
    cut, (lane,) = stage(plan, [(plan.root, [nbytes])], limits)
    chunk = cut.chunk(nbytes)

    def put(now: Sizes) -> list[Simple]:
        return copy(lane.at(), At(IN, 0, 0, chunk), now[0]) if at_root else []

    def get(now: Sizes) -> list[Simple]:
        return [] if at_root else copy(At(OUT, 0, 0, chunk), lane.at(), now[0])

    stream(plan, cut, [nbytes], put, get, [ALL if at_root else plan.root])
    plan.name = "streamed"


def direct_broadcast(plan: Plan, nbytes: int) -> tuple[list[Step], list[Need]]:
    """Only the root's tensor is touched by others, so only the root has to wait."""
    needs = [Need.INPUT if rank == plan.root else Need.NOTHING for rank in range(plan.world)]
    if plan.rank == plan.root:
        return [Wait(ALL, FIRST_SIGNAL)], needs
    return [*copy(At(OUT), At(PEER_IN, plan.root), nbytes), Signal(FIRST_SIGNAL)], needs
