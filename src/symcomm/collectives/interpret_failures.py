"""Plays plans while a rank fails at some step, and proves that no rank succeeds with wrong values.

What the core does when an operation fails (`_core/sync/fail.c`, `_core/exec/exec.c`), step by step, in any schedule
    telling    the rank that fails tells one rank after the other: stop, and this operation is void. Then its caller
               gets the tensors back and scribbles over them at once. It may be killed before it has told all
    learning   a rank whose wait does not hold stops when it was told, or when it waits for a dead one; it then tells
               all others before it returns, as the first one did
    finishing  a rank that has done its last step checks whether the operation is void, and succeeds only if it is not
    pushing    a rank that writes into others' outputs checks that too before it begins, and says when it is through. A
               rank that fails does not return before all that have arrived are through. If one takes too long (it was
               stopped), the tensor gets new pages, and the other rank goes on writing to the old ones

What is checked, besides what ``interpret.run`` checks: every rank ends; and no rank writes into a tensor after its
owner's operation has returned with an error. The caller compares the values of the ranks that succeed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from symcomm.collectives.interpret import Blocked, Buffer, Machine, PlanError, Tensors, add, play_all
from symcomm.collectives.plan import MAX_SIGNALS, Copy, Loop, Need, Plan, Reduce, Space


@dataclass(frozen=True)
class Failure:
    """Rank ``rank`` fails at its ``step``-th step of an operation (counted from 1).

    ``killed``: it dies once it has told so many ranks. ``patient``: whether it waits until all ranks that have arrived
    are through; otherwise it gives up at once, and its tensor gets new pages.
    """

    rank: int
    step: int
    operation: int = 1
    killed: int | None = None
    patient: bool = True


@dataclass
class Outcome:
    """``results[operation][rank]``: the outputs as they were on success, None after a failure or no call."""

    results: list[list[list[Any] | None]]
    happened: bool  # False: the operation has fewer steps


@dataclass
class _Leaving(Blocked):
    """Waits until all ranks that have arrived at the operation are through."""

    seq: int = 0


def writes_outputs(plan: Plan) -> bool:
    """Whether the direct form writes into other ranks' tensors."""
    steps = [inner for step in plan.direct or [] for inner in (step.body if isinstance(step, Loop) else (step,))]
    places = [at for step in steps if isinstance(step, Copy | Reduce) for at in step.dst]
    return any(at.space == Space.PEER_OUT and at.index != plan.rank for at in places)


class _FailingMachine(Machine):
    """The same machine with a failure in it."""

    def prepare(self, failure: Failure) -> None:
        self.failure, self.happened, self.steps = failure, False, 0
        nothing = len(self.plans) + 1
        self.told = [False] * self.world  # the abort words
        self.void = [nothing] * self.world  # by rank: the first operation that is void
        self.through = [0] * self.world  # by rank: the last operation in which it no longer writes
        self.dead = [False] * self.world
        self.ok = [[False] * self.world for _ in self.plans]
        self.returned: dict[int, int] = {}  # blocks whose owner's operation has returned with an error, and the owner

    # one rank ------------------------------------------------------------------------------------

    def play(self, rank: int) -> Iterator[Blocked | None]:
        for seq in range(1, len(self.plans) + 1):
            self.ok[seq - 1][rank] = yield from self.attempt(rank, seq)
            self.through[rank] = seq
            if not self.ok[seq - 1][rank]:
                yield from self.abandon(rank, seq)
                return
            self.give_back(rank, seq)

    def attempt(self, rank: int, seq: int) -> Generator[Blocked | None, None, bool]:
        """run_locked(): whether the operation succeeds."""
        if self.told[rank]:
            return False
        yield None  # it may be stopped between that look and its arrival
        for wait in self.operation(rank, seq):
            if self.is_due(rank, seq):
                return False
            yield wait
            if not super().ready(rank, wait):
                return False
        if self.is_due(rank, seq):
            return False
        yield None
        return not self.is_void(rank, seq)

    def is_due(self, rank: int, seq: int) -> bool:
        if (rank, seq) == (self.failure.rank, self.failure.operation):
            self.steps += 1
            self.happened = self.happened or self.steps == self.failure.step
            return self.steps == self.failure.step
        return False

    def block(self, rank: int, seq: int, steps: Any, part: str) -> Iterator[Blocked | None]:
        if part == "direct" and writes_outputs(self.plans[seq - 1][rank]):
            if self.is_void(rank, seq):
                yield Blocked([(rank, len(self.plans) * MAX_SIGNALS * 2)])  # never holds: the rank was told
            yield None  # it may be stopped between its look and its first write
        yield from super().block(rank, seq, steps, part)

    def is_void(self, rank: int, seq: int) -> bool:
        """sync_is_void()"""
        return self.void[rank] <= seq

    def abandon(self, rank: int, seq: int) -> Iterator[Blocked | None]:
        """sync_void() and abandon(): tell all ranks, myself first, then give the caller its tensors back."""
        self.at[rank] = (f"failure of operation {seq}",)
        for n in range(self.world):
            if rank == self.failure.rank and n == self.failure.killed:
                self.dead[rank] = True
                return
            self.tell((rank + n) % self.world, seq)
            yield None
        isolated = yield from self.recover(rank, seq)
        for buffer in self.tensors[seq - 1][rank].all:
            if id(buffer.block) not in isolated:
                self.returned[id(buffer.block)] = rank
                self.scribble(buffer, seq)

    def recover(self, rank: int, seq: int) -> Generator[Blocked | None, None, frozenset[int]]:
        """Wait until no rank writes into my output any more. Returns the blocks that got new pages instead."""
        outputs = self.tensors[seq - 1][rank].outputs if Need.OUTPUT & self.tensors[seq - 1][rank].symmetric else ()
        if not outputs or not any(map(writes_outputs, self.plans[seq - 1])):
            return frozenset()
        yield _Leaving([], seq)
        # later writes go to the old ones, which no rank reads
        return frozenset(id(buffer.block) for buffer in outputs if self.is_written(rank, seq))

    def tell(self, peer: int, seq: int) -> None:
        self.told[peer] = True
        self.void[peer] = min(self.void[peer], seq)

    def is_written(self, rank: int, seq: int) -> bool:
        """Whether a living rank has arrived and is not through."""
        others = [r for r in range(self.world) if r != rank and not self.dead[r]]
        arrived = [r for r in others if self.history[r][0] and self.history[r][0][-1] >= seq * MAX_SIGNALS]
        return any(self.through[r] < seq for r in arrived)

    def ready(self, rank: int, wait: Blocked | None) -> bool:
        if isinstance(wait, _Leaving):
            return not self.failure.patient or not self.is_written(rank, wait.seq)
        if super().ready(rank, wait) or self.told[rank]:
            return True
        assert wait is not None
        return any(
            self.dead[p] and not super(_FailingMachine, self).ready(rank, Blocked([(p, t)])) for p, t in wait.wants
        )

    # memory --------------------------------------------------------------------------------------

    def write(self, rank: int, buffer: Buffer) -> None:
        owner = self.returned.get(id(buffer.block), rank)
        if owner != rank:
            raise PlanError(
                f"rank {rank}, {self.where(rank)}: writes {buffer.block.name} after the operation of rank {owner}, "
                "whose tensor it is, has returned with an error"
            )
        super().write(rank, buffer)


def run_failing(
    plans: Sequence[Sequence[Plan]],
    tensors: Sequence[Sequence[Tensors]],
    failure: Failure,
    schedule: int | str = 0,
    stage_bytes: int = 2 << 20,
    reduce: Callable[[Sequence[Any]], Any] = add,
) -> Outcome:
    """Like ``interpret.run``, with a failure."""
    machine = _FailingMachine(plans, tensors, stage_bytes, reduce)
    machine.prepare(failure)
    play_all(machine, schedule)
    results = [
        [outputs if ok else None for outputs, ok in zip(row, oks, strict=True)]
        for row, oks in zip(machine.results, machine.ok, strict=True)
    ]
    return Outcome(results, machine.happened)
