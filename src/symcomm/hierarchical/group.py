"""HostsGroup: a group whose ranks are on several hosts, with the methods of ProcessGroup."""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from symcomm import errors
from symcomm.collectives.plan import Plan
from symcomm.collectives.select import Limits
from symcomm.group import hooks, registry
from symcomm.group.buffers import Buffer
from symcomm.group.factory import make_group
from symcomm.group.failure import Site, Status, call_site, explain, words_for_site
from symcomm.group.p2p import MessageWork
from symcomm.group.process_group import DEFAULT_TIMEOUT, ProcessGroup
from symcomm.group.work import Timeout, Watcher, Work, to_ns
from symcomm.hierarchical.agreement import Agreement, Council
from symcomm.hierarchical.connection import Frame, Link, Refused
from symcomm.hierarchical.control_channel import Card, Office, check_tokens, office_in, office_of
from symcomm.hierarchical.discovery import Part, agree_on_engine, boot_id, network
from symcomm.hierarchical.engines.base import Engine, Place, Transfer, available_engines, engine_class, wanted_engine
from symcomm.hierarchical.execution import HierarchicalExecution
from symcomm.hierarchical.failure import Stopped, Trouble
from symcomm.hierarchical.frames import MESSAGES, check
from symcomm.hierarchical.leader_links import Lines
from symcomm.hierarchical.operation import Operation, Signature
from symcomm.hierarchical.p2p import HostsMessages, Mail
from symcomm.hierarchical.rounds import Rounds
from symcomm.hierarchical.scratch import Scratch
from symcomm.hierarchical.topology import Layout
from symcomm.hierarchical.work import HostsWork, Runner
from symcomm.memory.arena import Arena, current_arena
from symcomm.memory.share import Exchange, Patience
from symcomm.store.address import LOOPBACK, own_address

__all__ = ["HostsGroup"]

LOCAL_ROUNDS = 3  # of the exchange, at most, to make a host's own group
Handler = Callable[[int, dict[str, Any], "bytes | bytearray"], None]
MOST_ARRIVALS = 10_000  # of hosts at operations that this one has not come to; each is at most a few ahead
ENGINE_NEWS = 1.0  # seconds for the office to learn who is gone, when the engine has noticed first
ENGINE_STOPS = 5.0  # seconds for an engine to stop; Gloo takes milliseconds

_living: weakref.WeakSet[HostsGroup] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A forked child is not the rank, and has neither its threads nor its connections."""
    for group in list(_living):
        group._goodbye = True
        group.news = threading.Condition()
        group.lines.forget()
        group._failure_lock = threading.RLock()
        group._failure = errors.forked(group._failure)
        group._retire.detach()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _leave_all() -> None:
    for group in list(_living):
        group._say_goodbye()
        group.trouble.end()
        if group._stopping is not None:
            group._stopping.join(2.0)


def _leave_first_at_exit() -> None:
    """Before engines end, whose broken transfers would be news otherwise: what is registered last runs first."""
    atexit.unregister(_leave_all)
    atexit.register(_leave_all)


def _retire(office: Office, key: str, runner: Runner, engine: Engine, lines: Lines, untold: list[str]) -> None:
    office.leave(key, untold)
    lines.close()
    runner.stop()
    engine.close()


class _HostGroup(ProcessGroup):
    """The ranks of one host. What they wait for is on the network, mostly: longer than looking for it pays."""

    _look_ns = _yield_ns = 5_000


class HostsGroup(HierarchicalExecution, HostsMessages, ProcessGroup):
    """Made by ``make_group`` where ranks turn out to be on several hosts.

    ``hosts``: the ranks that share memory, host by host; ``exchange``: everybody's bytes. All ranks make it at once."""

    spans_hosts = True

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: Exchange,
        hosts: Sequence[Sequence[int]],
        name: str = "world",
        timeout: Timeout = None,
        limits: Limits | None = None,
        global_ranks: Sequence[int] | None = None,
        engine: str | None = None,
    ):
        self.rank, self.size, self.name = rank, size, name
        self.global_ranks = list(global_ranks) if global_ranks is not None else list(range(size))
        self._limits = limits or Limits()
        self._timeout_ns = to_ns("HostsGroup", DEFAULT_TIMEOUT if timeout is None else timeout)
        self._plans: dict[Any, Any] = {}
        self._pending: list[Work] = []
        self._watcher = Watcher()
        self._in_flight: list[MessageWork] = []
        self._keep_lock = threading.Lock()
        self._failure: errors.SymcommError | None = None
        self._failure_lock = threading.RLock()
        self._children = self._barriers = 0
        self._together = None  # asynchronous operations have a thread of their own
        self._before_leaving: list[Callable[[], None]] = []
        self.exposed: dict[int, Any] = {}
        self.store: Any = None
        self.lease = None
        self.newcomers: list[int] = []
        self._family, self._meeting = name, None
        self._arena: Arena = current_arena()
        self.layout = Layout(hosts, rank)
        self.news = threading.Condition()  # anything that somebody may wait for has happened
        self.trouble = Trouble(self)
        self.arrivals: dict[tuple[int, int], tuple[list[int], bytes | bytearray]] = {}  # (number, speaker) -> signature
        self.lines = _lines_of(self)
        self.left: set[int] = set()
        self.doing: tuple[int, str, str] = (0, "", "")  # number, call and place of the last operation
        self._submitted = 0
        self._turn = threading.RLock()
        self._runner = Runner()
        self.scratch = Scratch(self._arena)
        self.mail = Mail(self)
        self.rounds, self.council = Rounds(self), Council(self)
        self._handlers: dict[str, Handler] = {}  # of messages that layers above send, by kind
        self._abandoned: list[Any] = []  # operations and tensors whose memory the engine may still write to
        self._goodbye = False
        self._acting = 0  # the thread that performs an operation
        self._key = ""
        self._rank_of: dict[str, int] = {}  # by the name of its office: the office may ask before all have met
        self._stopping: threading.Thread | None = None
        self._meet(exchange, engine)

    def _meet(self, exchange: Exchange, engine: str | None = None) -> None:
        """Meet: offices and engines first, then each host's own group, then the connections between hosts."""
        wanted, refusal = "", None
        try:
            wanted = wanted_engine(engine)
        except errors.SymcommError as error:  # told to the others, who would wait for us
            refusal = error
        key = f"{self.name}/{self._arena.nonce.hex()}/{self._arena.flight.address}/{time.monotonic_ns()}"
        self.office = office_of(self._arena, key, self)
        try:
            self._exchange_cards(exchange, key, wanted, refusal)
            self._connect(exchange)
        except BaseException:
            self.office.leave(key)
            self.office.leave(self._key)
            raise
        _living.add(self)
        registry.add(self)
        self._retire = weakref.finalize(
            self, _retire, self.office, self._key, self._runner, self.engine, self.lines, self._untold
        )
        self._retire.atexit = False
        _leave_first_at_exit()

    def _exchange_cards(self, exchange: Exchange, key: str, wanted: str, refusal: errors.SymcommError | None) -> None:
        address, across = own_address(), None
        office, here = self.office.card(address), self.office.card(LOOPBACK)
        card = {
            "office": office, "loopback": here.port, "has_token": self.office.has_token, "pid": os.getpid(),
            "host": socket.gethostname(), "machine": [boot_id(), network()], "wanted": wanted,
            "engines": [] if wanted else available_engines(), "refusal": str(refusal or ""), "key": key,
        }  # fmt: skip
        try:
            self.cards = [json.loads(item) for item in exchange(json.dumps(card).encode())]
            across = any(c["machine"] != self.cards[0]["machine"] for c in self.cards)
        finally:
            self.office.settle(address, needed=across is True)
            self.office.settle(LOOPBACK, needed=across is False)
        if any(c["refusal"] for c in self.cards):
            rank, text = next((r, c["refusal"]) for r, c in enumerate(self.cards) if c["refusal"])
            raise refusal or errors.ResourceError(f"rank {rank} cannot take part in group {self.name!r}: {text}")
        check_tokens(self.cards)
        self._key = self.cards[0]["key"]  # the first rank names the group for all offices
        self._offices = [office_in(c, bool(across)) for c in self.cards]
        self._rank_of = {card.nonce: r for r, card in enumerate(self._offices)}
        self._untold = [card.nonce for r, card in enumerate(self._offices) if r != self.rank]
        self.office.join(self._key, self)
        if self._key != key:
            self.office.leave(key)

    def _connect(self, exchange: Exchange) -> None:
        self.local = self._make_local(exchange)
        self.exposed = self.local.exposed  # which outlives the group while ranks of this host may write there
        self._make_engine(exchange)
        for host in self.layout.others:  # those we watch, and who watch us
            for rank in self.layout.counterparts(host):
                if rank > self.rank:
                    self.tell(rank, {"kind": "hello"}, timeout=self.timeout)

    def _make_local(self, exchange: Exchange) -> ProcessGroup:
        """This host's own group. Hosts may need more or fewer rounds of the exchange; all take part in as many."""
        here = self.layout.here
        exchange_here = Part(exchange, here)
        local = _HostGroup(
            self.layout.local, len(here), exchange_here, f"{self.name}@{self.layout.host}", self.timeout, self._limits,
            [self.global_ranks[r] for r in here],
        )  # fmt: skip
        while exchange_here.rounds < LOCAL_ROUNDS:
            exchange_here(b"")
        self._handle, self._peers = local._handle, local._peers
        return local

    def _make_engine(self, exchange: Exchange) -> None:
        self.engine_name = agree_on_engine(self.cards)
        check = getattr(exchange, "check", None)
        place = Place(self.rank, self.size, self._offices[self.rank].address, check)
        self.engine = engine_class(self.engine_name)(place)
        self.layout.most_with_arrivals = self.engine.most_with_arrivals
        cards = [json.loads(item) for item in exchange(json.dumps(self.engine.card).encode())]
        try:
            self.engine.connect(cards, self.timeout)
        except RuntimeError as error:  # also torch's
            Patience(self.timeout, check).await_reason()
            if isinstance(error, errors.DeadlineError):
                raise
            why = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise errors.RankFailedError(
                f"group {self.name!r}: {self.engine_name} could not connect rank {self.rank} to the others ({why}); "
                "a rank that ended meanwhile, or a network that does not let them through."
            ) from error

    def __repr__(self) -> str:
        hosts = len(self.layout.hosts)
        return f"<HostsGroup {self.name!r}: rank {self.rank} of {self.size}, host {self.layout.host} of {hosts}>"

    # --- running ----------------------------------------------------------------------------------------------

    def first_plan(
        self, signature: Signature, build: Callable[..., Plan] | None = None, args: tuple[Any, ...] = ()
    ) -> Any:
        """What this host's ranks begin an operation with: they compare its signature, and maybe do a part of it."""
        key = (signature, build, args)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) > 4096:
                self._plans.clear()
            s, rank, world = signature, self.layout.local, len(self.layout.here)
            if build is None:
                made = Plan(s.collective, rank, world, s.local_count(), s.dtype, s.redop, 0, "arrival")
            else:
                made = build(rank, world, *args, limits=self.local._limits)
                made = replace(made, collective=s.collective, count=s.local_count(is_whole=False))
            plan = self._plans[key] = self.local.load_plan(made)
        return plan

    def _perform(
        self, call: str, signature: Signature, body: Callable[[Operation], None], inputs: Sequence[Buffer],
        outputs: Sequence[Buffer], result: Sequence[Any], async_op: bool, timeout: Timeout,
    ) -> Work | None:  # fmt: skip
        """Run an operation: here and now, or in the group's thread where that has some to run already."""
        seconds = (self._timeout_ns if timeout is None else to_ns(call, timeout)) / 1e9
        self._check_usable()
        if self._acting == threading.get_ident():
            raise self._failed(Status.NESTED, call, call_site(3), None, explain)
        site = call_site(3)
        self._submitted += 1
        queued = async_op or any(not work.is_completed() for work in list(self._pending))

        def act() -> None:
            with self._turn:
                if queued:  # operations before this one may have changed what was copied
                    for buffer in (*inputs, *outputs):
                        buffer.refresh()
                self._acting = threading.get_ident()
                try:
                    self._operate(call, signature, body, seconds, site, (inputs, outputs))
                finally:
                    self._acting = 0
            for buffer in outputs:
                buffer.finish()

        if not queued:
            act()
            return None
        work = HostsWork(self, call, site, act, outputs, result)
        work._keep = (inputs, outputs)
        self._runner.submit(work)
        self._keep(work)
        if async_op:
            return work
        work.wait()
        return None

    def _operate(
        self, call: str, signature: Signature, body: Callable[[Operation], None], seconds: float, site: Site, on: Any
    ) -> None:
        """``on``: the buffers that ``body`` works on."""
        self._check_usable()
        begun = time.monotonic()
        seq = self.doing[0] + 1
        self.doing = (seq, signature.words(), words_for_site(site))
        operation = Operation(self, signature, seq, seconds, self._arena.flight.site(site))
        try:
            body(operation)
        except Stopped:
            self._abandoned.append((operation, on))
            self.await_engine()
            raise self._fail(f"{call} #{seq} on group {self.name!r}", time.monotonic() - begun) from None
        except BaseException:  # interrupted, or a bug: what the others do cannot be met any more
            self._abandoned.append((operation, on))
            self.trouble.abort()
            self.await_engine()
            self._fail(f"{call} #{seq} on group {self.name!r}", time.monotonic() - begun)
            raise
        operation.end()

    def _fail(self, what: str, seconds: float) -> errors.SymcommError:
        """This rank's exception for the group's trouble. The first one tells the story, later ones refer to it."""
        with self._failure_lock:
            if self._failure is not None:
                return self._unusable()
            error = self._failure = self.trouble.error(what, seconds)
        hooks.failed(self.local, error)
        self.run_abort_hooks()
        return error

    def fail(self, what: str, seconds: float) -> errors.SymcommError:
        """This rank's exception for a failure of the group that ``trouble`` knows of."""
        return self._fail(what, seconds)

    def _check_usable(self) -> None:
        """The first call after others have failed hears their story; later ones are referred to it."""
        verdict = self.trouble.verdict
        if self._failure is None and verdict is not None and verdict["fault"] != "gone":
            raise self._fail(f"an operation on group {self.name!r}", 0.0)
        if self._failure is not None:
            raise self._unusable()

    def trouble_with(self, transfer: Transfer) -> None:
        """The engine failed: because a rank is gone, which the office learns about as well, or for its own reasons."""
        deadline = time.monotonic() + ENGINE_NEWS
        while self.trouble.verdict is None and time.monotonic() < deadline:
            gone = [r for r in transfer.peers if self.is_gone(r)]
            if gone:
                self.trouble.gone(gone)
                return
            time.sleep(0.005)
        assert transfer.error is not None
        self.trouble.cut_off(transfer.peers, transfer.error)

    def stop_engine(self) -> None:
        """End what is on its way. Not here: this may be the office's thread, or the engine's. See await_engine."""
        stopping = threading.Thread(target=self.engine.abort, name="symcomm-abort", daemon=True)
        stopping.start()
        self._stopping = stopping

    def await_engine(self) -> None:
        """After a failure, before a caller is told: the engine leaves the caller's tensors alone."""
        if self._stopping is not None:
            self._stopping.join(ENGINE_STOPS)

    # --- the office -------------------------------------------------------------------------------------------

    def office_card(self, rank: int) -> Card:
        return self._offices[rank]

    def tell(self, rank: int, header: dict[str, Any], payload: bytes = b"", timeout: float = 10.0) -> bool:
        """Send a small message to a rank's office; False when it cannot be reached."""
        return self.office.send(self._offices[rank], {"group": self._key, **header}, payload, timeout)

    def tell_known(self, rank: int, header: dict[str, Any]) -> bool:
        """The same, to a rank that there is a connection to: does not wait for one."""
        return self.office.knows(self._offices[rank].nonce) and self.tell(rank, header)

    def backlog(self, rank: int) -> int:
        """Bytes for a rank that its connection has not taken yet."""
        return self.office.backlog(self._offices[rank].nonce)

    def on_control(self, kind: str, handler: Handler) -> None:
        """``handler(rank, header, payload)`` gets the messages of that kind, in the control channel's thread."""
        self._handlers[kind] = handler

    def is_gone(self, rank: int) -> bool:
        """Whether a rank left, or its connection to us broke."""
        return rank in self.left or self.office.is_lost(self._offices[rank].nonce)

    def ring(self, _: Any = None) -> None:
        """Something has happened: whoever waits looks again."""
        with self.news:
            self.news.notify_all()
        self.lines.ring()

    def on_message(self, sender: str, header: dict[str, Any], payload: bytes | bytearray) -> None:
        """Called by the office, in its thread."""
        rank = self._rank_of.get(sender)
        if rank is None:
            return
        kind = header.get("kind")
        if isinstance(kind, str) and kind in self._handlers:
            self._handlers[kind](rank, header, payload)
            return
        if not isinstance(kind, str) or kind not in MESSAGES:
            raise Refused("sent a message of no known kind")
        check(kind, header, payload, self.size)
        if kind == "letter":
            self.mail.on_letter(rank, header, payload)
        elif kind == "clear":
            self.mail.on_clear(rank, header)
        elif kind == "refused":
            self.mail.on_refused(rank, header)
        elif kind == "going":
            self.mail.on_going(rank, header)
        elif kind == "withdrawn":
            self.mail.on_withdrawn(rank, header)
        elif kind == "ask":
            self.trouble.answer(rank, header)
        elif kind == "answer":
            self.trouble.note_answer(rank, header)
        elif kind == "fail":
            self.trouble.accept(header)
        elif kind == "vote":
            self.rounds.note(rank, header)
        elif kind == "agree":
            self.council.note(rank, header)
        elif kind == "bye":
            self.left.add(rank)
            self.ring()

    def on_line(self, sender: str, line: Link) -> None:
        if sender in self._rank_of:
            self.lines.add(self._rank_of[sender], line)
        else:
            line.close()

    def on_lost(self, nonce: str) -> None:
        if nonce in self._rank_of:
            self.ring()

    # --- life -------------------------------------------------------------------------------------------------

    @property
    def sequence_number(self) -> int:
        """How many collectives this rank has started on the group."""
        return self._submitted

    def abort(self) -> None:
        """Make every rank's pending and later operations on this group fail now."""
        self.run_abort_hooks()
        self.trouble.abort()

    def _leave(self) -> None:
        if self._goodbye:
            return
        if self._failure is None:
            self._failure = errors.GroupUnusableError(f"group {self.name!r} was destroyed.")
        self._say_goodbye()
        self.trouble.end()
        self._retire()
        self.local._leave()
        self._pending = []

    def _say_goodbye(self) -> None:
        """Others learn that we left, and did not die."""
        if self._goodbye:
            return
        self._goodbye = True
        watching = {r for host in self.layout.others for r in self.layout.counterparts(host)}
        for nonce in self._untold:
            if self.office.knows(nonce) or self._rank_of[nonce] in watching:
                self.tell(self._rank_of[nonce], {"kind": "bye"}, timeout=1.0)
        self._untold.clear()

    # --- groups from groups -----------------------------------------------------------------------------------

    def _subgroup(self, choice: dict[int, tuple[int, int]], name: str, timeout: Timeout) -> Any:
        """As in ProcessGroup; members of one host form a plain ProcessGroup."""
        self._check_usable()
        self._children += 1
        mine = choice.get(self.rank)
        ranks = [r for _, r in sorted((k, r) for r, (c, k) in choice.items() if mine is not None and c == mine[0])]
        label = name or f"{self.name}/{self._children}"
        if not name and mine and len({c for c, _ in choice.values()}) > 1:
            label += f".{mine[0]}"
        key = f"sub/{self._children}/{mine[0] if mine else ''}"
        if mine is None:
            return None
        exchange = self.rounds.exchange_among(
            ranks, key, self.timeout if timeout is None else to_ns(key, timeout) / 1e9
        )
        return make_group(
            ranks.index(self.rank), len(ranks), exchange, label, self.timeout if timeout is None else timeout,
            self._limits, [self.global_ranks[r] for r in ranks], self.engine_name,
        )  # fmt: skip

    def shrink(
        self, timeout: float = 5.0, exclude: Sequence[int] = (), abort: bool = True, quorum: int | None = None
    ) -> Any:
        """As in ProcessGroup. Raises NoQuorumError when fewer than ``quorum`` ranks can be reached: then others may go
        on. Unless given it is more than half of this group's ranks, or half of them with rank 0."""
        from symcomm.group.shrink import check_excluded, check_quorum

        if self._goodbye:
            raise self._unusable()
        check_excluded(self, exclude)
        check_quorum(self, quorum)
        seconds = to_ns("shrink", timeout) / 1e9
        if abort:
            self._abort_once()

        def make(ranks: Sequence[int], exchange: Exchange) -> Any:
            smaller = make_group(
                ranks.index(self.rank), len(ranks), exchange, f"{self.name}-shrunk", seconds, self._limits,
                [self.global_ranks[r] for r in ranks], self.engine_name,
            )  # fmt: skip
            smaller.set_timeout(self.timeout)  # the short one was for building it
            return smaller

        smaller = Agreement(self, seconds, exclude, quorum).reach(make)
        self._abort_once()  # tells the ranks that were left out, should they still use it
        smaller.inherit(self)
        return smaller

    def _abort_once(self) -> None:
        if self.trouble.verdict is None:
            self.trouble.abort()

    def _gone(self) -> list[int]:
        return sorted(self.rounds.gone())

    def watch(self, ranks: Collection[int], what: str) -> Callable[[], None]:
        """As in ProcessGroup. Ranks of other hosts are seen to end by a connection, which this makes."""
        far, begun = [r for r in ranks if r not in self.layout.here], time.monotonic()
        for rank in far:
            if not self.tell_known(rank, {"kind": "hello"}):
                self.tell(rank, {"kind": "hello"}, timeout=1.0)
        return lambda: self.rounds.check_members(ranks, begun, what)

    def _seen_leaving(self) -> set[int]:
        counterparts = {r for host in self.layout.others for r in self.layout.counterparts(host)}
        return (counterparts | set(self.layout.here)) - {self.rank}


def _lines_of(group: HostsGroup) -> Lines:
    """They do not keep the group alive."""
    arrivals, ref = group.arrivals, weakref.ref(group)

    def call(rank: int) -> Link | None:
        found = ref()
        return found.office.call(found._offices[rank], found._key) if found is not None else None

    def hear(rank: int, frame: Frame) -> None:
        header, payload = frame
        check("arrival", header, payload, 0)
        if len(arrivals) >= MOST_ARRIVALS or (header["seq"], rank) in arrivals:
            raise Refused(f"sent arrival {header['seq']} twice, or is far ahead")
        arrivals[header["seq"], rank] = (header["signature"], payload)

    def complain(rank: int, why: str) -> None:
        if (found := ref()) is not None:
            found.office.complaints.note(f"rank {rank}", why)

    return Lines(group.rank, call, hear, complain)
