"""A plan: the short program that one rank runs for one collective.

Vocabulary
    space     where bytes live: my input, my output, rank r's staging area, rank r's symmetric tensor
    At        a place in a space; inside a loop it moves by ``stride`` each turn (modulo ``mod`` slots)
    step      copy, reduce, signal, wait, or a loop over chunks
    signal    "I have come this far": a number that only grows, published to all ranks of the group
    wait      until one rank, or all others, have signalled that far

How a plan is run (by the C core, and by the interpreter that proves it)::

    head                      unless my tensors already lie where the peers can read them
    arrive                    publish sequence number, signature and where my tensors live
    wait for all arrivals     compare signatures: a mismatch ends here, on every rank
    direct                    if every rank that must have symmetric tensors has them; else
    staged                    (if some rank skipped its head, it runs it now, and all synchronise once)

No rank passes "wait for all arrivals" before all have finished the operation before. Staging areas have two halves,
used in turn, so an operation may write its half before it arrives, and need not wait at its end. A direct plan lets
peers touch user tensors, so it must end with a signal and a wait.
"""

from __future__ import annotations

import enum
from array import array
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from symcomm._core import native

ALL = -1  # "every other rank", in Wait.who
FIRST_SIGNAL = native.PLAN_MIXED_SIGNAL + 1  # bodies number their signals from here; lower ones are the executor's
MAX_SIGNALS = 1 << native.PLAN_SIGNAL_BITS  # progress = sequence number * MAX_SIGNALS + signal, in 64 bits


class Space(enum.IntEnum):
    """Where bytes live. IN and OUT are indexed by buffer, the others by rank."""

    IN = native.SPACE_IN
    OUT = native.SPACE_OUT
    STAGE = native.SPACE_STAGE  # this operation's half of rank r's staging area
    PEER_IN = native.SPACE_PEER_IN  # rank r's input tensor; only in direct plans
    PEER_OUT = native.SPACE_PEER_OUT  # rank r's output tensor; only in direct plans


class Collective(enum.IntEnum):
    """The kind of operation; part of the signature that ranks compare."""

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
    """Combine ``src``, in the order given (always rank order), as a tree (``TREE``) into every place of ``dst``."""

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
    INPUT = native.NEED_INPUT
    OUTPUT = native.NEED_OUTPUT


# Names of plans; records hold their numbers.
ALGORITHMS = ("", "alone", "arrival", "one-shot", "two-shot", "streamed", "by-node")


@dataclass
class Plan:
    """What one rank does for one collective, and the signature by which ranks know that they mean the same one."""

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
    needs: Sequence[Need] = ()  # per rank; only used if there is a direct plan
    # Of each tensor of an input list (of the largest, if they differ), which counts as one tensor if they lie one after
    # another. A step reads a peer's k-th piece at k times so many bytes.
    piece_bytes: int = 0
    apart: bool = False  # those tensors may lie apart: no step of the direct part reads two of a peer's
    attach_bytes: int = 0  # of each piece that the direct part may read out of a peer's memory, not symmetric; 0: none
    attach_large: bool = True  # also for tensors that do not fit in the cache

    def encode(self) -> bytes:
        """The plan as the C core reads it: 64-bit integers, see ``_core/exec/plan.h``."""
        coder = _Encoder()
        parts = [coder.block(part) for part in (self.head, self.staged, self.direct or [])]
        needs = list(self.needs) if self.direct is not None else [Need.NOTHING] * self.world
        head = _Header(
            world=self.world, rank=self.rank, collective=self.collective, dtype=self.dtype, redop=self.redop,
            root=self.root, count=self.count, has_direct=self.direct is not None, n_head=len(parts[0]),
            n_staged=len(parts[1]), n_direct=len(parts[2]), n_places=len(coder.places), piece_bytes=self.piece_bytes,
            algorithm=ALGORITHMS.index(self.name), attach_bytes=self.attach_bytes, attach_large=self.attach_large,
            apart=self.apart,
        )  # fmt: skip
        ints = array("q", [*head, *needs])
        for row in (*parts[0], *parts[1], *parts[2], *coder.places):
            ints.extend(row)
        return ints.tobytes()


def _row_of(name: str, fields: str) -> Any:
    """A kind of row in an encoded plan. Fields that a row does not name are 0."""
    make: Any = namedtuple  # mypy cannot know its fields
    return make(name, fields, defaults=[0] * len(fields.split()))


_Header = _row_of("_Header", native.PLAN_HEADER)
_Row = _row_of("_Row", native.PLAN_STEP)
_place = attrgetter(*native.PLAN_PLACE.split())  # an At has these fields too


class _Encoder:
    """Turns steps into rows of integers, and collects the places they name."""

    def __init__(self) -> None:
        self.places: list[tuple[int, ...]] = []

    def block(self, steps: Sequence[Step]) -> list[tuple[int, ...]]:
        rows: list[tuple[int, ...]] = []
        for step in steps:
            if isinstance(step, Loop):
                rows.append(_Row(op=native.OP_LOOP, turns=step.turns, body=len(step.body)))
                rows += [self.row(inner) for inner in step.body]
            else:
                rows.append(self.row(step))
        return rows

    def row(self, step: Copy | Reduce | Signal | Wait) -> tuple[int, ...]:
        if isinstance(step, Signal):
            return _Row(op=native.OP_SIGNAL, value=step.value, value_stride=step.stride)
        if isinstance(step, Wait):
            return _Row(op=native.OP_WAIT, value=step.value, value_stride=step.stride, who=step.who)
        src = step.src if isinstance(step, Reduce) else (step.src,)
        return _Row(
            op=native.OP_REDUCE if isinstance(step, Reduce) else native.OP_COPY,
            dst=self.add(step.dst),
            n_dst=len(step.dst),
            src=self.add(src),
            n_src=len(src),
            nbytes=step.nbytes,
            last=step.nbytes if step.last is None else step.last,
        )

    def add(self, places: tuple[At, ...]) -> int:
        first = len(self.places)
        self.places += map(_place, places)
        return first
