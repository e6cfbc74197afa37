"""Collectives as cases: plans, tensors, and what every rank must end with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from symcomm import collectives
from symcomm.collectives import Limits, Need, Plan
from symcomm.collectives.interpret import Buffer, Tensors
from symcomm.types import DType, RedOpType

TINY = Limits(stage_bytes=4096, chunk_bytes=512, one_shot_bytes=256, direct_bytes=128)
ROOTED = ("broadcast", "reduce", "gather", "scatter")
UNROOTED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
BOTH = Need.INPUT | Need.OUTPUT


def combine(sources: Sequence[Any]) -> Any:
    """Combine in a way that is not commutative, so that the order of the sources shows."""
    result = sources[0]
    for source in sources[1:]:
        result = result * 31 + source
    return result


@dataclass(frozen=True)
class Case:
    """One operation of one group."""

    name: str
    world: int
    count: int
    root: int = 0
    uneven: bool = False
    listed: bool = False
    in_place: bool = False
    symmetric: str = "none"  # none, all, mixed
    limits: Limits = TINY
    dtype: DType = DType.INT64


class Operation:
    """A case made concrete: plans, tensors, and what every rank must end with."""

    def __init__(self, case: Case, salt: int = 0):
        self.case, self.salt, self.random = case, salt, random.Random(salt)
        self.plans: list[Plan] = []
        self.tensors: list[Tensors] = []
        self.expected: list[list[Any]] = []
        getattr(self, case.name)()

    def values(self, rank: int, count: int, part: int = 0) -> np.ndarray:
        return np.arange(count, dtype=np.int64) * 7 + (rank * 64 + part) * 100_003 + self.salt * 10_000_019

    def counts(self) -> tuple[int, ...]:
        n, world = self.case.count, self.case.world
        return tuple(n * ((3 * q + 2) % 5) // 4 for q in range(world)) if self.case.uneven else (n,) * world

    def add(self, plan: Plan, inputs: list[Buffer], outputs: list[Buffer], expected: list[Any]) -> None:
        symmetric = {"none": Need.NOTHING, "all": BOTH, "mixed": self.random.choice([BOTH, Need.NOTHING])}
        self.plans.append(plan)
        self.tensors.append(Tensors(inputs, outputs, symmetric[self.case.symmetric]))
        self.expected.append(expected)

    def divide(self, name: str, counts: Sequence[int], values: np.ndarray, listed: bool) -> list[Buffer]:
        """One buffer for all pieces, or one each; those of a symmetric list lie one after another."""
        starts = [*accumulate(counts, initial=0)]
        if not listed:
            return [Buffer.of(name, values)]
        if self.case.symmetric != "none":
            block = Buffer.of(name, values).block
            return [Buffer(block, starts[q], counts[q]) for q in range(len(counts))]
        return [Buffer.of(f"{name}[{q}]", values[starts[q] : starts[q + 1]]) for q in range(len(counts))]

    def piece(self, buffers: list[Buffer], counts: Sequence[int], q: int, listed: bool) -> Buffer:
        return buffers[q] if listed else Buffer(buffers[0].block, sum(counts[:q]), counts[q])

    def all_reduce(self) -> None:
        c = self.case
        inputs = [self.values(r, c.count) for r in range(c.world)]
        for rank in range(c.world):
            plan = collectives.all_reduce(rank, c.world, c.count, c.dtype, RedOpType.SUM, c.limits)
            mine = Buffer.of(f"input of {rank}", inputs[rank])
            out = mine if c.in_place else Buffer.of(f"output of {rank}", [-1] * c.count)
            self.add(plan, [mine], [out], [combine(inputs)])

    def reduce(self) -> None:
        c = self.case
        inputs = [self.values(r, c.count) for r in range(c.world)]
        for rank in range(c.world):
            plan = collectives.reduce(rank, c.world, c.count, c.dtype, RedOpType.SUM, c.root, c.limits)
            mine = Buffer.of(f"input of {rank}", inputs[rank])
            out = mine if c.in_place else Buffer.of(f"output of {rank}", [-1] * c.count)
            at_root = rank == c.root
            self.add(plan, [mine], [out] if at_root else [], [combine(inputs)] if at_root else [])

    def reduce_scatter(self) -> None:
        c, counts = self.case, self.counts()
        inputs = [self.values(r, sum(counts)) for r in range(c.world)]
        starts = [*accumulate(counts, initial=0)]
        for rank in range(c.world):
            plan = collectives.reduce_scatter(rank, c.world, counts, c.dtype, RedOpType.SUM, c.listed, c.limits)
            mine = self.divide(f"input of {rank}", counts, inputs[rank], c.listed)
            own = self.piece(mine, counts, rank, c.listed)
            out = own if c.in_place else Buffer.of(f"output of {rank}", [-1] * counts[rank])
            self.add(plan, mine, [out], [combine(inputs)[starts[rank] : starts[rank + 1]]])

    def all_gather(self) -> None:
        c, counts = self.case, self.counts()
        inputs = [self.values(r, counts[r]) for r in range(c.world)]
        for rank in range(c.world):
            plan = collectives.all_gather(rank, c.world, counts, c.dtype, c.listed, c.limits)
            self.collect(plan, rank, counts, inputs)

    def gather(self) -> None:
        c, counts = self.case, self.counts()
        inputs = [self.values(r, counts[r]) for r in range(c.world)]
        for rank in range(c.world):
            plan = collectives.gather(rank, c.world, counts, c.dtype, c.root, c.listed, c.limits)
            if rank == c.root:
                self.collect(plan, rank, counts, inputs)
            else:
                self.add(plan, [Buffer.of(f"input of {rank}", inputs[rank])], [], [])

    def collect(self, plan: Plan, rank: int, counts: tuple[int, ...], inputs: list[np.ndarray]) -> None:
        listed = self.case.listed
        outs = self.divide(f"output of {rank}", counts, np.full(sum(counts), -1), listed)
        mine = Buffer.of(f"input of {rank}", inputs[rank])
        if self.case.in_place:
            mine = self.piece(outs, counts, rank, listed)
            mine.block.values[mine.start : mine.start + mine.length] = inputs[rank]
        self.add(plan, [mine], outs, inputs if listed else [np.concatenate(inputs)])

    def broadcast(self) -> None:
        c = self.case
        sent = self.values(c.root, c.count)
        for rank in range(c.world):
            plan = collectives.broadcast(rank, c.world, c.count, c.dtype, c.root, c.limits)
            out = Buffer.of(f"tensor of {rank}", sent if rank == c.root else [-1] * c.count)
            self.add(plan, [out] if rank == c.root else [], [out], [sent])

    def scatter(self) -> None:
        c, counts = self.case, self.counts()
        sent = self.values(c.root, sum(counts))
        starts = [*accumulate(counts, initial=0)]
        for rank in range(c.world):
            plan = collectives.scatter(rank, c.world, counts, c.dtype, c.root, c.listed, c.limits)
            out = Buffer.of(f"output of {rank}", [-1] * counts[rank])
            ins: list[Buffer] = []
            if rank == c.root:
                ins = self.divide(f"input of {rank}", counts, sent, c.listed)
                out = self.piece(ins, counts, rank, c.listed) if c.in_place else out
            self.add(plan, ins, [out], [sent[starts[rank] : starts[rank + 1]]])

    def all_to_all(self) -> None:
        c, world = self.case, self.case.world
        uneven = tuple(tuple(c.count * ((i + 2 * j) % 4) // 3 for j in range(world)) for i in range(world))
        even = ((c.count,) * world,) * world
        matrix = uneven if c.uneven else even
        for rank in range(world):
            plan = collectives.all_to_all(rank, world, matrix if c.uneven else c.count, c.dtype, c.listed, c.limits)
            pieces = [self.values(q, matrix[q][rank], rank) for q in range(world)]
            sent = np.concatenate([self.values(rank, matrix[rank][q], q) for q in range(world)])
            column = [row[rank] for row in matrix]
            ins = self.divide(f"input of {rank}", matrix[rank], sent, c.listed)
            outs = self.divide(f"output of {rank}", column, np.full(sum(column), -1), c.listed)
            self.add(plan, ins, outs, pieces if c.listed else [np.concatenate(pieces)])

    def barrier(self) -> None:
        for rank in range(self.case.world):
            self.add(collectives.barrier(rank, self.case.world), [], [], [])


def explain(cases: Sequence[Case], schedule: int | str) -> str:
    return f"schedule {schedule!r} of\n  " + "\n  ".join(map(str, cases))


def on_nodes(nodes: int, width: int, limits: Limits = TINY) -> Limits:
    where = tuple(rank // width for rank in range(nodes * width))
    return replace(limits, nodes=where, node_ranks=2, node_bytes=64, node_scatter_bytes=64)


BY_NODE = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
