"""Tools for all families of collectives: cut tensors into pieces, pieces into chunks, and turns into loops.

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

from symcomm.collectives.limits import LINE, SLOTS, Limits
from symcomm.collectives.plan import ALL, FIRST_SIGNAL, At, Copy, Loop, Plan, Reduce, Signal, Space, Step, Wait
from symcomm.errors import bad_argument
from symcomm.types import ITEMSIZE

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

    def at(self, space: Space, rank: int, cut: Cut | None = None) -> At:
        """Where rank's piece is; with ``cut``, it moves on by a chunk each turn."""
        stride = cut.chunk(self.sizes[rank]) if cut else 0
        return At(space, rank, 0, stride) if self.listed else At(space, 0, self.starts[rank], stride)


def start_at_peer(plan: Plan, sizes: Sizes, q: int) -> int:
    """Where piece q of a peer's input begins, in one tensor or in a list (``Plan.piece_bytes``)."""
    return q * plan.piece_bytes if plan.piece_bytes else sum(sizes[:q])


def starts_of(sizes: Sizes) -> list[int]:
    """Where each of these begins if they are consecutive."""
    return [0, *accumulate(sizes)][:-1]


def copy(dst: At, src: At, nbytes: int) -> list[Simple]:
    """One copy, or none when there is nothing to copy."""
    return [Copy((dst,), src, nbytes)] if nbytes else []


def ring(world: int, rank: int) -> list[int]:
    """All ranks, from the one after ``rank`` round to ``rank`` itself, so that ranks read peers in different orders."""
    return [(rank + 1 + k) % world for k in range(world)]


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def shard(total: int, world: int, rank: int) -> tuple[int, int]:
    """(start, length) in bytes of rank's share of ``total`` bytes; shares start at cache lines."""
    per = up(-(-total // world), LINE)
    start = min(rank * per, total)
    return start, min(per, total - start)


# --- chunks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """Pieces cut into chunks so that all pieces, long and short, take about the same number of turns."""

    turns: int
    longest: int
    item: int  # bytes of an element

    def chunk(self, piece: int) -> int:
        """Bytes that one turn moves: whole cache lines, unless rounding up would end a piece several turns early."""
        if not piece:
            return 0
        lines = piece == self.longest or piece > LINE * self.turns**2
        return up(-(-piece // self.turns), LINE if lines else self.item)


class Lanes:
    """A slot of one rank's staging area: room for a chunk of each piece it stages, each in its own cache lines."""

    def __init__(self, owner: int, pieces: Sizes, cut: Cut, skip: int = -1):
        widths = (0 if q == skip else up(cut.chunk(n), LINE) for q, n in enumerate(pieces))
        *self.starts, self.slot = accumulate(widths, initial=0)
        self.owner = owner

    def at(self, lane: int = 0) -> At:
        return At(Space.STAGE, self.owner, self.starts[lane], self.slot, SLOTS)


def stage(
    plan: Plan, staged: Sequence[tuple[int, Sizes]], limits: Limits, skip_own: bool = False
) -> tuple[Cut, list[Lanes]]:
    """Cut the pieces that ranks stage, given as (rank, pieces), and place each rank's chunks.

    Pieces that fit at once take one turn and one slot. Otherwise this takes the fewest turns whose slots fit in the
    staging area. With ``skip_own``, pieces are numbered by reader, and a rank does not stage the piece that it reads
    itself.
    """
    longest = max(n for _, pieces in staged for n in pieces)
    chunk, room = up(longest, LINE), min(limits.stage_bytes, limits.chunk_bytes)
    while True:
        cut = Cut(-(-longest // chunk) if longest else 0, longest, ITEMSIZE[plan.dtype])
        lanes = [Lanes(rank, pieces, cut, rank if skip_own else -1) for rank, pieces in staged]
        widest = max(lane.slot for lane in lanes)
        if widest <= room:
            return cut, lanes
        room = limits.stage_bytes // SLOTS
        if chunk == LINE and widest <= room:  # more than chunk_bytes, but no smaller one exists
            return cut, lanes
        if chunk == LINE:
            raise too_small(limits.stage_bytes, widest * SLOTS)
        room = min(room, limits.chunk_bytes)
        chunk = max(min(chunk - LINE, chunk * room // widest // LINE * LINE), LINE)


def too_small(stage_bytes: int, least: int) -> Exception:
    return bad_argument("plan", "stage_bytes", stage_bytes, f"at least {least}", "use a larger staging area")


# --- turns ---------------------------------------------------------------------------------------


def later(steps: Iterable[Simple], turns: int) -> list[Simple]:
    """The same steps, ``turns`` turns later."""

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


Body = Callable[[Sizes, Sizes | None], list[Simple]]


def pipeline(pieces: Sizes, chunks: Sizes, turns: int, body: Body, delays: Sizes | None = None) -> list[Step]:
    """``body(now, following)`` for every turn, as loops over the turns in which all sizes stay the same.

    ``now`` and ``following`` hold the bytes of each piece that this and the next turn handle; ``following`` is None
    in the last turn. The number of steps depends on how many different sizes there are, never on how large they are.
    ``delays``: the turn in which each piece's first chunk is handled, where that is not the first.
    """
    cuts = list(zip(pieces, chunks, delays or [0] * len(pieces), strict=True))

    def sizes(turn: int) -> Sizes:
        return [min(max(n - (turn - d) * chunk, 0), chunk) if turn >= d else 0 for n, chunk, d in cuts]

    ends = {turn + d for n, chunk, d in cuts if n for turn in (0, n // chunk, -(-n // chunk))}
    changes = {turns, turns - 1, *ends}
    edges = sorted(turn for turn in {0, *changes, *(turn - 1 for turn in changes)} if 0 <= turn <= turns)
    steps: list[Step] = []
    for first, end in pairwise(edges):
        run = body(sizes(first), sizes(first + 1) if first + 1 < turns else None)
        if end - first == 1:
            steps += fixed(run, first)
        else:
            steps.append(Loop(end - first, tuple(later(run, first))))
    while steps and isinstance(steps[-1], Wait):
        steps.pop()  # a staged plan need not wait at its end, where this rank is done
    return steps


def stream(
    plan: Plan,
    cut: Cut,
    pieces: Sizes,
    put: Callable[[Sizes], list[Simple]],
    get: Callable[[Sizes], list[Simple]],
    partners: Sequence[int],
    name: str = "streamed",
) -> None:
    """Stage the next chunk, signal, take this one: the pipeline for all that peers read once.

    Turn i puts chunk i+1 and signals, then gets chunk i, then waits until its partners signalled i too. So when a
    rank puts chunk i+1 its partners have signalled i-1: they have taken chunk i-2, maybe not i-1. Hence three slots.
    """

    def turn(now: Sizes, following: Sizes | None) -> list[Simple]:
        if following is None:
            return get(now)
        ahead = [*later(put(following), 1), Signal(FIRST_SIGNAL, 1)]
        return [*ahead, *get(now), *(Wait(rank, FIRST_SIGNAL, 1) for rank in partners)]

    chunks = [cut.chunk(n) for n in pieces]
    plan.head = list(fixed(put([min(n, chunk) for n, chunk in zip(pieces, chunks, strict=True)]), 0))
    plan.staged = pipeline(pieces, chunks, cut.turns, turn)
    plan.name = name


def finish(meanwhile: Sequence[Step] = (), signal: int = FIRST_SIGNAL) -> list[Step]:
    """The end of a direct plan: signal that I no longer touch peers' tensors, do the steps of ``meanwhile``, and wait
    until no peer touches mine."""
    return [Signal(signal), *meanwhile, Wait(ALL, signal)]
