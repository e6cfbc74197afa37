"""ProcessGroup: ranks that act together, wherever they are. This file has the methods that users call, and says how a
group fails, how ranks leave it, and how its members change.

Two subclasses give it its parts: LocalGroup (local.py) where ranks share memory, HierarchicalGroup
(symcomm.hierarchical) across hosts. Collectives on CUDA tensors have an object of their own (symcomm.cuda)."""

from __future__ import annotations

import importlib
import json
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from symcomm import errors
from symcomm._core import native
from symcomm.collectives.plan import Plan
from symcomm.collectives.select import Limits
from symcomm.group import hooks, object_calls
from symcomm.group.call_hooks import GROUP_CALLS, CallHooks, HookMethods
from symcomm.group.ephemeral import Extension
from symcomm.group.executor import HostExecutor
from symcomm.group.facade import SUM, GroupCalls
from symcomm.group.interception import Interception
from symcomm.group.monitored_barrier import MonitoredBarriers
from symcomm.group.p2p import ANY_SOURCE, Message, Messages
from symcomm.group.refusal import Refusals
from symcomm.group.request import Request
from symcomm.group.shards import all_reduce_shards, reduce_scatter_shards, share_of
from symcomm.group.state import GroupState
from symcomm.group.work import Timeout, Work, to_ns
from symcomm.memory.arena import Arena, Peer

if TYPE_CHECKING:
    from symcomm.membership.newcomers import JoinQueue
    from symcomm.store.lease import Lease

DEFAULT_TIMEOUT = 1800.0  # seconds, as in PyTorch
LEAVE_WAIT = 5.0  # seconds for the others to leave before the rank that serves their store does
WINDOWS = "symcomm.windows"  # a layer above: loaded by name when it is asked for


def _check_name(call: str, name: Any) -> None:
    if not isinstance(name, str):
        raise errors.wrong_type(call, "name", name, "a str")


class ProcessGroup(GroupCalls, HookMethods):
    """Made by ``symcomm.init()``, ``join()``, ``new_group()``, ``split()``, ``shrink()`` or ``grow()``.

    Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, ResourceError."""

    # Slots, since a dictionary of thirty attributes slows every call of a method: Python searches it first.
    __slots__ = (
        "_call_hooks", "_call_seen", "arena", "attached", "base_name", "before_leaving", "executor", "exposed",
        "given_limits", "global_ranks", "handle", "interception", "messages", "monitored_barriers", "name", "newcomers",
        "peers", "plan_limits", "rank", "size", "state",
    )  # fmt: skip
    executor: HostExecutor
    messages: Messages
    monitored_barriers: MonitoredBarriers
    handle: native.Group  # of the ranks of this host
    peers: list[Peer]  # those ranks' arenas

    spans_hosts = False  # see symcomm.hierarchical
    store: Any = None  # the one in which the ranks met, and in which newcomers find them
    lease: Lease | None = None  # on that store, if the store ends with its groups
    join_queue: JoinQueue | None = None
    _children = 0  # groups made from this one

    def __init__(
        self, rank: int, size: int, name: str, timeout: Timeout, limits: Limits | None, global_ranks: Any
    ):  # fmt: skip
        self.rank = rank
        self.size = size
        self.name = name
        self.global_ranks = list(global_ranks) if global_ranks is not None else list(range(size))
        self.given_limits = limits  # None: found when the group is made
        self.plan_limits = limits or Limits()
        self.state = self._new_state(to_ns("ProcessGroup", DEFAULT_TIMEOUT if timeout is None else timeout))
        self.interception = Interception()
        self.interception.add_facade(self, GROUP_CALLS)
        self._call_hooks = CallHooks(self.interception)
        self._call_seen: Callable[..., Any] = native.call_unseen
        self.before_leaving: list[Callable[[], None]] = []  # what destroy() has to finish first
        self.attached: dict[tuple[str, int], Any] = {}  # what layers above made for it, by kind and device
        self.exposed: dict[int, Any] = {}  # memory that peers may write to, by window
        self.newcomers: list[int] = []  # the ranks that came in when grow() made this group
        self.base_name = name  # the name that newcomers ask for, however often the group shrinks and grows
        self.arena: Arena = self.state.arena

    def _new_state(self, timeout_ns: int) -> GroupState:
        return GroupState(self, self.rank, self.size, self.name, timeout_ns)

    def _own(self, executor: HostExecutor, messages: Messages) -> None:
        """Calls can be made from now on."""
        self.executor, self.messages = executor, messages
        self.monitored_barriers = MonitoredBarriers(messages)

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
        return self.state.timeout

    @property
    def timeout_ns(self) -> int:
        return self.state.timeout_ns

    def set_timeout(self, timeout: float | timedelta) -> None:
        self.state.change_timeout(to_ns("set_timeout", timeout) + self.state.extended_ns)

    def add_ephemeral_timeout(self, timeout: float | timedelta) -> None:
        """Operations may take longer than the group's time-out by this much, until the first that is called from now
        on has ended. Several extensions add up, each with an end of its own. A call's own time-out stays as it is."""
        Extension(self.state, self.interception, to_ns("add_ephemeral_timeout", timeout)).begin()

    @property
    def failure(self) -> errors.SymcommError | None:
        """What ended the group, as this rank was told; None while it can be used."""
        return self.state.failure

    @property
    def pending(self) -> list[Work]:
        """Asynchronous operations that may be under way."""
        return self.executor.pending

    @property
    def call_hooks(self) -> CallHooks:
        """The hooks around its calls."""
        return self._call_hooks

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
    def copy_stats(self) -> dict[str, dict[str, int]]:
        """How many collectives of this rank went directly between tensors, with how many bytes, and why others did not.

        ``direct``: nothing was copied; ``attached``: read out of peers' ordinary memory. The others went through
        staging areas: ``ordinary_here``, ``ordinary_there``: since a tensor of this rank, or only a peer's, is not
        symmetric; ``no_plan``: since that is fastest for so few bytes. See docs/how-to/process-group.md."""

    @abstractmethod
    def wait_stats(self) -> dict[str, int]:
        """How this rank's waits of more than about 10 us ended: while it polled, while it offered its core to other
        threads, or after it had slept."""

    @abstractmethod
    def describe(self, description: str) -> None:
        """Set what dumps of the flight recorder say of this group besides its name."""

    # --- failure ----------------------------------------------------------------------------------------------

    def on_failure(self, error: errors.SymcommError) -> None:
        """The group has just failed here, and this rank has let go of all tensors."""
        hooks.failed(self._observed, error)
        self.call_hooks.run_abort_hooks()

    def after_fork(self) -> None:
        """In a forked child, which is not the rank: make the group unusable, whatever locks the parent held."""
        for part in (self.state, self.executor, self.messages):
            part.after_fork()

    @property
    def _observed(self) -> ProcessGroup:
        """The group that observers know this one by: that of the ranks of this host."""
        return self

    def unusable_error(self) -> errors.GroupUnusableError:
        return self.state.unusable_error()

    @property
    def is_usable(self) -> bool:
        """Whether it was neither destroyed nor aborted, and no operation on it has failed here."""
        return self.failure is None

    def check_usable(self) -> None:
        """Raise if the group was destroyed, or has failed."""
        self.state.check_usable()

    @abstractmethod
    def abort(self) -> None:
        """Make every rank's pending and later operations on this group fail now."""

    def destroy(self) -> None:
        """Leave the group. Pending asynchronous operations end first; peers that still wait for this rank are told."""
        if self.failure is None:
            for work in list(self.pending):
                work.wait_until(time.monotonic_ns() + self.timeout_ns)
            for finish in self.before_leaving:
                finish()
            if self.lease is not None and self.lease.serves_others:
                self.await_departures()
        self.leave()

    def leave(self, why: str = "was destroyed") -> None:
        """Leave the group at once. Operations that are pending, or come later, fail and say ``why``."""
        self.state.end(errors.GroupUnusableError(f"group {self.name!r} {why}."))
        self._leave()
        if self.lease is not None:
            self.lease.release()
        self.store = self.lease = None

    @abstractmethod
    def _leave(self) -> None: ...

    def await_departures(self, seconds: float = LEAVE_WAIT) -> None:
        """Give the others time to leave the group, too: the store that this process serves ends with it."""
        end, others = time.monotonic() + seconds, self._seen_leaving()
        while not others <= set(self.gone_ranks()) and time.monotonic() < end:
            time.sleep(0.001)

    @abstractmethod
    def departures(self) -> Callable[[float], None]:
        """A function that waits until all ranks of this host have left, for at most the seconds that it is given. It is
        called after this rank has left."""

    def _seen_leaving(self) -> set[int]:
        """The ranks whose leaving this rank can see."""
        return set(range(self.size)) - {self.rank}

    @property
    def is_busy(self) -> bool:
        """Whether asynchronous operations or messages of this rank are under way."""
        return bool(self.pending) or self.messages.is_busy

    def new_window(self, tensor: Any = None) -> Any:
        """A window into every rank's tensor, for one-sided puts and signals. Every rank of the group calls it.

        Without ``tensor``, every rank calls ``tensor_register`` of the window later. See docs/how-to/windows.md.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError,
        ResourceError."""
        return importlib.import_module(WINDOWS).new_window(self, tensor)

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
        return self.executor.run_plan(name, plan, inputs, outputs, async_op, timeout)

    # --- logical shards ---------------------------------------------------------------------------------------

    def shard_range(self, shards: int) -> range:
        """Which of the job's ``shards`` logical shards are this rank's.

        Raises: BadArgumentError unless every rank has equally many, a power of two (one rank: any number)."""
        return share_of("shard_range", "shards", shards, self.rank, self.size)

    def all_reduce_shards(
        self, output: Any, inputs: Any, shards: int, op: Any = SUM, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Combine the job's ``shards`` logical shards into ``output``: the same bits on any number of ranks.

        ``inputs``: those of ``shard_range(shards)``, in a list, or one by one from an iterator, which may use the same
        memory again. They are read during the call. See docs/explanation/bits.md.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        return self._go_on(-1, all_reduce_shards, (output, inputs, shards, op), async_op, timeout)

    def reduce_scatter_shards(
        self, output: Any, inputs: Any, shards: int, op: Any = SUM, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Like all_reduce_shards; each shard is one piece per rank, and rank k gets the combination of all k-th pieces.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        return self._go_on(-1, reduce_scatter_shards, (output, inputs, shards, op), async_op, timeout)

    # --- messages ---------------------------------------------------------------------------------------------

    def send(self, tensor: Any, peer: int, tag: int = 0, timeout: Timeout = None) -> None:
        """Returns once ``tensor`` may be changed again.

        Raises: BadArgumentError, RankFailedError, DeadlineError, GroupUnusableError."""
        mailbox = self.state.mailbox
        if timeout is None and mailbox is not None:  # a plain tensor: one call of the core
            outcome = mailbox.exchange(True, peer, tag, tensor)
            if type(outcome) is int:
                return
            if outcome is not None:
                raise self.messages.failure_of(outcome, Message.send(tensor, peer, tag))
        self.messages.send(tensor, peer, tag, timeout)

    def recv(self, tensor: Any, peer: int = ANY_SOURCE, tag: int = 0, timeout: Timeout = None) -> int:
        """Fill ``tensor`` from ``peer`` (or from the first rank that sends); returns the sender's rank.

        Raises: BadArgumentError, RankFailedError, DeadlineError, GroupUnusableError."""
        mailbox = self.state.mailbox
        if timeout is None and mailbox is not None:
            outcome = mailbox.exchange(False, peer, tag, tensor)
            if type(outcome) is int:
                return outcome
            if outcome is not None:
                raise self.messages.failure_of(outcome, Message.receive(tensor, peer, tag))
        return self.messages.recv(tensor, peer, tag, timeout)

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose failure names the ranks that did not come, and leaves the group usable.

        With ``wait_all_ranks`` all missing ranks are named, otherwise the first.

        Raises: BadArgumentError, CallRefusedError, RankFailedError, DeadlineError, GroupUnusableError."""
        self.monitored_barriers.wait(timeout, wait_all_ranks)

    # --- objects ----------------------------------------------------------------------------------------------

    def all_gather_object(self, obj: Any, timeout: Timeout = None) -> list[Any]:
        """All ranks' objects, in rank order.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        return object_calls.all_gather_object(self, obj, timeout)

    def broadcast_object(self, obj: Any = None, root: int = 0, timeout: Timeout = None) -> Any:
        """The object of rank ``root``; those of others are ignored.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        return object_calls.broadcast_object(self, obj, root, timeout)

    def gather_object(self, obj: Any, root: int = 0, timeout: Timeout = None) -> list[Any] | None:
        """All ranks' objects, in rank order, on rank ``root``; None elsewhere.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        return object_calls.gather_object(self, obj, root, timeout)

    def scatter_object(self, objs: Sequence[Any] | None = None, root: int = 0, timeout: Timeout = None) -> Any:
        """This rank's object of those that ``root`` gives, one for each rank; others give None.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        return object_calls.scatter_object(self, objs, root, timeout)

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
            if self.spans_hosts:  # members then meet without the others, so a rank that refuses must tell them here
                self.executor.execute(Request("barrier", [], [], call="new_group"), False, timeout)
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
        """Return when all ranks have made this group. If one could not, raise what it says in ``exchange``.

        The operation that follows is not the program's: it has number 0."""

    @abstractmethod
    def _subgroup(self, choice: dict[int, tuple[int, int]], name: str, timeout: Timeout) -> ProcessGroup | None:
        """``choice``: color and key of each rank that is to be in a group."""

    def _name_of_subgroup(self, choice: dict[int, tuple[int, int]], name: str) -> tuple[list[int], str]:
        """(the ranks of this rank's subgroup, its name)"""
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
        """After a failure: the ranks that live, and call this within ``timeout``, go on in a new group.

        It has the same members on all of them. A rank that stalls on the way is left out when ``timeout`` has passed
        once more, and raises RankFailedError when it comes. Ranks in ``exclude`` stay behind though they live; they do
        not call this. Without ``abort``, operations that other ranks still have under way end first. ``quorum``: how
        many ranks of this group must be reached, where they are on several hosts; by default more than half of them,
        or half of them with rank 0. With fewer it raises NoQuorumError: others may go on."""
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
        """After an abort: no peer writes to this rank's windows any more, not even one that was stopped meanwhile."""

    @abstractmethod
    def gone_ranks(self) -> list[int]:
        """Ranks that died, or left."""

    @abstractmethod
    def watch(self, ranks: Collection[int], what: str) -> Callable[[], None]:
        """A check for waits outside the group: it raises RankFailedError once one of ``ranks`` is gone."""

    def inherit(self, older: ProcessGroup) -> None:
        """Take the place of the group that this one was made from: newcomers find it in the same store."""
        self.store, self.base_name = older.store, older.base_name
        self.lease = older.lease.share() if older.lease is not None else None

    def grow(self, timeout: float = 10.0, wait: float = 0.0, size: int | None = None) -> ProcessGroup:
        """Between two steps: let in the processes that wait in ``symcomm.join()``. Every rank of this group calls it.

        Returns a new group, members first in their old order, then the newcomers; this very group when none waits, or
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
