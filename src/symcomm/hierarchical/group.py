"""HierarchicalGroup: a group whose ranks are on several hosts, with the methods of ProcessGroup.

This file makes the group and its parts, hands control messages to the parts, and ends the group.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import Any

from symcomm import errors
from symcomm.group import hooks, registry
from symcomm.group.factory import make_group
from symcomm.group.meeting import HostMeeting, Meeting
from symcomm.group.process_group import ProcessGroup
from symcomm.group.refusal import settled
from symcomm.group.work import Timeout, to_ns
from symcomm.hierarchical.connecting import DeathWatch
from symcomm.hierarchical.connection import FramedConnection, ProtocolViolation
from symcomm.hierarchical.control_channel import ControlChannel, channel_of, check_tokens, endpoint_in
from symcomm.hierarchical.discovery import agree_on_engine, check_addresses, network_advice, wants_wide_sums
from symcomm.hierarchical.engines.base import Engine, EngineContext, available_engines, engine_class, wanted_engine
from symcomm.hierarchical.executor import HierarchicalExecutor
from symcomm.hierarchical.failure import Failures, HierarchicalState
from symcomm.hierarchical.frames import MESSAGES, check
from symcomm.hierarchical.intra_host import HostRanks, IntraHostGroup
from symcomm.hierarchical.leader_links import LeaderLinks, links_of
from symcomm.hierarchical.matcher import MessageMatcher
from symcomm.hierarchical.operation import Parts
from symcomm.hierarchical.p2p import HierarchicalMessages
from symcomm.hierarchical.presence import Presence
from symcomm.hierarchical.refusal import RefusalsAcrossHosts
from symcomm.hierarchical.rounds import ControlExchange, Rounds
from symcomm.hierarchical.scratch import Scratch
from symcomm.hierarchical.shrink import shrink
from symcomm.hierarchical.standoff import Lasting, Waits
from symcomm.hierarchical.topology import Layout
from symcomm.hierarchical.work import Runner
from symcomm.membership.quorum_board import QuorumBoard
from symcomm.memory.hosts import boot_id, network
from symcomm.memory.share import Exchange
from symcomm.store.address import LOOPBACK, own_address

Handler = Callable[[int, dict[str, Any], "bytes | bytearray"], None]
ENGINE_STOP = 5.0  # seconds for an engine to stop; Gloo takes milliseconds

# The part of a group that takes each kind of control message; it is called with the sender's rank and the message.
_RECEIVERS = {
    "clear_to_send": attrgetter("matcher.on_clear_to_send"), "refused": attrgetter("matcher.on_refused"),
    "sending": attrgetter("matcher.on_sending"), "cancelled": attrgetter("matcher.on_cancelled"),
    "ask": attrgetter("failures.answer"), "answer": attrgetter("failures.note_answer"),
    "refusal": attrgetter("refusals.note"), "exchange": attrgetter("rounds.note"),
    "agree": attrgetter("board.note"),
}  # fmt: skip
_living: weakref.WeakSet[HierarchicalGroup] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A forked child is not the rank: it has neither its threads nor its connections."""
    for group in list(_living):
        group._has_left = True
        group.presence.after_fork()
        group.leader_links.forget()
        group.after_fork()
        group._retire.detach()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _leave_all() -> None:
    for group in list(_living):
        group._say_goodbye()
        group.failures.end()
        if group._stopping is not None:
            group._stopping.join(2.0)


def _leave_first_at_exit() -> None:
    """Leave before engines end: their broken transfers would look like failures. The last handler runs first."""
    atexit.unregister(_leave_all)
    atexit.register(_leave_all)


def _retire(
    channel: ControlChannel, key: str, runner: Runner, engine: Engine, links: LeaderLinks, untold: list[str]
) -> None:
    channel.leave(key, untold)
    links.close()
    runner.stop()
    engine.close()


class HierarchicalGroup(ProcessGroup):
    """A group across hosts, made from what its ranks learned of each other when they met (see group/factory.py). They
    exchange twice more: to reach each other and map their host's arenas, and to connect the engine."""

    state: HierarchicalState
    executor: HierarchicalExecutor
    spans_hosts = True
    _retire: weakref.finalize

    def __init__(self, met: Meeting, name: str = "world", timeout: Timeout = None, engine: str | None = None):
        super().__init__(met.rank, met.size, name, timeout, met.part.given, met.members)
        self.layout = Layout(met.hosts, met.rank)
        self.failures = self.state.failures
        self.arrivals: dict[tuple[int, int], tuple[list[int], Any]] = {}  # (number, leader) -> signature, data
        self.refusals = RefusalsAcrossHosts(self)
        self.leader_links = links_of(self)
        self.presence = Presence(self.leader_links)
        self.matcher, self.waits = MessageMatcher(self), Waits(self)
        self.rounds, self.board = Rounds(self), QuorumBoard(self)
        self._handlers: dict[str, Handler] = {}  # of messages of the layers above, by kind
        self._has_left = False
        self._key = ""
        self._rank_of: dict[str, int] = {}  # by name of control channel; the channel may ask during bootstrap
        self._untold: list[str] = []  # control channels of ranks that have to hear when this one leaves
        self._stopping: threading.Thread | None = None
        self.local: Any = None  # until it is made: peers' messages may arrive before that
        self.engine: Any = None
        self._bootstrap(met, engine)

    def _new_state(self, timeout_ns: int) -> HierarchicalState:
        state = HierarchicalState(self, self.rank, self.size, self.name, timeout_ns)
        state.failures, state.doing, state.since = Failures(self), (0, "", ""), 0.0
        return state

    def _bootstrap(self, met: Meeting, engine: str | None) -> None:
        """Exchange control channels and this host's arenas, make this host's group, then connect the hosts."""
        key = f"{self.name}/{self.arena.nonce.hex()}/{self.arena.flight.address}/{time.monotonic_ns()}"
        self.control = channel_of(self.arena, key, self)
        try:
            local = self._meet_host(met, key, wanted_engine(engine))
            self._connect(local, met.exchange)
        except BaseException as error:
            self._tell_why(met.exchange, error)
            self.control.leave(key)
            self.control.leave(self._key, self._untold)  # peers would else take this rank for dead
            raise
        _living.add(self)
        registry.add(self)
        hooks.watch(self)
        self._retire = weakref.finalize(
            self, _retire, self.control, self._key, self.executor.runner, self.engine, self.leader_links, self._untold
        )
        self._retire.atexit = False
        _leave_first_at_exit()

    def _tell_why(self, exchange: Exchange, error: BaseException) -> None:
        """Tell the others this rank's own reason, if it has one, before they see that it leaves."""
        tell = getattr(exchange, "give_up", None)
        if tell is not None and not isinstance(error, (errors.PeerError, errors.DeadlineError)):
            tell(error)

    def _meet_host(self, met: Meeting, key: str, wanted: str) -> Meeting:
        """All ranks exchange how they can be reached; those of this host also map each other's arenas."""
        address, across = own_address(), None
        with HostMeeting(met) as host:
            remote, here = self.control.open_endpoint(address), self.control.open_endpoint(LOOPBACK)
            try:
                info = {
                    "control": remote, "loopback": here.port, "has_token": self.control.has_token, "pid": os.getpid(),
                    "host": socket.gethostname(), "machine": [boot_id(), network()], "wanted": wanted,
                    "engines": [] if wanted else available_engines(), "key": key, "wide_sums": wants_wide_sums(),
                    **host.item,
                }  # fmt: skip
                self.peer_info = [json.loads(item) for item in met.exchange(json.dumps(info).encode())]
                across = any(c["machine"] != self.peer_info[0]["machine"] for c in self.peer_info)
            finally:
                self.control.settle(address, needed=across is True)
                self.control.settle(LOOPBACK, needed=across is False)
            self._join_channel(key, across)
            return host.finish(self.peer_info, self.timeout)

    def _join_channel(self, key: str, across: bool) -> None:
        check_tokens(self.peer_info)
        if across:
            check_addresses(self.peer_info)
        self._key = self.peer_info[0]["key"]  # the first rank names the group for all
        self._endpoints = [endpoint_in(c, across) for c in self.peer_info]
        self.presence.watch(self.control, self._endpoints)
        self._rank_of = {endpoint.nonce: r for r, endpoint in enumerate(self._endpoints)}
        self._untold = [endpoint.nonce for r, endpoint in enumerate(self._endpoints) if r != self.rank]
        self.control.join(self._key, self)
        if self._key != key:
            self.control.leave(key)

    def _connect(self, host: Meeting, exchange: Exchange) -> None:
        local = IntraHostGroup(host, f"{self.name}@{self.layout.host}", self.timeout)
        local.waits, local.here = self.waits, self.layout.here
        self.handle, self.peers = self.state.handle, self.state.peers = local.handle, local.peers
        self.local = local
        self.exposed = local.exposed  # it outlives the group while ranks of this host may write there
        with DeathWatch(self, exchange) as watch:
            self._make_engine(exchange, watch.check_all)
        parts = Parts(
            self.layout, HostRanks(self.local), self.leader_links, self.arrivals, self.engine,
            Scratch(self.arena), self.presence, self.failures, self.refusals,
        )  # fmt: skip
        messages = HierarchicalMessages(self.state, self.layout, self.local.messages, self.matcher)
        self._own(HierarchicalExecutor(self.state, parts), messages)

    def meet(self, exchange: Exchange) -> None:
        self.state.doing, self.executor.submitted = (-1, "", ""), -1
        exchange(b"")

    def _make_engine(self, exchange: Exchange, check: Callable[[], None]) -> None:
        self.engine_name = agree_on_engine(self.peer_info)
        context = EngineContext(self.rank, self.size, self._endpoints[self.rank].address, check)
        self.engine = engine_class(self.engine_name)(context)
        self.layout.eager_host_max = self.engine.eager_host_max
        self.layout.wide_sums = self.peer_info[0]["wide_sums"]  # all ranks do as the first one says
        endpoints = [json.loads(item) for item in exchange(json.dumps(self.engine.endpoint).encode())]
        try:
            self.engine.connect(endpoints, self.timeout)
        except RuntimeError as error:  # also torch's
            if isinstance(error, errors.SymcommError) and not isinstance(error, ConnectionError):
                raise
            why = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise errors.RankFailedError(
                f"group {self.name!r}: {self.engine_name} could not connect rank {self.rank} to the others ({why}); "
                f"a rank ended meanwhile, or the network blocks them: {network_advice(self.peer_info)}."
            ) from error
        finally:
            context.check = None  # it holds this group, which an engine must not keep alive

    def __repr__(self) -> str:
        hosts = len(self.layout.hosts)
        return f"<HierarchicalGroup {self.name!r}: rank {self.rank} of {self.size}, host {self.layout.host} of {hosts}>"

    # --- failure ----------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """After a failure, before the caller learns of it: return once the caller's tensors are not used any more."""
        self.await_engine()
        self.local.handle.let_go()
        self.executor.await_turn()
        with self.cond:  # wait for a message that is being delivered; none is delivered after the verdict
            pass

    @property
    def _observed(self) -> ProcessGroup:
        return self.local

    def stop_engine(self) -> None:
        """Abort transfers, in another thread: this one may be the control channel's, or the engine's."""
        if self.engine is None:
            return
        stopping = threading.Thread(target=self.engine.abort, name="symcomm-abort", daemon=True)
        try:
            stopping.start()
        except RuntimeError:  # no thread could be started
            self.engine.abort()
        else:
            self._stopping = stopping

    def await_engine(self) -> None:
        """Return when the engine no longer touches the caller's tensors."""
        if self._stopping is not None:
            self._stopping.join(ENGINE_STOP)

    # --- control channel --------------------------------------------------------------------------------------

    def dial(self, rank: int) -> FramedConnection | None:
        """A link between leaders, from this one."""
        return self.control.dial(self._endpoints[rank], self._key)

    def tell(self, rank: int, header: dict[str, Any], payload: bytes = b"", timeout: float = 10.0) -> bool:
        """Send a control message to a rank; False when it cannot be reached."""
        return self.control.send(self._endpoints[rank], {"group": self._key, **header}, payload, timeout)

    def tell_known(self, rank: int, header: dict[str, Any]) -> bool:
        """Send a control message if there is a connection; never waits for one."""
        return self.control.is_connected(self._endpoints[rank].nonce) and self.tell(rank, header)

    def tell_all(self, ranks: Iterable[int], header: dict[str, Any], timeout: float) -> None:
        """Send a message to each of ``ranks``. Connects to all of them at the same time, since that may take long."""
        far = [r for r in ranks if not self.tell_known(r, header)]
        tell = functools.partial(self.tell, header=header, timeout=timeout)
        if far:
            try:
                with ThreadPoolExecutor(16, thread_name_prefix="symcomm-tell") as pool:
                    list(pool.map(tell, far))
            except RuntimeError:  # no thread could be started: one after the other
                list(map(tell, far))

    def backlog(self, rank: int) -> int:
        """Bytes queued for a rank."""
        return self.control.backlog(self._endpoints[rank].nonce)

    def on_control(self, kind: str, handler: Handler) -> None:
        """``handler(rank, header, payload)`` gets the messages of that kind, in the control channel's thread."""
        self._handlers[kind] = handler

    @property
    def cond(self) -> threading.Condition:
        """Notified whenever something changes that a thread may wait for."""
        return self.presence.cond

    @property
    def left(self) -> set[int]:
        """Ranks that have said that they left."""
        return self.presence.left

    def is_gone(self, rank: int) -> bool:
        """Whether a rank left, or its connection to this one broke."""
        return self.presence.is_gone(rank)

    def notify(self) -> None:
        """Something changed: wake all waiters."""
        self.presence.notify()

    def on_message(self, sender: str, header: dict[str, Any], payload: bytes | bytearray) -> None:
        """Called by the control channel, in its thread."""
        rank = self._rank_of.get(sender)
        if rank is None:
            return
        kind = header.get("kind")
        if isinstance(kind, str) and kind in self._handlers:
            self._handlers[kind](rank, header, payload)
            return
        if not isinstance(kind, str) or kind not in MESSAGES:
            raise ProtocolViolation("sent a message of no known kind")
        check(kind, header, payload, self.size)
        if kind == "envelope":
            self.matcher.on_envelope(rank, header, payload)
        elif kind == "fail":
            self.failures.accept(header)
        elif kind == "bye":
            self.left.add(rank)
            self.matcher.on_left(rank)
            self.notify()
        elif kind in _RECEIVERS:
            _RECEIVERS[kind](self)(rank, header)

    def on_leader_link(self, sender: str, conn: FramedConnection) -> None:
        if sender in self._rank_of:
            self.leader_links.add(self._rank_of[sender], conn)
        else:
            conn.close()

    def on_lost(self, nonce: str) -> None:
        if nonce in self._rank_of:
            self.notify()

    # --- lifecycle --------------------------------------------------------------------------------------------

    @property
    def sequence_number(self) -> int:
        return self.executor.submitted

    @property
    def doing(self) -> tuple[int, str, str]:
        """Sequence number, call and call site of the last operation."""
        return self.state.doing

    def lasts(self) -> Lasting | None:
        """The call that this rank waits in: a collective, or else the message that it has waited for longest."""
        (seq, call, site), since = self.state.doing, self.state.since
        return Lasting(seq, f"{call} #{seq}", site, since, None) if since else self.waits.longest()

    def call_stats(self) -> dict[str, dict[str, int]]:
        return self.local.call_stats()

    def copy_stats(self) -> dict[str, dict[str, int]]:
        return self.local.copy_stats()

    def wait_stats(self) -> dict[str, int]:
        return self.local.wait_stats()

    def describe(self, description: str) -> None:
        self.local.describe(description)

    @property
    def has_left(self) -> bool:
        return self._has_left

    def departures(self) -> Callable[[float], None]:
        return self.local.departures()

    def reclaim_windows(self) -> None:
        self.local.reclaim_windows()

    def abort(self) -> None:
        self.call_hooks.run_abort_hooks()
        self.failures.abort()

    def _leave(self) -> None:
        if self._has_left:
            return
        self._say_goodbye()
        self.failures.end()
        if self.matcher.is_moving:  # the caller gets its tensors back now
            self.stop_engine()
            self.await_engine()
        self._retire()
        self.local.leave()
        self.executor.pending = []

    def _say_goodbye(self) -> None:
        """Tell peers that this rank leaves, and does not die."""
        if self._has_left:
            return
        self._has_left = True
        watching = {r for host in self.layout.others for r in self.layout.counterparts(host)}
        for nonce in self._untold:
            if self.control.is_connected(nonce) or self._rank_of[nonce] in watching:
                self.tell(self._rank_of[nonce], {"kind": "bye"}, timeout=1.0)
        self._untold.clear()

    # --- groups from groups -----------------------------------------------------------------------------------

    def _subgroup(self, choice: dict[int, tuple[int, int]], name: str, timeout: Timeout) -> Any:
        """Members of one host form a plain LocalGroup."""
        self.check_usable()
        ranks, label = self._name_of_subgroup(choice, name)
        if not ranks:
            return None
        key = f"sub/{self._children}/{choice[self.rank][0]}"
        lifetime = self.timeout if timeout is None else to_ns(key, timeout) / 1e9
        exchange = ControlExchange(self.rounds, ranks, key, lifetime)
        try:
            return self._of(ranks, exchange, label, lifetime)
        except Exception as error:
            exchange.give_up(error)
            settled(error)
            raise

    def _of(self, ranks: Sequence[int], exchange: Exchange, name: str, seconds: float) -> Any:
        return make_group(
            ranks.index(self.rank), len(ranks), exchange, name, seconds, self.given_limits,
            [self.global_ranks[r] for r in ranks], self.engine_name,
        )  # fmt: skip

    def _shrink(self, seconds: float, exclude: Sequence[int], abort: bool, quorum: int | None) -> Any:
        if abort:
            self._abort_once()

        def make(ranks: Sequence[int], exchange: Exchange) -> Any:
            smaller = self._of(ranks, exchange, f"{self.name}-shrunk", seconds)
            smaller.set_timeout(self.timeout)  # the short deadline was for building it
            return smaller

        smaller = shrink(self, seconds, exclude, quorum, make)
        self._abort_once()  # for ranks that were left out, should they still use it
        smaller.inherit(self)
        return smaller

    def _abort_once(self) -> None:
        if self.failures.verdict is None:
            self.failures.abort()

    def gone_ranks(self) -> list[int]:
        return sorted(self.rounds.gone())

    def watch(self, ranks: Collection[int], what: str) -> Callable[[], None]:
        """Connects to the ranks of other hosts: the end of a rank is seen by the end of its connection."""
        far, begun = [r for r in ranks if r not in self.layout.here], time.monotonic()
        self.tell_all(far, {"kind": "hello"}, timeout=1.0)
        return lambda: self.rounds.check_members(ranks, begun, what)

    def _seen_leaving(self) -> set[int]:
        counterparts = {r for host in self.layout.others for r in self.layout.counterparts(host)}
        return (counterparts | set(self.layout.here)) - {self.rank}
