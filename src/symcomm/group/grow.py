"""How a group admits newcomers between two steps.

Members never disagree about which group they are in, whichever rank dies meanwhile, and however.

The members' first rank reads the requests (membership/newcomers.py) and opens a round (membership/admission.py): it
tells the members through the group they have, and the newcomers through the store. Members also tell each other the
verdict through the group they have, in case some lost the store; a member that cannot learn it goes on in neither
group. After any verdict but "go" members keep the group they had, and living newcomers draw another ticket."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from symcomm import errors
from symcomm.collectives.select import Limits
from symcomm.errors import format_ranks
from symcomm.group import hooks
from symcomm.group.work import to_ns
from symcomm.membership.admission import GO, Round
from symcomm.membership.newcomers import JoinQueue, NewcomerProcess, join_request
from symcomm.store.base import poll_until

if TYPE_CHECKING:
    from symcomm.group.process_group import ProcessGroup

log = logging.getLogger(__name__)


class MembersRound(Round):
    """A round for members of ``group``, which can also ask each other for the verdict."""

    def __init__(self, store: Any, group: ProcessGroup, size: int, seconds: float, find_failure: Callable[[], str]):
        super().__init__(store, group.rank, size, seconds, find_failure)
        self._group = group

    def settle(self, verdict: str) -> str:
        """The store's verdict, if any member can still read it. Otherwise members keep the group they have."""
        known = ""
        with contextlib.suppress(errors.PeerError, errors.DeadlineError):
            known = self.decide(verdict)
        try:
            told = self._group.all_gather_bytes(known.encode(), self.seconds)
        except errors.SymcommError as error:
            if known == GO:
                return known
            if known:
                raise  # a member is gone: the next operation on the group would say the same
            self._group.leave()  # others may be in either group: this rank must not go on in one by itself
            raise errors.RankFailedError(
                f"grow of group {self._group.name!r}: rank {self.index} lost the store, and could not ask the other "
                f"members whether newcomers were let in ({error}); end this process, or join anew.",
                [self.index],
            ) from error
        return next((word.decode() for word in told if word), "the store was lost while they joined")


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
    """Tell newcomers, also later ones, that no group will take them in.

    Raises: CallerError for a group without a store."""
    with contextlib.suppress(errors.PeerError, errors.DeadlineError):  # a store that is gone lets no newcomer in either
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
    """On rank 0: which newcomers come in, and the round in which they meet; empty when none waits."""
    processes: dict[int, NewcomerProcess] = {}
    room = None if size is None else max(0, size - group.size)
    wanted = 1 if room is None else room
    try:
        requests: dict[int, dict[str, Any]] = {}
        for _ in poll_until(wait):
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
            "may die, keep it elsewhere: `symcomm run --restart failed`, or a FileStore."
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
    return bigger


def _invite(queue: JoinQueue, plan: dict[str, Any]) -> None:
    for index, ticket in enumerate(plan["tickets"], plan["members"]):
        if not queue.settle(ticket, {**plan, "index": index}):
            raise errors.RankFailedError("a newcomer gave up before it was let in")


def _make(round_: Round, plan: dict[str, Any]) -> ProcessGroup:
    from symcomm.group.factory import make_group

    limits = plan["limits"] and Limits(**plan["limits"])
    # the short deadline while it is built; its own after that
    group: ProcessGroup = make_group(
        round_.index, round_.size, round_, plan["name"], round_.left(), limits, plan["global_ranks"]
    )  # fmt: skip
    group.set_timeout(plan["timeout"])
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
        ticket = queue.request_to_join(join_request(rank))
        plan = _await_answer(queue, ticket, left)
        if plan is None or "withdrawn" in plan:
            continue
        size = plan["members"] + len(plan["tickets"])
        round_ = Round(queue.round_store(plan["round"]), plan["index"], size, plan["seconds"])
        group = round_.build(partial(_make, plan=plan))
        if group is not None:
            group.store, group.base_name = store, name
            hooks.joined(group, store)
            return group
        if round_.own_error is not None:
            raise round_.own_error  # another round would not change it
        why = f"last time {round_.why}"
    raise errors.deadline(f"join of group {name!r}", seconds, fix=f"Nobody let this process in: {why}.")


def _await_answer(queue: JoinQueue, ticket: int, seconds: float) -> dict[str, Any] | None:
    plan = None
    try:
        for _ in poll_until(seconds):
            plan = queue.answer(ticket)
            if plan is not None:
                return plan
    finally:
        if plan is None:  # out of time, or interrupted: members must not wait for this process
            with contextlib.suppress(errors.PeerError, errors.DeadlineError):
                queue.settle(ticket, {"withdrawn": "gave up"})
    return queue.answer(ticket)
