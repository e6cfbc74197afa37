"""LocalGroup: ranks of one host, on symmetric memory. This file says how the group is made and left, and how some of
its ranks make another. facade.py has its calls, executor.py runs them, p2p.py has its messages."""

from __future__ import annotations

import atexit
import functools
import os
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from symcomm._core import native
from symcomm.group import hooks, registry
from symcomm.group.executor import LocalExecutor
from symcomm.group.failure import call_site, check_living
from symcomm.group.leaving import await_others, retire
from symcomm.group.meeting import Meeting, meet_again
from symcomm.group.p2p import LocalMessages
from symcomm.group.process_group import ProcessGroup
from symcomm.group.refusal import settled
from symcomm.group.standoff import format_message, format_standoff, warn
from symcomm.group.work import Timeout
from symcomm.memory.arena import Arena, current_arena
from symcomm.memory.share import Exchange, GroupNotBuilt

# A waiting rank first polls this often (about 10 us). With a core of its own it then spins on, for longer than a peer
# may lose its core for a time slice; with more ranks than cores it yields. Then it sleeps, which costs two context
# switches (about 10 us). See _core/sync/backoff.h.
SPIN_COUNT = 4000
SPIN_NS = 5_000_000
YIELD_NS = 100_000
MEETING_LOOKS = 1000  # in a row, for ranks that have almost made the group, too; about 10 us
MEETING_FIRST, MEETING_LAST = 0.00002, 0.005  # seconds between two such looks
GAVE_UP = b"!"  # then follows why a rank cannot take part; the others' items are JSON


def _locate() -> int:
    """The number by which this rank's flight recorder knows the program's line that called."""
    return current_arena().flight.site(call_site())


def _group_of(handle: native.Group) -> LocalGroup | None:
    return next((group for group in list(_living) if group.handle is handle), None)


def _wait_lasts(handle: native.Group, *facts: Any) -> float:
    group = _group_of(handle)
    return group.on_long_wait(call_site(), *facts) if group is not None else 0.0


def _stands_off(handle: native.Group, is_send: bool, peer: int, tag: int) -> None:
    if (group := _group_of(handle)) is not None:
        group.on_standoff(is_send, peer, tag)


def tell_of_long_waits() -> None:
    """Have the core report long waits, after the time that the environment gives."""
    native.use_long_wait_callback(_wait_lasts, hooks.seconds_of_long_waits())


native.use_call_site_callback(_locate)
native.use_deadlock_callback(_stands_off)
native.use_whereabouts_callback(hooks.where_am_i)
atexit.register(native.refuse_whereabouts)
_living: weakref.WeakSet[LocalGroup] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """End the threads of asynchronous operations while they can still call the interpreter."""
    for group in list(_living):
        if group.is_busy:
            group.leave()


def _after_fork_in_child() -> None:
    """A forked child is not the rank: whatever it does with its copies of groups must not reach the others."""
    for group in list(_living):
        group.handle.forked()
        group.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


def leave_groups_of(arena: Arena) -> None:
    """Leave all groups of one rank at once: it has failed."""
    for group in [g for g in list(_living) if g.arena is arena]:
        group.leave()


class LocalGroup(ProcessGroup):
    """A group whose ranks share memory, made from what they learned of each other when they met (see factory.py)."""

    executor: LocalExecutor
    _spin_ns, _yield_ns = SPIN_NS, YIELD_NS
    _operations = 0  # counted as done when a group is made; the same on all ranks

    def __init__(self, met: Meeting, name: str = "world", timeout: Timeout = None):
        super().__init__(met.rank, met.size, name, timeout, met.part.given, met.members)
        with met.part.at_risk():
            self._build(met)
        registry.add(self)
        hooks.made(self)

    def _build(self, met: Meeting) -> None:
        met.check_alike(self.name)
        self.peers, self.plan_limits, part = list(met.peers), met.limits(), met.part
        self._offset = part.offset
        starts = [peer.base + f["offset"] for peer, f in zip(self.peers, met.facts, strict=True)]
        self._recorded_as = self.arena.flight.add_group(self.name, self.rank, self.global_ranks)
        own_process = sum(p.pid == os.getpid() for p in self.peers) == 1
        self.handle = native.Group(
            rank=self.rank,
            world=self.size,
            controls=tuple(starts),
            stages=tuple([s + part.stage for s in starts]),
            stage_bytes=self.plan_limits.stage_bytes,
            arenas=tuple([p.base for p in self.peers]),
            arena_bytes=self.arena.nbytes,
            lives=tuple([p.life for p in self.peers]),
            channels=tuple([s + part.channels for s in starts]),
            flight=self.arena.flight.address,
            flight_group=self._recorded_as,
            own_process=own_process,
            spin=SPIN_COUNT,
            poll_ns=self._spin_ns,
            yield_ns=self._yield_ns,
            operations=self._operations,
            timeout_ns=self.timeout_ns,
        )
        state = self.state
        state.handle = state.mailbox = self.handle
        state.peers = self.peers
        self._own(LocalExecutor(state, self.plan_limits, part.offset + part.stage), LocalMessages(state))
        self._call_seen = self.executor.call_seen
        self.handle.keep((self.arena, *self.peers))
        _living.add(self)
        self._retire = weakref.finalize(self, retire, self.handle, self.arena, part.offset, self.exposed)
        self._retire.atexit = False  # the kernel frees everything

    def meet(self, exchange: Exchange) -> None:
        self.handle.skip_number()
        check, pause = getattr(exchange, "check", None), MEETING_FIRST
        end = time.monotonic() + self.timeout
        while check is not None and not self.handle.announce(MEETING_LOOKS):
            if time.monotonic() > end or self.gone_ranks():
                return  # the first operation will say what happened
            check()
            time.sleep(pause)
            pause = min(1.5 * pause, MEETING_LAST)

    # --- state ------------------------------------------------------------------------------------------------

    @property
    def sequence_number(self) -> int:
        """How many collectives this rank has started on the group."""
        return self.handle.report()["seq"]

    def call_stats(self) -> dict[str, dict[str, int]]:
        return self.handle.ways()

    def copy_stats(self) -> dict[str, dict[str, int]]:
        return self.handle.copies()

    def wait_stats(self) -> dict[str, int]:
        return dict(zip(("looked", "yielded", "slept"), self.handle.waits(), strict=False))

    def on_long_wait(self, site: Any, *facts: Any) -> float:
        return hooks.waits(self, site, *facts)

    def on_standoff(self, is_send: bool, peer: int, tag: int) -> None:
        """For a second, ``peer`` has waited in a collective and this rank for a message; the core calls this."""
        if words := format_standoff(self.state, peer, f"rank {self.rank}"):
            warn(self.state, format_message(is_send, peer, tag), words)

    def describe(self, description: str) -> None:
        self.arena.flight.describe_group(self._recorded_as, description)

    def abort(self) -> None:
        self.call_hooks.run_abort_hooks()
        self.handle.abort()

    def _leave(self) -> None:
        self._retire()
        self.executor.pending = []

    def departures(self) -> Callable[[float], None]:
        return functools.partial(await_others, self.handle)

    def reclaim_windows(self) -> None:
        tensors = [tensor for tensor, _ in self.exposed.values() if tensor is not None and tensor.device.type == "cpu"]
        self.handle.reclaim(tuple((t.data_ptr(), t.numel() * t.element_size()) for t in tensors))

    def gone_ranks(self) -> list[int]:
        return [r["rank"] for r in self.handle.report()["ranks"] if r["gone"]]

    def watch(self, ranks: Collection[int], what: str) -> Callable[[], None]:
        return functools.partial(check_living, self, ranks, what)

    # --- groups from groups -----------------------------------------------------------------------------------

    def _subgroup(self, choice: dict[int, tuple[int, int]], name: str, timeout: Timeout) -> ProcessGroup | None:
        ranks, label = self._name_of_subgroup(choice, name)
        if not ranks:
            self.all_gather_bytes(b"", timeout)
            return None
        exchange = ParentExchange(self, ranks, label, timeout)
        try:
            return self._of(ranks, exchange, label, self.timeout if timeout is None else timeout)
        except Exception as error:
            exchange.give_up(error)
            settled(error)
            raise

    def of_members(self, ranks: Sequence[int], exchange: Exchange) -> LocalGroup:
        """The group in which only ``ranks`` of this one go on."""
        return self._of(ranks, exchange, f"{self.name}-shrunk", self.timeout)

    def _of(self, ranks: Sequence[int], exchange: Exchange, name: str, timeout: Timeout) -> LocalGroup:
        peers, members = [self.peers[r] for r in ranks], [self.global_ranks[r] for r in ranks]
        return LocalGroup(meet_again(ranks.index(self.rank), peers, exchange, self.plan_limits, members), name, timeout)

    def _shrink(self, seconds: float, exclude: Sequence[int], abort: bool, quorum: int | None) -> ProcessGroup:
        from symcomm.group.shrink import shrink

        return shrink(self, seconds, exclude, abort)

    @property
    def has_left(self) -> bool:
        return not self._retire.alive


class ParentExchange:
    """The one exchange in which ``ranks`` of a group make another. It runs on the group, so all its ranks take part.

    A rank that cannot make its part says why instead; the group lives on."""

    def __init__(self, group: LocalGroup, ranks: Sequence[int], label: str, timeout: Timeout):
        self._group, self._ranks, self._label, self._timeout = group, ranks, label, timeout
        self._is_over = False

    def __call__(self, item: bytes) -> list[bytes]:
        self._is_over = True
        everyone = self._group.all_gather_bytes(item, self._timeout)
        for rank in self._ranks:
            if everyone[rank].startswith(GAVE_UP):
                why = everyone[rank].removeprefix(GAVE_UP).decode(errors="replace")
                raise GroupNotBuilt(
                    f"group {self._label!r}: rank {rank} of {self._group.name!r} gave up: {why}", [rank]
                )
        return [everyone[rank] for rank in self._ranks]

    def give_up(self, error: Exception) -> None:
        """Called when this rank's part failed, perhaps before the exchange."""
        if not self._is_over:
            why = str(error) or type(error).__name__
            self._group.all_gather_bytes(GAVE_UP + why.encode(errors="replace"), self._timeout)
