"""all_reduce: every rank ends with the combination, in rank order, of every rank's tensor.

one-shot   every rank reads every peer's staged tensor and combines all of it; one synchronisation
two-shot   rank k combines the k-th shard and all collect the shards; each byte is combined once
direct     two-shot straight on symmetric tensors: rank k writes its shard into every peer's output
"""

from __future__ import annotations

from symcomm.collectives.plan import ALL, FIRST_SIGNAL, At, Collective, Copy, Loop, Need, Plan, Reduce, Signal, Space, Wait

IN, OUT, STAGE, PEER_IN, PEER_OUT = Space.IN, Space.OUT, Space.STAGE, Space.PEER_IN, Space.PEER_OUT


def shard(total: int, world: int, rank: int, item: int) -> tuple[int, int]:
    """(offset, length) in bytes of rank's share of ``total`` bytes, in whole elements, cache-line aligned starts."""
    line = max(64, item)
    per = -(-total // (world * line)) * line
    start = min(rank * per, total)
    return start, min(per, total - start)


def one_shot(plan: Plan, nbytes: int) -> Plan:
    """The whole tensor fits into the staging half: copy in, arrive, combine."""
    mine = At(STAGE, plan.rank)
    if nbytes:
        plan.head = [Copy((mine,), At(IN), nbytes)]
        plan.staged = [Reduce((At(OUT),), tuple(At(STAGE, r) for r in range(plan.world)), nbytes)]
    plan.name = "one-shot"
    return plan


def direct_two_shot(plan: Plan, nbytes: int, item: int) -> list:
    """Rank k combines shard k of all inputs into all outputs. Only rank k touches shard k, so in place is safe."""
    start, length = shard(nbytes, plan.world, plan.rank, item)
    steps: list = []
    if length:
        others = [r for r in range(plan.world) if r != plan.rank]
        outs = tuple(At(PEER_OUT, r, start) for r in (plan.rank, *others))
        ins = tuple(At(PEER_IN, r, start) for r in range(plan.world))
        steps.append(Reduce(outs, ins, length))
    return [*steps, Signal(FIRST_SIGNAL), Wait(ALL, FIRST_SIGNAL)]
