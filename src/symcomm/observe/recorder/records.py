"""Operations, decoded from the flight recorders' raw entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from symcomm._core import native
from symcomm.collectives.plan import ALGORITHMS, Collective
from symcomm.collectives.select import elements_of
from symcomm.group.failure import REDUCING, ROOTED, Status
from symcomm.memory.flight import FlightEntry, read_flight
from symcomm.types import ITEMSIZE, DType, RedOpType

DIRECT, ATTACHED = native.FLIGHT_DIRECT, native.FLIGHT_ATTACHED
MESSAGE, ATTACHED_MESSAGE = native.FLIGHT_MESSAGE, native.FLIGHT_ATTACHED_MESSAGE
COPIES = {
    DIRECT: "direct", ATTACHED: "attached", ATTACHED_MESSAGE: "attached",
    native.FLIGHT_ORDINARY_HERE: "ordinary_here", native.FLIGHT_ORDINARY_THERE: "ordinary_there",
}  # fmt: skip
OTHER_PLANS = {DIRECT: "direct", ATTACHED: "attached", ATTACHED_MESSAGE: "attached"}
REFUSED = "refused"  # the name of a call that its own rank refused, and the state of the others' part in it
LONG, QUEUED = native.FLIGHT_SLOW_PATH, native.FLIGHT_QUEUED


@dataclass(frozen=True)
class Operation:
    """One collective or message of one rank. Times are nanoseconds of CLOCK_MONOTONIC."""

    rank: int  # in the group
    number: int  # among all operations of this rank, in the order they began
    group: str
    ranks: tuple[int, ...]  # of the group, as the world numbers them
    seq: int  # in the group: an operation has the same number on every rank; messages have their own numbers
    call: str  # "all_reduce", "send", ...
    dtype: str
    op: str | None  # "SUM", ...
    root: int | None  # of the group; of a message the peer, -1: any
    count: int  # elements
    nbytes: int
    created_ns: int
    finished_ns: int | None
    waited_us: int  # time asleep until all ranks had arrived
    state: str  # "running", "completed", or what went wrong
    plan: str
    zero_copy: bool
    site: str  # "file:line", or "" when not known
    exact_site: bool  # False: that of the first call of this kind
    way: str = ""  # "short": the core alone; "long": through Python; "": not known
    thread: str = ""  # "inline": the caller's; "queued": the group's own
    copies: str = ""  # how its bytes went, as ProcessGroup.copy_stats names it; "": of a message through the channel

    @property
    def is_over(self) -> bool:
        """Whether all is well with it: it ended, or was no call, since some rank refused it."""
        return self.state in ("completed", REFUSED)

    @property
    def is_message(self) -> bool:
        return self.call in ("send", "recv")

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)  # all plain values; asdict() would copy each of them

    def changed(self, **facts: Any) -> Operation:
        """A copy with other values. (dataclasses.replace() takes three times as long, and a page has 1,000 ranks.)"""
        copy = object.__new__(Operation)
        copy.__dict__.update(self.__dict__)
        copy.__dict__.update(facts)
        return copy

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Operation:
        return cls(**{**facts, "ranks": tuple(facts["ranks"])})

    @property
    def world_rank(self) -> int:
        """The rank that made the call, as the world numbers it."""
        return self.ranks[self.rank] if 0 <= self.rank < len(self.ranks) else self.rank

    def __str__(self) -> str:
        """``all_reduce(float32 x 1024, SUM)``"""
        if self.call == "barrier":
            return "barrier()"
        if self.call == REFUSED:
            return "a call that it refused"
        peer = {"send": "to", "recv": "from"}.get(self.call, "root")
        parts = [f"{self.dtype} x {self.count}", self.op]
        if self.root is not None:
            parts.append(f"{peer} any" if self.root < 0 else f"{peer} {self.root}")
        return f"{self.call}({', '.join(p for p in parts if p)})"


class GroupKeys:
    """Numbers for pairs of a group's name and ranks. Hashing a long tuple for every call would dominate an analysis;
    most calls of a rank share the tuple, so its identity is enough. Only for calls that stay in memory."""

    def __init__(self) -> None:
        self._by_identity: dict[tuple[str, int], int] = {}
        self._by_value: dict[tuple[str, tuple[int, ...]], int] = {}

    def __call__(self, op: Operation) -> int:
        quick = (op.group, id(op.ranks))
        number = self._by_identity.get(quick)
        if number is None:
            number = self._by_value.setdefault((op.group, op.ranks), len(self._by_value))
            self._by_identity[quick] = number
        return number


def operations_at(address: int) -> list[Operation]:
    """The operations in the flight recorder at ``address``, oldest first."""
    return [as_operation(entry) for entry in read_flight(address, native.peek)]


def on_this_host(group: Any) -> Any:
    """The part of a group whose memory this rank can read: all of it, unless its ranks are on several hosts."""
    return group.local if group.spans_hosts else group


def operations_of(group: Any) -> list[list[Operation]]:
    """What every rank of ``group`` on this host has recorded, by rank, even if it is stuck or dead."""
    return [operations_at(peer.flight) for peer in on_this_host(group).peers]


def as_operation(entry: FlightEntry) -> Operation:
    """A raw entry as an Operation."""
    message = entry.path in (MESSAGE, ATTACHED_MESSAGE)
    dtype = DType(entry.signature >> 8 & 0xFF)
    side = entry.signature >> 24 & 0xFFFFFFFF
    op: str | None = None
    root: int | None = None
    if message:
        call, root = ("send" if entry.signature & 1 else "recv"), side - (side >> 31 << 32)
        nbytes, count = entry.count, entry.count // ITEMSIZE[dtype]
    elif entry.signature == native.REFUSED_CALL:
        call, count, nbytes = REFUSED, 0, 0
    else:
        collective = Collective(entry.signature & 0xFF)
        call = collective.label
        op = RedOpType(entry.signature >> 16 & 0xFF).name if collective in REDUCING else None
        root = side if collective in ROOTED else None
        count = elements_of(entry.count)
        nbytes = count * ITEMSIZE[dtype]
    return Operation(
        rank=entry.group.get("rank", -1),
        number=entry.number,
        group=entry.group.get("name", "?"),
        ranks=tuple(entry.group.get("ranks", ())),
        seq=entry.seq,
        call=call,
        dtype=dtype.label,
        op=op,
        root=root,
        count=count,
        nbytes=nbytes,
        created_ns=native.ticks_to_ns(entry.created),
        finished_ns=native.ticks_to_ns(entry.finished) if entry.finished else None,
        waited_us=entry.waited_us,
        state=_state(entry),
        plan=OTHER_PLANS.get(entry.path, ALGORITHMS[entry.plan]),
        zero_copy=entry.path == DIRECT,
        site=entry.site,
        exact_site=entry.exact_site,
        way="long" if entry.way & LONG else "short",
        copies=COPIES.get(entry.path, "" if message else "no_plan"),
        thread="queued" if entry.way & QUEUED else "inline",
    )


def _state(entry: FlightEntry) -> str:
    if not entry.finished or not entry.status:
        return "completed" if entry.finished else "running"
    return Status(entry.status).name.lower() if entry.status in set(Status) else f"status {entry.status}"
