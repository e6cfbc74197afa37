"""A collective of your own: an inclusive scan, in which rank k gets the sum of ranks 0 to k. Proved, then run.

A plan is what one rank does: here it copies its tensor to where the others can read it, arrives, and adds up
(docs/explanation/plans.md).
"""

import functools

import torch

import symcomm
from symcomm.collectives import Collective, Plan, interpret
from symcomm.collectives.plan import At, Copy, Reduce, Space


@functools.cache  # a group loads each plan once
def scan_plan(rank: int, world: int, count: int, dtype: symcomm.DType) -> Plan:
    nbytes = count * dtype.itemsize
    mine, below = At(Space.IN), [At(Space.STAGE, r) for r in range(rank)]
    plan = Plan(Collective.CUSTOM, rank, world, count, dtype)
    plan.head = [Copy((At(Space.STAGE, rank),), mine, nbytes)]  # before I arrive
    plan.staged = [Reduce((At(Space.OUT),), (*below, mine), nbytes)]  # once all have arrived, in rank order
    return plan


def scan(group: symcomm.ProcessGroup, tensor: torch.Tensor) -> None:
    plan = scan_plan(group.rank, group.size, tensor.numel(), symcomm.DType.FLOAT32)
    group.run_plan("scan", plan, inputs=tensor, outputs=tensor)


def prove(world: int, count: int) -> None:
    """Play all ranks of two scans, one after the other: a race or a deadlock raises, in whichever order they run."""
    plans = [[scan_plan(rank, world, count, symcomm.DType.FLOAT32) for rank in range(world)] for _ in range(2)]
    for schedule in ["round-robin", *(f"slowest {rank}" for rank in range(world)), *range(10)]:
        buffers = [[interpret.Buffer.of(f"rank {r}", [10**r] * count) for r in range(world)] for _ in range(2)]
        tensors = [[interpret.Tensors([mine], [mine]) for mine in each] for each in buffers]
        for operation in interpret.run(plans, tensors, schedule):
            assert [set(out) for (out,) in operation] == [{int("1" * (r + 1))} for r in range(world)]


def work(group: symcomm.ProcessGroup) -> list[float]:
    x = torch.arange(3.0) + group.rank
    scan(group, x)
    return x.tolist()


if __name__ == "__main__":
    prove(world=3, count=5)
    for rank, result in enumerate(symcomm.spawn(work, 4, mode="threads")):
        print(f"rank {rank}: {result}")
