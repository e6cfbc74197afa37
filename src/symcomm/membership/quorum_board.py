"""The board of ranks on several hosts (see succession.py): a quorum of them keeps it, by messages that may be lost.

Two halves of a job never both go on, even if some hosts are partitioned from the rest, or in one direction only. For
that, the standing is a register that a quorum of the group's members keeps, as in CASPaxos: two quorums have a rank in
common. A quorum is more than half of the members, or just half of them with rank 0; callers may ask for another number.

Every member is an acceptor, in the thread of its control channel, whether it calls shrink() or not. It remembers

    promised   the highest *ballot* that it has seen: (number, rank of the proposer). It takes part in no lower ballot.
    accepted   the standing that it agreed to last, and in which ballot
    known      the newest standing that it knows a quorum agreed to

To change the standing, a rank

1. sends ``prepare`` with a higher ballot to all members. Each either promises it and says what it has accepted, or
   refuses;
2. once a quorum has promised, takes the standing that was accepted in the highest ballot. If that is the one it wanted
   to change, it sends ``accept`` with its own standing to all, else with the one it found, which may lack a quorum yet;
3. once a quorum has accepted, tells all members the standing.

The lowest rank goes first. If that leads nowhere, others follow a moment later. A quorum that callers ask for may have
no rank in common with another; each step then waits for all ranks that may go on, and leaves out those that do not
answer.

Records are sent to all members and may be lost: a rank that missed a vote still learns of the decision."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

from symcomm import errors
from symcomm.errors import format_ranks
from symcomm.membership.succession import Attempt, Board, Record, Standing, pack_ranks, unpack_ranks

SLICE = 0.05  # seconds between liveness checks
REACH = 1.0  # seconds to connect to a rank
GRACE = 0.3  # seconds by which the next rank waits longer before it proposes

Ballot = tuple[int, int]
NO_BALLOT: Ballot = (0, -1)


def pack(standing: Standing) -> list[Any]:
    attempt, is_open, author = standing
    return [attempt.number, attempt.since, pack_ranks(attempt.dead), is_open, author]


def unpack(packed: Any) -> Standing:
    number, since, dead, is_open, author = packed
    return Standing(Attempt(number, since, unpack_ranks(dead)), is_open, author)


def age(standing: Standing) -> tuple[int, bool]:
    """Orders standings: later ones are greater."""
    return standing.attempt.number, not standing.is_open


class Acceptor:
    """What one rank remembers. Each kind of message has a handler here, which returns the answer if there is one."""

    def __init__(self) -> None:
        self.promised = NO_BALLOT
        self.accepted = NO_BALLOT, Standing()
        self.known = Standing()
        self.records: dict[int, Record] = {}
        self.late: dict[int, int] = {}  # the last attempt in which a rank waited too long for others
        self.quit: set[int] = set()  # ranks that came, and gave up
        self.ballot = NO_BALLOT  # this rank's own; the fields below hold the others' answers to it
        self.promises: dict[int, tuple[Ballot, Standing]] = {}
        self.acceptances: set[int] = set()
        self.heard: set[int] = set()  # ranks that have answered since this one began to change the standing

    def on_prepare(self, rank: int, header: dict[str, Any]) -> dict[str, Any]:
        ballot = _ballot(header["proposal"])
        if ballot <= self.promised:
            return self._refusal()
        self.promised = ballot
        accepted, standing = self.accepted
        return {"step": "promise", "proposal": list(ballot), "accepted": [list(accepted), pack(standing)]}

    def on_promise(self, rank: int, header: dict[str, Any]) -> None:
        self.heard.add(rank)
        if _ballot(header["proposal"]) == self.ballot:
            accepted, standing = header["accepted"]
            self.promises[rank] = _ballot(accepted), unpack(standing)

    def on_accept(self, rank: int, header: dict[str, Any]) -> dict[str, Any]:
        ballot = _ballot(header["proposal"])
        if ballot < self.promised:
            return self._refusal()
        self.promised, self.accepted = ballot, (ballot, unpack(header["value"]))
        return {"step": "accepted", "proposal": list(ballot)}

    def on_accepted(self, rank: int, header: dict[str, Any]) -> None:
        if _ballot(header["proposal"]) == self.ballot:
            self.acceptances.add(rank)

    def on_refused(self, rank: int, header: dict[str, Any]) -> None:
        self.heard.add(rank)
        self.promised = max(self.promised, _ballot(header["proposal"]))  # to promise more is always safe
        self.on_learned(rank, header)

    def on_learned(self, rank: int, header: dict[str, Any]) -> None:
        standing = unpack(header["value"])
        if age(standing) > age(self.known):
            self.known = standing

    def on_record(self, rank: int, header: dict[str, Any]) -> None:
        """The newest record of a rank comes last: connections keep the order of messages, and newer connections carry
        newer ones."""
        self.records[rank] = Record(vote=header["vote"], done=header["done"])
        self.late[rank] = header["late"]
        self.quit.discard(rank)
        self.on_learned(rank, header)

    def on_quit(self, rank: int, header: dict[str, Any]) -> None:
        self.quit.add(rank)

    def _refusal(self) -> dict[str, Any]:
        """Tell a rank that lags behind how far this one is."""
        return {"step": "refused", "proposal": list(self.promised), "value": pack(self.known)}


def _ballot(packed: Any) -> Ballot:
    number, rank = packed
    return int(number), int(rank)


class QuorumBoard(Board):
    """The board of one group as one of its ranks knows it. It lives as long as the group."""

    def __init__(self, group: Any):
        self._group: Callable[[], Any] = weakref.ref(group)
        self._cond = group.cond
        self.rank, self.size, self.name = group.rank, group.size, group.name
        self._acceptor = Acceptor()
        self._timeout = self._deadline = 0.0
        self._quorum: int | None = None
        self._late = 0
        self._silent: set[int] = set()  # ranks that did not answer in time, where all that may go on have to

    def begin(self, timeout: float, quorum: int | None) -> None:
        """Tell all that this rank takes part in a call of shrink()."""
        self._timeout, self._quorum = timeout, quorum
        self.publish()

    # --- messages -----------------------------------------------------------------------------------------------

    def note(self, rank: int, header: dict[str, Any]) -> None:
        """A member's message; called in the control channel's thread."""
        with self._cond:
            answer = getattr(self._acceptor, f"on_{header['step']}")(rank, header)
            self._cond.notify_all()
        if answer is not None and rank == self.rank:
            self.note(rank, answer)
        elif answer is not None and (group := self._group()) is not None:
            group.tell_known(rank, {"kind": "agree", **answer})

    def _send_all(self, header: dict[str, Any]) -> None:
        """Send it to every member that can be reached, this one first."""
        self.note(self.rank, header)
        group = self._group()
        others = [r for r in range(self.size) if r != self.rank and not group.is_gone(r)]
        group.tell_all(others, {"kind": "agree", **header}, timeout=REACH)

    def _await(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Wait until ``ready()``; False when the time is over."""
        with self._cond:
            while not ready():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._cond.wait(min(left, SLICE))
        return True

    # --- quorums ------------------------------------------------------------------------------------------------

    def _is_quorum(self, ranks: Iterable[int]) -> bool:
        present = set(ranks)
        if self._quorum is not None:
            return len(present) >= self._quorum
        return 2 * len(present) > self.size or (2 * len(present) == self.size and 0 in present)

    def _check_quorum(self, present: Collection[int]) -> None:
        if self._is_quorum(present):
            return
        least = self._quorum or self.size // 2 + 1
        raise errors.NoQuorumError(
            f"shrink of group {self.name!r}: of its {self.size} ranks only {format_ranks(present)} can be "
            f"reached, and {least} are needed: the others may live, and go on by themselves. End this process, or pass "
            "quorum= if they cannot.",
            [r for r in range(self.size) if r not in present],
        )

    # --- the register -------------------------------------------------------------------------------------------

    def _swap(self, before: Standing, after: Standing) -> None:
        """Change the standing if it is still ``before``; otherwise learn what it is."""
        acceptor = self._acceptor
        self._extend()
        while self._is_turn(before):
            self._check_quorum([r for r in range(self.size) if r not in self._group().rounds.gone()])
            with self._cond:
                acceptor.ballot = acceptor.promised[0] + 1, self.rank
                acceptor.promises, acceptor.acceptances = {}, set()
            ballot = list(acceptor.ballot)
            self._send_all({"step": "prepare", "proposal": ballot})
            if not self._await_answers(lambda: acceptor.promises, after):
                continue
            current = max(acceptor.promises.values(), key=lambda accepted: accepted[0])[1]
            value = pack(current if age(current) > age(before) else after)
            self._send_all({"step": "accept", "proposal": ballot, "value": value})
            if self._await_answers(lambda: acceptor.acceptances, after):
                self._send_all({"step": "learned", "value": value})

    def _is_turn(self, before: Standing) -> bool:
        """Let ranks below this one go first. False once the standing has changed."""
        left = [r for r in range(self.size) if r == self.rank or r not in before.attempt.dead.union(self.gone())]
        return not self._await(lambda: self.now() != before, time.monotonic() + GRACE * left.index(self.rank))

    def _extend(self) -> None:
        """Give a quorum the full time-out again to answer."""
        self._deadline, self._acceptor.heard = time.monotonic() + self._timeout, {self.rank}

    def _await_answers(self, answers: Callable[[], Collection[int]], after: Standing) -> bool:
        """Wait until a quorum has answered. False if there is a higher ballot, or if the caller must try again."""
        acceptor = self._acceptor

        def missing() -> set[int]:
            """With a smaller quorum any rank may take over, so all ranks that go on have to answer."""
            if self._quorum is None:
                return set()
            return set(range(self.size)) - after.attempt.dead - set(self.gone()) - set(answers())

        def is_outdone() -> bool:
            return acceptor.promised > acceptor.ballot

        def is_over() -> bool:
            return is_outdone() or (self._is_quorum(answers()) and not missing())

        # a rank that was stopped may have answers that it has not read yet
        if not self._await(is_over, self._deadline) and not self._await(is_over, time.monotonic() + GRACE):
            self._check_quorum(acceptor.heard)
            self._extend()
            if not self._is_quorum(answers()):
                return False
            self._silent |= missing()
        elif not is_outdone():
            self._extend()
        return not is_outdone()

    # --- the board ----------------------------------------------------------------------------------------------

    def now(self) -> Standing:
        return self._acceptor.known

    def propose(self, before: Standing, dead: Collection[int], since: int) -> None:
        attempt = Attempt(before.attempt.number + 1, since, frozenset(dead))
        self._swap(before, Standing(attempt, True, self.rank))

    def decide(self, before: Standing) -> None:
        self._swap(before, before._replace(is_open=False))

    def publish(self, **changes: Any) -> None:
        _, vote, done, _ = self._acceptor.records.get(self.rank, Record())._replace(**changes)
        self._send_all({"step": "record", "vote": vote, "done": done, "late": self._late, "value": pack(self.now())})

    def read(self) -> list[Record]:
        with self._cond:
            return [self._acceptor.records.get(r, Record()) for r in range(self.size)]

    def gone(self) -> Collection[int]:
        return (self._group().rounds.gone() | self._acceptor.quit | self._silent) - {self.rank}

    def pause(self, seconds: float = 0.0) -> None:
        before = self.now()
        if seconds:
            self._await(lambda: self.now() != before, time.monotonic() + seconds)
            return
        with self._cond:
            self._cond.wait(SLICE)

    def find_culprits(self, attempt: Attempt, missing: Collection[int]) -> Collection[int]:
        """The ranks of ``missing`` that do not say that they, too, wait for others."""
        self._late = attempt.number
        self.publish()

        def culprits() -> set[int]:
            return {r for r in missing if self._acceptor.late.get(r) != attempt.number}

        self._await(lambda: self.now().attempt != attempt or not culprits(), time.monotonic() + 2 * GRACE)
        return culprits()

    def withdraw(self) -> None:
        self._send_all({"step": "quit"})
