"""all_reduce: every rank ends with the combination, as the tree over ranks, of every rank's tensor.

one-shot   every rank reads every peer's staged tensor and combines all of it, a chunk in each turn
two-shot   rank k combines the k-th shard of a chunk and all collect the shards; each byte is combined once
direct     two-shot straight on symmetric tensors: rank k writes its shard into every peer's output

A rank reads its own contribution from its input; it never stages it for itself. Input and output may be the same
tensor: a part of the output is written only after its chunk was staged. ``reduce`` is the same with the root as the
only collector.
"""

from __future__ import annotations

from symcomm.collectives.chunks import Simple, Sizes, copy, finish, fixed, later, pipeline, ring, shard, stage, stream
from symcomm.collectives.limits import Limits
from symcomm.collectives.nodes import chunk_in
from symcomm.collectives.plan import ALL, FIRST_SIGNAL, At, Need, Plan, Reduce, Signal, Space, Step, Wait

IN, OUT, STAGE, PEER_IN, PEER_OUT = Space.IN, Space.OUT, Space.STAGE, Space.PEER_IN, Space.PEER_OUT
TWO_SHOT_SLOTS = 2


def one_shot(plan: Plan, nbytes: int, limits: Limits, root: int | None = None) -> None:
    """Each rank that wants the result (all of them, or the root) reads every peer's chunk and combines all of it."""
    me, world = plan.rank, plan.world
    cut, lanes = stage(plan, [(rank, [nbytes]) for rank in range(world)], limits)
    chunk = cut.chunk(nbytes)
    mine = At(IN, 0, 0, chunk)

    def put(now: Sizes) -> list[Simple]:
        return copy(lanes[me].at(), mine, now[0]) if me != root else []

    def get(now: Sizes) -> list[Simple]:
        sources = tuple(mine if rank == me else lanes[rank].at() for rank in range(world))
        return [Reduce((At(OUT, 0, 0, chunk),), sources, now[0])] if root in (None, me) else []

    stream(plan, cut, [nbytes], put, get, [ALL if root is None or root == me else root], "one-shot")


def two_shot(plan: Plan, nbytes: int, limits: Limits, root: int | None = None) -> None:
    """Rank k combines shard k of every chunk; then all ranks, or the root, collect the shards.

    Turn i: combine my shard of chunk i, stage chunk i+1, signal i, wait for all to signal i, collect chunk i. Before a
    rank stages chunk i+1, all have signalled i-1 and so have combined chunk i-1: two slots for staged chunks. Before it
    writes shard i, all have signalled i-1 and so have collected chunk i-2: two slots for combined shards.
    """
    me, world = plan.rank, plan.world
    room = limits.stage_bytes * world // (world + 1) // TWO_SHOT_SLOTS  # a slot is a chunk and one shard of a chunk
    chunk = chunk_in(room, nbytes, limits, world, (world + 1) * TWO_SHOT_SLOTS)
    collecting = root in (None, me)

    def staged(rank: int, start: int) -> At:
        return At(STAGE, rank, start, chunk, TWO_SHOT_SLOTS)

    def combined(rank: int) -> At:
        return At(STAGE, rank, TWO_SHOT_SLOTS * chunk, chunk // world, TWO_SHOT_SLOTS)

    def put(now: Sizes) -> list[Simple]:
        start, length = shard(now[0], world, me)
        end = start + length
        before = copy(staged(me, 0), At(IN, 0, 0, chunk), start)
        return before + copy(staged(me, end), At(IN, 0, end, chunk), now[0] - end)

    def combine(now: Sizes) -> list[Simple]:
        start, length = shard(now[0], world, me)
        sources = tuple(At(IN, 0, start, chunk) if r == me else staged(r, start) for r in range(world))
        outs = (At(OUT, 0, start, chunk),) if collecting else ()
        shown = (combined(me),) if root != me else ()
        return [Reduce(outs + shown, sources, length)] if length else []

    def collect(now: Sizes) -> list[Simple]:
        steps: list[Simple] = []
        for rank in ring(world, me)[:-1]:
            start, length = shard(now[0], world, rank)
            steps += copy(At(OUT, 0, start, chunk), combined(rank), length)
        return steps

    def turn(now: Sizes, following: Sizes | None) -> list[Simple]:
        steps = combine(now) + (later(put(following), 1) if following else [])
        if following or root != me:  # in the last turn no rank waits for the root
            steps.append(Signal(FIRST_SIGNAL, 1))
        return [*steps, Wait(ALL, FIRST_SIGNAL, 1), *(collect(now) if collecting else [])]

    plan.head = list(fixed(put([min(nbytes, chunk)]), 0))
    plan.staged = pipeline([nbytes], [chunk], -(-nbytes // chunk), turn)
    plan.name = "two-shot"


def direct_all_reduce(plan: Plan, nbytes: int) -> tuple[list[Step], list[Need]]:
    """Two-shot straight on the tensors: rank k writes its shard into all outputs, its own first."""
    outputs = [plan.rank, *ring(plan.world, plan.rank)[:-1]]
    return direct_two_shot(plan, nbytes, outputs), [Need.INPUT | Need.OUTPUT] * plan.world


def direct_two_shot(plan: Plan, nbytes: int, outputs: list[int]) -> list[Step]:
    """Rank k combines shard k of all inputs into some outputs. Only rank k touches shard k, so in place is safe."""
    start, length = shard(nbytes, plan.world, plan.rank)
    if not length:
        return finish()
    ins = tuple(At(PEER_IN, rank, start) for rank in range(plan.world))
    return [Reduce(tuple(At(PEER_OUT, rank, start) for rank in outputs), ins, length), *finish()]
