"""Where a viewer's data comes from: the ranks of a job, observed from outside.

A ``Feed`` is polled and returns what is new. ``attach(pids)`` makes one that reads the flight recorders of running
processes: their arenas are memory files that any process of the same user can open under ``/proc/PID/fd``, read-only.
The ranks take no part, so this works while they are stuck, and an open file still tells what a rank did before it died.
"""

from __future__ import annotations

import abc
import contextlib
import os
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from symcomm import errors
from symcomm.memory.arena import read_waits
from symcomm.memory.flight import ENTRY, SITES, FlightEntry, read_groups, read_site
from symcomm.memory.heap import PAGE
from symcomm.observe.recorder.processes import is_running, open_file, process_state
from symcomm.observe.recorder.records import Operation, as_operation
from symcomm.observe.recorder.stacks import ThreadStack
from symcomm.observe.top.ask import ask_stacks, format_stacks, kernel_stacks, list_store, spied_stacks
from symcomm.observe.top.jobs import arenas_of

READ_AT_ONCE = 4096  # entries of one rank per poll; older ones of a faster rank are counted, not shown


@dataclass(frozen=True)
class RankFacts:
    """One rank, as the system sees it."""

    rank: int  # of the world
    pid: int
    alive: bool
    operations: int  # recorded in total
    arena_bytes: int  # memory that its arena occupies
    missed: int = 0  # operations that were overwritten before they were read
    stopped: bool = False  # by SIGSTOP or a debugger
    waits: tuple[int, ...] = ()  # long waits that ended while spinning, yielding, sleeping; empty: not known


@dataclass(frozen=True)
class GroupFacts:
    name: str
    size: int
    ranks: tuple[int, ...]  # of the world; empty: not known (a very large group)
    description: str = ""


@dataclass
class Sample:
    """One poll. ``operations``: by rank of the world, those that began or ended since the last poll."""

    now_ns: int
    ranks: list[RankFacts]
    operations: dict[int, list[Operation]]
    groups: list[GroupFacts] = field(default_factory=list)


class Feed(abc.ABC):
    """What a viewer needs. ``title`` names the job."""

    title = "job"

    @abc.abstractmethod
    def poll(self) -> Sample:
        """What has changed since the last call."""

    def find_stacks(self, ranks: Iterable[int]) -> dict[int, list[ThreadStack]]:
        """Stacks of the ranks that can be asked; ``[]``: one did not answer."""
        return {}

    def stacks(self, rank: int) -> str:
        """The same of one rank, as text."""
        return format_stacks(self.find_stacks([rank]).get(rank, [])) or "this rank does not say where it is."

    def store_keys(self) -> list[str]:
        """Keys of the job's store."""
        return []

    def close(self) -> None:  # noqa: B027 (most feeds hold nothing)
        """Close everything that is open."""


class _Recorder:
    """One rank's flight recorder, read through a file."""

    def __init__(self, pid: int, fd: int, path: str = ""):
        self.pid, self.fd, self.path = pid, fd, path  # of the arena
        self._capacity = 0
        self._read: int | None = None  # operations up to this number were read
        self._unsettled: set[int] = set()  # numbers of operations that had not ended, or were being written
        self._groups: dict[int, dict[str, Any]] = {}
        self._sites = {0: ""}
        self._pieces: list[tuple[int, bytes, bytes]] = []  # (number before the first, entries, the same read again)
        self._named = 0
        self.missed = 0
        self.total = 0
        self.waits: tuple[int, ...] = ()
        self.latest_ns = 0  # when its last operation began

    def bytes_at(self, place: int, length: int) -> bytes:
        """Of the recorder, which begins at the arena's second page."""
        return os.pread(self.fd, length, PAGE + place)

    def read(self) -> None:
        """Copy what is new. Decoding comes later, so that all ranks are read at nearly the same moment."""
        self.total, self._capacity, self._named, _, forgotten = struct.unpack("<5Q", self.bytes_at(0, 40))
        self.waits = read_waits(self.fd)
        self._pieces = []
        if not self._capacity:
            return
        first = max(self._read or forgotten, self.total - min(self._capacity, READ_AT_ONCE), 0)
        if self._read is not None:  # what came before the first poll does not count as lost
            self.missed += first - self._read
        for number in sorted(self._unsettled):
            if self.total - self._capacity < number <= first:
                self._copy(number - 1, 1)
        while first < self.total:  # at most two pieces of the ring
            count = min(self.total - first, self._capacity - first % self._capacity)
            self._copy(first, count)
            first += count
        self._read = self.total

    def _copy(self, first: int, count: int) -> None:
        place = PAGE + first % self._capacity * ENTRY.size
        raw, again = (self.bytes_at(place, count * ENTRY.size) for _ in range(2))
        self._pieces.append((first, raw, again))

    def decode(self) -> list[Operation]:
        """Operations that began or ended since the last poll, in order."""
        if self._named > len(self._groups):
            for number, facts in read_groups(0, self.bytes_at).items():
                self._groups[number] = {**facts, "ranks": tuple(facts["ranks"])}  # one tuple for all operations
        found = []
        self._unsettled = set()
        for first, raw, again in self._pieces:
            for at in range(0, len(raw), ENTRY.size):
                number = first + at // ENTRY.size + 1
                entry = self._entry(raw, again, at)
                if entry is not None and entry.number == number:
                    found.append(as_operation(entry))
                if entry is None or (entry.number == number and not entry.finished):
                    self._unsettled.add(number)
        if found:
            self.latest_ns = max(self.latest_ns, found[-1].created_ns)
        return found

    def _entry(self, raw: bytes, again: bytes, at: int) -> FlightEntry | None:
        """None if the entry changed while we read it."""
        fields = ENTRY.unpack_from(again, at)
        if not fields[0] or fields[0] != ENTRY.unpack_from(raw, at)[0]:
            return None
        return FlightEntry.of(fields, self._site(fields[7]), self._groups.get(fields[8], {}))

    def _site(self, number: int) -> str:
        if number not in self._sites and number < SITES:
            self._sites[number] = read_site(0, self._capacity, number, self.bytes_at)
        return self._sites.get(number, "")

    @property
    def world_rank(self) -> int | None:
        """The rank's number in the largest group that it was ever in; None before the first."""
        best = max(self._groups.values(), key=lambda g: g.get("size", 0), default=None)
        if best is None:
            return None
        ranks = best.get("ranks") or []
        return ranks[best["rank"]] if best["rank"] < len(ranks) else best["rank"]

    @property
    def groups(self) -> list[GroupFacts]:
        return [
            GroupFacts(g["name"], g["size"], tuple(g.get("ranks", ())), g.get("description", ""))
            for g in self._groups.values()
        ]


class SharedMemoryFeed(Feed):
    """The ranks behind open arena files. Made by ``attach``."""

    def __init__(self, recorders: list[_Recorder], title: str):
        self.title = title
        self._recorders = recorders
        self._last: dict[int, _Recorder] = {}  # by rank

    def poll(self) -> Sample:
        ranks: list[RankFacts] = []
        operations: dict[int, list[Operation]] = {}
        groups: dict[tuple[Any, ...], GroupFacts] = {}  # disjoint ones may share a name
        for recorder in self._recorders:
            recorder.read()
        now = time.monotonic_ns()
        newest: dict[int, _Recorder] = {}
        for place, recorder in enumerate(self._recorders):
            new = recorder.decode()
            rank = place if recorder.world_rank is None else recorder.world_rank
            other = newest.get(rank)  # a process may still hold the arena of an earlier rank
            if other is None or recorder.latest_ns >= other.latest_ns:
                newest[rank], operations[rank] = recorder, new
                groups.update({(g.name, g.ranks): g for g in recorder.groups})
        for rank, recorder in sorted(newest.items()):
            self._last[rank] = recorder
            taken = os.fstat(recorder.fd).st_blocks * 512
            alive, stopped = is_running(recorder.pid), process_state(recorder.pid) in ("T", "t")
            counts = (recorder.total, taken, recorder.missed)
            ranks.append(RankFacts(rank, recorder.pid, alive, *counts, stopped, recorder.waits))
        return Sample(now, ranks, operations, list(groups.values()))

    def find_stacks(self, ranks: Iterable[int]) -> dict[int, list[ThreadStack]]:
        known = {rank: self._last[rank] for rank in ranks if rank in self._last}
        return ask_stacks({rank: (one.pid, one.path) for rank, one in known.items()})

    def stacks(self, rank: int) -> str:
        pid = self._last[rank].pid if rank in self._last else 0
        if not pid or not is_running(pid):
            return f"rank {rank} does not run any more."
        told = self.find_stacks([rank]).get(rank)
        return format_stacks(told) if told else spied_stacks(pid) or kernel_stacks(pid)

    def store_keys(self) -> list[str]:
        return list_store(next((r.pid for r in self._recorders if is_running(r.pid)), None))

    def close(self) -> None:
        for recorder in self._recorders:
            os.close(recorder.fd)
        self._recorders = []


def attach(pids: Iterable[int], title: str = "job", *, call: str = "attach") -> SharedMemoryFeed:
    """A feed of the ranks in these processes; if its ranks are threads, a process has several. ``call``: who asks."""
    recorders: list[_Recorder] = []
    seen: set[bytes] = set()
    pids = list(pids)
    for pid in pids:
        for path in arenas_of(pid):
            with contextlib.suppress(OSError):  # it ended meanwhile
                fd = open_file(path)
                nonce = os.pread(fd, 24, 0)[8:]
                if nonce in seen:
                    os.close(fd)
                else:
                    seen.add(nonce)
                    recorders.append(_Recorder(pid, fd, path))
    if not recorders:
        where = f"{'process' if len(pids) == 1 else 'processes'} {', '.join(map(str, pids))}"
        fix = "they must still run on this host, as the same user, and have joined a group"
        raise errors.ResourceError(f"{call}: no rank found in {where}; {fix}.")
    return SharedMemoryFeed(recorders, title)


class _OwnFeed(SharedMemoryFeed):
    def find_stacks(self, ranks: Iterable[int]) -> dict[int, list[ThreadStack]]:
        return {}  # a process does not ask itself


def attach_arena(fd: int) -> SharedMemoryFeed:
    """A feed of one rank of this process, whose arena is open as ``fd``."""
    return _OwnFeed([_Recorder(os.getpid(), os.dup(fd))], "rank")
