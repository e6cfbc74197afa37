"""Tools that every family of collectives uses to cut tensors into pieces, pieces into chunks, and chunks into loops.

Vocabulary
    piece     what belongs to one rank: a slice of a tensor, or one tensor of a list
    shard     the part of a chunk that one rank combines for all
    chunk     how much of a piece moves in one turn
    turn      one round of a pipeline; turn ``i`` handles the ``i``-th chunk of every piece
    slot      room in a staging area for what one turn stages; turn ``i`` uses slot ``i % slots``
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from symcomm.collectives.plan import ALL, FIRST_SIGNAL, At, Copy, Loop, Plan, Reduce, Signal, Space, Step, Wait
from symcomm.errors import bad_argument

if TYPE_CHECKING:
    from symcomm.collectives.select import Limits

LINE = 64  # shards and slots start at cache lines; every element size divides it
SLOTS = 3  # of a stream, see below

Simple = Copy | Reduce | Signal | Wait
Sizes = Sequence[int]


@dataclass(frozen=True)
class Pieces:
    """A tensor cut into one piece per rank (``sizes`` in bytes), or with ``listed`` one tensor per rank."""

    sizes: tuple[int, ...]
    listed: bool = False

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes, initial=0))

    def at(self, space: Space, rank: int, chunk: int = 0) -> At:
        """Where rank's piece lies, moving on by ``chunk`` each turn."""
        return At(space, rank, 0, chunk) if self.listed else At(space, 0, self.starts[rank], chunk)


def copy(dst: At, src: At, nbytes: int) -> list[Simple]:
    """One copy, or none when there is nothing to copy."""
    return [Copy((dst,), src, nbytes)] if nbytes else []


def ring(world: int, rank: int) -> list[int]:
    """All ranks, from the one after ``rank`` round to ``rank`` itself: peers are not all read in the same order."""
    return [(rank + 1 + k) % world for k in range(world)]


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def shard(total: int, world: int, rank: int) -> tuple[int, int]:
    """(start, length) in bytes of rank's share of ``total`` bytes; starts lie at cache lines."""
    per = up(-(-total // world), LINE)
    start = min(rank * per, total)
    return start, min(per, total - start)


def chunk_size(longest: int, room: int, most: int, unit: int = LINE) -> int:
    """The chunk for pieces of up to ``longest`` bytes: at most ``most`` and at most ``room``, all turns about alike."""
    limit = max(min(most, room) // unit, 1) * unit
    if limit > room:
        raise bad_argument("plan", "stage_bytes", room, f"at least {limit} for each slot", "use a larger staging area")
    turns = max(-(-longest // limit), 1)
    return max(up(-(-longest // turns), unit), unit)


def stream_chunk(longest: int, limits: Limits, lanes: int = 1) -> int:
    """The chunk of a stream whose slots hold ``lanes`` chunks each; what fits into one turn needs only one slot."""
    at_once = min(limits.stage_bytes, limits.chunk_bytes) // lanes // LINE * LINE
    slots = 1 if longest <= at_once else SLOTS
    return chunk_size(longest, limits.stage_bytes // slots // lanes, limits.chunk_bytes // lanes)


# --- turns ---------------------------------------------------------------------------------------


def later(steps: Iterable[Simple], turns: int) -> list[Simple]:
    """The same steps, as they will be ``turns`` turns later."""

    def at(place: At) -> At:
        space, index, offset, stride, mod = place.space, place.index, place.offset, place.stride, place.mod
        if mod:
            return At(space, index, offset, stride, mod, (place.phase + turns) % mod)
        return At(space, index, offset + stride * turns, stride)

    return [_moved(step, turns, at, True) for step in steps]


def fixed(steps: Iterable[Simple], turn: int) -> list[Simple]:
    """The steps as they are in one turn, outside any loop."""
    return [_moved(step, turn, lambda p: At(p.space, p.index, p.position(turn)), False) for step in steps]


def _moved(step: Simple, turns: int, at: Callable[[At], At], looped: bool) -> Simple:
    if isinstance(step, Copy):
        return Copy(tuple(map(at, step.dst)), at(step.src), step.nbytes)
    if isinstance(step, Reduce):
        return Reduce(tuple(map(at, step.dst)), tuple(map(at, step.src)), step.nbytes)
    value, stride = step.value + step.stride * turns, step.stride if looped else 0
    return Signal(value, stride) if isinstance(step, Signal) else Wait(step.who, value, stride)


def pipeline(pieces: Sizes, chunk: int, body: Callable[[Sizes, Sizes | None], list[Simple]]) -> list[Step]:
    """``body(now, following)`` for every turn, as loops over the turns in which all sizes stay the same.

    ``now`` and ``following`` hold the bytes of each piece that this and the next turn handle; ``following`` is None
    in the last turn. The number of steps depends on how many different sizes there are, never on how large they are.
    """

    def sizes(turn: int) -> Sizes:
        return [min(max(n - turn * chunk, 0), chunk) for n in pieces]

    turns = -(-max(pieces, default=0) // chunk)
    changes = {turns - 1, *(turn for n in pieces for turn in (n // chunk, -(-n // chunk)))}
    edges = sorted(turn for turn in {0, *changes, *(turn - 1 for turn in changes)} if turn >= 0)
    steps: list[Step] = []
    for first, end in pairwise(edges):
        run = body(sizes(first), sizes(first + 1) if first + 1 < turns else None)
        if end - first == 1:
            steps += fixed(run, first)
        else:
            steps.append(Loop(end - first, tuple(later(run, first))))
    while steps and isinstance(steps[-1], Wait):
        steps.pop()  # a staged plan need not wait at its end, and this rank has nothing left to do
    return steps


def stream(
    plan: Plan,
    pieces: Sizes,
    chunk: int,
    put: Callable[[Sizes], list[Simple]],
    get: Callable[[Sizes], list[Simple]],
    partners: Sequence[int],
) -> None:
    """Stage the next chunk, say so, take this one: the pipeline of everything that peers read once.

    Turn i puts chunk i+1 and signals, then gets chunk i, then waits until its partners signalled i too. So when a
    rank puts chunk i+1 its partners have signalled i-1: they have taken chunk i-2, maybe not i-1. Hence three slots.
    """

    def turn(now: Sizes, following: Sizes | None) -> list[Simple]:
        if following is None:
            return get(now)
        ahead = [*later(put(following), 1), Signal(FIRST_SIGNAL, 1)]
        return [*ahead, *get(now), *(Wait(rank, FIRST_SIGNAL, 1) for rank in partners)]

    plan.head = list(fixed(put([min(n, chunk) for n in pieces]), 0))
    plan.staged = pipeline(pieces, chunk, turn)


def finish(meanwhile: Sequence[Step] = ()) -> list[Step]:
    """The end of a direct plan: I touch nobody's tensors any more; ``meanwhile``; nobody touches mine."""
    return [Signal(FIRST_SIGNAL), *meanwhile, Wait(ALL, FIRST_SIGNAL)]
