"""How a group admits newcomers between two steps. They find each other in the store.

A process that wants to join draws a ticket, leaves a request and waits for an answer. The members' first rank reads the
requests and opens a *round*: it tells the members through the group they have, and the newcomers through the store. The
participants of a round build the new group together; each reports when it has. Then the round gets its verdict, by one
atomic step in the store: a rank that has heard from all says "go", one that met a failure or ran out of time says why
not, and the first value holds for everybody. Members also tell each other through the group they have, in case some
lost the store; one that cannot know the verdict goes on in neither group. So members never disagree about which group
they are in, whoever dies meanwhile, and however. After any verdict but "go" the members keep the group they had, and
newcomers that are still alive draw another ticket.

In the store, below ``grow/<name of the group>``::

    tickets            how many were drawn
    request/T, answer/T   who drew ticket T; the round it is invited to, or that it was cancelled
    rounds             how many there were
    N/1/i, N/2/i ...   in round N: what number i told the others, first, second ...
    N/verdict          "go", or why not
    closed             why there is nothing to join any more
"""

from __future__ import annotations

import contextlib
import errno
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
from symcomm.errors import format_ranks, format_seconds
from symcomm.group import hooks
from symcomm.group.work import to_ns
from symcomm.memory.hosts import boot_id
from symcomm.memory.share import OthersShortage
from symcomm.store.prefix import PrefixStore

if TYPE_CHECKING:
    from symcomm.group.process_group import ProcessGroup

log = logging.getLogger(__name__)
GO = "go"
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
POLL_FIRST, POLL_LAST = 0.001, 0.02  # seconds between two polls of the store


def _polls(seconds: float) -> Iterator[None]:
    """Yields with growing pauses until the time is up; at least once."""
    end, pause = time.monotonic() + seconds, POLL_FIRST
    yield
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, POLL_LAST)
        yield


# --- newcomers' processes --------------------------------------------------------------------------


def _started(pid: int) -> str:
    """When a process started: with its pid, that identifies it for ever."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]


def _join_request(rank: int | None) -> dict[str, Any]:
    pid = os.getpid()
    return {"pid": pid, "started": _started(pid), "names": _pid_namespace(), "rank": rank}


def _pid_namespace() -> str:
    """Where a pid means the same: in one pid namespace of one machine, since it was booted."""
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"


class NewcomerProcess:
    """Whether the process behind a request is still alive, where its pid means something to us."""

    def __init__(self, request: dict[str, Any]):
        self.pid = request["pid"]
        self.dead = False
        self._fd: int | None = None
        if request["names"] != _pid_namespace():
            return  # in another container, or on another host: only the deadline will tell
        try:
            self.dead = _started(self.pid) != request["started"]
            self._fd = os.pidfd_open(self.pid)
            self.dead = self.dead or self._ended()
        except OSError as error:
            self.dead = error.errno not in NO_DESCRIPTOR  # else it may live, and only the deadline will tell

    def _ended(self) -> bool:
        if self._fd is None:
            return False
        poll = select.poll()  # its number may be beyond what select() knows
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def is_dead(self) -> bool:
        """Whether it is dead."""
        self.dead = self.dead or self._ended()
        return self.dead

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


# --- rounds and requests ---------------------------------------------------------------------------


class Round:
    """Participant ``index`` of ``size`` that build a group. ``find_failure`` returns what is known to be wrong, or
    ""."""

    def __init__(self, store: Any, index: int, size: int, seconds: float, find_failure: Callable[[], str] = str):
        self._store, self.index, self.size, self.seconds = store, index, size, seconds
        self._end = time.monotonic() + seconds
        self._find_failure = find_failure
        self._turn = 0
        self.own_error: BaseException | None = None  # why this participant cannot go on, where that is its own fault

    def exchange(self, item: bytes) -> list[bytes]:
        """All-gather bytes; raises RankFailedError as soon as the round cannot succeed any more."""
        self._turn += 1
        keys = [f"{self._turn}/{i}" for i in range(self.size)]
        self._store.set(keys[self.index], b"." + item)
        for _ in _polls(self._end - time.monotonic()):
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
        why = bytes(self._store.get("verdict")).decode() if self._store.check(["verdict"]) else self._find_failure()
        if why and why != GO:  # what was missing has come meanwhile
            raise self.to_error(why)

    def late(self, missing: Sequence[int]) -> errors.SymcommError:
        return errors.RankFailedError(
            f"{format_ranks(missing)} of the new ranks did not come within {format_seconds(self.seconds)}"
        )

    def to_error(self, verdict: str) -> errors.SymcommError:
        return errors.RankFailedError(verdict)

    def to_verdict(self, error: BaseException) -> str:
        """The inverse of to_error()."""
        return str(error)

    def _clean_up(self) -> None:
        """All have built theirs, so nobody reads the earlier keys any more; some of them are secret."""
        for turn in range(1, self._turn):
            with contextlib.suppress(RuntimeError, errors.SymcommError, NotImplementedError):  # some stores cannot
                self._store.delete_key(f"{turn}/{self.index}")

    def left(self) -> float:
        return max(0.001, self._end - time.monotonic())

    def decide(self, verdict: str) -> str:
        """The verdict that holds for everybody: this one, unless another came first."""
        return bytes(self._store.compare_set("verdict", "", verdict)).decode()

    def build(self, make: Callable[[Round], Any]) -> Any:
        """What ``make(self)`` builds with all others; None with the verdict in ``why`` when the round failed."""
        built, self.why = None, GO
        try:
            built = make(self)
            self.exchange(b"built")
        except (errors.SymcommError, OSError, MemoryError) as error:
            self.why = self.to_verdict(self._blame_self(error))
        except BaseException as error:
            why = f"{self.describe(self.index)} was interrupted ({str(error) or type(error).__name__})"
            self.decide(self.to_verdict(errors.RankFailedError(why, [self.index])))
            self._drop(built)
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

    def describe(self, index: int) -> str:
        """A participant, in words."""
        return f"rank {index} of the new group (pid {os.getpid()})"

    def _blame_self(self, error: BaseException) -> BaseException:
        """What only this participant can know has to name it: the others will read it."""
        if isinstance(error, (errors.PeerError, errors.DeadlineError, errors.CallerError, OthersShortage)):
            return error
        self.own_error = error
        return errors.ResourceError(f"{self.describe(self.index)} gave up: {str(error) or type(error).__name__}")

    def settle(self, verdict: str) -> str:
        """The verdict that holds for everybody. Raises where this rank cannot know it: then it has neither group."""
        return self.decide(verdict)

    def _drop(self, built: Any) -> None:
        if built is not None:
            built.leave()


class MembersRound(Round):
    """A round of members of ``group``, who can also ask each other for the verdict."""

    def __init__(self, store: Any, group: ProcessGroup, size: int, seconds: float, find_failure: Callable[[], str]):
        super().__init__(store, group.rank, size, seconds, find_failure)
        self._group = group

    def settle(self, verdict: str) -> str:
        """As the store says, if one of the members can still read it. Otherwise they stay as they are."""
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
            self._group.leave()  # others may be in either group: this rank must not go on in one by itself
            raise errors.RankFailedError(
                f"grow of group {self._group.name!r}: rank {self.index} lost the store, and could not ask the other "
                f"members whether newcomers were let in ({error}); end this process, or join anew.",
                [self.index],
            ) from error
        return next((word.decode() for word in told if word), "the store was lost while they joined")


class JoinQueue:
    """The requests to join a group, and their answers, in a store."""

    def __init__(self, store: Any, name: str):
        self.store = PrefixStore(f"grow/{name}", store)
        self._first = 1  # all tickets before are answered

    def round_store(self, number: int) -> PrefixStore:
        """The part of the store that belongs to a round."""
        return PrefixStore(str(number), self.store)

    # -- a newcomer's side

    def request_to_join(self, request: dict[str, Any]) -> int:
        ticket = self.store.add("tickets", 1)
        self.store.set(f"request/{ticket}", json.dumps(request))
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
        """Requests by ticket, of those that were not answered yet."""
        drawn = self.store.add("tickets", 0)
        found: dict[int, dict[str, Any]] = {}
        for ticket in range(self._first, drawn + 1):
            if self.store.check([f"answer/{ticket}"]):
                if ticket == self._first:
                    self._first += 1
            elif self.store.check([f"request/{ticket}"]):  # else it is being written
                found[ticket] = json.loads(self.store.get(f"request/{ticket}"))
        return found


def join_queue_of(group: ProcessGroup) -> JoinQueue:
    if group.join_queue is None:
        if group.store is None:
            raise errors.CallerError(
                f"grow of group {group.name!r}: it has no store, so newcomers could not find it; grow the group that "
                "symcomm.init() made, or what its shrink() gave."
            )
        group.join_queue = JoinQueue(group.store, group.base_name)
    return group.join_queue


def close(group: ProcessGroup, why: str = "the job is over; there is nothing to join") -> None:
    """Tell newcomers, also those to come, that nobody will take them in.

    Raises: CallerError for a group without a store."""
    with contextlib.suppress(errors.PeerError, errors.DeadlineError):  # a store that is gone takes nobody in either
        join_queue_of(group).store.set("closed", why)


# --- members ---------------------------------------------------------------------------------------


def grow(group: ProcessGroup, timeout: float, wait: float, size: int | None) -> ProcessGroup:
    """See ProcessGroup.grow."""
    queue = join_queue_of(group)
    plan: dict[str, Any] = {}
    processes: list[NewcomerProcess] = []
    try:
        if group.rank == 0:
            plan, processes = _plan_or_tell(group, queue, timeout, wait, size)
        told = group.all_gather_bytes(json.dumps(plan).encode(), max(group.timeout, wait + timeout))[0]
        plan = json.loads(told)
        if "error" in plan:
            raise errors.StoreConnectionError(plan["error"])
        if not plan:
            return group
        return _grow_by(group, queue, plan, processes)
    finally:
        for process in processes:
            process.close()


def _plan_or_tell(
    group: ProcessGroup, queue: JoinQueue, timeout: float, wait: float, size: int | None
) -> tuple[dict[str, Any], list[NewcomerProcess]]:
    try:
        return _plan(group, queue, timeout, wait, size)
    except Exception as error:  # the others wait for the plan
        told = {"error": f"grow of group {group.name!r}: rank 0 gave up: {str(error) or type(error).__name__}"}
        group.all_gather_bytes(json.dumps(told).encode(), max(group.timeout, wait + timeout))
        raise


def _plan(
    group: ProcessGroup, queue: JoinQueue, timeout: float, wait: float, size: int | None
) -> tuple[dict[str, Any], list[NewcomerProcess]]:
    """On rank 0: who comes in, and the round they meet in; empty when nobody waits."""
    processes: dict[int, NewcomerProcess] = {}
    room = None if size is None else max(0, size - group.size)
    wanted = 1 if room is None else room
    try:
        requests: dict[int, dict[str, Any]] = {}
        for _ in _polls(wait):
            for ticket, request in queue.waiting().items():
                process = processes.get(ticket) or processes.setdefault(ticket, NewcomerProcess(request))
                if process.is_dead():
                    queue.settle(ticket, {"withdrawn": "dead"})
                else:
                    requests[ticket] = request
            requests = {ticket: request for ticket, request in requests.items() if not processes[ticket].is_dead()}
            if len(requests) >= wanted or group.gone_ranks():
                break
        chosen = sorted(requests, key=lambda t: (requests[t]["rank"] is None, requests[t]["rank"], t))[:room]
        if not chosen or group.gone_ranks():
            return {}, list(processes.values())
        plan = {
            "round": queue.store.add("rounds", 1),
            "tickets": chosen,
            "pids": [requests[t]["pid"] for t in chosen],
            "global_ranks": _global_ranks(group.global_ranks, [requests[t]["rank"] for t in chosen]),
            "members": group.size,
            "seconds": timeout,
            "timeout": group.timeout,
            "limits": group.given_limits and asdict(group.given_limits),
        }
        plan["name"] = f"{group.base_name}+{plan['round']}"
        for ticket in processes.keys() - set(chosen):
            processes[ticket].close()
        return plan, [processes[t] for t in chosen]
    except (errors.PeerError, errors.DeadlineError) as error:
        return {
            "error": f"grow of group {group.name!r}: the store cannot be used ({error}). Where the rank that hosts it "
            "may die, let somebody else keep it: `symcomm run --restart failed`, or a FileStore."
        }, list(processes.values())


def _global_ranks(members: Sequence[int], wishes: Sequence[int | None]) -> list[int]:
    """Newcomers keep the rank that the launcher gave them, unless it is taken."""
    ranks = list(members)
    for wish in wishes:
        ranks.append(wish if wish is not None and wish not in ranks else max(ranks) + 1)
    return ranks


def _grow_by(
    group: ProcessGroup, queue: JoinQueue, plan: dict[str, Any], processes: list[NewcomerProcess]
) -> ProcessGroup:
    def find_failure() -> str:
        if gone := group.gone_ranks():
            return f"rank {format_ranks(gone)} of the members died meanwhile"
        if dead := [str(process.pid) for process in processes if process.is_dead()]:
            return f"newcomer (pid {', '.join(dead)}) died while it joined"
        return ""

    size = plan["members"] + len(plan["tickets"])
    round_ = MembersRound(queue.round_store(plan["round"]), group, size, plan["seconds"], find_failure)

    def make(round_: Round) -> ProcessGroup:
        if group.rank == 0:
            _invite(queue, plan)
        return _make(round_, plan)

    bigger = round_.build(make)
    if bigger is None:
        log.warning("grow of group %r: %s; the group stays as it is.", group.name, round_.why)
        return group
    bigger.inherit(group)
    return _with_newcomers(bigger, plan)


def _invite(queue: JoinQueue, plan: dict[str, Any]) -> None:
    for index, ticket in enumerate(plan["tickets"], plan["members"]):
        if not queue.settle(ticket, {**plan, "index": index}):
            raise errors.RankFailedError("a newcomer gave up before it was let in")


def _make(round_: Round, plan: dict[str, Any]) -> ProcessGroup:
    from symcomm.group.factory import make_group

    limits = plan["limits"] and Limits(**plan["limits"])
    # the short deadline while it is built; its own after that
    group = make_group(
        round_.index, round_.size, round_, plan["name"], round_.left(), limits, plan["global_ranks"]
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
    queue = JoinQueue(store, name)
    why = "the members have to call group.grow() between steps"
    while (left := end - time.monotonic()) > 0:
        ticket = queue.request_to_join(_join_request(rank))
        plan = _await_answer(queue, ticket, left)
        if plan is None or "withdrawn" in plan:
            continue
        size = plan["members"] + len(plan["tickets"])
        round_ = Round(queue.round_store(plan["round"]), plan["index"], size, plan["seconds"])
        group = round_.build(partial(_make, plan=plan))
        if group is not None:
            group.store, group.base_name = store, name
            _with_newcomers(group, plan)
            hooks.joined(group, store)
            return group
        if round_.own_error is not None:
            raise round_.own_error  # which another round would not change
        why = f"last time {round_.why}"
    raise errors.deadline(f"join of group {name!r}", seconds, fix=f"Nobody let this process in: {why}.")


def _await_answer(queue: JoinQueue, ticket: int, seconds: float) -> dict[str, Any] | None:
    plan = None
    try:
        for _ in _polls(seconds):
            plan = queue.answer(ticket)
            if plan is not None:
                return plan
    finally:
        if plan is None:  # out of time, or interrupted: nobody should wait for us
            with contextlib.suppress(errors.PeerError, errors.DeadlineError):
                queue.settle(ticket, {"withdrawn": "gave up"})
    return queue.answer(ticket)
