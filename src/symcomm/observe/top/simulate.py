"""A simulated job: any number of ranks that train, optionally with a straggler and a stuck rank.

For tests, the documentation's pictures, and trying the live page without a cluster.
Steps follow a clock, the real one or a test's, so what a poll returns depends only on the seed and the times asked for.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from symcomm import errors
from symcomm.observe.recorder.records import Operation
from symcomm.observe.recorder.stacks import Frame, ThreadStack
from symcomm.observe.top.feed import Feed, GroupFacts, RankFacts, Sample

MS = 1_000_000  # nanoseconds
# One step of training: (call, dtype, elements, reduce op, milliseconds of computing before it, of moving data)
STEP = (
    ("broadcast", "float32", 1 << 10, None, 3.0, 0.3),
    ("all_gather", "bfloat16", 4 << 20, None, 6.0, 9.0),
    ("all_reduce", "float32", 8 << 20, "SUM", 40.0, 22.0),
    ("all_reduce", "float32", 2 << 20, "SUM", 18.0, 7.0),
    ("reduce_scatter", "bfloat16", 4 << 20, "SUM", 12.0, 10.0),
    ("all_reduce", "float32", 1, "SUM", 2.0, 0.2),
    ("barrier", "uint8", 0, None, 1.0, 0.1),
)
PAUSE_MS = 90.0  # between steps: reading the next batch
SITES = ("train.py:88", "fsdp.py:214", "train.py:131", "train.py:131", "fsdp.py:260", "train.py:140", "train.py:145")
ITEM = {"float32": 4, "bfloat16": 2, "uint8": 1}
START_PID = 41_000


@dataclass
class _SimulatedCollective:
    """What every rank does in one collective, decided when its step begins."""

    operations: list[Operation]  # by rank, finished (unless a rank never arrives)
    missing: set[int]


class SimulatedFeed(Feed):
    """``ranks`` ranks. ``stuck`` stops for good after ``stuck_after`` seconds; ``straggler`` is always late."""

    def __init__(
        self,
        ranks: int,
        *,
        straggler: int | None = None,
        stuck: int | None = None,
        stuck_after: float = 12.0,
        history: float = 30.0,
        seed: int = 0,
        clock: Callable[[], int] = time.monotonic_ns,
    ):
        if ranks < 1:
            raise errors.bad_argument("symcomm top", "--simulate", ranks, "1 rank or more")
        for option, rank in (("--straggler", straggler), ("--stuck", stuck)):
            if rank is not None and not 0 <= rank < ranks:
                raise errors.bad_argument("symcomm top", option, rank, f"a rank, 0 to {ranks - 1}")
        self.title = f"simulated job, {ranks:,} rank{'s' if ranks > 1 else ''}"
        self._world, self._straggler, self._stuck = ranks, straggler, stuck
        self._random = random.Random(seed)
        self._pace = max(1.0, ranks / 64)  # large jobs compute longer, which bounds what we report per second
        self._clock = clock
        self._members = tuple(range(ranks))
        self._seq = 0
        self._next_ns = clock() - int(history * 1e9)  # the job was there before we looked
        self._stuck_ns = self._next_ns + int((history + stuck_after) * 1e9) if stuck is not None else None
        self._step = 0
        self._ended: list[int] = [0] * ranks
        self._told: dict[int, set[int]] = {}  # seq -> ranks whose operation we reported as running
        self._open: list[_SimulatedCollective] = []
        self._halted = False

    # --- the job ------------------------------------------------------------------------------------------------

    def _plan_next(self) -> _SimulatedCollective:
        """The next collective: each rank computes, arrives, waits for the last, and moves data."""
        call, dtype, count, op, compute, moving = STEP[self._step]
        site = SITES[self._step]
        gauss, late = self._random.gauss, self._straggler
        compute = (compute + PAUSE_MS * (self._step == 0)) * self._pace
        starts = [int(self._next_ns + max(0.2, gauss(compute, compute * 0.06)) * MS) for _ in range(self._world)]
        if late is not None:
            starts[late] += int(abs(gauss(compute * 0.55, compute * 0.2)) * MS)
        missing = set()
        if self._stuck_ns is not None and self._stuck is not None and min(starts) > self._stuck_ns:
            missing, self._halted = {self._stuck}, True
        last = max(starts)
        move = moving * self._pace**0.5 * (1 + 0.05 * gauss(0, 1) ** 2)
        ends = [int(last + move * MS * self._random.uniform(0.97, 1.0)) for _ in range(self._world)]
        base = Operation(
            rank=0, number=self._seq + 1, group="world", ranks=self._members, seq=self._seq, call=call, dtype=dtype,
            op=op, root=0 if call == "broadcast" else None, count=count, nbytes=count * ITEM[dtype], created_ns=0,
            finished_ns=0, waited_us=0, state="running" if missing else "completed",
            plan="streamed" if count > 1 << 16 else "one-shot", zero_copy=count > 1 << 20, site=site, exact_site=True,
            way="short", thread="inline", copies="direct" if count > 1 << 20 else "no_plan",
        )  # fmt: skip
        operations = [
            base.changed(
                rank=r, created_ns=start, finished_ns=None if missing else end, waited_us=(last - start) // 1000
            )
            for r, start, end in zip(self._members, starts, ends, strict=True)
        ]
        self._seq += 1
        self._step = (self._step + 1) % len(STEP)
        self._next_ns = max(ends)
        return _SimulatedCollective(operations, missing)

    # --- the feed -----------------------------------------------------------------------------------------------

    def poll(self) -> Sample:
        now = self._clock()
        while not self._halted and self._next_ns < now:
            self._open.append(self._plan_next())
        told: dict[int, list[Operation]] = {r: [] for r in self._members}
        self._open = [plan for plan in self._open if not self._tell(plan, now, told)]
        ranks = [
            RankFacts(r, START_PID + r, True, self._ended[r], (160 << 20) + (r * 7919 % 64 << 20))
            for r in self._members
        ]
        groups = [GroupFacts("world", self._world, self._members)]
        if self._world >= 4:
            middle = self._world // 2
            for name, half in (("tp0", self._members[:middle]), ("tp1", self._members[middle:])):
                groups.append(GroupFacts(name, len(half), half, "tensor parallel"))
        return Sample(now, ranks, told, groups)

    def _tell(self, plan: _SimulatedCollective, now: int, told: dict[int, list[Operation]]) -> bool:
        """Report what of a collective has happened by ``now``; True once it is over."""
        seq = plan.operations[0].seq
        running = self._told.setdefault(seq, set())
        done = True
        for operation in plan.operations:
            rank = operation.rank
            if rank in plan.missing:
                continue
            if operation.finished_ns is not None and operation.finished_ns <= now:
                told[rank].append(operation)
                self._ended[rank] = operation.number
            else:
                done = False
                if operation.created_ns <= now and rank not in running:
                    running.add(rank)
                    told[rank].append(replace(operation, finished_ns=None, state="running", waited_us=0))
                    self._ended[rank] = operation.number
        if done:
            self._told.pop(seq)
        return done

    def find_stacks(self, ranks: Iterable[int]) -> dict[int, list[ThreadStack]]:
        reading = (("storage.py", 61, "read_exactly"), ("data.py", 118, "next_batch"), ("train.py", 79, "train"))
        reducing = (("train.py", 131, "step"), ("train.py", 84, "train"))
        halted = {self._stuck} if self._halted else set()
        frames = {rank: tuple(Frame(*at) for at in (reading if rank in halted else reducing)) for rank in ranks}
        return {rank: [ThreadStack("MainThread", True, found)] for rank, found in frames.items()}

    def store_keys(self) -> list[str]:
        return ["init/count", "init/cards", *(f"groups/{name}/cards" for name in ("world", "tp0", "tp1")), "epoch"]
