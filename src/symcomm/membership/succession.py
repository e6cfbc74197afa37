"""Succession: how the members of a group that lost some agree on the next group.

All members that get a new group get one with the same members, although any may die at any moment, or stop and go on
much later. They agree on a *board*, which outlives each of them:

    standing   the attempt that they are at: its number, the ranks that it leaves out, the first attempt of the same
               agreement, and whether it is open or decided. Only compare-and-swap changes it.
    records    one for each rank, which that rank alone writes: the attempt that it has voted for, an item for the
               others that goes with the vote, and the last attempt for which it needs no other rank any more

The standing goes from (n, open) to (n, decided), or to (n + 1, open); from (n, decided) to (n + 1, open) when a rank
calls shrink() again.

1. A rank that finds no open attempt proposes one. If another rank was faster, it takes part in that rank's attempt. A
   rank that finds itself left out raises.
2. A rank that knows of more ranks that are gone, or to be left out, proposes the next attempt without them.
3. Otherwise it votes for the attempt. When all ranks that the attempt keeps have voted, any of them decides it.
4. If one of them dies first, or does not vote before another's deadline, the next attempt is proposed without it.

Within one agreement, an attempt follows another only if the earlier one was not decided and cannot be decided any more.
So at most one is decided, for all ranks. A rank that wakes up late finds that the standing has changed, that it was
left out, or the decision.

On one host the board is shared memory (shared_board.py). A vote says where the rank's part of the new group lies, and
the group is made once the attempt is decided. Across hosts a quorum of the members keeps the board (quorum_board.py). A
rank votes once it has built the group, and uses the group only if the attempt is decided."""

from __future__ import annotations

import abc
import base64
import contextlib
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from symcomm import errors
from symcomm.memory.share import Exchange, GroupNotBuilt

TRIES = 3  # attempts that may fail without a rank to blame


def pack_ranks(ranks: Collection[int]) -> str:
    """A set of ranks in few characters: 172 for any of 1,024."""
    mask = sum(1 << r for r in set(ranks))
    return base64.b64encode(mask.to_bytes((mask.bit_length() + 7) // 8, "little")).decode()


def unpack_ranks(text: str) -> frozenset[int]:
    mask = int.from_bytes(base64.b64decode(text), "little")
    return frozenset(r for r in range(mask.bit_length()) if mask >> r & 1)


class Attempt(NamedTuple):
    """An attempt to go on without the ranks in ``dead``. ``since``: the first attempt of the same agreement."""

    number: int = 0
    since: int = 0
    dead: frozenset[int] = frozenset()

    def living(self, size: int) -> list[int]:
        return [r for r in range(size) if r not in self.dead]


class Standing(NamedTuple):
    attempt: Attempt = Attempt()
    is_open: bool = False
    author: int = 0  # the rank that proposed it


class Record(NamedTuple):
    """What one rank has published. ``proposals``: its last two, on a board whose standing only names them."""

    proposals: tuple[Attempt, ...] = ()
    vote: int = 0
    done: int = 0
    item: bytes = b""


class Board(abc.ABC):
    """The board on which the members of a group agree, as one of them sees it."""

    rank: int
    size: int
    name: str  # of the group

    @abc.abstractmethod
    def now(self) -> Standing: ...

    @abc.abstractmethod
    def propose(self, before: Standing, dead: Collection[int], since: int) -> None:
        """Open the attempt after ``before``, unless the standing has changed."""

    @abc.abstractmethod
    def decide(self, before: Standing) -> None:
        """Close an open attempt, unless the standing has changed."""

    @abc.abstractmethod
    def publish(self, **changes: Any) -> None:
        """Change this rank's record."""

    @abc.abstractmethod
    def read(self) -> list[Record]:
        """All ranks' records."""

    @abc.abstractmethod
    def gone(self) -> Collection[int]:
        """Ranks that cannot go on, as far as this one knows."""

    @abc.abstractmethod
    def pause(self, seconds: float = 0.0) -> None:
        """Wait between two looks. With ``seconds``: that long, or until the standing changes."""

    @abc.abstractmethod
    def find_culprits(self, attempt: Attempt, missing: Collection[int]) -> Collection[int]:
        """The ranks to leave out, of those in ``missing``, whose votes did not come in time."""

    @abc.abstractmethod
    def withdraw(self) -> None:
        """Let the others go on without this rank, which cannot."""

    def left_out(self) -> errors.RankFailedError:
        return errors.RankFailedError(
            f"shrink of group {self.name!r}: the other ranks went on without rank {self.rank}, which did not come in "
            "time; end this process, or join anew.",
            [self.rank],
        )


class Succession:
    """One rank's part in one agreement. See the module's text."""

    def __init__(self, board: Board, timeout: float, exclude: Collection[int]):
        self.board, self.timeout = board, timeout
        self._excluded = frozenset(exclude)
        self._voted = 0  # the attempt that this call took part in
        self._failures = 0

    def next_attempt(self) -> Attempt:
        """The attempt to take part in."""
        board, deadline = self.board, time.monotonic() + self.timeout
        while True:
            standing = board.now()
            attempt, is_open, _ = standing
            if board.rank in attempt.dead or (is_open and 0 < self._voted < attempt.since):
                raise board.left_out()
            lost = self._excluded.union(board.gone()) - attempt.dead
            if is_open and not lost:
                return attempt
            if is_open:
                board.propose(standing, attempt.dead | lost, attempt.since)
            elif self._is_over(attempt) or time.monotonic() > deadline:
                board.propose(standing, attempt.dead | lost, attempt.number + 1)
            else:
                board.pause()

    def _is_over(self, attempt: Attempt) -> bool:
        """Whether all members have got what they need of a decided attempt."""
        records, gone = self.board.read(), self.board.gone()
        return all(records[r].done >= attempt.number or r in gone for r in attempt.living(self.board.size))

    def vote(self, attempt: Attempt, item: bytes = b"") -> list[Record]:
        """The records of the ranks that go on, once ``attempt`` is decided. Raises GroupNotBuilt once it cannot be."""
        board, number, living = self.board, attempt.number, attempt.living(self.board.size)
        deadline = time.monotonic() + self.timeout
        self._voted = number
        board.publish(vote=number, item=item)
        while True:
            standing = board.now()
            if standing.attempt.number != number:
                if standing.attempt.since > number:  # ours may have been decided, and its group may be in use
                    raise board.left_out()
                raise GroupNotBuilt(f"attempt {number} to shrink group {board.name!r} has failed")
            records = board.read()
            if not standing.is_open:
                return [records[r] for r in living]
            missing = [r for r in living if records[r].vote != number]
            if lost := set(living).intersection(board.gone()):
                board.propose(standing, attempt.dead | lost, attempt.since)
            elif not missing:
                board.decide(standing)
            elif time.monotonic() > deadline:
                self.fail(standing, board.find_culprits(attempt, missing))
            else:
                board.pause()

    def fail(self, standing: Standing, culprits: Collection[int]) -> None:
        """Propose the next attempt, without ``culprits``. If there are none, others go first: they may know more."""
        if not culprits:
            self._failures += 1
            if self._failures >= TRIES:
                raise errors.deadline(f"shrink of group {self.board.name!r}", self.timeout)
            self.board.pause(self.timeout / 2)
        self.board.propose(standing, standing.attempt.dead.union(culprits), standing.attempt.since)

    def exchange_for(self, attempt: Attempt) -> Exchange:
        """An exchange that votes with a rank's bytes, and returns all ranks' once ``attempt`` is decided."""
        return lambda item: self._take_part(attempt, item)

    def _take_part(self, attempt: Attempt, item: bytes) -> list[bytes]:
        records = self.vote(attempt, item)
        if any(record.vote != attempt.number for record in records):
            raise self.board.left_out()  # others have gone on to another agreement, which did not wait for this rank
        self.board.publish(done=attempt.number)
        return [record.item for record in records]


def agree(board: Board, timeout: float, exclude: Collection[int], build: Callable[[Succession, Attempt], Any]) -> Any:
    """What ``build`` returned in the decided attempt. ``build`` raises GroupNotBuilt to ask for another attempt."""
    succession = Succession(board, timeout, exclude)
    try:
        while True:
            with contextlib.suppress(GroupNotBuilt):
                return build(succession, succession.next_attempt())
    except BaseException:
        board.withdraw()
        raise
