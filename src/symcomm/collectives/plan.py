"""A plan: the short program that one rank runs for one collective.

Vocabulary
    space     where bytes live: my input, my output, rank r's staging area, rank r's symmetric tensor
    At        a place in a space; inside a loop it moves by ``stride`` each turn (modulo ``mod`` slots)
    step      copy, reduce, signal, wait, or a loop over chunks
    signal    "I have come so far": a number that only grows, published to all ranks of the group
    wait      until one rank, or all the others, have signalled that far

How a plan is run (by the C core, and by the interpreter that proves it)::

    head                      unless my tensors already lie where the peers can read them
    arrive                    publish sequence number, signature and where my tensors live
    wait for all arrivals     compare signatures: a mismatch ends here, on every rank
    direct                    if every rank that must have symmetric tensors has them; else
    staged                    (when some rank skipped its head: it runs it now, and all synchronise once)

Nobody passes "wait for all arrivals" before everybody has finished the operation before. Staging areas have two
halves, used in turn, so an operation may write its half before it arrives and need not wait at its end.
A direct plan lets peers touch user tensors, so it must end with a signal and a wait.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

ALL = -1  # "every other rank", in Wait.who
FIRST_SIGNAL = 2  # bodies number their signals from here; lower ones belong to the executor
MAX_SIGNALS = 1 << 24  # progress = sequence number * MAX_SIGNALS + signal, in 64 bits


class Space(enum.IntEnum):
    """Where bytes live. IN and OUT are indexed by buffer, the others by rank."""

    IN = 0
    OUT = 1
    STAGE = 2  # this operation's half of rank r's staging area
    PEER_IN = 3  # rank r's input tensor; only in direct plans
    PEER_OUT = 4  # rank r's output tensor; only in direct plans


class Collective(enum.IntEnum):
    """What is being done; part of the signature that ranks compare."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    REDUCE = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    CUSTOM = 9  # a user's own plan, see ProcessGroup.run_plan

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class At:
    """A place: ``offset + stride * turn`` bytes into a space; with ``mod``, turn counts ``(turn + phase) % mod``."""

    space: Space
    index: int = 0
    offset: int = 0
    stride: int = 0
    mod: int = 0
    phase: int = 0

    def position(self, turn: int) -> int:
        return self.offset + self.stride * ((turn + self.phase) % self.mod if self.mod else turn)


@dataclass(frozen=True)
class Copy:
    """``nbytes`` from ``src`` to every place of ``dst``; ``last`` replaces ``nbytes`` in a loop's last turn."""

    dst: tuple[At, ...]
    src: At
    nbytes: int
    last: int | None = None


@dataclass(frozen=True)
class Reduce:
    """Combine ``src`` in the order given (always rank order) into every place of ``dst``."""

    dst: tuple[At, ...]
    src: tuple[At, ...]
    nbytes: int
    last: int | None = None


@dataclass(frozen=True)
class Signal:
    """Publish progress ``value + stride * turn``; ranks that wait for it see everything done before."""

    value: int
    stride: int = 0


@dataclass(frozen=True)
class Wait:
    """Wait until rank ``who`` (or ALL others) has signalled at least ``value + stride * turn``."""

    who: int
    value: int
    stride: int = 0


@dataclass(frozen=True)
class Loop:
    """``turns`` times the steps of ``body``. Loops do not nest."""

    turns: int
    body: tuple[Copy | Reduce | Signal | Wait, ...]


Step = Copy | Reduce | Signal | Wait | Loop


class Need(enum.IntFlag):
    """Which of a rank's tensors must be symmetric for the direct plan to be taken."""

    NOTHING = 0
    INPUT = 1
    OUTPUT = 2


# Names of plans; records hold their numbers.
ALGORITHMS = ("", "alone", "arrival", "one-shot", "two-shot", "streamed", "by-node")


@dataclass
class Plan:
    """What one rank does for one collective, and the signature by which ranks know they mean the same one."""

    collective: Collective
    rank: int
    world: int
    count: int  # elements, as the caller counts them; compared between ranks
    dtype: int = 0  # DType; compared
    redop: int = 0  # RedOpType; compared
    root: int = 0  # compared
    name: str = ""  # the algorithm, for people
    why: str = ""  # why it was chosen, for SYMCOMM_DEBUG=plan
    head: list[Step] = field(default_factory=list)
    staged: list[Step] = field(default_factory=list)
    direct: list[Step] | None = None
    needs: Sequence[Need] = ()  # per rank; looked at only when there is a direct plan
    piece_bytes: int = 0  # of each tensor, when the input is a list that is one tensor if they lie one after another
    attach_bytes: int = 0  # of each piece that the direct part may read out of a peer's memory, not symmetric; 0: none
    attach_large: bool = True  # also for tensors that do not fit in the cache

    def encode(self) -> bytes:
        """The plan as the C core reads it: 64-bit integers, see ``_core/exec/plan.h``."""
        coder = _Encoder()
        parts = [coder.block(part) for part in (self.head, self.staged, self.direct or [])]
        needs = list(self.needs) if self.direct is not None else [Need.NOTHING] * self.world
        head = [
            self.world, self.rank, self.collective, self.dtype, self.redop, self.root, self.count,
            1 if self.direct is not None else 0, *map(len, parts), len(coder.places), self.piece_bytes,
            ALGORITHMS.index(self.name), self.attach_bytes, self.attach_large,
        ]  # fmt: skip
        ints = array("q", [*head, *needs])
        for part in parts:
            for row in part:
                ints.extend(row)
        for place in coder.places:
            ints.extend(place)
        return ints.tobytes()


class _Encoder:
    """Turns steps into rows of integers, and collects the places they name."""

    def __init__(self) -> None:
        self.places: list[tuple[int, ...]] = []

    def block(self, steps: Sequence[Step]) -> list[list[int]]:
        rows: list[list[int]] = []
        for step in steps:
            if isinstance(step, Loop):
                rows.append([4, 0, 0, 0, 0, 0, 0, 0, 0, 0, step.turns, len(step.body)])
                rows += [self.row(inner) for inner in step.body]
            else:
                rows.append(self.row(step))
        return rows

    def row(self, step: Copy | Reduce | Signal | Wait) -> list[int]:
        if isinstance(step, Signal):
            return [2, 0, 0, 0, 0, 0, 0, step.value, step.stride, 0, 0, 0]
        if isinstance(step, Wait):
            return [3, 0, 0, 0, 0, 0, 0, step.value, step.stride, step.who, 0, 0]
        src = step.src if isinstance(step, Reduce) else (step.src,)
        first_dst = self.add(step.dst)
        first_src = self.add(src)
        last = step.nbytes if step.last is None else step.last
        code = 1 if isinstance(step, Reduce) else 0
        return [code, first_dst, len(step.dst), first_src, len(src), step.nbytes, last, 0, 0, 0, 0, 0]

    def add(self, places: tuple[At, ...]) -> int:
        first = len(self.places)
        self.places += [(p.space, p.index, p.offset, p.stride, p.mod, p.phase) for p in places]
        return first
