"""How a group takes in newcomers between two steps. They meet in the store.

Whoever wants to come in draws a ticket, leaves a card and waits for an answer. The members' first rank looks at the
cards and opens a *round*: it tells the members through the group they have, and the newcomers through the store. Those
in a round build the new group together; each says when it has. Then the round gets its verdict, by one atomic step in
the store: whoever has heard from all says "go", whoever met trouble or ran out of time says why not, and what came
first holds for everybody. Members tell each other through the group they have, in case the store is lost to some; one
that cannot know goes on in neither group. So members never disagree about which group they are in, whoever dies
meanwhile, and however. After any verdict but "go" the members keep the group they had, and newcomers that still live
draw another ticket.

In the store, below ``grow/<name of the group>``::

    tickets            how many were drawn
    card/T, answer/T   who drew ticket T; the round it is invited to, or that it was withdrawn
    rounds             how many there were
    N/1/i, N/2/i ...   in round N: what number i told the others, first, second ...
    N/verdict          "go", or why not
    closed             why there is nothing to join any more
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from symcomm import errors
from symcomm.collectives.select import Limits
from symcomm.errors import words_for_ranks, words_for_seconds
from symcomm.group import hooks
from symcomm.group.work import to_ns
from symcomm.store.prefix import PrefixStore

if TYPE_CHECKING:
    from symcomm.group.process_group import ProcessGroup

__all__ = ["Meeting", "Round", "close", "grow", "join_through"]

log = logging.getLogger(__name__)
GO = "go"
LOOK_FIRST, LOOK_LAST = 0.001, 0.02  # seconds between two looks at the store


def _looks(seconds: float) -> Iterator[None]:
    """Comes back again and again, more and more seldom, until the time is over; at least once."""
    end, pause = time.monotonic() + seconds, LOOK_FIRST
    yield
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, LOOK_LAST)
        yield


# --- who comes -------------------------------------------------------------------------------------


def _started(pid: int) -> str:
    """When a process started: with its number, that names it for ever."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]


def _my_card(rank: int | None) -> dict[str, Any]:
    pid = os.getpid()
    return {"pid": pid, "started": _started(pid), "names": _names(), "rank": rank}


def _names() -> str:
    """Where a process's number means the same: in one namespace of one machine, since it was started."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


class Lifeline:
    """Tells whether the process of a card still lives, where its number means something to us."""

    def __init__(self, card: dict[str, Any]):
        self.pid = card["pid"]
        self.dead = False
        self._fd: int | None = None
        if card["names"] != _names():
            return  # in another container, or on another host: only the deadline will tell
        try:
            self._fd = os.pidfd_open(self.pid)
            self.dead = _started(self.pid) != card["started"] or self._ended()
        except OSError:
            self.dead = True

    def _ended(self) -> bool:
        if self._fd is None:
            return False
        poll = select.poll()  # its number may be beyond what select() knows
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def look(self) -> bool:
        """Whether it is dead."""
        self.dead = self.dead or self._ended()
        return self.dead

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


# --- where they meet -------------------------------------------------------------------------------


class Round:
    """Number ``index`` of ``size`` that build a group together. ``trouble`` says what it knows to be wrong, or ""."""

    def __init__(self, store: Any, index: int, size: int, seconds: float, trouble: Callable[[], str] = str):
        self._store, self.index, self.size, self.seconds = store, index, size, seconds
        self._end = time.monotonic() + seconds
        self._trouble = trouble
        self._turn = 0

    def exchange(self, item: bytes) -> list[bytes]:
        """Everybody's bytes; raises RankFailedError as soon as the round cannot succeed any more."""
        self._turn += 1
        keys = [f"{self._turn}/{i}" for i in range(self.size)]
        self._store.set(keys[self.index], b"." + item)
        for _ in _looks(self._end - time.monotonic()):
            if self._store.check(keys):
                break
            self.check()
        else:
            if missing := [i for i, key in enumerate(keys) if not self._store.check([key])]:
                raise self.late(missing)
        return [value[1:] for value in self._store.multi_get(keys)]

    def __call__(self, item: bytes) -> list[bytes]:
        return self.exchange(item)

    def check(self) -> None:
        """Raise if the round cannot succeed any more."""
        why = bytes(self._store.get("verdict")).decode() if self._store.check(["verdict"]) else self._trouble()
        if why and why != GO:  # what was missing has come meanwhile
            raise self.to_error(why)

    def late(self, missing: Sequence[int]) -> errors.SymcommError:
        return errors.RankFailedError(
            f"{words_for_ranks(missing)} of the new ranks did not come within {words_for_seconds(self.seconds)}"
        )

    def to_error(self, verdict: str) -> errors.SymcommError:
        return errors.RankFailedError(verdict)

    def to_verdict(self, error: BaseException) -> str:
        """What the others are told of it; the opposite of to_error()."""
        return str(error)

    def _clean_up(self) -> None:
        """All have said that they built theirs, so nobody reads what came before that; some of it is secret."""
        for turn in range(1, self._turn):
            with contextlib.suppress(RuntimeError, errors.SymcommError, NotImplementedError):  # some stores cannot
                self._store.delete_key(f"{turn}/{self.index}")

    def left(self) -> float:
        return max(0.001, self._end - time.monotonic())

    def decide(self, verdict: str) -> str:
        """What holds for everybody: this verdict, unless somebody was quicker."""
        return bytes(self._store.compare_set("verdict", "", verdict)).decode()

    def build(self, make: Callable[[Round], Any]) -> Any:
        """What ``make(self)`` builds with all others; None with the verdict in ``why`` when the round failed."""
        built, self.why = None, GO
        try:
            built = make(self)
            self.exchange(b"built")
        except (errors.SymcommError, OSError) as error:
            self.why = self.to_verdict(error)
        except BaseException:
            self.decide(self.to_verdict(errors.RankFailedError(f"number {self.index} was interrupted", [self.index])))
            raise
        try:
            self.why = self.settle(self.why)
        except BaseException:
            self._drop(built)
            raise
        if self.why == GO:
            self._clean_up()
            return built
        self._drop(built)
        return None

    def settle(self, verdict: str) -> str:
        """What holds for everybody. Raises where this one cannot know it: then it has neither group."""
        return self.decide(verdict)

    def _drop(self, built: Any) -> None:
        if built is not None:
            built._leave()


class MembersRound(Round):
    """A round of members of ``group``, who can also ask each other for the verdict."""

    def __init__(self, store: Any, group: ProcessGroup, size: int, seconds: float, trouble: Callable[[], str]):
        super().__init__(store, group.rank, size, seconds, trouble)
        self._group = group

    def settle(self, verdict: str) -> str:
        """As the store says, if one of the members could still ask it. Otherwise they stay as they are."""
        known = ""
        with contextlib.suppress(errors.PeerError, errors.DeadlineError):
            known = self.decide(verdict)
        try:
            told = self._group.all_gather_bytes(known.encode(), self.seconds)
        except errors.SymcommError as error:
            if known == GO:
                return known
            if known:
                raise  # a member is gone: as the next operation on the group would tell
            self._group._leave()  # others may be in either group: this rank must not go on in one by itself
            raise errors.RankFailedError(
                f"grow of group {self._group.name!r}: rank {self.index} lost the store, and could not ask the other "
                f"members whether newcomers were let in ({error}); end this process, or join anew.",
                [self.index],
            ) from error
        return next((word.decode() for word in told if word), "the store was lost while they joined")


class Meeting:
    """The place in a store where the members of a group and newcomers find each other."""

    def __init__(self, store: Any, name: str):
        self.store = PrefixStore(f"grow/{name}", store)
        self._first = 1  # all tickets before are answered

    def place(self, number: int) -> PrefixStore:
        """The part of the store that belongs to a round."""
        return PrefixStore(str(number), self.store)

    # -- a newcomer's side

    def apply(self, card: dict[str, Any]) -> int:
        ticket = self.store.add("tickets", 1)
        self.store.set(f"card/{ticket}", json.dumps(card))
        return ticket

    def answer(self, ticket: int) -> dict[str, Any] | None:
        """The invitation, once there is one."""
        if self.store.check([f"answer/{ticket}"]):
            return json.loads(self.store.get(f"answer/{ticket}"))
        if self.store.check(["closed"]):
            raise errors.GroupUnusableError(f"join: {bytes(self.store.get('closed')).decode()}.")
        return None

    def settle(self, ticket: int, answer: dict[str, Any]) -> bool:
        """Answer a ticket; False when that was done before."""
        text = json.dumps(answer)
        return bytes(self.store.compare_set(f"answer/{ticket}", "", text)).decode() == text

    # -- the members' side

    def waiting(self) -> dict[int, dict[str, Any]]:
        """Cards by ticket, of those that were not answered yet."""
        drawn = self.store.add("tickets", 0)
        found: dict[int, dict[str, Any]] = {}
        for ticket in range(self._first, drawn + 1):
            if self.store.check([f"answer/{ticket}"]):
                if ticket == self._first:
                    self._first += 1
            elif self.store.check([f"card/{ticket}"]):  # else it is being written
                found[ticket] = json.loads(self.store.get(f"card/{ticket}"))
        return found


def meeting_of(group: ProcessGroup) -> Meeting:
    if group._meeting is None:
        if group.store is None:
            raise errors.CallerError(
                f"grow of group {group.name!r}: it has no store, so newcomers could not find it; grow the group that "
                "symcomm.init() made, or what its shrink() gave."
            )
        group._meeting = Meeting(group.store, group._family)
    return group._meeting


def close(group: ProcessGroup, why: str = "the job is over; there is nothing to join") -> None:
    """Tell newcomers, also those to come, that nobody will take them in.

    Raises: CallerError for a group without a store."""
    with contextlib.suppress(errors.PeerError, errors.DeadlineError):  # a store that is gone takes nobody in either
        meeting_of(group).store.set("closed", why)


# --- members ---------------------------------------------------------------------------------------


def grow(group: ProcessGroup, timeout: float, wait: float, size: int | None) -> ProcessGroup:
    """See ProcessGroup.grow."""
    meeting = meeting_of(group)
    plan: dict[str, Any] = {}
    lifelines: list[Lifeline] = []
    try:
        if group.rank == 0:
            plan, lifelines = _plan(group, meeting, timeout, wait, size)
        told = group.all_gather_bytes(json.dumps(plan).encode(), max(group.timeout, wait + timeout))[0]
        plan = json.loads(told)
        if "error" in plan:
            raise errors.StoreConnectionError(plan["error"])
        if not plan:
            return group
        return _grow_by(group, meeting, plan, lifelines)
    finally:
        for line in lifelines:
            line.close()


def _plan(
    group: ProcessGroup, meeting: Meeting, timeout: float, wait: float, size: int | None
) -> tuple[dict[str, Any], list[Lifeline]]:
    """On rank 0: who comes in, and the round they meet in; empty when nobody waits."""
    lifelines: dict[int, Lifeline] = {}
    room = None if size is None else max(0, size - group.size)
    wanted = 1 if room is None else room
    try:
        cards: dict[int, dict[str, Any]] = {}
        for _ in _looks(wait):
            for ticket, card in meeting.waiting().items():
                line = lifelines.get(ticket) or lifelines.setdefault(ticket, Lifeline(card))
                if line.look():
                    meeting.settle(ticket, {"withdrawn": "dead"})
                else:
                    cards[ticket] = card
            cards = {ticket: card for ticket, card in cards.items() if not lifelines[ticket].look()}
            if len(cards) >= wanted or group._gone():
                break
        chosen = sorted(cards, key=lambda t: (cards[t]["rank"] is None, cards[t]["rank"], t))[:room]
        if not chosen or group._gone():
            return {}, list(lifelines.values())
        plan = {
            "round": meeting.store.add("rounds", 1),
            "tickets": chosen,
            "pids": [cards[t]["pid"] for t in chosen],
            "global_ranks": _global_ranks(group.global_ranks, [cards[t]["rank"] for t in chosen]),
            "members": group.size,
            "seconds": timeout,
            "timeout": group.timeout,
            "limits": asdict(group._limits),
        }
        plan["name"] = f"{group._family}+{plan['round']}"
        for ticket in lifelines.keys() - set(chosen):
            lifelines[ticket].close()
        return plan, [lifelines[t] for t in chosen]
    except (errors.PeerError, errors.DeadlineError) as error:
        return {
            "error": f"grow of group {group.name!r}: the store cannot be used ({error}). Where the rank that hosts it "
            "may die, let somebody else keep it: `symcomm run --restart failed`, or a FileStore."
        }, list(lifelines.values())


def _global_ranks(members: Sequence[int], wishes: Sequence[int | None]) -> list[int]:
    """Newcomers keep the rank that the launcher gave them, unless it is taken."""
    ranks = list(members)
    for wish in wishes:
        ranks.append(wish if wish is not None and wish not in ranks else max(ranks) + 1)
    return ranks


def _grow_by(group: ProcessGroup, meeting: Meeting, plan: dict[str, Any], lifelines: list[Lifeline]) -> ProcessGroup:
    def trouble() -> str:
        if gone := group._gone():
            return f"rank {words_for_ranks(gone)} of the members died meanwhile"
        if dead := [str(line.pid) for line in lifelines if line.look()]:
            return f"newcomer (pid {', '.join(dead)}) died while it joined"
        return ""

    size = plan["members"] + len(plan["tickets"])
    round_ = MembersRound(meeting.place(plan["round"]), group, size, plan["seconds"], trouble)

    def make(round_: Round) -> ProcessGroup:
        if group.rank == 0:
            _invite(meeting, plan)
        return _make(round_, plan)

    bigger = round_.build(make)
    if bigger is None:
        log.warning("grow of group %r: %s; the group stays as it is.", group.name, round_.why)
        return group
    bigger.inherit(group)
    return _with_newcomers(bigger, plan)


def _invite(meeting: Meeting, plan: dict[str, Any]) -> None:
    for place, ticket in enumerate(plan["tickets"], plan["members"]):
        if not meeting.settle(ticket, {**plan, "index": place}):
            raise errors.RankFailedError("a newcomer gave up before it was let in")


def _make(round_: Round, plan: dict[str, Any]) -> ProcessGroup:
    from symcomm.group.making import make_group

    # the short deadline while it is built; its own after that
    group = make_group(
        round_.index, round_.size, round_, plan["name"], round_.left(), Limits(**plan["limits"]),
        plan["global_ranks"],
    )  # fmt: skip
    group.set_timeout(plan["timeout"])
    return group


def _with_newcomers(group: ProcessGroup, plan: dict[str, Any]) -> ProcessGroup:
    group.newcomers = list(range(plan["members"], group.size))
    return group


# --- newcomers -------------------------------------------------------------------------------------


def join_through(store: Any, name: str, timeout: float | timedelta, rank: int | None = None) -> ProcessGroup:
    """Wait in ``store`` until the members of group ``name`` call grow(), and come in. ``rank``: a wish, global."""
    seconds = to_ns("join", timeout) / 1e9
    end = time.monotonic() + seconds
    meeting = Meeting(store, name)
    why = "the members have to call group.grow() between steps"
    while (left := end - time.monotonic()) > 0:
        ticket = meeting.apply(_my_card(rank))
        plan = _await_answer(meeting, ticket, left)
        if plan is None or "withdrawn" in plan:
            continue
        size = plan["members"] + len(plan["tickets"])
        round_ = Round(meeting.place(plan["round"]), plan["index"], size, plan["seconds"])
        group = round_.build(partial(_make, plan=plan))
        if group is not None:
            group.store, group._family = store, name
            _with_newcomers(group, plan)
            hooks.joined(group, store)
            return group
        why = f"last time {round_.why}"
    raise errors.deadline(f"join of group {name!r}", seconds, fix=f"Nobody let this process in: {why}.")


def _await_answer(meeting: Meeting, ticket: int, seconds: float) -> dict[str, Any] | None:
    plan = None
    try:
        for _ in _looks(seconds):
            plan = meeting.answer(ticket)
            if plan is not None:
                return plan
    finally:
        if plan is None:  # out of time, or interrupted: nobody should wait for us
            with contextlib.suppress(errors.PeerError, errors.DeadlineError):
                meeting.settle(ticket, {"withdrawn": "gave up"})
    return meeting.answer(ticket)
