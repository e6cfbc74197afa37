"""How ranks on several hosts agree on who goes on, by messages that may be lost, even in one direction only.

As on one host (group/shrink.py) all ranks that get a group get one of the same members, whoever dies or stops
meanwhile. Here no memory is shared by all, and some hosts may be partitioned from the rest. So the ranks run Paxos
(one instance for each time that the group is shrunk): a decision needs a *quorum* of the group's members.
Two quorums have a rank in common, so two halves of a job never both go on. A quorum is more than half of the members,
or just half of them with rank 0; callers may ask for another number.

Every member is an acceptor, in the thread of its control channel, whether it calls shrink() or not. It remembers

    promised   the highest *proposal* it was told of: (number, rank of the proposer). It takes part in no lower one.
    attempts   the ranks that each proposal leaves out
    accepted   the value that it agreed to last, and in which proposal
    decided    the value that a quorum agreed to

and a value is (the proposal in which its group was built, the ranks left out).

1. A rank with a reason to (it is the first of those alive; somebody died; a deadline passed) proposes: it sends
   ``prepare`` with a higher proposal and the ranks to leave out to all members. They promise it, and say what they have
   accepted, or refuse, and say what they promised.
2. If a quorum has promised, and one of them has accepted a value, the proposer must take that value: go to 4.
3. All that are to go on build the new group, and tell each other when they have. They keep it, and do not use it yet.
4. The proposer sends ``accept`` with the value to all. Those that have promised nothing higher do. When a quorum has,
   the value is decided. (Where callers ask for fewer ranks than that, all that go on must have, too.)
5. A rank that learns of the decision tells all others, and returns the group that was built in that proposal; or
raises, where
   the decision is to go on without it.

A rank that waits too long, or sees another die, goes back to 1; the lowest rank left goes first.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from symcomm import errors
from symcomm.errors import format_ranks
from symcomm.group.shrink import left_out, pack_ranks, unpack_ranks
from symcomm.hierarchical.rounds import SLICE
from symcomm.hierarchical.session import ProtocolViolation
from symcomm.memory.share import GroupNotBuilt

REACH = 1.0  # seconds to connect to a rank
GRACE = 0.3  # seconds by which the next rank waits longer before it proposes
TRIES = 3  # of building the group, when it fails and nobody is to blame

Proposal = tuple[int, int]
NO_PROPOSAL: Proposal = (0, -1)


class MembersLost(errors.RankFailedError):
    """Members of a proposal are gone, as the group that is shrunk counts them."""


class MembersLate(errors.DeadlineError):
    """Members of a proposal did not arrive."""


MOST_AHEAD = 1000  # agreements that another rank may be ahead


class Value(NamedTuple):
    built_in: Proposal
    dead: frozenset[int]

    def pack(self) -> list[Any]:
        return [list(self.built_in), pack_ranks(self.dead)]

    @classmethod
    def unpack(cls, packed: Any) -> Value:
        (number, rank), dead = packed
        return cls((int(number), int(rank)), unpack_ranks(dead))


class Acceptor:
    """What one rank remembers of one agreement; and, of the proposals it has proposed, what the others answered."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.promised = NO_PROPOSAL
        self.attempts: dict[Proposal, frozenset[int]] = {}
        self.accepted: tuple[Proposal, Value] | None = None
        self.decided: Value | None = None
        self.here: set[int] = set()  # ranks that have come to shrink()
        self.quit: set[int] = set()  # that have come, and given up
        self.late: dict[Proposal, set[int]] = {}  # ranks that timed out waiting for others
        self.promises: dict[Proposal, dict[int, tuple[Proposal, Value] | None]] = {}
        self.acceptances: dict[Proposal, set[int]] = {}

    def see(self, proposal: Proposal, dead: frozenset[int]) -> bool:
        """Promise a proposal, unless a higher one was; to promise more is always safe."""
        if proposal > self.promised:
            self.promised = proposal
            self.attempts[proposal] = dead
        return proposal == self.promised

    # --- what comes; each returns the answer, if there is one ---------------------------------------------------

    def on_here(self, rank: int, header: dict[str, Any]) -> dict[str, Any] | None:
        self.here.add(rank)
        self.quit.discard(rank)
        return None if self.decided is None and self.promised == NO_PROPOSAL else self._standing()

    def on_quit(self, rank: int, header: dict[str, Any]) -> None:
        self.here.discard(rank)
        self.quit.add(rank)

    def on_late(self, rank: int, header: dict[str, Any]) -> dict[str, Any] | None:
        """Somebody waits, maybe for us: if we did not know of that proposal, that is the fault of neither."""
        proposal, unknown = _proposal(header), _proposal(header) > self.promised
        self.late.setdefault(proposal, set()).add(rank)
        self.see(proposal, unpack_ranks(header["dead"]))
        return header if unknown and self.rank in self.here else None

    def on_prepare(self, rank: int, header: dict[str, Any]) -> dict[str, Any]:
        proposal = _proposal(header)
        if self.decided is not None or not self.see(proposal, unpack_ranks(header["dead"])):
            return self._standing()
        accepted = None if self.accepted is None else [list(self.accepted[0]), self.accepted[1].pack()]
        return {"step": "promise", "proposal": list(proposal), "accepted": accepted}

    def on_promise(self, rank: int, header: dict[str, Any]) -> None:
        told = header["accepted"]
        accepted = None if told is None else (_proposal({"proposal": told[0]}), Value.unpack(told[1]))
        self.promises.setdefault(_proposal(header), {})[rank] = accepted

    def on_accept(self, rank: int, header: dict[str, Any]) -> dict[str, Any]:
        proposal = _proposal(header)
        if self.decided is not None or proposal < self.promised:
            return self._standing()
        self.see(proposal, unpack_ranks(header["dead"]))
        self.accepted = proposal, Value.unpack(header["value"])
        return {"step": "accepted", "proposal": list(proposal)}

    def on_accepted(self, rank: int, header: dict[str, Any]) -> None:
        self.acceptances.setdefault(_proposal(header), set()).add(rank)

    def on_refused(self, rank: int, header: dict[str, Any]) -> None:
        self.see(_proposal(header), unpack_ranks(header["dead"]))

    def on_decided(self, rank: int, header: dict[str, Any]) -> None:
        self.decided = Value.unpack(header["value"])

    def _standing(self) -> dict[str, Any]:
        """How far this rank is, for one that is not."""
        if self.decided is not None:
            return {"step": "decided", "value": self.decided.pack()}
        return {"step": "refused", "proposal": list(self.promised), "dead": pack_ranks(self.attempts[self.promised])}


def _proposal(header: dict[str, Any]) -> Proposal:
    number, rank = header["proposal"]
    return int(number), int(rank)


class Agreements:
    """All agreements of one group, as one of its ranks knows them."""

    def __init__(self, group: Any):
        self._ref, self._cond, self.rank = weakref.ref(group), group.cond, group.rank
        self._acceptors: dict[int, Acceptor] = {}
        self.instance = 1  # which agreement is, or would be, under way

    def acceptor(self, instance: int) -> Acceptor:
        with self._cond:
            return self._acceptors.setdefault(instance, Acceptor(self.rank))

    def note(self, rank: int, header: dict[str, Any]) -> None:
        """Called in the control channel's thread: a member's message."""
        step, instance = header["step"], header["instance"]
        if instance > self.instance + MOST_AHEAD:
            raise ProtocolViolation(f"spoke of agreement {instance}, far beyond {self.instance}")
        with self._cond:
            answer = getattr(self.acceptor(instance), f"on_{step}")(rank, header)
            self._cond.notify_all()
        if answer is not None:
            self.send(rank, instance, answer)

    def send(self, rank: int, instance: int, header: dict[str, Any]) -> None:
        if rank == self.rank:
            self.note(rank, {**header, "instance": instance})
        elif (group := self._ref()) is not None:
            group.tell_known(rank, {"kind": "agree", "instance": instance, **header})


class Agreement:
    """One call of shrink() by one rank. See the module's text."""

    def __init__(self, group: Any, timeout: float, exclude: Collection[int], quorum: int | None):
        self._group, self._agreements, self._cond = group, group.agreements, group.cond
        self._rank, self._size = group.rank, group.size
        self._timeout, self._quorum = timeout, quorum
        before: frozenset[int] = frozenset()
        while (known := self._agreements.acceptor(self._agreements.instance).decided) is not None:
            before |= known.dead  # it was decided before, in a call of ours or without us
            self._agreements.instance += 1
        if group.rank in before:
            raise left_out(group.name, group.rank)
        self._instance = self._agreements.instance
        self._state = self._agreements.acceptor(self._instance)
        self._dead = before | frozenset(exclude)  # to be left out, as far as this rank knows
        self._built: dict[Proposal, Any] = {}
        self._failures = 0

    # --- sending ------------------------------------------------------------------------------------------------

    def _send_all(self, header: dict[str, Any]) -> None:
        """To every member that can be reached, this one first."""
        self._agreements.send(self._rank, self._instance, header)
        message = {"kind": "agree", "instance": self._instance, **header}
        others = [r for r in range(self._size) if r != self._rank and not self._group.is_gone(r)]
        strangers = [r for r in others if not self._group.tell_known(r, message)]
        if strangers:  # connecting may take a while
            with ThreadPoolExecutor(16, thread_name_prefix="symcomm-agree") as pool:
                list(pool.map(lambda r: self._group.tell(r, message, timeout=REACH), strangers))

    # --- state --------------------------------------------------------------------------------------------------

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
            f"shrink of group {self._group.name!r}: of its {self._size} ranks only {format_ranks(present)} can be "
            f"reached, and {least} are needed: the others may live, and go on by themselves. End this process, or pass "
            "quorum= where they cannot.",
            [r for r in range(self._size) if r not in present],
        )

    def _moved(self, proposal: Proposal) -> bool:
        """Whether this proposal is over, for this rank."""
        return self._state.decided is not None or self._state.promised > proposal

    def _await(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Wait until it is ready; False when the time is over."""
        with self._cond:
            while not ready():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._cond.wait(min(left, SLICE))
        return True

    # --- the agreement ------------------------------------------------------------------------------------------

    def reach(self, make: Callable[[Sequence[int], Any], Any]) -> Any:
        """The group that ``make(members, exchange)`` gives, on every member alike."""
        try:
            self._send_all({"step": "here"})
            self._begin()
            while self._state.decided is None:
                proposal = self._state.promised
                dead = self._state.attempts[proposal]
                if self._rank in dead:
                    self._await_decision(proposal)
                elif not self._dead | self._lost() <= dead:
                    self._next(proposal)
                elif proposal[1] != self._rank:
                    self._follow(proposal, make)
                else:
                    self._lead(proposal, make)
            return self._finish(self._state.decided)
        except BaseException:
            self._send_all({"step": "quit"})
            raise
        finally:
            for group in self._built.values():
                group.leave()
            self._group.rounds.forget(f"shrink/{self._instance}/")

    def _finish(self, value: Value) -> Any:
        self._send_all({"step": "decided", "value": value.pack()})  # whoever told us may have told nobody else
        self._agreements.instance = self._instance + 1
        if self._rank in value.dead or value.built_in not in self._built:
            raise left_out(self._group.name, self._rank)
        return self._built.pop(value.built_in)

    def _propose(self) -> None:
        lost = self._lost()
        self._check_quorum([r for r in range(self._size) if r not in self._group.rounds.gone()])
        self._dead |= lost
        proposal = (self._state.promised[0] + 1, self._rank)
        self._send_all({"step": "prepare", "proposal": list(proposal), "dead": pack_ranks(self._dead)})

    def _propose_in_turn(self, over: Callable[[], bool], wait: float = 0.0) -> None:
        """The lowest of those that are left proposes, the others only if nothing comes of it."""
        left = [r for r in range(self._size) if r not in self._dead | self._lost()]
        if not self._await(over, time.monotonic() + wait + GRACE * left.index(self._rank)):
            self._propose()

    def _next(self, proposal: Proposal, wait: float = 0.0) -> None:
        """This proposal cannot succeed: make the next."""
        self._dead |= self._state.attempts[proposal]
        self._propose_in_turn(lambda: self._moved(proposal), wait)

    def _begin(self) -> None:
        """Wait until there is a proposal."""
        state = self._state

        def over() -> bool:
            return state.promised > NO_PROPOSAL or state.decided is not None

        first = min(r for r in range(self._size) if r not in self._dead | self._lost())
        if over():
            return
        if first != self._rank and not self._await(over, time.monotonic() + self._timeout):
            self._dead |= frozenset(range(self._size)) - state.here
        if not over():
            self._propose_in_turn(over)

    def _await_decision(self, proposal: Proposal) -> None:
        """Wait to learn whether this rank is left out: others may see it differently."""
        if not self._await(lambda: self._moved(proposal), time.monotonic() + self._timeout):
            raise left_out(self._group.name, self._rank)

    def _follow(self, proposal: Proposal, make: Callable[[Sequence[int], Any], Any]) -> None:
        if not self._build(proposal, make):
            return

        def over() -> bool:
            return self._moved(proposal) or proposal[1] in self._lost()

        if not self._await(over, time.monotonic() + self._timeout):
            self._dead |= {proposal[1]}
        self._next(proposal)

    def _lead(self, proposal: Proposal, make: Callable[[Sequence[int], Any], Any]) -> None:
        state, deadline = self._state, time.monotonic() + self._timeout
        promises = state.promises.setdefault(proposal, {})
        if not self._await(lambda: self._moved(proposal) or self._is_quorum(promises), deadline):
            self._check_quorum(promises)
        if self._moved(proposal):
            return
        earlier = [accepted for accepted in list(promises.values()) if accepted is not None]
        if earlier:
            value = max(earlier, key=lambda accepted: accepted[0])[1]
        elif self._build(proposal, make):
            value = Value(proposal, state.attempts[proposal])
        else:
            return
        self._decide(proposal, value)

    def _decide(self, proposal: Proposal, value: Value) -> None:
        accepted = self._state.acceptances.setdefault(proposal, set())
        dead = pack_ranks(self._state.attempts[proposal])
        self._send_all({"step": "accept", "proposal": list(proposal), "value": value.pack(), "dead": dead})

        def missing() -> set[int]:
            """Where callers ask for a smaller quorum, any rank may take over: all members have to know."""
            members = set() if self._quorum is None else set(range(self._size)) - value.dead - self._lost()
            return members - accepted

        ready = self._await(
            lambda: self._moved(proposal) or (self._is_quorum(accepted) and not missing()),
            time.monotonic() + self._timeout,
        )
        if self._moved(proposal):
            return
        if not ready:
            self._check_quorum(accepted)
            self._dead |= missing()
            self._next(proposal)
            return
        with self._cond:
            self._state.decided = value

    # --- building -----------------------------------------------------------------------------------------------

    def _build(self, proposal: Proposal, make: Callable[[Sequence[int], Any], Any]) -> bool:
        """Whether all members of a proposal have built its group, and it may still be decided."""
        if proposal in self._built:
            return True
        members = [r for r in range(self._size) if r not in self._state.attempts[proposal]]

        def check() -> None:
            if self._moved(proposal):
                raise GroupNotBuilt("there is another attempt")
            if lost := self._lost().intersection(members):
                raise MembersLost(f"rank {format_ranks(lost)} is gone", sorted(lost))

        topic = f"shrink/{self._instance}/{proposal[0]}.{proposal[1]}"
        exchange = self._group.rounds.exchange_among(
            members, topic, self._timeout, check, lambda missing: MembersLate("they did not come", missing)
        )
        wait = 0.0
        try:
            self._built[proposal] = make(members, exchange)
            exchange(b"built")
            return True
        except GroupNotBuilt:
            return False
        except MembersLost as error:
            self._dead |= frozenset(error.ranks)
        except MembersLate as error:
            unresponsive = self._unresponsive(proposal, error.missing)
            self._dead |= unresponsive
            if not unresponsive:
                wait = self._try_again()
        except (errors.PeerError, errors.DeadlineError):  # it numbers ranks differently; the next attempt knows more
            wait = self._try_again()
        self._next(proposal, wait)
        return False

    def _unresponsive(self, proposal: Proposal, missing: Collection[int]) -> frozenset[int]:
        """Of ranks that did not arrive: those that do not say they wait for others themselves."""
        waiting = self._state.late.setdefault(proposal, set())
        self._send_all({"step": "late", "proposal": list(proposal), "dead": pack_ranks(self._state.attempts[proposal])})
        self._await(lambda: self._moved(proposal) or waiting.issuperset(missing), time.monotonic() + 2 * GRACE)
        return frozenset(missing) - waiting

    def _try_again(self) -> float:
        """Nobody is to blame, as far as this rank can tell. Says how long to let others go first, who may know more."""
        self._failures += 1
        if self._failures >= TRIES:
            raise errors.deadline(f"shrink of group {self._group.name!r}", self._timeout)
        return self._timeout / 2 + 2 * GRACE
