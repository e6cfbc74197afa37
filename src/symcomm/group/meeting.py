"""What the ranks of a new group learn of each other before they make it.

``meet`` costs one exchange and returns a value, a Meeting: which ranks share a host and, where all do, their arenas and
what each said of itself. A LocalGroup is made from that. Where there are several hosts, the ranks of each meet
(``HostMeeting``) in the exchange that a group across hosts needs anyway.

A rank's part of the group exists before the others are told of it. When a meeting fails the part is put aside, not
freed: some ranks may have made the group by then, and will write into all parts that it has failed."""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from symcomm import errors
from symcomm._core import native
from symcomm.collectives.select import Limits
from symcomm.group import calibration
from symcomm.group.leaving import free_retired
from symcomm.memory.arena import Arena, Peer, current_arena
from symcomm.memory.numa import current_node
from symcomm.memory.share import Connected, Deadline, Exchange, GroupNotBuilt, HostArenas, connect


def layout(size: int, limits: Limits) -> tuple[int, int, int]:
    """Within a rank's part of a group: (where staging begins, where channels begin, total bytes)."""
    stage = -(-native.CONTROL_BYTES // 4096) * 4096
    channels = stage + 2 * limits.stage_bytes
    return stage, channels, channels + size * native.CHANNEL_BYTES


class Part:
    """One rank's part of a group of ``size`` ranks, in its arena: control block, staging area and channels.

    ``members``: the group's ranks, by global rank. Memory that was put aside serves the same members only."""

    def __init__(self, rank: int, size: int, limits: Limits | None, members: Sequence[int]):
        self.arena: Arena = current_arena()
        self.given, self.limits = limits, limits or Limits()
        self._tells_attach = limits is None and rank == 0 and size >= self.limits.attach_ranks
        self.stage, self.channels, self.total = layout(size, self.limits)
        free_retired()
        self._spares = self.arena.spares.setdefault((self.total, *members), [])
        self.offset = self._spares.pop() if self._spares else self.arena.allocate_sparse(self.total, touched=self.stage)
        if self.arena.must_reserve:
            self._reserve_channels()
        native.poke(self.arena.base + self.offset, bytes(native.CONTROL_BYTES))
        for r in range(size):  # only the counters of a channel need to start at zero
            channel = self.arena.base + self.offset + self.channels + r * native.CHANNEL_BYTES
            native.poke(channel, bytes(native.CHANNEL_HEAD_BYTES))

    def _reserve_channels(self) -> None:
        try:
            self.arena.reserve(self.offset + self.channels, self.total - self.channels)
        except errors.ResourceError:
            self.free()
            raise

    def free(self) -> None:
        self.arena.free(self.offset)

    @contextlib.contextmanager
    def at_risk(self) -> Iterator[None]:
        """Around code that may fail while the others know of this part."""
        try:
            yield
        except GroupNotBuilt:
            self.free()
            raise
        except BaseException:
            self._spares.append(self.offset)  # the others are done with it before they meet us again
            raise

    def facts(self) -> dict[str, Any]:
        """What the others have to know of this part, and of the cores that this rank runs on."""
        node = current_node()
        self.arena.move_to(node)  # this rank may have been bound since
        return {
            "offset": self.offset, "total": self.total, "node": node,
            "cores": f"{sum(1 << core for core in os.sched_getaffinity(0)):x}",
            "limits": zlib.crc32(repr(self.given and self.given.on_nodes(())).encode()),
            "attach": calibration.load() if self._tells_attach else {},
        }  # fmt: skip


class Meeting(NamedTuple):
    """What one rank has learned of all ranks of the group."""

    rank: int
    size: int
    members: Sequence[int]  # global ranks
    exchange: Exchange
    part: Part
    facts: Sequence[dict[str, Any]]  # Part.facts() of each rank
    peers: Sequence[Peer]  # their arenas, where all are on one host
    found: Connected | None = None  # None where the arenas were mapped before

    @property
    def hosts(self) -> Sequence[Sequence[int]]:
        """The ranks that share memory, host by host."""
        return [range(self.size)] if self.found is None else self.found.hosts

    def check_alike(self, name: str) -> None:
        """Refuse ranks that lay out their parts differently."""
        mine = self.facts[self.rank]
        if any((f["total"], f["limits"]) != (mine["total"], mine["limits"]) for f in self.facts):
            raise errors.CollectiveMismatchError(
                f"group {name!r}: ranks use different sizes or versions; make them all the same."
            )

    def limits(self) -> Limits:
        """The limits that the caller gave, or those of this machine, with the ranks' NUMA nodes."""
        limits = self.part.limits
        if self.part.given is None:
            cores = functools.reduce(operator.or_, (int(f["cores"], 16) for f in self.facts))
            limits = calibration.tuned(limits, self.size > cores.bit_count(), self.facts[0]["attach"])
        return limits.on_nodes([f["node"] for f in self.facts])


def meet(
    rank: int, size: int, exchange: Exchange, seconds: float, limits: Limits | None, members: Sequence[int]
) -> Meeting:
    """One exchange among ``size`` ranks; one more where arenas have names, and have to be opened."""
    part = Part(rank, size, limits, members)
    with part.at_risk():
        found = connect(rank, size, exchange, part.facts(), seconds)
    if len(found.hosts) > 1:
        part.free()  # each host's group is smaller
    return Meeting(rank, size, members, exchange, part, found.extras, found.peers, found)


def meet_again(
    rank: int, peers: Sequence[Peer], exchange: Exchange, limits: Limits | None, members: Sequence[int]
) -> Meeting:
    """Like ``meet``, for ranks that have mapped each other's arenas: always one exchange, of few bytes."""
    part = Part(rank, len(peers), limits, members)
    with part.at_risk():
        facts = [json.loads(item) for item in exchange(json.dumps(part.facts()).encode())]
    return Meeting(rank, len(peers), members, exchange, part, facts, peers)


class HostMeeting:
    """The ranks of one host meet, within an exchange of all ranks::

    with HostMeeting(meeting) as host:
        items = exchange(host.item, with whatever else there is to say)
        met = host.finish(items, seconds)
    """

    def __init__(self, meeting: Meeting):
        assert meeting.found is not None
        self._meeting, self._arenas, self._stack = meeting, HostArenas(meeting.rank, meeting.found), ExitStack()
        ranks = self.ranks = self._arenas.ranks
        self._members = [meeting.members[r] for r in ranks]
        self._part = Part(ranks.index(meeting.rank), len(ranks), meeting.part.given, self._members)

    def __enter__(self) -> HostMeeting:
        with ExitStack() as stack:
            stack.enter_context(self._part.at_risk())
            stack.enter_context(self._arenas)
            self.item = {"socket": self._arenas.socket, "facts": self._part.facts()}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def finish(self, items: Sequence[dict[str, Any]], seconds: float) -> Meeting:
        meeting, ranks = self._meeting, self.ranks
        peers = self._arenas.connect([item["socket"] for item in items], Deadline.of(meeting.exchange, seconds))
        facts = [items[r]["facts"] for r in ranks]
        return Meeting(
            ranks.index(meeting.rank), len(ranks), self._members, meeting.exchange, self._part, facts, peers
        )  # fmt: skip
