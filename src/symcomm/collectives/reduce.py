"""reduce: the root ends with the combination, as the tree over ranks, of every rank's tensor.

one-shot   the root reads every peer's staged tensor and combines all of it
two-shot   rank k combines the k-th shard of each chunk, the root collects the shards
direct     rank k combines the k-th shard of all symmetric inputs straight into the root's symmetric output

These are all_reduce's algorithms with one collector. Only the root's output may be the same tensor as its input.
"""

from __future__ import annotations

from symcomm.collectives.all_reduce import direct_two_shot
from symcomm.collectives.plan import Need, Plan, Step


def direct_reduce(plan: Plan, nbytes: int) -> tuple[list[Step], list[Need]]:
    needs = [Need.INPUT | Need.OUTPUT if rank == plan.root else Need.INPUT for rank in range(plan.world)]
    return direct_two_shot(plan, nbytes, [plan.root]), needs
