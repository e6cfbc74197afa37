"""ProcessGroup: ranks that act together, wherever they are: the API, its state, its failure, and who belongs to it.

What executes its collectives is a sibling's business: LocalGroup (local.py) where ranks share memory, HierarchicalGroup
(symcomm.hierarchical) across hosts. Collectives on CUDA tensors have an object of their own (symcomm.cuda)."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from symcomm import errors
from symcomm._core import native
from symcomm.collectives.plan import Plan
from symcomm.collectives.select import Limits
from symcomm.group import hooks
from symcomm.group.ephemeral import EphemeralTimeouts
from symcomm.group.monitored_barrier import MonitoredBarrier
from symcomm.group.object_calls import ObjectCalls
from symcomm.group.p2p import MessageWork
from symcomm.group.refusal import Refusals
from symcomm.group.work import Timeout, Watcher, Work, to_ns
from symcomm.memory.arena import Arena, Peer, current_arena

if TYPE_CHECKING:
    from symcomm.group.grow import JoinQueue
    from symcomm.store.lease import Lease

DEFAULT_TIMEOUT = 1800.0  # seconds, as in PyTorch
MOST_PLANS = 4096  # kept by a group; a program that needs more makes them anew
LEAVE_WAIT = 5.0  # seconds for the others to leave before the rank that serves their store does
WINDOWS = "symcomm.windows"  # a layer above: loaded by name when it is asked for


def check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise errors.bad_argument("ProcessGroup", "rank", rank, f"0 to {size - 1}")


def _check_name(call: str, name: Any) -> None:
    if not isinstance(name, str):
        raise errors.wrong_type(call, "name", name, "a str")


class ProcessGroup(EphemeralTimeouts, MonitoredBarrier, ObjectCalls):
    """Made by ``symcomm.init()``, ``join()``, ``new_group()``, ``split()``, ``shrink()`` or ``grow()``.

    Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, ResourceError."""

    # Not in the object's dictionary: with thirty there, Python searches it at every call of a method.
    __slots__ = (
        "_failure", "_failure_lock", "_in_flight", "_keep_lock", "_plans", "arena", "base_name", "before_leaving",
        "exposed", "given_limits", "global_ranks", "handle", "letting_go", "name", "newcomers", "peers", "pending",
        "plan_limits", "rank", "size", "timeout_ns", "watcher",
    )  # fmt: skip
    handle: native.Group  # of the ranks of this host
    peers: list[Peer]  # those ranks' arenas

    spans_hosts = False  # see symcomm.hierarchical
    store: Any = None  # where the ranks met, and where newcomers find them
    lease: Lease | None = None  # on that store, if it ends with its groups
    join_queue: JoinQueue | None = None
    _children = 0  # groups made from this one
    _barriers = 0

    def __init__(
        self, rank: int, size: int, name: str, timeout: Timeout, limits: Limits | None, global_ranks: Any
    ):  # fmt: skip
        check_rank(rank, size)
        self.rank = rank
        self.size = size
        self.name = name
        self.global_ranks = list(global_ranks) if global_ranks is not None else list(range(size))
        self.given_limits = limits  # None: found when the group is made
        self.plan_limits = limits or Limits()
        self.timeout_ns = to_ns("ProcessGroup", DEFAULT_TIMEOUT if timeout is None else timeout)
        self._plans: dict[Any, Any] = {}
        self.pending: list[Work] = []
        self.watcher = Watcher()
        self._in_flight: list[MessageWork] = []
        self._keep_lock = threading.Lock()
        self._failure: errors.SymcommError | None = None
        self._failure_lock = threading.RLock()  # a signal handler may need it while we do
        self.before_leaving: list[Callable[[], None]] = []  # what destroy() has to finish first
        self.letting_go: list[Callable[[], Any]] = []  # return, after a failure, once tensors are their owners' again
        self.exposed: dict[int, Any] = {}  # memory that peers may write to, by window
        self.newcomers: list[int] = []  # the ranks that came in when grow() made this group
        self.base_name = name  # what newcomers call it, through all its shrinking and growing
        self.arena: Arena = current_arena()

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.name!r}: rank {self.rank} of {self.size}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"group {self.name!r} cannot be pickled or copied: it is memory that this process shares with its peers. "
            "Make a group in each process instead, with symcomm.init() or new_group()."
        )

    # --- state ------------------------------------------------------------------------------------------------

    @property
    def timeout(self) -> float:
        """Seconds after which an operation gives up, unless the call says otherwise."""
        return self.timeout_ns / 1e9

    def set_timeout(self, timeout: float | timedelta) -> None:
        self.change_timeout(to_ns("set_timeout", timeout) + self.extended_ns)

    @property
    def failure(self) -> errors.SymcommError | None:
        """What ended the group, as this rank was told; None while it can be used."""
        return self._failure

    @property
    def flight_address(self) -> int:
        """Where this rank's flight recorder lies in memory."""
        return self.arena.flight.address

    @property
    @abstractmethod
    def sequence_number(self) -> int:
        """How many collectives this rank has started on the group."""

    @abstractmethod
    def call_stats(self) -> dict[str, dict[str, int]]:
        """How many collectives, messages and puts this rank has made on the group, and which way they took.

        ``short``: the core knew the call and did it all; ``long``: Python looked at the tensors and found the plan.
        ``inline``: the calling thread ran it; ``queued``: the group's own did. See docs/how-to/process-group.md."""

    @abstractmethod
    def wait_stats(self) -> dict[str, int]:
        """How this rank's waits on the group ended that took more than about 10 us: while it kept its core and looked,
        while it offered the core to others, or after it had slept."""

    # --- failure ----------------------------------------------------------------------------------------------

    def fail(self, describe: Callable[[], errors.SymcommError]) -> errors.SymcommError:
        """The exception for a failure. The first one has the full description, later ones refer to it; observers and
        abort hooks are told once, whichever way the failure was found."""
        with self._failure_lock:
            first = describe() if self._failure is None else None
            if first is not None:  # which holds its frames once it is raised, and they the caller's tensors
                self._failure = copy.copy(first)
        self._let_go()
        if first is None:
            return self.unusable_error()
        hooks.failed(self._observed, first)
        self.run_abort_hooks()
        return first

    def _let_go(self) -> None:
        """Return once no tensor of any of this rank's calls is used any more: the group has failed."""
        for return_when_unused in list(self.letting_go):
            return_when_unused()

    def after_fork(self) -> None:
        """In a forked child, which is not the rank: it cannot use the group, whatever the parent's threads held."""
        self._failure_lock = threading.RLock()
        self._keep_lock = threading.Lock()
        self._failure = errors.forked(self._failure)

    @property
    def _observed(self) -> ProcessGroup:
        """The group that observers know this one by: that of the ranks of this host."""
        return self

    def unusable_error(self) -> errors.GroupUnusableError:
        error = errors.GroupUnusableError(f"group {self.name!r} cannot be used any more: {self._failure}")
        error.__cause__ = self._failure
        return error

    @property
    def is_usable(self) -> bool:
        """Whether it was neither destroyed nor aborted, and no operation on it has failed here."""
        return self._failure is None

    def check_usable(self) -> None:
        """Raise if the group was destroyed, or has failed."""
        if self._failure is not None:
            self._let_go()
            raise self.unusable_error()

    @abstractmethod
    def refuse(self, error: Exception) -> None:
        """Take the next operation's number, and tell the others that this rank makes no call, and why."""

    @abstractmethod
    def abort(self) -> None:
        """Make every rank's pending and later operations on this group fail now."""

    def destroy(self) -> None:
        """Leave the group. Pending asynchronous operations end first; peers that still wait for us are told."""
        if self._failure is None:
            for work in list(self.pending):
                work.poll(self.timeout_ns)
            for finish in self.before_leaving:
                finish()
            if self.lease is not None and self.lease.serves_others:
                self.await_departures()
        self.leave()

    def leave(self, why: str = "was destroyed") -> None:
        """Leave the group at once; ``why`` is what operations that are pending, or come later, are told."""
        if self._failure is None:
            self._failure = errors.GroupUnusableError(f"group {self.name!r} {why}.")
        self._leave()
        if self.lease is not None:
            self.lease.release()
        self.store = self.lease = None

    @abstractmethod
    def _leave(self) -> None: ...

    def await_departures(self, seconds: float = LEAVE_WAIT) -> None:
        """Give the others time to leave the group, too: what this process serves ends when it has."""
        end, others = time.monotonic() + seconds, self._seen_leaving()
        while not others <= set(self.gone_ranks()) and time.monotonic() < end:
            time.sleep(0.001)

    @abstractmethod
    def departures(self) -> Callable[[float], None]:
        """Waits, so many seconds at most, until all ranks of this host have left; for after this one has."""

    def _seen_leaving(self) -> set[int]:
        """The ranks of which this one learns that they left."""
        return set(range(self.size)) - {self.rank}

    @property
    def is_busy(self) -> bool:
        """Whether asynchronous operations or messages of this rank are under way."""
        return bool(self.pending or self._in_flight)

    def _keep(self, work: Work) -> None:
        """Before it is submitted: the core uses its tensors whether or not the caller keeps or ever gets ``work``."""
        pending = self.pending
        pending.append(work)
        if not self._keep_lock.acquire(blocking=False):
            return  # somebody looks already; it may be this very thread, which a signal handler interrupted
        try:
            # They end in order. One with callbacks is left to the watcher: those never run in a caller's thread.
            before = len(pending) - 1
            each = enumerate(itertools.islice(pending, before))
            del pending[: next((i for i, w in each if not w.settled and (w.callbacks or not w.poll(-1))), before)]
        finally:
            self._keep_lock.release()

    def new_window(self, tensor: Any = None) -> Any:
        """A window into every rank's tensor, for one-sided puts and signals. Every rank of the group calls it.

        Without ``tensor``, every rank calls ``tensor_register`` of the window later. See docs/how-to/windows.md.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError,
        ResourceError."""
        return importlib.import_module(WINDOWS).new_window(self, tensor)

    # --- plans ------------------------------------------------------------------------------------------------

    def kept_plan(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make()`` returned for this key; plans are kept for the life of the group."""
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) > MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = make()
        return plan

    def run_plan(
        self, name: str, plan: Plan, inputs: Any = (), outputs: Any = (), async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:  # fmt: skip
        """Run a plan of your own (docs/explanation/plans.md) as the next operation of the group, on every rank.

        ``inputs`` and ``outputs`` are its ``Space.IN`` and ``Space.OUT``: a tensor each, or a list of tensors. They and
        the plan are checked before anything happens; then ranks compare ``name``, the plan's count, dtype, operation,
        root and needs, and with a direct part the sizes of their tensors. What its steps compute is not checked:
        ``symcomm.collectives.interpret`` proves that. A plan is loaded once, so do not change it afterwards.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError,
        ResourceError."""
        raise errors.ResourceError(
            f"{name}: the ranks of group {self.name!r} are on several hosts, and a plan works in memory that ranks "
            "share; use a group of one host's ranks."
        )

    # --- groups from groups -----------------------------------------------------------------------------------

    def new_group(self, ranks: Sequence[int], name: str = "", timeout: Timeout = None) -> ProcessGroup | None:
        """A group of ``ranks`` of this one. Every rank of this group calls it; non-members get None.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError,
        ResourceError."""
        with Refusals(self):
            _check_name("new_group", name)
            chosen = list(ranks)
            if (
                not chosen
                or len(set(chosen)) != len(chosen)
                or not all(isinstance(r, int) and 0 <= r < self.size for r in chosen)
            ):
                allowed = f"distinct ranks of 0 to {self.size - 1}, at least one"
                raise errors.bad_argument("new_group", "ranks", chosen, allowed)
            if self.spans_hosts:  # where members meet apart from the others: a rank that refuses tells all of them here
                self.barrier(timeout=timeout)
            return self._subgroup({r: (0, i) for i, r in enumerate(chosen)}, name, timeout)

    def split(self, color: int | None, key: int = 0, name: str = "", timeout: Timeout = None) -> ProcessGroup | None:
        """Ranks with the same ``color`` form a group, ordered by ``key``, then rank. Color None: no group.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError,
        ResourceError."""
        with Refusals(self):
            _check_name("split", name)
            for argument, number in (("color", color), ("key", key)):
                if not isinstance(number, int) and (number is not None or argument == "key"):
                    raise errors.wrong_type("split", argument, number, "a whole number")
            answers = self.all_gather_bytes(json.dumps([color, key]).encode(), timeout)
            choice = {r: json.loads(a) for r, a in enumerate(answers)}
            return self._subgroup({r: (c, k) for r, (c, k) in choice.items() if c is not None}, name, timeout)

    @abstractmethod
    def meet(self, exchange: Callable[[bytes], list[bytes]]) -> None:
        """Return when all ranks have made this group; raises what one of them says in ``exchange`` that could not."""

    @abstractmethod
    def _subgroup(self, choice: dict[int, tuple[int, int]], name: str, timeout: Timeout) -> ProcessGroup | None:
        """``choice``: color and key of each rank that is to be in a group."""

    def _name_of_subgroup(self, choice: dict[int, tuple[int, int]], name: str) -> tuple[list[int], str]:
        """(the ranks of this rank's subgroup, what it is called)"""
        self._children += 1
        mine = choice.get(self.rank)
        ranks = [r for _, r in sorted((k, r) for r, (c, k) in choice.items() if mine is not None and c == mine[0])]
        label = name or f"{self.name}/{self._children}"
        if not name and mine and len({c for c, _ in choice.values()}) > 1:
            label += f".{mine[0]}"
        return ranks, label

    def shrink(
        self, timeout: float = 5.0, exclude: Sequence[int] = (), abort: bool = True, quorum: int | None = None
    ) -> ProcessGroup:
        """After a failure: the ranks that still live, and come here within ``timeout``, go on in a new group.

        All of them in one of the same members. A rank that stalls on the way is left out when ``timeout`` has passed
        once more, and raises RankFailedError when it comes. Ranks in ``exclude`` stay behind though they live; they do
        not call this. Without ``abort`` operations that other ranks still have under way end first. ``quorum``: how
        many ranks of this group must be reached, where they are on several hosts; unless given it is more than half of
        them, or half of them with rank 0. With fewer it raises NoQuorumError: others may go on."""
        from symcomm.group.shrink import check_excluded, check_quorum

        if self.has_left:
            raise self.unusable_error()
        check_excluded(self, exclude)
        check_quorum(self, quorum)
        return self._shrink(to_ns("shrink", timeout) / 1e9, exclude, abort, quorum)

    @abstractmethod
    def _shrink(self, seconds: float, exclude: Sequence[int], abort: bool, quorum: int | None) -> ProcessGroup: ...

    @property
    @abstractmethod
    def has_left(self) -> bool:
        """Whether this rank has left the group, by destroy() or since it failed for good."""

    @abstractmethod
    def reclaim_windows(self) -> None:
        """After an abort: what peers could put into is this rank's alone from now on, whoever was stopped meanwhile."""

    @abstractmethod
    def gone_ranks(self) -> list[int]:
        """Ranks that died, or left."""

    @abstractmethod
    def watch(self, ranks: Collection[int], what: str) -> Callable[[], None]:
        """For who waits for ``ranks`` of this group elsewhere: raises RankFailedError once one of them is gone."""

    def inherit(self, older: ProcessGroup) -> None:
        """Take the place of a group that this one was made from: newcomers find it where they would have found that."""
        self.store, self.base_name = older.store, older.base_name
        self.lease = older.lease.share() if older.lease is not None else None

    def grow(self, timeout: float = 10.0, wait: float = 0.0, size: int | None = None) -> ProcessGroup:
        """Between two steps: let in who waits in ``symcomm.join()``. Every rank of this group calls it.

        Returns a new group, members first in their old order, then the newcomers; this very group when nobody waits, or
        when a newcomer fails to come in within ``timeout`` seconds (it is then dropped, with a warning). The answer is
        the same on every rank. ``wait``: seconds to wait for newcomers, until there is one, or ``size`` ranks in all;
        no more than ``size`` are let in."""
        from symcomm.group.grow import grow

        self.check_usable()
        with Refusals(self):
            if size is not None and (not isinstance(size, int) or size < 1):
                raise errors.bad_argument("grow", "size", size, "a number of ranks, 1 or more")
            seconds = to_ns("grow", timeout) / 1e9, to_ns("grow", wait) / 1e9 if wait else 0.0
        return grow(self, *seconds, size)
