"""A running job as the page shows it: data of feeds, assembled by rank and by collective.

A *collective instance* is one collective of a group, as all its ranks made it: when each arrived and when each was
done. Everything else follows from these: which rank waits for which (lag, states, the verdict), which is repeatedly
late (the heat map), and how fast data moved. All memory is bounded: collectives, heat columns and samples are dropped
after a while.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from symcomm.observe.analysis.verdict import Verdict, judge
from symcomm.observe.recorder.records import Operation
from symcomm.observe.recorder.stacks import ThreadStack
from symcomm.observe.top.feed import Feed, GroupFacts, RankFacts, Sample
from symcomm.observe.top.live import add_stacks, as_trace

STATES = ("idle", "computing", "communicating", "waiting", "late", "failed", "dead")
IDLE, COMPUTING, COMMUNICATING, WAITING, LATE, FAILED, DEAD = range(len(STATES))

BIN_NS = 1_000_000_000  # width of a column of the heat map
BINS = 60
USUAL_SPREADS = 4.5  # median deviations (three standard deviations, if normal) that blame no rank
RANK_OPERATIONS_KEPT = 400_000  # of all ranks together, in instances
RECENT = 8  # operations of each rank that a verdict looks at, beside its last one in each group
SAMPLES = 512  # instances of one collective and size that percentiles are made of
STANDS_OUT = 0.75  # of all waiting, the share that one of two or three ranks must cause; of more, twice an even share
WAIT_NS = 200_000_000  # a rank that waits longer than this is shown as waiting
STUCK_S = 5.0  # a rank that waits longer than this is stuck
STACKS_S = 5.0  # how long a rank's stacks may be shown before it is asked again
BLAMED = 3  # ranks that are asked where they are

GroupKey = tuple[str, tuple[int, ...]]


def group_of(operation: Operation) -> GroupKey:
    """Name and first rank: disjoint groups may share a name, and hashing all ranks of a large one takes long."""
    return operation.group, operation.ranks[:1]


@dataclass
class CollectiveInstance:
    """One collective of all its ranks, or one message of one rank. Times by rank of the world."""

    ident: int
    first: Operation  # the call, as the first rank reported it
    size: int
    version: int = 0  # of the model, when it last changed
    starts: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    failure: str = ""
    is_direct: bool = False  # nobody copied: it is so on all ranks, or on none

    @property
    def is_whole(self) -> bool:
        return len(self.starts) == self.size

    @property
    def is_over(self) -> bool:
        return len(self.ends) == len(self.starts)

    @property
    def last_start(self) -> int:
        return max(self.starts.values())


@dataclass
class Numbers:
    """Samples of one collective and size, in seconds: the time to move data after all had come, and the wait before."""

    nbytes: int
    count: int = 0
    direct: int = 0  # of these, between symmetric tensors
    moving: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    waiting: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def row(self) -> dict[str, float]:
        ordered = sorted(self.moving)
        middle = percentile(ordered, 0.5)
        return {
            "count": self.count,
            "bytes": self.nbytes,
            "direct": self.direct / self.count,
            "p50": middle,
            "p90": percentile(ordered, 0.9),
            "p99": percentile(ordered, 0.99),
            "waited": statistics.median(self.waiting),
            "rate": self.nbytes / middle if middle > 0 else 0.0,
        }


@dataclass
class Lateness:
    """How often a rank came last, and how long the middle rank (of two: the other) then waited for it."""

    rank: int
    times: int = 0
    of: int = 0  # collectives that it took part in
    seconds: float = 0.0
    each: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def add(self, seconds: float) -> None:
        self.times += 1
        self.seconds += seconds
        self.each.append(seconds)

    def row(self) -> dict[str, float]:
        usual = statistics.median(self.each) if self.each else 0.0
        return {"rank": self.rank, "times": self.times, "of": self.of, "seconds": self.seconds, "usual": usual}


def percentile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


class Live:
    """Call ``refresh()`` periodically; everything else only reads."""

    def __init__(self, feed: Feed, stuck_after: float = STUCK_S):
        self.feed = feed
        self.version = 0
        self.sample = Sample(0, [], {})
        self.running: dict[tuple[Any, ...], CollectiveInstance] = {}
        self.over: deque[CollectiveInstance] = deque()
        self.numbers: dict[tuple[str, int], Numbers] = {}
        self.heat: dict[int, dict[int, int]] = {}  # column -> rank -> nanoseconds behind the pack, at most
        self.late: dict[int, Lateness] = {}  # of each rank
        self.reached: dict[GroupKey, dict[int, int]] = {}  # group -> rank -> number of its last collective
        self.current: dict[int, Operation] = {}  # rank -> its last operation
        self.recent: dict[int, dict[int, Operation]] = {}  # rank -> its last operations by number
        self.latest: dict[int, dict[GroupKey, Operation]] = {}  # rank -> group -> its last collective there
        self.failed: set[int] = set()  # ranks of which an operation failed
        self.stuck_after = stuck_after
        self._told: tuple[int, list[int], dict[int, list[ThreadStack]]] = (0, [], {})  # when, whom, their stacks
        self._judged: tuple[int, Verdict | None] = (0, None)
        self._idents = 0
        self._kept = 0

    def refresh(self) -> None:
        self.sample = self.feed.poll()
        self.version += 1
        for rank, operations in self.sample.operations.items():
            for operation in operations:
                self._add(rank, operation)
        self._close_instances()
        self._forget()

    # --- putting together -----------------------------------------------------------------------------------------

    def _add(self, rank: int, operation: Operation) -> None:
        last = self.current.get(rank)
        if last is None or operation.number >= last.number:
            self.current[rank] = operation
        recent = self.recent.setdefault(rank, {})
        recent[operation.number] = operation
        if len(recent) > RECENT:
            del recent[min(recent)]
        message = operation.is_message
        group = group_of(operation)
        key = (group, operation.seq, rank, operation.call) if message else (group, operation.seq)
        instance = self.running.get(key)
        if instance is None:
            self._idents += 1
            size = 1 if message else self._size_of(operation)
            instance = self.running[key] = CollectiveInstance(self._idents, operation, size)
        instance.version = self.version
        instance.starts[rank] = operation.created_ns
        if operation.finished_ns is not None:
            instance.ends[rank] = operation.finished_ns
            instance.is_direct |= operation.copies == "direct"
        if operation.state not in ("running", "completed"):
            instance.failure = operation.state
            self.failed.add(rank)
        if not message:
            self.latest.setdefault(rank, {})[group] = operation
            reached = self.reached.setdefault(group, {})
            reached[rank] = max(reached.get(rank, -1), operation.seq)

    def _size_of(self, operation: Operation) -> int:
        if operation.ranks:
            return len(operation.ranks)
        known = next((g.size for g in self.sample.groups if g.name == operation.group), 0)
        return known or len(self.sample.ranks)

    def _close_instances(self) -> None:
        """Drop collectives that are over, and those that we missed a part of (their ring was overwritten)."""
        for key, instance in list(self.running.items()):
            if not instance.is_over or not (instance.is_whole or self._everyone_passed(instance)):
                continue
            del self.running[key]
            instance.version = self.version
            self.over.append(instance)
            self._kept += len(instance.starts)
            if instance.is_whole and instance.size > 1 and not instance.failure:
                self._count(instance)

    def _everyone_passed(self, instance: CollectiveInstance) -> bool:
        reached = self.reached.get(group_of(instance.first), {})
        members = instance.first.ranks or tuple(reached)
        return all(reached.get(rank, -1) >= instance.first.seq for rank in members)

    def _count(self, instance: CollectiveInstance) -> None:
        starts = instance.starts
        last, first = max(starts.values()), min(starts.values())
        size = instance.first.nbytes
        bucket = 1 << (size - 1).bit_length() if size > 1 else size
        numbers = self.numbers.setdefault((instance.first.call, bucket), Numbers(bucket))
        numbers.count += 1
        numbers.direct += instance.is_direct
        numbers.moving.append(max(0, max(instance.ends.values()) - last) / 1e9)
        numbers.waiting.append((last - first) / 1e9)
        middle, pack = end_of_pack(starts.values())
        column = self.heat.setdefault(last // BIN_NS, {})
        for rank, start in starts.items():
            if rank not in self.late:
                self.late[rank] = Lateness(rank)
            self.late[rank].of += 1
            if start - pack > column.get(rank, 0):
                column[rank] = start - pack
        latest = max(starts, key=lambda rank: starts[rank])
        self.late[latest].add((last - middle) / 1e9)

    def _forget(self) -> None:
        while self._kept > RANK_OPERATIONS_KEPT:
            self._kept -= len(self.over.popleft().starts)
        oldest = self.sample.now_ns // BIN_NS - BINS
        for column in [c for c in self.heat if c < oldest]:
            del self.heat[column]
        if len(self.running) > 4096:  # ranks left without ending their operations
            for key in list(self.running)[: len(self.running) - 4096]:
                del self.running[key]

    # --- reading --------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> list[RankFacts]:
        return self.sample.ranks

    @property
    def groups(self) -> list[GroupFacts]:
        return self.sample.groups

    def absent(self, instance: CollectiveInstance) -> list[int]:
        """Ranks that, as far as we know, have not arrived at a collective."""
        reached = self.reached.get(group_of(instance.first), {})
        members = instance.first.ranks or tuple(fact.rank for fact in self.ranks)
        seq = instance.first.seq
        return [rank for rank in members if rank not in instance.starts and reached.get(rank, -1) < seq]

    def waited_for(self) -> list[tuple[CollectiveInstance, list[int]]]:
        """Running collectives from which ranks are missing, the longest wait first."""
        found = [(m, self.absent(m)) for m in self.running.values() if m.size > 1 and not m.is_over]
        return sorted(((m, who) for m, who in found if who), key=lambda item: min(item[0].starts.values()))

    def states(self) -> list[int]:
        """One of STATES for each rank."""
        now = self.sample.now_ns
        awaited: set[int] = set()
        waiting: set[int] = set()
        for instance, absent in self.waited_for():
            if now - max(instance.starts.values()) > WAIT_NS:
                awaited.update(absent)
                waiting.update(rank for rank in instance.starts if rank not in instance.ends)
        found = []
        for fact in self.ranks:
            operation = self.current.get(fact.rank)
            if not fact.alive:
                state = DEAD
            elif fact.rank in self.failed:
                state = FAILED
            elif fact.rank in awaited and fact.rank not in waiting:
                state = LATE
            elif fact.rank in waiting:
                state = WAITING
            elif operation is None:
                state = IDLE
            else:
                state = COMMUNICATING if operation.finished_ns is None else COMPUTING
            found.append(state)
        return found

    def lags(self) -> list[int]:
        """How many collectives each rank is behind the first one, in the group where that is worst."""
        behind: dict[int, int] = {}
        for reached in self.reached.values():
            front = max(reached.values())
            for rank, seq in reached.items():
                behind[rank] = max(behind.get(rank, 0), front - seq)
        return [behind.get(fact.rank, 0) for fact in self.ranks]

    def verdict(self) -> Verdict | None:
        """What is wrong, in one sentence, or None. Found once per refresh."""
        if self._judged[0] != self.version:
            self._judged = self.version, self._judge()
        return self._judged[1]

    def _judge(self) -> Verdict | None:
        trace = as_trace(self.sample, {rank: self._known(rank) for rank in self.recent})
        found = judge(trace, self.stuck_after)
        if found.kind in ("fine", "unknown"):
            return None
        add_stacks(trace, self._ask(found.ranks[:BLAMED]))
        return judge(trace, self.stuck_after)

    def _known(self, rank: int) -> list[Operation]:
        """Its recent operations and the last one in each group, in order."""
        known = {op.number: op for op in self.latest.get(rank, {}).values()} | self.recent[rank]
        return [known[number] for number in sorted(known)]

    def _ask(self, blamed: list[int]) -> dict[int, list[ThreadStack]]:
        """The stacks of the ranks at fault; asks again only after a while."""
        when, whom, _ = self._told
        if whom != blamed or self.sample.now_ns - when > STACKS_S * 1e9:
            alive = [fact.rank for fact in self.ranks if fact.rank in blamed and fact.alive and not fact.stopped]
            self._told = self.sample.now_ns, blamed, self.feed.find_stacks(alive)
        return self._told[2]

    def stragglers(self, most: int = 5) -> list[Lateness]:
        """Ranks that came last, the longest awaited first."""
        return sorted((late for late in self.late.values() if late.times), key=lambda late: -late.seconds)[:most]

    def straggler(self) -> Lateness | None:
        """The rank that stands out, if any: some rank is always last, and of two ranks each is last about half of the
        time."""
        worst = self.stragglers(1)
        total = sum(late.seconds for late in self.late.values())
        return worst[0] if worst and worst[0].seconds > total * min(STANDS_OUT, 2 / len(self.late)) else None


def end_of_pack(starts: Iterable[int]) -> tuple[int, int]:
    """When the median rank arrived, and until when a rank counts as on time given the usual spread of the ranks.

    The spread is that of the earlier half, which stragglers do not reach."""
    ordered = sorted(starts)
    middle = ordered[(len(ordered) - 1) // 2]
    spread = middle - ordered[(len(ordered) - 1) // 4]
    return middle, middle + int(USUAL_SPREADS * spread)
