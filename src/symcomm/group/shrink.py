"""How survivors of a failure agree on who goes on, with nothing but their shared memory.

The store may have died with rank 0, so it is not asked. Any rank may die at any moment, or stop and go on much later;
and yet all ranks that get a group get one of the same members. (Across hosts: hierarchical/agreement.py.)

There is one *word* for all, in the memory of rank 0, which outlives that rank. It is changed by compare-and-swap only,
and says which *attempt* they are at: its number, who proposed it, and whether it is open or decided. Every rank has a
*record* that it alone writes, as a whole:

    proposals   its last two: the attempt's number, the ranks to be left out, and the first attempt of this agreement
    vote        the attempt that it is here for, and where its part of the new group lies
    done        the last attempt of which it has read everybody's vote

The word goes from (n, open) to (n, decided), or to (n + 1, open) with more ranks left out; from (n, decided) to (n + 1,
open) when somebody calls shrink() again.

1. A rank that finds no open attempt proposes one: it publishes the proposal first, and swaps the word then. If another
   was faster, it takes part in that. A rank that finds itself left out raises.
2. A rank that knows of more ranks that are gone, or to be left out, proposes the next attempt with them.
3. Else it votes for the attempt. When all that are to go on have voted for it, anybody decides it. Then each of them
   builds the new group from what the votes say, and needs nobody for it any more.
4. When one of them dies before, or its vote does not come until somebody's deadline, the next attempt is proposed
   without it.

An attempt follows another within one agreement only if that was not decided, and nobody can decide it any more. So one
is decided at most, for everybody; a rank that wakes up late finds the word changed, itself left out, or the decision.
Every attempt leaves out at least one rank more: after as many deadlines as ranks stalled, one by one, it is over.
"""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from symcomm import errors
from symcomm._core import native
from symcomm.memory.share import Exchange, GroupNotBuilt

POLL_S = 0.001  # seconds between two polls of the others' records


def check_excluded(group: Any, exclude: Collection[int]) -> None:
    """Refuse ranks to leave out that are none, or the caller's own."""
    if any(not isinstance(r, int) or not 0 <= r < group.size for r in exclude):
        raise errors.bad_argument("shrink", "exclude", list(exclude), f"ranks of this group, 0 to {group.size - 1}")
    if group.rank in exclude:
        raise errors.bad_argument(
            "shrink", "exclude", list(exclude), f"without this rank ({group.rank})", "only ranks that stay call it"
        )


def check_quorum(group: Any, quorum: int | None) -> None:
    is_number = isinstance(quorum, int) and not isinstance(quorum, bool)
    if quorum is not None and not (is_number and 1 <= quorum <= group.size):
        raise errors.bad_argument("shrink", "quorum", quorum, f"a number of ranks, 1 to {group.size}, or None")


def pack_ranks(ranks: Collection[int]) -> str:
    """A set of ranks in few characters: 172 for any of 1,024."""
    mask = sum(1 << r for r in set(ranks))
    return base64.b64encode(mask.to_bytes((mask.bit_length() + 7) // 8, "little")).decode()


def unpack_ranks(text: str) -> frozenset[int]:
    mask = int.from_bytes(base64.b64decode(text), "little")
    return frozenset(r for r in range(mask.bit_length()) if mask >> r & 1)


def left_out(name: str, rank: int) -> errors.RankFailedError:
    return errors.RankFailedError(
        f"shrink of group {name!r}: the other ranks went on without rank {rank}, which did not come in time; "
        "end this process, or join anew.",
        [rank],
    )


class Attempt(NamedTuple):
    """To go on without the ranks in ``dead``. ``since``: the first attempt of the same agreement."""

    number: int = 0
    since: int = 0
    dead: frozenset[int] = frozenset()

    def living(self, size: int) -> list[int]:
        return [r for r in range(size) if r not in self.dead]


class AttemptWord(NamedTuple):
    """Where all ranks are; a number of 64 bits in memory."""

    number: int
    author: int
    is_open: bool

    @classmethod
    def unpack(cls, value: int) -> AttemptWord:
        return cls(value >> 17, value >> 1 & 0xFFFF, bool(value & 1))

    def pack(self) -> int:
        return self.number << 17 | self.author << 1 | self.is_open


class Record(NamedTuple):
    """What one rank says."""

    proposals: tuple[Attempt, ...] = ()
    vote: int = 0
    done: int = 0
    item: bytes = b""

    @classmethod
    def unpack(cls, data: bytes | None) -> Record:
        if data is None:
            return cls()
        head, _, item = data.partition(b"\n")
        proposals, vote, done = json.loads(head)
        return cls(tuple(Attempt(n, since, unpack_ranks(dead)) for n, since, dead in proposals), vote, done, item)

    def pack(self) -> bytes:
        proposals = [[p.number, p.since, pack_ranks(p.dead)] for p in self.proposals]
        head = json.dumps([proposals, self.vote, self.done], separators=(",", ":"))
        return head.encode() + b"\n" + self.item


class Records:
    """The memory in which the ranks of one host agree."""

    def __init__(self, group: Any):
        self.handle = group.handle

    def gone(self) -> set[int]:
        return {r["rank"] for r in native.group_report(self.handle)["ranks"] if r["gone"]}

    def word(self) -> AttemptWord:
        return AttemptWord.unpack(native.group_agree(self.handle, 0, 0))

    def swap(self, before: AttemptWord, after: AttemptWord) -> None:
        """Change the word, unless somebody else has."""
        native.group_agree(self.handle, before.pack(), after.pack())

    def publish(self, record: Record) -> None:
        native.group_publish(self.handle, native.RECORD_VOTE, record.pack())

    def read(self) -> list[Record]:
        return [Record.unpack(data) for data in native.group_records(self.handle, native.RECORD_VOTE)]


class Agreement:
    """One rank's part. See the module's text."""

    def __init__(self, group: Any, timeout: float, exclude: Collection[int]):
        self._rank, self._size, self._name = group.rank, group.size, group.name
        self._records, self._timeout, self._exclude = Records(group), timeout, frozenset(exclude)
        self._mine = self._records.read()[group.rank]  # of an earlier call
        self._voted = 0  # the attempt that this call took part in

    def _publish(self, **changes: Any) -> None:
        self._mine = self._mine._replace(**changes)
        self._records.publish(self._mine)

    def _propose(self, word: AttemptWord, dead: Collection[int], since: int) -> None:
        """The attempt after ``word``. That may be one of ours too, which others still have to read."""
        kept = tuple(p for p in self._mine.proposals if p.number == word.number)
        self._publish(proposals=(*kept, Attempt(word.number + 1, since, frozenset(dead))))
        self._records.swap(word, AttemptWord(word.number + 1, self._rank, True))

    def _now(self) -> tuple[AttemptWord, Attempt]:
        """The attempt that the word names."""
        while True:
            word = self._records.word()
            if word.number == 0:
                return word, Attempt()
            for attempt in self._records.read()[word.author].proposals:
                if attempt.number == word.number:
                    return word, attempt
            time.sleep(POLL_S)  # its author has gone on, and so has the word

    def next_attempt(self) -> Attempt:
        """The attempt to take part in."""
        deadline = time.monotonic() + self._timeout
        while True:
            word, attempt = self._now()
            if self._rank in attempt.dead or (word.is_open and 0 < self._voted < attempt.since):
                raise left_out(self._name, self._rank)
            lost = (self._exclude | self._records.gone()) - attempt.dead
            if word.is_open and not lost:
                return attempt
            if word.is_open:
                self._propose(word, attempt.dead | lost, attempt.since)
            elif self._is_over(attempt) or time.monotonic() > deadline:
                self._propose(word, attempt.dead | lost, word.number + 1)
            else:
                time.sleep(POLL_S)

    def _is_over(self, attempt: Attempt) -> bool:
        """Whether all members have what they need of an attempt that was decided."""
        records, gone = self._records.read(), self._records.gone()
        return all(records[r].done >= attempt.number or r in gone for r in attempt.living(self._size))

    def exchange_for(self, attempt: Attempt) -> Exchange:
        """Everybody's bytes, once and only once ``attempt`` is decided; raises GroupNotBuilt when it cannot be any
        more."""
        return lambda item: self._take_part(attempt, item)

    def _take_part(self, attempt: Attempt, item: bytes) -> list[bytes]:
        number, living = attempt.number, attempt.living(self._size)
        deadline = time.monotonic() + self._timeout
        self._voted = number
        self._publish(vote=number, item=item)
        while True:
            word = self._records.word()
            if word.number != number:
                if self._now()[1].since > number:  # this one may have been decided, and its group be in use
                    raise left_out(self._name, self._rank)
                raise GroupNotBuilt(f"attempt {number} to shrink group {self._name!r} has failed")
            records = self._records.read()
            missing = [r for r in living if records[r].vote != number]
            if not word.is_open:
                if missing:  # they have gone on to another agreement, which did not wait for us any longer
                    raise left_out(self._name, self._rank)
                self._publish(done=number)
                return [records[r].item for r in living]
            lost = self._records.gone().intersection(living)
            if not lost and time.monotonic() > deadline:
                lost = set(missing)
            if lost:
                self._propose(word, attempt.dead | lost, attempt.since)
            elif not missing:
                self._records.swap(word, word._replace(is_open=False))
            else:
                time.sleep(POLL_S)

    def withdraw(self) -> None:
        """This rank cannot go on: let the others do so without it."""
        while True:
            word, attempt = self._now()
            if not word.is_open or self._rank in attempt.dead:
                return
            self._propose(word, attempt.dead | {self._rank}, attempt.since)


def shrink(group: Any, timeout: float, exclude: Collection[int], abort: bool) -> Any:
    """See ProcessGroup.shrink. ``abort`` ends what other ranks still do on the group now; otherwise once everybody that
    goes on has come."""
    agreement = Agreement(group, timeout, exclude)
    if abort:
        native.group_abort(group.handle)  # a no-op when the group has failed already
    smaller = None
    try:
        while smaller is None:
            attempt = agreement.next_attempt()
            with contextlib.suppress(GroupNotBuilt):
                smaller = group.of_members(attempt.living(group.size), agreement.exchange_for(attempt))
    except BaseException:
        agreement.withdraw()
        raise
    native.group_abort(group.handle)  # tells the ranks that were left out, should they still use it
    group.reclaim_windows()
    smaller.inherit(group)
    return smaller
