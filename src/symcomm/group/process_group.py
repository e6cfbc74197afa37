"""ProcessGroup: ranks of one host that act together on symmetric memory."""

from __future__ import annotations

import atexit
import copy
import functools
import importlib
import itertools
import json
import operator
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from symcomm import errors
from symcomm._core import native
from symcomm.collectives.plan import Plan
from symcomm.collectives.select import Limits
from symcomm.group import hooks, registry
from symcomm.group.ephemeral import EphemeralTimeouts
from symcomm.group.failure import Site, Status, call_site, check_living
from symcomm.group.messages import MessageWork
from symcomm.group.more_calls import MoreCalls
from symcomm.group.object_calls import ObjectCalls
from symcomm.group.together import looks_for_others
from symcomm.group.work import Timeout, Watcher, Work, to_ns
from symcomm.memory.arena import Arena, Peer, current_arena
from symcomm.memory.numa import current_node
from symcomm.memory.share import Exchange, NotMade, SeveralHostsError, connect

if TYPE_CHECKING:
    from symcomm.group.grow import Meeting
    from symcomm.store.lease import Lease

__all__ = ["DEFAULT_TIMEOUT", "ProcessGroup"]

DEFAULT_TIMEOUT = 1800.0  # seconds, as in PyTorch
FAREWELL = 5.0  # seconds for the others to leave before the rank that serves their store does
WINDOWS = "symcomm.windows"  # a layer above: loaded by name when it is asked for

# How often a waiting rank looks first (about 10 us). If it has a core of its own it then goes on looking, for longer
# than a peer stays away whose core somebody else uses for a time slice; with more ranks than cores it offers its core.
# Then it sleeps, which costs two context switches (about 10 us). See _core/backoff.h.
SPIN_LOOKS = 4000
LOOK_NS = 5_000_000
YIELD_NS = 100_000
FIRST_STAGE = 16 << 10  # bytes of a staging half that the first call that stages anything reserves; then it doubles


def _locate() -> int:
    """Where the program calls us from, as the flight recorder of this rank knows it."""
    return current_arena().flight.site(call_site())


native.use_locator(_locate)
_living: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """End the threads of asynchronous operations while there still is an interpreter that they may call."""
    for group in list(_living):
        if group._pending or group._in_flight:
            group._leave()


def _after_fork_in_child() -> None:
    """A forked child is not the rank: whatever it does with its copies of groups must not reach the others."""
    for group in list(_living):
        native.group_forked(group._handle)
        group._failure_lock = threading.RLock()
        group._keep_lock = threading.Lock()
        group._failure = errors.forked(group._failure)


os.register_at_fork(after_in_child=_after_fork_in_child)
# Groups left, whose part of the arena others may still look at, and whose windows they may still write to.
_retired: deque[tuple[Any, Arena, int, dict[int, Any]]] = deque()
_leavings = itertools.count(1)
_last_leaving = 0


def _retire(handle: Any, arena: Arena, offset: int, exposed: dict[int, Any]) -> None:
    """Leave a group, and give its memory back once everybody has left it."""
    global _last_leaving
    native.group_leave(handle)
    _retired.append((handle, arena, offset, exposed))
    _last_leaving = next(_leavings)
    give_back()


def give_back() -> None:
    """Free the memory of groups that everybody has left. No lock: the garbage collector may call this within itself.

    Whoever left while we had a group in hand did not find it: then we look again."""
    seen = 0
    while seen != _last_leaving:
        seen = _last_leaving
        for _ in range(len(_retired)):
            try:
                handle, arena, offset, exposed = _retired.popleft()
            except IndexError:  # another thread took it
                break
            if native.group_detach(handle):
                arena.free(offset)
            else:
                _retired.append((handle, arena, offset, exposed))


def retired_count() -> int:
    """How many groups this process has left whose memory others may still look at."""
    return len(_retired)


def await_departures_from(handle: Any, seconds: float) -> None:
    """Return once all ranks have left a group that this one has left, or when the time is over."""
    end = time.monotonic() + seconds
    while any(left is handle for left, *_ in list(_retired)) and time.monotonic() < end:
        time.sleep(0.001)
        give_back()


def leave_groups_of(arena: Arena) -> None:
    """Leave all groups of one rank at once: it has failed."""
    for group in [g for g in list(_living) if g._arena is arena]:
        group._leave()


def _layout(world: int, limits: Limits) -> tuple[int, int, int]:
    """(offset of staging, offset of channels, total bytes) of a rank's part of a group."""
    stage = -(-native.CONTROL_BYTES // 4096) * 4096
    channels = stage + 2 * limits.stage_bytes
    return stage, channels, channels + world * native.CHANNEL_BYTES


class ProcessGroup(EphemeralTimeouts, MoreCalls, ObjectCalls):
    """Made by ``symcomm.init()``, ``join()``, ``new_group()``, ``split()``, ``shrink()`` or ``grow()``.

    Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, ResourceError."""

    spans_hosts = False  # see symcomm.hosts
    _look_ns, _yield_ns = LOOK_NS, YIELD_NS
    _operations = 0  # that count as done when a group is made; the same on all ranks

    # Defaults live here: Python reads the attributes of objects that have more than thirty of their own more slowly.
    store: Any = None  # where the ranks met, and where newcomers find them
    lease: Lease | None = None  # on that store, if it ends with its groups
    _meeting: Meeting | None = None
    _children = 0  # groups made from this one
    _barriers = 0

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: Exchange,
        name: str = "world",
        timeout: Timeout = None,
        limits: Limits | None = None,
        global_ranks: Sequence[int] | None = None,
        peers: Sequence[Peer] | None = None,
    ):
        """``peers``: the members' arenas, where all members have mapped them already."""
        if not 0 <= rank < size:
            raise errors.bad_argument("ProcessGroup", "rank", rank, f"0 to {size - 1}")
        self.rank = rank
        self.size = size
        self.name = name
        self.global_ranks = list(global_ranks) if global_ranks is not None else list(range(size))
        self._limits = limits or Limits()
        self._timeout_ns = to_ns("ProcessGroup", DEFAULT_TIMEOUT if timeout is None else timeout)
        self._plans: dict[Any, Any] = {}
        self._pending: list[Work] = []
        self._watcher = Watcher()
        self._in_flight: list[MessageWork] = []
        self._keep_lock = threading.Lock()
        self._sweep_at = 16
        self._failure: errors.SymcommError | None = None
        self._failure_lock = threading.RLock()  # a signal handler may need it while we do
        self._before_leaving: list[Callable[[], None]] = []  # what destroy() has to finish first
        self.exposed: dict[int, Any] = {}  # memory that peers may write to, by window
        self.newcomers: list[int] = []  # the ranks that came in when grow() made this group
        self._family = name  # what newcomers call it, through all its shrinking and growing
        self._arena: Arena = current_arena()
        self._build(exchange, peers, tune=limits is None)
        registry.add(self)
        hooks.made(self)

    def _build(self, exchange: Exchange, peers: Sequence[Peer] | None, tune: bool) -> None:
        give_back()
        stage, channels, total = _layout(self.size, self._limits)
        spares = self._arena.spares.setdefault((total, *self.global_ranks), [])
        self._offset = spares.pop() if spares else self._arena.allocate_sparse(total, touched=stage)
        self._stage, self._reserved = self._offset + stage, 0
        if self._arena.must_reserve:
            self._reserve_channels(channels, total)
        native.poke(self._arena.base + self._offset, bytes(native.CONTROL_BYTES))
        for r in range(self.size):  # only the counters of a channel need to start at zero
            channel = self._arena.base + self._offset + channels + r * native.CHANNEL_BYTES
            native.poke(channel, bytes(native.CHANNEL_HEAD_BYTES))
        try:
            everyone = self._introduce(exchange, peers, total)
        except (NotMade, SeveralHostsError):
            self._arena.free(self._offset)
            raise
        except BaseException:
            # Some of these ranks may have the group now, and will write into our part that it failed. They are done
            # with it before they meet us again.
            spares.append(self._offset)
            raise
        all_cores = functools.reduce(operator.or_, (int(f["cores"], 16) for f in everyone))
        if tune and self.size > all_cores.bit_count():
            self._limits = self._limits.crowded()
        self._limits = self._limits.on_nodes([f["node"] for f in everyone])
        starts = [peer.base + f["offset"] for peer, f in zip(self._peers, everyone, strict=True)]
        own_process = sum(p.pid == os.getpid() for p in self._peers) == 1
        self._looks = looks_for_others(self.size, own_process)
        self._handle = native.make_group(
            self.rank, self.size,
            tuple(starts),
            tuple([s + stage for s in starts]), self._limits.stage_bytes,
            tuple([p.base for p in self._peers]), self._arena.nbytes,
            tuple([p.life for p in self._peers]),
            tuple([s + channels for s in starts]),
            self._arena.flight.address, self._arena.flight.add_group(self.name, self.rank, self.global_ranks),
            own_process, SPIN_LOOKS, self._look_ns, self._yield_ns, self._operations,
        )  # fmt: skip
        _living.add(self)
        self._retire = weakref.finalize(self, _retire, self._handle, self._arena, self._offset, self.exposed)
        self._retire.atexit = False  # the kernel takes it all
        native.group_keep(self._handle, (self._arena, *self._peers))

    def _reserve_channels(self, start: int, end: int) -> None:
        try:
            self._arena.reserve(self._offset + start, end - start)
        except errors.ResourceError:
            self._arena.free(self._offset)
            raise

    def _introduce(self, exchange: Exchange, peers: Sequence[Peer] | None, total: int) -> list[dict[str, Any]]:
        """Learn where the others' parts of the group lie, mapping their arenas where ``peers`` are not given."""
        cores = sum(1 << core for core in os.sched_getaffinity(0))
        node = current_node()
        self._arena.move_to(node)  # this rank may have been bound since
        facts = {"offset": self._offset, "total": total, "cores": f"{cores:x}", "node": node}
        if peers is not None:
            everyone = [json.loads(item) for item in exchange(json.dumps(facts).encode())]
            self._peers = list(peers)
        else:
            self._peers, everyone = connect(self.rank, self.size, exchange, facts, self._timeout_ns / 1e9)
        if any(f["total"] != total for f in everyone):
            raise errors.CollectiveMismatchError(
                f"group {self.name!r}: ranks use different sizes or versions; make them all the same."
            )
        return everyone

    def load_plan(self, plan: Plan) -> Any:
        """``plan`` as the core runs it. The memory that it stages in is reserved here, so that running out of it is an
        error at this line. A group that stages nothing has none."""
        loaded = native.make_plan(plan.encode())
        self._reserve_stage(native.plan_stage(loaded))
        return loaded

    def _reserve_stage(self, nbytes: int) -> None:
        """Make the pages of ``nbytes`` of each half of this rank's staging area exist."""
        if nbytes <= self._reserved:
            return
        half = self._limits.stage_bytes
        reach = min(half, max(FIRST_STAGE, 1 << (nbytes - 1).bit_length()))
        for start in (0, half):
            self._arena.reserve(self._stage + start, reach)
        native.group_reserved(self._handle, reach)
        self._reserved = max(self._reserved, reach)

    _peers: list[Peer]

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
        return self._timeout_ns / 1e9

    def set_timeout(self, timeout: float | timedelta) -> None:
        self._timeout_ns = to_ns("set_timeout", timeout) + self._extended_ns

    @property
    def failure(self) -> errors.SymcommError | None:
        """What ended the group, as this rank was told; None while it can be used."""
        return self._failure

    @property
    def flight_address(self) -> int:
        """Where this rank's flight recorder lies in memory."""
        return self._arena.flight.address

    @property
    def sequence_number(self) -> int:
        """How many collectives this rank has started on the group."""
        return native.group_report(self._handle)["seq"]

    def call_stats(self) -> dict[str, dict[str, int]]:
        """How many collectives, messages and puts this rank has made on the group, and which way they took.

        ``short``: the core knew the call and did it all; ``long``: Python looked at the tensors and found the plan.
        ``inline``: the calling thread ran it; ``queued``: the group's own did. See docs/how-to/process-group.md."""
        return native.group_ways(self._handle)

    def wait_stats(self) -> dict[str, int]:
        """How this rank's waits on the group ended that took more than about 10 us: while it kept its core and looked,
        while it offered the core to others, or after it had slept."""
        return dict(zip(("looked", "yielded", "slept"), native.group_waits(self._handle), strict=False))

    def _failed(
        self, status: int, call: str, site: Site, seconds: float | None, explain: Callable[..., Any]
    ) -> errors.SymcommError:
        """The exception to raise for a failed operation. The first one tells the story, later ones refer to it."""
        if status & 0xFF == Status.NESTED:
            return errors.CallerError(
                f"{call} on group {self.name!r}: called by a signal handler (or a finalizer) while its thread waits "
                "in another operation of this group. Set a flag there and make the call later, or use another group."
            )
        with self._failure_lock:
            if self._failure is None:
                first = explain(self, status, call, site, seconds)
                self._failure = copy.copy(
                    first
                )  # the one that is raised holds its frames, and they the caller's tensors
            else:
                return self._unusable()
        hooks.failed(self, first)
        self.run_abort_hooks()
        return first

    def _unusable(self) -> errors.GroupUnusableError:
        error = errors.GroupUnusableError(f"group {self.name!r} cannot be used any more: {self._failure}")
        error.__cause__ = self._failure
        return error

    @property
    def is_usable(self) -> bool:
        """Whether it was neither destroyed nor aborted, and no operation on it has failed here."""
        return self._failure is None

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._unusable()

    def check_usable(self) -> None:
        """Raise if the group was destroyed, or has failed."""
        self._check_usable()

    def abort(self) -> None:
        """Make every rank's pending and later operations on this group fail now."""
        self.run_abort_hooks()
        native.group_abort(self._handle)

    def destroy(self) -> None:
        """Leave the group. Pending asynchronous operations end first; peers that still wait for us are told."""
        if self._failure is None:
            for work in list(self._pending):
                work._poll(self._timeout_ns)
            for finish in self._before_leaving:
                finish()
            if self.lease is not None and self.lease.serves_others:
                self.await_departures()
        self._leave()
        self._let_go_of_store()

    def _let_go_of_store(self) -> None:
        if self.lease is not None:
            self.lease.release()
        self.store = self.lease = None

    def await_departures(self, seconds: float = FAREWELL) -> None:
        """Give the others time to leave the group, too: what this process serves ends when it has."""
        end, others = time.monotonic() + seconds, self._seen_leaving()
        while not others <= set(self._gone()) and time.monotonic() < end:
            time.sleep(0.001)

    def departures(self) -> Callable[[float], None]:
        """Waits, so many seconds at most, until all ranks of this host have left; for after this one has."""
        return functools.partial(await_departures_from, self._handle)

    def _seen_leaving(self) -> set[int]:
        """The ranks of which this one learns that they left."""
        return set(range(self.size)) - {self.rank}

    def leave(self, why: str) -> None:
        """Leave the group at once; ``why`` is what operations that are pending, or come later, are told."""
        if self._failure is None:
            self._failure = errors.GroupUnusableError(f"group {self.name!r} {why}.")
        self._leave()
        self._let_go_of_store()

    def _leave(self) -> None:
        """Leave at once: what is pending here fails."""
        if self._failure is None:
            self._failure = errors.GroupUnusableError(f"group {self.name!r} was destroyed.")
        self._retire()
        self._pending = []

    def _may_run_here(self) -> bool:
        """Whether an asynchronous call may run in this thread: nothing waits before it, and all others are there."""
        last = self._pending[-1:]
        return (
            self._looks > 0
            and self._failure is None
            and (not last or last[0]._settled)  # they end in order
            and native.group_announce(self._handle, self._looks)
        )

    def new_window(self, tensor: Any = None) -> Any:
        """A window into every rank's tensor, for one-sided puts and signals. Every rank of the group calls it.

        Without ``tensor``, every rank calls ``tensor_register`` of the window later. See docs/how-to/windows.md.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError,
        ResourceError."""
        return importlib.import_module(WINDOWS).new_window(self, tensor)

    # --- groups from groups -----------------------------------------------------------------------------------

    def new_group(self, ranks: Sequence[int], name: str = "", timeout: Timeout = None) -> ProcessGroup | None:
        """A group of ``ranks`` of this one. Every rank of this group calls it; non-members get None.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError,
        ResourceError."""
        chosen = list(ranks)
        if (
            not chosen
            or len(set(chosen)) != len(chosen)
            or not all(isinstance(r, int) and 0 <= r < self.size for r in chosen)
        ):
            raise errors.bad_argument(
                "new_group", "ranks", chosen, f"distinct ranks of 0 to {self.size - 1}, at least one"
            )
        return self._subgroup({r: (0, i) for i, r in enumerate(chosen)}, name, timeout)

    def split(self, color: int | None, key: int = 0, name: str = "", timeout: Timeout = None) -> ProcessGroup | None:
        """Ranks with the same ``color`` form a group, ordered by ``key``, then rank. Color None: no group.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError,
        ResourceError."""
        answers = self.all_gather_bytes(json.dumps([color, key]).encode(), timeout)
        choice = {r: json.loads(a) for r, a in enumerate(answers)}
        return self._subgroup({r: (c, k) for r, (c, k) in choice.items() if c is not None}, name, timeout)

    def _subgroup(self, choice: dict[int, tuple[int, int]], name: str, timeout: Timeout) -> ProcessGroup | None:
        self._children += 1
        mine = choice.get(self.rank)
        members = sorted((k, r) for r, (c, k) in choice.items() if mine is not None and c == mine[0])
        ranks = [r for _, r in members]
        label = name or f"{self.name}/{self._children}"
        if not name and mine and len({c for c, _ in choice.values()}) > 1:
            label += f".{mine[0]}"

        # Everybody takes part in the exchange, since it runs on this group; a group keeps what its members said.
        def exchange(item: bytes) -> list[bytes]:
            everyone = self.all_gather_bytes(item, timeout)
            return [everyone[r] for r in ranks]

        if mine is None:
            self.all_gather_bytes(b"", timeout)
            return None
        return ProcessGroup(
            ranks.index(self.rank), len(ranks), exchange, label, self.timeout if timeout is None else timeout,
            self._limits, [self.global_ranks[r] for r in ranks], [self._peers[r] for r in ranks],
        )  # fmt: skip

    def shrink(
        self, timeout: float = 5.0, exclude: Sequence[int] = (), abort: bool = True, quorum: int | None = None
    ) -> ProcessGroup:
        """After a failure: the ranks that still live, and come here within ``timeout``, go on in a new group.

        All of them in one of the same members. A rank that stalls on the way is left out when ``timeout`` has passed
        once more, and raises RankFailedError when it comes. Ranks in ``exclude`` stay behind though they live; they do
        not call this. Without ``abort`` operations that other ranks still have under way end first. ``quorum``: how
        many ranks of this group must be reached, where they are on several hosts; more than half unless given."""
        from symcomm.group.shrink import check_excluded, check_quorum, shrink

        if not self._retire.alive:
            raise self._unusable()
        check_excluded(self, exclude)
        check_quorum(self, quorum)
        return shrink(self, to_ns("shrink", timeout) / 1e9, exclude, abort)

    def of_members(self, ranks: Sequence[int], exchange: Exchange) -> ProcessGroup:
        """What is left of this group when only ``ranks`` go on."""
        return ProcessGroup(
            ranks.index(self.rank), len(ranks), exchange, f"{self.name}-shrunk", self.timeout, self._limits,
            [self.global_ranks[r] for r in ranks], [self._peers[r] for r in ranks],
        )  # fmt: skip

    def reclaim_windows(self) -> None:
        """After an abort: what peers could put into is this rank's alone from now on, whoever was stopped meanwhile."""
        tensors = [tensor for tensor, _ in self.exposed.values() if tensor is not None and tensor.device.type == "cpu"]
        native.group_reclaim(self._handle, tuple((t.data_ptr(), t.numel() * t.element_size()) for t in tensors))

    def inherit(self, older: ProcessGroup) -> None:
        """Take the place of a group that this one was made from: newcomers find it where they would have found that."""
        self.store, self._family = older.store, older._family
        self.lease = older.lease.share() if older.lease is not None else None

    def _gone(self) -> list[int]:
        """Ranks that died, or left."""
        return [r["rank"] for r in native.group_report(self._handle)["ranks"] if r["gone"]]

    def watch(self, ranks: Collection[int], what: str) -> Callable[[], None]:
        """For who waits for ``ranks`` of this group elsewhere: raises RankFailedError once one of them is gone."""
        return functools.partial(check_living, self, ranks, what)

    def grow(self, timeout: float = 10.0, wait: float = 0.0, size: int | None = None) -> ProcessGroup:
        """Between two steps: let in who waits in ``symcomm.join()``. Every rank of this group calls it.

        Returns a new group, members first in their old order, then the newcomers; this very group when nobody waits, or
        when a newcomer fails to come in within ``timeout`` seconds (it is then dropped, with a warning). The answer is
        the same on every rank. ``wait``: seconds to wait for newcomers, until there is one, or ``size`` ranks in all;
        no more than ``size`` are let in."""
        from symcomm.group.grow import grow

        self._check_usable()
        if size is not None and (not isinstance(size, int) or size < 1):
            raise errors.bad_argument("grow", "size", size, "a number of ranks, 1 or more")
        return grow(self, to_ns("grow", timeout) / 1e9, to_ns("grow", wait) / 1e9 if wait else 0.0, size)
