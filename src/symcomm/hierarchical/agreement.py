"""How ranks on several hosts agree on who goes on: by messages, of which any may be lost, also in one direction only.

As on one host (group/shrink.py) all ranks that get a group get one of the same members, whoever dies or stops
meanwhile. Here is no memory that all can see, and a part of the hosts may be cut off from the rest. So the ranks vote,
by Paxos (a single decree for each time that the group is shrunk): a decision needs a *quorum* of the group's members.
Two quorums have a rank in common, so two halves of a job never both go on. A quorum is more than half of the members,
or just half of them with rank 0; callers may ask for another number.

Every member answers for itself, in the thread of its office, whether it calls shrink() or not. It remembers

    promised   the highest *ballot* it was told of: (number, rank of the proposer). It takes part in no lower one.
    attempts   the ranks that each ballot leaves out
    accepted   the value that it agreed to last, and in which ballot
    decided    the value that a quorum agreed to

and a value is (the ballot in which its group was built, the ranks left out).

1. Who has reason to (it is the first of those that live; somebody died; a deadline passed) proposes: it sends
   ``prepare`` with a higher ballot and the ranks to leave out to all members. They promise it, and say what they have
   accepted, or refuse, and say what they promised.
2. Has a quorum promised, and one of them accepted a value before, the proposer must take that value: go to 4.
3. All that are to go on build the new group, and tell each other when they have. They keep it, and do not use it yet.
4. The proposer sends ``accept`` with the value to all. Those that have promised nothing higher do. When a quorum has,
   the value is decided. (Where callers ask for fewer ranks than that, all that go on must have, too.)
5. Who learns of the decision tells all others, and returns the group that was built in that ballot; or raises, where
   the decision is to go on without it.

Whoever waits for another too long, or sees it go, goes back to 1, those first that are lowest among the others.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from symcomm import errors
from symcomm.errors import words_for_ranks
from symcomm.group.shrink import left_out, pack_ranks, unpack_ranks
from symcomm.hierarchical.rounds import SLICE
from symcomm.hierarchical.session import Refused
from symcomm.memory.share import NotMade

__all__ = ["Agreement", "Council"]

REACH = 1.0  # seconds to connect to a rank
GRACE = 0.3  # seconds by which the next rank waits longer before it proposes
TRIES = 3  # of building, when it fails and nobody is to blame

Ballot = tuple[int, int]
NOTHING: Ballot = (0, -1)


class Lost(errors.RankFailedError):
    """Members of a ballot are gone, as the group that is shrunk counts them."""


class Silent(errors.DeadlineError):
    """Members of a ballot did not come."""


MOST_TURNS = 1000  # agreements that another rank may be ahead


class Value(NamedTuple):
    built_in: Ballot
    dead: frozenset[int]

    def pack(self) -> list[Any]:
        return [list(self.built_in), pack_ranks(self.dead)]

    @classmethod
    def unpack(cls, packed: Any) -> Value:
        (number, rank), dead = packed
        return cls((int(number), int(rank)), unpack_ranks(dead))


class Acceptor:
    """What one rank remembers of one agreement; and, of the ballots it has proposed, what the others answered."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.promised = NOTHING
        self.attempts: dict[Ballot, frozenset[int]] = {}
        self.accepted: tuple[Ballot, Value] | None = None
        self.decided: Value | None = None
        self.here: set[int] = set()  # ranks that have come to shrink()
        self.quit: set[int] = set()  # that have come, and given up
        self.late: dict[Ballot, set[int]] = {}  # ranks that wait for others in vain
        self.promises: dict[Ballot, dict[int, tuple[Ballot, Value] | None]] = {}
        self.acceptances: dict[Ballot, set[int]] = {}

    def see(self, ballot: Ballot, dead: frozenset[int]) -> bool:
        """Promise a ballot, unless a higher one was; to promise more is always safe."""
        if ballot > self.promised:
            self.promised = ballot
            self.attempts[ballot] = dead
        return ballot == self.promised

    # --- what comes; each returns the answer, if there is one ---------------------------------------------------

    def on_here(self, rank: int, header: dict[str, Any]) -> dict[str, Any] | None:
        self.here.add(rank)
        self.quit.discard(rank)
        return None if self.decided is None and self.promised == NOTHING else self._standing()

    def on_quit(self, rank: int, header: dict[str, Any]) -> None:
        self.here.discard(rank)
        self.quit.add(rank)

    def on_late(self, rank: int, header: dict[str, Any]) -> dict[str, Any] | None:
        """Somebody waits, maybe for us: if we did not know of that ballot, that is the fault of neither."""
        ballot, unknown = _ballot(header), _ballot(header) > self.promised
        self.late.setdefault(ballot, set()).add(rank)
        self.see(ballot, unpack_ranks(header["dead"]))
        return header if unknown and self.rank in self.here else None

    def on_prepare(self, rank: int, header: dict[str, Any]) -> dict[str, Any]:
        ballot = _ballot(header)
        if self.decided is not None or not self.see(ballot, unpack_ranks(header["dead"])):
            return self._standing()
        accepted = None if self.accepted is None else [list(self.accepted[0]), self.accepted[1].pack()]
        return {"step": "promise", "ballot": list(ballot), "accepted": accepted}

    def on_promise(self, rank: int, header: dict[str, Any]) -> None:
        told = header["accepted"]
        accepted = None if told is None else (_ballot({"ballot": told[0]}), Value.unpack(told[1]))
        self.promises.setdefault(_ballot(header), {})[rank] = accepted

    def on_accept(self, rank: int, header: dict[str, Any]) -> dict[str, Any]:
        ballot = _ballot(header)
        if self.decided is not None or ballot < self.promised:
            return self._standing()
        self.see(ballot, unpack_ranks(header["dead"]))
        self.accepted = ballot, Value.unpack(header["value"])
        return {"step": "accepted", "ballot": list(ballot)}

    def on_accepted(self, rank: int, header: dict[str, Any]) -> None:
        self.acceptances.setdefault(_ballot(header), set()).add(rank)

    def on_refused(self, rank: int, header: dict[str, Any]) -> None:
        self.see(_ballot(header), unpack_ranks(header["dead"]))

    def on_decided(self, rank: int, header: dict[str, Any]) -> None:
        self.decided = Value.unpack(header["value"])

    def _standing(self) -> dict[str, Any]:
        """How far this rank is, for one that is not."""
        if self.decided is not None:
            return {"step": "decided", "value": self.decided.pack()}
        return {"step": "refused", "ballot": list(self.promised), "dead": pack_ranks(self.attempts[self.promised])}


def _ballot(header: dict[str, Any]) -> Ballot:
    number, rank = header["ballot"]
    return int(number), int(rank)


class Council:
    """All agreements of one group, as one of its ranks knows them."""

    def __init__(self, group: Any):
        self._ref, self._news, self.rank = weakref.ref(group), group.news, group.rank
        self._acceptors: dict[int, Acceptor] = {}
        self.turn = 1  # which agreement is, or would be, under way

    def acceptor(self, turn: int) -> Acceptor:
        with self._news:
            return self._acceptors.setdefault(turn, Acceptor(self.rank))

    def note(self, rank: int, header: dict[str, Any]) -> None:
        """Called by the office, in its thread: a member has something to say."""
        step, turn = header["step"], header["turn"]
        if turn > self.turn + MOST_TURNS:
            raise Refused(f"spoke of agreement {turn}, far beyond {self.turn}")
        with self._news:
            answer = getattr(self.acceptor(turn), f"on_{step}")(rank, header)
            self._news.notify_all()
        if answer is not None:
            self.send(rank, turn, answer)

    def send(self, rank: int, turn: int, header: dict[str, Any]) -> None:
        if rank == self.rank:
            self.note(rank, {**header, "turn": turn})
        elif (group := self._ref()) is not None:
            group.tell_known(rank, {"kind": "agree", "turn": turn, **header})


class Agreement:
    """One call of shrink() by one rank. See the module's text."""

    def __init__(self, group: Any, timeout: float, exclude: Collection[int], quorum: int | None):
        self._group, self._council, self._news = group, group.council, group.news
        self._rank, self._size = group.rank, group.size
        self._timeout, self._quorum = timeout, quorum
        before: frozenset[int] = frozenset()
        while (known := self._council.acceptor(self._council.turn).decided) is not None:
            before |= known.dead  # it was decided before, in a call of ours or without us
            self._council.turn += 1
        if group.rank in before:
            raise left_out(group.name, group.rank)
        self._turn = self._council.turn
        self._state = self._council.acceptor(self._turn)
        self._dead = before | frozenset(exclude)  # to be left out, as far as this rank knows
        self._built: dict[Ballot, Any] = {}
        self._failures = 0

    # --- telling ------------------------------------------------------------------------------------------------

    def _send_all(self, header: dict[str, Any]) -> None:
        """To every member that can be reached, this one first."""
        self._council.send(self._rank, self._turn, header)
        message = {"kind": "agree", "turn": self._turn, **header}
        others = [r for r in range(self._size) if r != self._rank and not self._group.is_gone(r)]
        strangers = [r for r in others if not self._group.tell_known(r, message)]
        if strangers:  # connecting may take a while
            with ThreadPoolExecutor(16, thread_name_prefix="symcomm-agree") as pool:
                list(pool.map(lambda r: self._group.tell(r, message, timeout=REACH), strangers))

    # --- looking ------------------------------------------------------------------------------------------------

    def _lost(self) -> frozenset[int]:
        """Members that cannot go on, as far as this rank can see."""
        return frozenset(self._group.rounds.gone() | self._state.quit) - {self._rank}

    def _is_quorum(self, ranks: Iterable[int]) -> bool:
        present = set(ranks)
        if self._quorum is not None:
            return len(present) >= self._quorum
        return 2 * len(present) > self._size or (2 * len(present) == self._size and 0 in present)

    def _check_quorum(self, present: Collection[int]) -> None:
        if self._is_quorum(present):
            return
        least = self._quorum or self._size // 2 + 1
        raise errors.NoQuorumError(
            f"shrink of group {self._group.name!r}: of its {self._size} ranks only {words_for_ranks(present)} can be "
            f"reached, and {least} are needed: the others may live, and go on by themselves. End this process, or pass "
            "quorum= where they cannot.",
            [r for r in range(self._size) if r not in present],
        )

    def _moved(self, ballot: Ballot) -> bool:
        """Whether this ballot is over, for this rank."""
        return self._state.decided is not None or self._state.promised > ballot

    def _await(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Wait until it is ready; False when the time is over."""
        with self._news:
            while not ready():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._news.wait(min(left, SLICE))
        return True

    # --- the agreement ------------------------------------------------------------------------------------------

    def reach(self, make: Callable[[Sequence[int], Any], Any]) -> Any:
        """The group that ``make(members, exchange)`` gives, on every member alike."""
        try:
            self._send_all({"step": "here"})
            self._begin()
            while self._state.decided is None:
                ballot = self._state.promised
                dead = self._state.attempts[ballot]
                if self._rank in dead:
                    self._await_decision(ballot)
                elif not self._dead | self._lost() <= dead:
                    self._next(ballot)
                elif ballot[1] != self._rank:
                    self._follow(ballot, make)
                else:
                    self._lead(ballot, make)
            return self._finish(self._state.decided)
        except BaseException:
            self._send_all({"step": "quit"})
            raise
        finally:
            for group in self._built.values():
                group._leave()
            self._group.rounds.forget(f"shrink/{self._turn}/")

    def _finish(self, value: Value) -> Any:
        self._send_all({"step": "decided", "value": value.pack()})  # whoever told us may have told nobody else
        self._council.turn = self._turn + 1
        if self._rank in value.dead or value.built_in not in self._built:
            raise left_out(self._group.name, self._rank)
        return self._built.pop(value.built_in)

    def _propose(self) -> None:
        lost = self._lost()
        self._check_quorum([r for r in range(self._size) if r not in self._group.rounds.gone()])
        self._dead |= lost
        ballot = (self._state.promised[0] + 1, self._rank)
        self._send_all({"step": "prepare", "ballot": list(ballot), "dead": pack_ranks(self._dead)})

    def _propose_in_turn(self, over: Callable[[], bool], wait: float = 0.0) -> None:
        """The lowest of those that are left proposes, the others only if nothing comes of it."""
        left = [r for r in range(self._size) if r not in self._dead | self._lost()]
        if not self._await(over, time.monotonic() + wait + GRACE * left.index(self._rank)):
            self._propose()

    def _next(self, ballot: Ballot, wait: float = 0.0) -> None:
        """Nothing can become of this one."""
        self._dead |= self._state.attempts[ballot]
        self._propose_in_turn(lambda: self._moved(ballot), wait)

    def _begin(self) -> None:
        """Until there is a ballot."""
        state = self._state

        def over() -> bool:
            return state.promised > NOTHING or state.decided is not None

        first = min(r for r in range(self._size) if r not in self._dead | self._lost())
        if over():
            return
        if first != self._rank and not self._await(over, time.monotonic() + self._timeout):
            self._dead |= frozenset(range(self._size)) - state.here
        if not over():
            self._propose_in_turn(over)

    def _await_decision(self, ballot: Ballot) -> None:
        """To be left out, or not: others may see it differently."""
        if not self._await(lambda: self._moved(ballot), time.monotonic() + self._timeout):
            raise left_out(self._group.name, self._rank)

    def _follow(self, ballot: Ballot, make: Callable[[Sequence[int], Any], Any]) -> None:
        if not self._build(ballot, make):
            return

        def over() -> bool:
            return self._moved(ballot) or ballot[1] in self._lost()

        if not self._await(over, time.monotonic() + self._timeout):
            self._dead |= {ballot[1]}
        self._next(ballot)

    def _lead(self, ballot: Ballot, make: Callable[[Sequence[int], Any], Any]) -> None:
        state, deadline = self._state, time.monotonic() + self._timeout
        promises = state.promises.setdefault(ballot, {})
        if not self._await(lambda: self._moved(ballot) or self._is_quorum(promises), deadline):
            self._check_quorum(promises)
        if self._moved(ballot):
            return
        earlier = [accepted for accepted in list(promises.values()) if accepted is not None]
        if earlier:
            value = max(earlier, key=lambda accepted: accepted[0])[1]
        elif self._build(ballot, make):
            value = Value(ballot, state.attempts[ballot])
        else:
            return
        self._decide(ballot, value)

    def _decide(self, ballot: Ballot, value: Value) -> None:
        accepted = self._state.acceptances.setdefault(ballot, set())
        dead = pack_ranks(self._state.attempts[ballot])
        self._send_all({"step": "accept", "ballot": list(ballot), "value": value.pack(), "dead": dead})

        def missing() -> set[int]:
            """Where callers content themselves with few ranks, any may take over: all members have to know."""
            members = set() if self._quorum is None else set(range(self._size)) - value.dead - self._lost()
            return members - accepted

        ready = self._await(
            lambda: self._moved(ballot) or (self._is_quorum(accepted) and not missing()),
            time.monotonic() + self._timeout,
        )
        if self._moved(ballot):
            return
        if not ready:
            self._check_quorum(accepted)
            self._dead |= missing()
            self._next(ballot)
            return
        with self._news:
            self._state.decided = value

    # --- building -----------------------------------------------------------------------------------------------

    def _build(self, ballot: Ballot, make: Callable[[Sequence[int], Any], Any]) -> bool:
        """Whether all members of a ballot have built its group, and it may still be decided."""
        if ballot in self._built:
            return True
        members = [r for r in range(self._size) if r not in self._state.attempts[ballot]]

        def check() -> None:
            if self._moved(ballot):
                raise NotMade("there is another attempt")
            if lost := self._lost().intersection(members):
                raise Lost(f"rank {words_for_ranks(lost)} is gone", sorted(lost))

        topic = f"shrink/{self._turn}/{ballot[0]}.{ballot[1]}"
        exchange = self._group.rounds.exchange_among(
            members, topic, self._timeout, check, lambda missing: Silent("they did not come", missing)
        )
        wait = 0.0
        try:
            self._built[ballot] = make(members, exchange)
            exchange(b"built")
            return True
        except NotMade:
            return False
        except Lost as error:
            self._dead |= frozenset(error.ranks)
        except Silent as error:
            culprits = self._culprits(ballot, error.missing)
            self._dead |= culprits
            if not culprits:
                wait = self._try_again()
        except (errors.PeerError, errors.DeadlineError):  # it counts ranks differently; next time we shall know more
            wait = self._try_again()
        self._next(ballot, wait)
        return False

    def _culprits(self, ballot: Ballot, missing: Collection[int]) -> frozenset[int]:
        """Of ranks that did not come: those that do not say they wait for others themselves."""
        waiting = self._state.late.setdefault(ballot, set())
        self._send_all({"step": "late", "ballot": list(ballot), "dead": pack_ranks(self._state.attempts[ballot])})
        self._await(lambda: self._moved(ballot) or waiting.issuperset(missing), time.monotonic() + 2 * GRACE)
        return frozenset(missing) - waiting

    def _try_again(self) -> float:
        """Nobody is to blame, as far as this rank can tell. Says how long to let others go first, who may know more."""
        self._failures += 1
        if self._failures >= TRIES:
            raise errors.deadline(f"shrink of group {self._group.name!r}", self._timeout)
        return self._timeout / 2 + 2 * GRACE
