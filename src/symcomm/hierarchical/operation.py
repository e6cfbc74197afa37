"""One collective in progress: its deadline, its synchronization with the other ranks, and its steps."""

from __future__ import annotations

import ctypes
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from symcomm.collectives.plan import Collective, Plan
from symcomm.collectives.select import HASHED, sizes_of_hash
from symcomm.group.failure import Status, call_words
from symcomm.hierarchical.engines.base import Engine, Expected, Move, Transfer
from symcomm.hierarchical.failure import Failures, OperationRefused, OperationStopped
from symcomm.hierarchical.intra_host import HostRanks
from symcomm.hierarchical.leader_links import LeaderLinks
from symcomm.hierarchical.presence import Presence
from symcomm.hierarchical.refusal import RefusalsAcrossHosts
from symcomm.hierarchical.scratch import Scratch
from symcomm.hierarchical.session import ProtocolViolation
from symcomm.hierarchical.topology import Layout
from symcomm.types import DType

IN_FLIGHT = 4  # chunks: two on the network, one that was just produced, one that is being consumed
LATE_BYTES = 1.0  # seconds for which data of a rank that ended may still be in flight
NOTHING: Mapping[int, int] = {}

# Processes one chunk, and yields transfers to wait for. The first yield is None: it has posted its receives.
Chunk = Generator["Transfer | None", None, None]
Pieces = Iterable[tuple[int, int, int]]  # (rank, address, bytes)


class Signature(NamedTuple):
    """The facts of a call that ranks compare. ``detail``: a hash of the sizes of pieces, where they differ."""

    collective: Collective
    dtype: DType = DType.UINT8
    redop: int = 0
    root: int = 0
    elements: int = 0
    detail: int = 0

    def words(self) -> str:
        """``all_reduce(float32 x 1024, SUM)``"""
        sizes = sizes_of_hash(self.detail) or str(self.elements)
        return call_words(self.collective, self.dtype, self.redop, self.root, sizes)

    def local_count(self, is_whole: bool = True) -> int:
        """The count in the signature that ranks of one host compare. That signature cannot hold roots on other hosts,
        so a hash of this one goes in. ``is_whole``: that signature holds dtype and operation."""
        if is_whole and not (self.root or self.detail):
            return self.elements
        return HASHED | (zlib.crc32(array("q", [*self]).tobytes()) & 0x3FFFFFFF) << 32 | self.elements & 0xFFFFFFFF


class Parts(NamedTuple):
    """What the operations of a group work with."""

    layout: Layout
    host: HostRanks
    links: LeaderLinks
    arrivals: dict[tuple[int, int], tuple[list[int], Any]]  # (number, leader) -> signature, data
    engine: Engine
    scratch: Scratch
    presence: Presence
    failures: Failures
    refusals: RefusalsAcrossHosts


class Operation:
    """One collective. Raises OperationStopped when it cannot go on; ``failures`` knows why."""

    def __init__(self, parts: Parts, signature: Signature, seq: int, timeout: float, site: int):
        self.layout, self._host, self._engine, self._scratch = parts.layout, parts.host, parts.engine, parts.scratch
        self._links, self._arrivals, self._presence = parts.links, parts.arrivals, parts.presence
        self._failures, self._refusals = parts.failures, parts.refusals
        self.signature = signature
        self._seq = seq
        self._match = zlib.crc32(array("q", [seq, *signature]).tobytes()) >> 5  # marks this operation's bytes
        self._seconds = timeout
        self._deadline = time.monotonic() + timeout
        self._site = site
        self._borrowed: dict[int, Any] = {}  # scratch memory, by its address

    # --- synchronization --------------------------------------------------------------------------------------

    def synchronize(
        self, build: Callable[..., Plan] | None = None, ins: Sequence[int] = (), outs: Sequence[int] = (), *args: Any,
        sends: Pieces = (), expected: Expected | None = None,
    ) -> Transfer | None:  # fmt: skip
        """Return once all ranks of all hosts have arrived with the same call; meanwhile, run a collective on this host.

        ``sends`` start only then: a rank may refuse the call, and a send that has begun cannot be taken back. A receive
        for which nothing is sent can be dropped."""
        self.arrive(build, ins, outs, *args)
        if self.layout.is_leader:
            self.exchange_arrivals({})
        self.release()
        return self.start(sends, expected)

    def arrive(
        self, build: Callable[..., Plan] | None = None, ins: Sequence[int] = (), outs: Sequence[int] = (), *args: Any
    ) -> None:
        """Wait until all ranks of this host have arrived with the same call; in the same step, run a collective."""
        self._run(self._host.arrival(self.signature, build, args), ins, outs)

    def exchange_arrivals(
        self, payloads: dict[int, bytes], expected: Mapping[int, int] = NOTHING
    ) -> dict[int, bytes | bytearray]:
        """Called by leaders only: tell the other hosts that this one has arrived, with eager data; returns theirs.
        ``expected``: the bytes that each must send; by default none."""
        self.send_arrivals(payloads)
        return self.receive_arrivals(expected)

    def send_arrivals(self, payloads: dict[int, bytes]) -> None:
        header = {"seq": self._seq, "signature": self.signature}
        for host in self.layout.others:
            self._links.send(self.layout.leader(host), header, payloads.get(host, b""))

    def receive_arrivals(self, expected: Mapping[int, int] = NOTHING) -> dict[int, bytes | bytearray]:
        """The data of the other hosts' leaders. When this returns, all that this one sent has left."""
        arrivals, links = self._arrivals, self._links
        for key in [key for key in arrivals if key[0] < self._seq]:  # left from operations that a rank refused
            del arrivals[key]
        awaited = {self.layout.leader(h): h for h in self.layout.others}
        self.wait_for(
            lambda: [r for r in awaited if (self._seq, r) not in arrivals or links.has_backlog(r)],
            LATE_BYTES,
            list(awaited),
        )
        theirs = {host: arrivals.pop((self._seq, r)) for r, host in awaited.items()}
        if any(signature != list(self.signature) for signature, _ in theirs.values()):
            self._failures.mismatch()
            raise OperationStopped
        for rank, host in awaited.items():
            if (got := len(theirs[host][1])) != (due := expected.get(host, 0)):
                links.drop(rank, f"sent {got} bytes with an arrival that has {due}")
                self._cut_off(rank)
        return {host: payload for host, (_, payload) in theirs.items()}

    def _cut_off(self, rank: int) -> None:
        """Its link was closed for what it sent. Report that first: the peer would say that this rank had gone."""
        self._failures.cut_off([rank], ProtocolViolation(f"it {self._links.refused[rank]}"))
        raise OperationStopped

    def release(self) -> None:
        """Wait until this host's leader has received the arrivals of all others."""
        if len(self.layout.here) > 1:
            self._run(self._host.arrival(self.signature), (), ())

    def wait_for(
        self, missing: Callable[[], Collection[int]], grace: float = 0.0, listen_to: Sequence[int] = ()
    ) -> None:
        """Wait until ``missing()`` is empty. If one of these ranks is gone, or the deadline passes, the operation ends.

        ``grace``: seconds for which data of a rank that ended may still arrive. ``listen_to``: ranks whose links this
        thread reads meanwhile. When a link closes, it may take a moment until its rank is known to be gone."""
        presence, links, gone_since = self._presence, self._links, 0.0
        whom: Collection[int] = ()
        gone: list[int] = []

        def left() -> float:
            """Seconds until the next check; 0: the wait is over."""
            nonlocal whom, gone, gone_since
            if not (whom := missing()):
                return 0.0
            if self._failures.verdict is not None:
                raise OperationStopped
            self._refusals.check(self._seq)
            if listen_to and (refused := next((r for r in whom if r in links.refused), None)) is not None:
                self._cut_off(refused)
            now = time.monotonic()
            over = [r for r in whom if listen_to and links.is_closed(r)]
            if gone := [r for r in whom if r in over or presence.is_gone(r)]:
                gone_since = gone_since or now
                if now - gone_since >= grace or any(presence.is_gone(r) for r in over):
                    return 0.0
            if now >= self._deadline:
                return 0.0
            return min(self._deadline - now, 0.05 if gone else 5.0)

        if listen_to:
            links.listen(listen_to, left)
        else:
            with presence.cond:
                while seconds := left():
                    presence.cond.wait(seconds)
        if not whom:
            return
        if gone:
            self._failures.gone(gone)
        else:
            self._failures.late(self._seq, self._seconds, whom)
        raise OperationStopped

    # --- on this host -----------------------------------------------------------------------------------------

    def local(self, build: Callable[..., Plan], ins: Sequence[int], outs: Sequence[int], *args: Any) -> None:
        """Run a collective of this host's ranks on memory at these addresses. ``args``: arguments of its plan."""
        self._run(self._host.plan(build, *args), ins, outs)

    def _run(self, plan: Any, ins: Sequence[int], outs: Sequence[int]) -> None:
        left = max(1, int((self._deadline - time.monotonic()) * 1e9))
        ended = self._host.run(plan, ins, outs, left, self._site)
        if not ended:
            return
        status = ended & 0xFF
        if status == Status.REFUSED:
            raise OperationRefused(self._host.refusal(ended >> 8))
        if status in (Status.DEAD, Status.LEFT):
            self._failures.gone(self._host.gone())
        elif status == Status.TIMEOUT:
            self._failures.late(self._seq, self._seconds, [r for r in self.layout.here if r != self.layout.rank])
        elif status == Status.MISMATCH:
            self._failures.mismatch()
        else:
            self._failures.await_verdict()
        raise OperationStopped

    # --- between hosts ----------------------------------------------------------------------------------------

    def expect(self, receives: Pieces) -> Expected | None:
        """Post receives before ranks synchronize, so that no sender has to wait for them."""
        moves = [Move(False, address, nbytes, rank, 0, self._match) for rank, address, nbytes in receives if nbytes]
        return self._engine.expect(moves) if moves else None

    def start(self, sends: Pieces, expected: Expected | None = None) -> Transfer | None:
        """Start sends, together with receives posted by ``expect``. None: there is nothing to transfer."""
        moves = [Move(True, address, nbytes, rank, 0, self._match) for rank, address, nbytes in sends if nbytes]
        return self._engine.start(moves, self._presence.notify, expected) if moves or expected is not None else None

    def finish(self, transfer: Transfer | None) -> None:
        """Wait for a transfer."""
        if transfer is None:
            return
        self.wait_for(lambda: [] if transfer.ended else transfer.peers, LATE_BYTES)
        if transfer.error is not None:
            self._failures.on_transfer_error(transfer)
            raise OperationStopped

    # --- memory -----------------------------------------------------------------------------------------------

    def borrow(self, nbytes: int) -> int:
        """The address of scratch memory that all ranks of the host can read, until ``give_back`` or the end."""
        piece = self._scratch.take(nbytes)
        self._borrowed[address := ctypes.addressof(piece)] = piece
        return address

    def give_back(self, address: int) -> None:
        self._scratch.give(self._borrowed.pop(address))

    def end(self) -> None:
        """Give all memory back. Not called after a failure, since the engine may still write there."""
        for address in list(self._borrowed):
            self.give_back(address)

    # --- chunks -----------------------------------------------------------------------------------------------

    def pipeline(self, chunks: Iterable[Chunk]) -> None:
        """Synchronize, then process several chunks round-robin: the network moves some while the host works on others.

        All ranks keep the same order, whichever data arrives first, since collectives on a host must match."""
        under_way: deque[tuple[Chunk, Transfer | None]] = deque()
        coming = iter(chunks)
        for chunk in islice(coming, IN_FLIGHT):
            under_way.append((chunk, next(chunk)))
        self.synchronize()
        while under_way:
            chunk, transfer = under_way.popleft()
            self.finish(transfer)
            if not self._advance(chunk, under_way) and (further := next(coming, None)) is not None:
                next(further)
                self._advance(further, under_way)

    @staticmethod
    def _advance(chunk: Chunk, under_way: deque[tuple[Chunk, Transfer | None]]) -> bool:
        """Process a chunk until it has to wait; False when it is done."""
        for awaited in chunk:
            under_way.append((chunk, awaited))
            return True
        return False
