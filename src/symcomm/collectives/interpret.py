"""Plays all ranks of one or several operations in one process, and proves that their plans are right.

What is checked, whatever the schedule
    values     the caller compares what ``run`` returns with what the collective means
    deadlock   no rank can move: the error says which rank waits for which
    order      every read comes after the write it reads, and every write after the accesses it overwrites, *because of*
               arrivals, signals and waits. Vector clocks decide that, so a race is found even if luck hides it.
    bounds     no access beyond a tensor or a staging half; no peer's tensor in a staged plan or when not symmetric

The machine moves whole elements: a ``Block`` holds one integer per element, and byte counts must come out even.
Print a plan with ``python -m symcomm.collectives.interpret all_reduce 2 100000``.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from symcomm.collectives.plan import ALL, MAX_SIGNALS, At, Copy, Loop, Need, Plan, Reduce, Signal, Space, Step, Wait
from symcomm.errors import InternalError
from symcomm.types import ITEMSIZE


class PlanError(InternalError):
    """A plan does something that is forbidden."""


class RaceError(PlanError):
    """Two accesses to the same bytes, at least one a write, that nothing orders."""


class DeadlockError(PlanError):
    """Every rank that is not done waits for another."""


# --- memory --------------------------------------------------------------------------------------


class Block:
    """Elements that lie together in memory, and which rank touched each of them last, by vector clock."""

    def __init__(self, name: str, values: Any):
        import numpy as np

        self.name = name
        self.values = np.array(values, dtype=np.int64)
        self.writer: Any = None
        self.written: Any = None
        self.read: Any = None

    def reset(self, world: int) -> None:
        """Forget which ranks touched what. Writer ``world`` stands for no rank."""
        import numpy as np

        self.writer = np.full(len(self.values), world, dtype=np.int64)
        self.written = np.zeros(len(self.values), dtype=np.int64)
        self.read = np.zeros((world, len(self.values)), dtype=np.int64)


@dataclass(frozen=True)
class Buffer:
    """Part of a block: one tensor of a caller. In place, two buffers share a block."""

    block: Block
    start: int
    length: int

    @staticmethod
    def of(name: str, values: Sequence[int]) -> Buffer:
        return Buffer(Block(name, values), 0, len(values))


@dataclass(frozen=True)
class Tensors:
    """What one rank passes to one operation."""

    inputs: Sequence[Buffer] = ()
    outputs: Sequence[Buffer] = ()
    symmetric: Need = Need.NOTHING

    @property
    def all(self) -> Sequence[Buffer]:
        return (*self.inputs, *self.outputs)


def add(sources: Sequence[Any]) -> Any:
    """The default reduction."""
    return sum(sources[1:], start=sources[0])


# --- running -------------------------------------------------------------------------------------


@dataclass
class Blocked:
    """Why a rank does not move: it waits until these ranks have come this far."""

    wants: list[tuple[int, int]]


@dataclass
class Machine:
    """All ranks, their memory and their clocks."""

    plans: Sequence[Sequence[Plan]]  # by operation, by rank
    tensors: Sequence[Sequence[Tensors]]
    stage_bytes: int
    reduce: Callable[[Sequence[Any]], Any]
    world: int = field(init=False)
    results: list[list[list[Any]]] = field(init=False)

    def __post_init__(self) -> None:
        import numpy as np

        self.world = world = len(self.plans[0])
        self.clock: Any = np.zeros((world, world + 1), dtype=np.int64)  # the last column belongs to no rank: always 0
        for rank in range(world):
            self.clock[rank, rank] = 1
        self.history: list[tuple[list[int], list[Any]]] = [([], []) for _ in range(world)]  # progress, clock then
        self.results = [[[] for _ in range(world)] for _ in self.plans]
        self.at: list[tuple[Any, ...]] = [()] * world  # what each rank is doing, for errors
        self.stages: dict[tuple[int, int, int], Buffer] = {}  # by rank, half, element size
        for operation in self.tensors:
            for tensors in operation:
                for buffer in tensors.all:
                    buffer.block.reset(world)

    # one rank ------------------------------------------------------------------------------------

    def play(self, rank: int) -> Iterator[Blocked | None]:
        """Play a rank, one step at a time. Yields None if it could go on, or what it waits for."""
        for seq in range(1, len(self.plans) + 1):
            yield from self.operation(rank, seq)
            self.give_back(rank, seq)

    def operation(self, rank: int, seq: int) -> Iterator[Blocked | None]:
        plan = self.plans[seq - 1][rank]
        self.at[rank] = (f"operation {seq}",)
        self.own(rank, seq)
        skipped = self.skips_head(rank, seq)
        if not skipped:
            yield from self.block(rank, seq, plan.head, "head")
        self.publish(rank, seq, 0)
        yield from self.wait(rank, seq, ALL, 0)
        self.compare(rank, seq)
        if self.is_direct(seq):
            assert plan.direct is not None
            yield from self.block(rank, seq, plan.direct, "direct")
        else:
            if any(self.skips_head(r, seq) for r in range(self.world)):
                if skipped:
                    yield from self.block(rank, seq, plan.head, "late head")
                self.publish(rank, seq, 1)
                yield from self.wait(rank, seq, ALL, 1)
            yield from self.block(rank, seq, plan.staged, "staged")

    def give_back(self, rank: int, seq: int) -> None:
        """The operation has succeeded: the caller may do anything with its tensors."""
        self.at[rank] = (f"return from operation {seq}",)
        self.results[seq - 1][rank] = [self.values(b).copy() for b in self.tensors[seq - 1][rank].outputs]
        self.own(rank, seq)
        for buffer in self.tensors[seq - 1][rank].all:
            self.scribble(buffer, seq)

    def scribble(self, buffer: Buffer, seq: int) -> None:
        self.values(buffer)[:] = -(10**9) - seq

    def where(self, rank: int) -> str:
        operation, *step = self.at[rank]
        if not step:
            return operation
        part, number, turn, what = step
        return f"{operation}, {part} step {number}, turn {turn}: {words(what)}"

    def satisfied(self, rank: int, seq: int) -> bool:
        needs = self.plans[seq - 1][rank].needs[rank]
        return needs & self.tensors[seq - 1][rank].symmetric == needs

    def is_direct(self, seq: int) -> bool:
        return self.plans[seq - 1][0].direct is not None and all(self.satisfied(r, seq) for r in range(self.world))

    def skips_head(self, rank: int, seq: int) -> bool:
        plan = self.plans[seq - 1][rank]
        return plan.direct is not None and plan.needs[rank] != Need.NOTHING and self.satisfied(rank, seq)

    def compare(self, rank: int, seq: int) -> None:
        def signature(plan: Plan) -> tuple[Any, ...]:
            what = (plan.collective, plan.world, plan.count, plan.dtype, plan.redop, plan.root)
            return *what, plan.direct is None, tuple(plan.needs)

        mine = signature(self.plans[seq - 1][rank])
        for peer, plan in enumerate(self.plans[seq - 1]):
            if signature(plan) != mine:
                raise PlanError(f"operation {seq}: ranks {rank} and {peer} differ: {mine} and {signature(plan)}")

    def block(self, rank: int, seq: int, steps: Sequence[Step], part: str) -> Iterator[Blocked | None]:
        for number, step in enumerate(steps):
            turns, body = (step.turns, step.body) if isinstance(step, Loop) else (1, (step,))
            for turn in range(turns):
                for inner in body:
                    self.at[rank] = (f"operation {seq}", part, number, turn, inner)
                    yield from self.step(rank, seq, inner, turn, turn == turns - 1, part == "direct")

    def step(self, rank: int, seq: int, step: Step, turn: int, last: bool, direct: bool) -> Iterator[Blocked | None]:
        if isinstance(step, Signal):
            self.publish(rank, seq, step.value + step.stride * turn)
        elif isinstance(step, Wait):
            yield from self.wait(rank, seq, step.who, step.value + step.stride * turn)
        elif isinstance(step, Copy | Reduce):
            nbytes = step.last if last and step.last is not None else step.nbytes
            places = step.src if isinstance(step, Reduce) else (step.src,)
            sources = [self.resolve(rank, seq, at, turn, nbytes, direct) for at in places]
            targets = [self.resolve(rank, seq, at, turn, nbytes, direct) for at in step.dst]
            self.move(rank, sources, targets, isinstance(step, Reduce))
        yield None

    # memory --------------------------------------------------------------------------------------

    def resolve(self, rank: int, seq: int, at: At, turn: int, nbytes: int, direct: bool) -> Buffer:
        """The elements that a place names. Raises for those that the plan must not touch."""
        item = ITEMSIZE[self.plans[seq - 1][rank].dtype]
        base, position = self.base(rank, seq, at, item, direct, at.position(turn))
        if position % item or nbytes % item or nbytes <= 0:
            raise PlanError(f"rank {rank}, {self.where(rank)}: {nbytes} bytes at {position} are not whole elements")
        start, length = position // item, nbytes // item
        if start < 0 or start + length > base.length:
            raise PlanError(
                f"rank {rank}, {self.where(rank)}: bytes {position} to {position + nbytes} of {base.block.name}, "
                f"which has {base.length * item}"
            )
        return Buffer(base.block, base.start + start, length)

    def base(self, rank: int, seq: int, at: At, item: int, direct: bool, position: int) -> tuple[Buffer, int]:
        """The tensor, and the position in it."""
        tensors, plan = self.tensors[seq - 1], self.plans[seq - 1][rank]
        if at.space in (Space.IN, Space.OUT):
            buffers = tensors[rank].inputs if at.space == Space.IN else tensors[rank].outputs
            if at.index >= len(buffers):
                raise PlanError(f"rank {rank}, {self.where(rank)}: there is no {at.space.name}[{at.index}]")
            return buffers[at.index], position
        if at.space == Space.STAGE:
            return self.stage(at.index, seq % 2, item), position
        need, buffers = (
            (Need.INPUT, tensors[at.index].inputs)
            if at.space == Space.PEER_IN
            else (Need.OUTPUT, tensors[at.index].outputs)
        )
        if not direct or not need & tensors[at.index].symmetric:
            raise PlanError(f"rank {rank}, {self.where(rank)}: {at.space.name}[{at.index}] cannot be reached here")
        if at.space == Space.PEER_IN and plan.apart and len(buffers) > 1:
            return buffers[position // plan.piece_bytes], position % plan.piece_bytes
        return self.joined(buffers), position

    @staticmethod
    def joined(buffers: Sequence[Buffer]) -> Buffer:
        """Consecutive tensors, as one."""
        first = buffers[0]
        ends = [b.start + b.length for b in buffers]
        if any(b.block is not first.block or b.start != end for b, end in zip(buffers[1:], ends, strict=False)):
            raise PlanError(f"{first.block.name} and the others of its list do not lie one after another")
        return Buffer(first.block, first.start, ends[-1] - first.start)

    def stage(self, rank: int, half: int, item: int) -> Buffer:
        key = rank, half, item
        if key not in self.stages:
            if any(known != item for _, _, known in self.stages):
                raise PlanError("operations with elements of different sizes cannot be played one after the other")
            self.stages[key] = Buffer.of(f"STAGE[{rank}] half {half}", [-1] * (self.stage_bytes // item))
            self.stages[key].block.reset(self.world)
        return self.stages[key]

    @staticmethod
    def values(buffer: Buffer) -> Any:
        return buffer.block.values[buffer.start : buffer.start + buffer.length]

    def own(self, rank: int, seq: int) -> None:
        """The caller touches its tensors: it made them before the call, and may change them afterwards."""
        for buffer in self.tensors[seq - 1][rank].all:
            self.write(rank, buffer)

    def move(self, rank: int, sources: list[Buffer], targets: list[Buffer], combine: bool) -> None:
        """Copy or combine. A copy onto itself does nothing; a combination may replace one of its sources; no other
        overlap is allowed."""
        for target in targets:
            for other in (*sources, *(t for t in targets if t is not target)):
                apart = target.start + target.length <= other.start or other.start + other.length <= target.start
                if target.block is other.block and target.start != other.start and not apart:
                    raise PlanError(f"rank {rank}, {self.where(rank)}: places overlap in {target.block.name}")
        if not combine:
            targets = [t for t in targets if (t.block, t.start) != (sources[0].block, sources[0].start)]
        if targets:
            for source in sources:
                self.look(rank, source)
            result = self.reduce([self.values(s) for s in sources]) if combine else self.values(sources[0])
            for target in targets:
                self.write(rank, target)
                self.values(target)[:] = result

    def look(self, rank: int, buffer: Buffer) -> None:
        block, span, clock = buffer.block, slice(buffer.start, buffer.start + buffer.length), self.clock[rank]
        writer = block.writer[span]
        if not (clock[writer] >= block.written[span]).all() or (writer == self.world).any():
            self.race(rank, buffer, "reads", (clock[writer] < block.written[span]) | (writer == self.world))
        block.read[rank, span] = clock[rank]

    def write(self, rank: int, buffer: Buffer) -> None:
        block, span, clock = buffer.block, slice(buffer.start, buffer.start + buffer.length), self.clock[rank]
        written = clock[block.writer[span]] < block.written[span]
        if written.any():
            self.race(rank, buffer, "overwrites", written)
        read = block.read[:, span] > clock[:-1, None]
        if read.any():
            self.race(rank, buffer, "overwrites", read.any(axis=0), block.read[:, span])
        block.writer[span] = rank
        block.written[span] = clock[rank]

    def race(self, rank: int, buffer: Buffer, does: str, wrong: Any, reads: Any = None) -> None:
        first, last = int(wrong.argmax()), len(wrong) - int(wrong[::-1].argmax())
        element = buffer.start + first
        if reads is not None:
            peers = [r for r in range(self.world) if reads[r, first] > self.clock[rank, r]]
            what = f"rank {peers[0]} may still read"
        else:
            writer = int(buffer.block.writer[element])
            what = f"rank {writer} may still write" if writer < self.world else "nobody has written"
        raise RaceError(
            f"rank {rank} {does} elements {element} to {buffer.start + last} of {buffer.block.name}, which {what} "
            f"({self.where(rank)})"
        )

    # order ---------------------------------------------------------------------------------------

    def publish(self, rank: int, seq: int, value: int) -> None:
        progress, clocks = self.history[rank]
        now = seq * MAX_SIGNALS + value
        if value >= MAX_SIGNALS or (progress and now <= progress[-1]):
            raise PlanError(f"rank {rank}, {self.where(rank)}: signal {value} does not go up")
        progress.append(now)
        clocks.append(self.clock[rank].copy())
        self.clock[rank, rank] += 1

    def wait(self, rank: int, seq: int, who: int, value: int) -> Iterator[Blocked | None]:
        import numpy as np

        peers = [r for r in range(self.world) if r != rank] if who == ALL else [who]
        target = seq * MAX_SIGNALS + value
        yield Blocked([(peer, target) for peer in peers])
        for peer in peers:
            # the clock when it gave that signal, not what it has done since
            progress, clocks = self.history[peer]
            promised = clocks[bisect_left(progress, target)]
            self.clock[rank] = np.maximum(self.clock[rank], promised)

    def ready(self, rank: int, wait: Blocked | None) -> bool:
        return wait is None or all(self.history[p][0] and self.history[p][0][-1] >= t for p, t in wait.wants)

    def stuck(self, waits: dict[int, Blocked | None]) -> DeadlockError:
        lines = []
        for rank, wait in waits.items():
            for peer, target in wait.wants if wait else ():
                progress = self.history[peer][0][-1] if self.history[peer][0] else 0
                if progress < target:
                    come, want = divmod(progress, MAX_SIGNALS), divmod(target, MAX_SIGNALS)
                    where = f"rank {rank} ({self.where(rank)}) waits for rank {peer}"
                    lines.append(f"{where}: operation {want[0]} signal {want[1]}, it is at {come[0]} signal {come[1]}")
        return DeadlockError("no rank can move: " + "; ".join(lines))


# --- schedules -----------------------------------------------------------------------------------


def _picker(schedule: int | str) -> Callable[[list[int]], int]:
    """Chooses which of the ranks that can move moves next."""
    if isinstance(schedule, int):
        return random.Random(schedule).choice
    kind, _, number = schedule.partition(" ")
    if kind == "round-robin":
        turn = [0]

        def rotate(ready: list[int]) -> int:
            turn[0] = min((r for r in ready if r > turn[0]), default=ready[0])
            return turn[0]

        return rotate
    rank = int(number)
    if kind in ("slowest", "stalled"):
        first = [rank] if kind == "stalled" else []
        return lambda ready: first.pop() if first else next((r for r in ready if r != rank), rank)
    return lambda ready: rank if rank in ready else ready[0]


def run(
    plans: Sequence[Sequence[Plan]],
    tensors: Sequence[Sequence[Tensors]],
    schedule: int | str = 0,
    stage_bytes: int = 2 << 20,
    reduce: Callable[[Sequence[Any]], Any] = add,
) -> list[list[list[Any]]]:
    """Play ``plans[operation][rank]`` on ``tensors[operation][rank]``; returns every output, as it was on return.

    ``schedule``: a seed for random interleavings, "round-robin", "slowest R" (rank R moves only when no other can),
    "stalled R" (the same, after its first step) or "fastest R". Raises RaceError, DeadlockError or PlanError, naming
    rank, step, space and range."""
    machine = Machine(plans, tensors, stage_bytes, reduce)
    play_all(machine, schedule)
    return machine.results


def play_all(machine: Machine, schedule: int | str) -> None:
    pick = _picker(schedule)
    ranks = {rank: machine.play(rank) for rank in range(machine.world)}
    waits: dict[int, Blocked | None] = {rank: None for rank in ranks}
    while waits:
        ready = [rank for rank, wait in waits.items() if machine.ready(rank, wait)]
        if not ready:
            raise machine.stuck(waits)
        rank = pick(ready)
        try:
            waits[rank] = next(ranks[rank])
        except StopIteration:
            del waits[rank]


# --- words ---------------------------------------------------------------------------------------


def _place(at: At) -> str:
    text = f"{at.space.name}[{at.index}]"
    if at.offset or not at.stride:
        text += f"+{at.offset}"
    if at.stride:
        turn = "i" if not at.mod else f"((i+{at.phase})%{at.mod})" if at.phase else f"(i%{at.mod})"
        text += f"+{at.stride}*{turn}"
    return text


def _number(step: Signal | Wait) -> str:
    return f"{step.value}" + (f"+{step.stride}*i" if step.stride else "")


def words(step: Step) -> str:
    """One step, for people; ``i`` is the turn of the loop around it."""
    if isinstance(step, Signal):
        return f"signal {_number(step)}"
    if isinstance(step, Wait):
        return f"wait for {'all' if step.who == ALL else f'rank {step.who}'} to signal {_number(step)}"
    if isinstance(step, Loop):
        return "\n".join([f"{step.turns} turns:", *(f"  {words(inner)}" for inner in step.body)])
    size = f"{step.nbytes}" + (f" (last turn {step.last})" if step.last is not None else "")
    targets = ", ".join(map(_place, step.dst))
    if isinstance(step, Reduce):
        return f"combine {size} of {', '.join(map(_place, step.src))} into {targets}"
    return f"copy {size} from {_place(step.src)} to {targets}"


def describe(plan: Plan) -> str:
    """A plan as text, one step a line."""
    lines = [f"{plan.collective.label} on rank {plan.rank} of {plan.world}: {plan.name} ({plan.why})"]
    parts: list[tuple[str, list[Step] | None]] = [("head", plan.head), ("staged", plan.staged), ("direct", plan.direct)]
    for name, steps in parts:
        if steps is not None:
            lines.append(f"  {name}" + ("" if steps else ": nothing"))
            lines += [f"    {line}" for step in steps for line in words(step).splitlines()]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """collective, world, elements per rank (float32): print what every rank would do."""
    from symcomm.collectives import select
    from symcomm.types import DType

    if len(argv) != 3:
        raise SystemExit("usage: python -m symcomm.collectives.interpret COLLECTIVE RANKS ELEMENTS")
    name, world, count = argv[0], int(argv[1]), int(argv[2])
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (count, DType.FLOAT32, 0),
        "reduce": (count, DType.FLOAT32, 0, 0),
        "reduce_scatter": ((count,) * world, DType.FLOAT32, 0),
        "all_gather": ((count,) * world, DType.FLOAT32),
        "broadcast": (count, DType.FLOAT32, 0),
        "gather": ((count,) * world, DType.FLOAT32, 0),
        "scatter": ((count,) * world, DType.FLOAT32, 0),
        "all_to_all": (count, DType.FLOAT32),
        "barrier": (),
    }
    for rank in range(world):
        print(describe(getattr(select, name)(rank, world, *arguments[name])))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
