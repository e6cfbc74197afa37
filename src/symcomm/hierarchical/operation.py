"""One collective on its way: its deadline, its meeting with the others, and the steps it is made of."""

from __future__ import annotations

import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from symcomm._core import native
from symcomm.collectives.plan import Collective, Plan
from symcomm.group.failure import REDUCING, ROOTED, Status
from symcomm.hierarchical.engines.base import Expected, Move, Transfer
from symcomm.hierarchical.failure import Stopped
from symcomm.hierarchical.session import Refused
from symcomm.types import DType, RedOpType

__all__ = ["Chunk", "Operation", "Signature"]

IN_FLIGHT = 4  # chunks: two on the network, one that was just made, one that is being put in place
LATE_BYTES = 1.0  # seconds that data of a rank that ended may still be on its way
NOTHING: Mapping[int, int] = {}
HASHED = 1 << 62  # as in collectives/select.py: a count that carries more than a number

# Works on one chunk, and gives what it has to wait for: nothing at first, when it has said what it expects.
Chunk = Generator["Transfer | None", None, None]
Pieces = Iterable[tuple[int, int, int]]  # (rank, address, bytes)


class Signature(NamedTuple):
    """What ranks compare. ``detail``: whatever else must be the same, as a number."""

    collective: Collective
    dtype: DType = DType.UINT8
    redop: int = 0
    root: int = 0
    elements: int = 0
    detail: int = 0

    def words(self) -> str:
        """``all_reduce(float32 x 1024, SUM)``"""
        if self.collective is Collective.BARRIER:
            return "barrier()"
        parts = [f"{self.dtype.label} x {self.elements}"]
        if self.collective in REDUCING:
            parts.append(RedOpType(self.redop).name)
        if self.collective in ROOTED:
            parts.append(f"root {self.root}")
        return f"{self.collective.label}({', '.join(parts)})"

    def local_count(self, is_whole: bool = True) -> int:
        """The count for the signature of the host's own meeting, which has no place for roots of other hosts.

        ``is_whole``: dtype and operation have theirs."""
        if is_whole and not (self.root or self.detail):
            return self.elements
        return HASHED | (zlib.crc32(array("q", [*self]).tobytes()) & 0x3FFFFFFF) << 32 | self.elements & 0xFFFFFFFF


class Operation:
    """Made by HostsGroup for each collective; raises Stopped when it cannot go on."""

    def __init__(self, group: Any, signature: Signature, seq: int, timeout: float, site: int):
        self._group = group
        self.signature = signature
        self._seq = seq
        self._match = zlib.crc32(array("q", [seq, *signature]).tobytes()) >> 5  # tells its bytes from other operations'
        self._seconds = timeout
        self._deadline = time.monotonic() + timeout
        self._site = site
        self._borrowed: list[Any] = []
        self.layout = group.layout

    # --- meeting ----------------------------------------------------------------------------------------------

    def meet(
        self, build: Callable[..., Plan] | None = None, ins: Sequence[int] = (), outs: Sequence[int] = (), *args: Any,
        sends: Pieces = (), expected: Expected | None = None,
    ) -> Transfer | None:  # fmt: skip
        """Return once all ranks of all hosts have come, with the same call; on the way, a collective of this host's.

        ``sends`` leave at once: only the same operation of the receiver can take them. Where the engine cannot tell
        operations apart, they leave when it is known to be the same."""
        at_once = self._group.engine.has_tags
        transfer = self.start(sends, expected) if at_once else None
        self.come(build, ins, outs, *args)
        if self.layout.speaks:
            self.exchange({})
        self.part()
        return transfer if at_once else self.start(sends, expected)

    def come(
        self, build: Callable[..., Plan] | None = None, ins: Sequence[int] = (), outs: Sequence[int] = (), *args: Any
    ) -> None:
        """Until all ranks of this host have come, with the same call; in the same step, a collective of theirs."""
        self._run(self._group.first_plan(self.signature, build, args), tuple(ins), tuple(outs))

    def exchange(self, say: dict[int, bytes], expected: Mapping[int, int] = NOTHING) -> dict[int, bytes | bytearray]:
        """Called by speakers only: tell other hosts that this one has come, and a few bytes; theirs are returned, which
        are as many as ``expected`` of a host, or none."""
        self.speak(say)
        return self.hear(expected)

    def speak(self, say: dict[int, bytes]) -> None:
        come = {"seq": self._seq, "signature": self.signature}
        for host in self.layout.others:
            self._group.lines.send(self.layout.speaker(host), come, say.get(host, b""))

    def hear(self, expected: Mapping[int, int] = NOTHING) -> dict[int, bytes | bytearray]:
        """What the other hosts' speakers said. What this one said has left by then."""
        group, lines = self._group, self._group.lines
        awaited = {self.layout.speaker(h): h for h in self.layout.others}
        self.wait_for(
            lambda: [r for r in awaited if (self._seq, r) not in group.arrivals or lines.has_backlog(r)],
            LATE_BYTES,
            list(awaited),
        )
        theirs = {host: group.arrivals.pop((self._seq, r)) for r, host in awaited.items()}
        if any(signature != list(self.signature) for signature, _ in theirs.values()):
            group.trouble.mismatch()
            raise Stopped
        for rank, host in awaited.items():
            if (came := len(theirs[host][1])) != (due := expected.get(host, 0)):
                lines.hang_up(rank, f"sent {came} bytes with an arrival that has {due}")
                self._cut_off(rank)
        return {host: payload for host, (_, payload) in theirs.items()}

    def _cut_off(self, rank: int) -> None:
        """Its line was closed for what came over it. We say so first: to the other it looks as if we had gone."""
        self._group.trouble.cut_off([rank], Refused(f"it {self._group.lines.refused[rank]}"))
        raise Stopped

    def part(self) -> None:
        """Wait for this host's speaker, which has heard of all others."""
        if len(self.layout.here) > 1:
            self._run(self._group.first_plan(self.signature), (), ())

    def wait_for(
        self, missing: Callable[[], Collection[int]], grace: float = 0.0, listen_to: Sequence[int] = ()
    ) -> None:
        """Until ``missing()`` is empty. Ranks in it that are gone, or the deadline, end the operation.

        ``grace``: seconds that something of a rank that ended may still arrive. ``listen_to``: ranks whose lines this
        thread reads meanwhile; when one is over, it may take a moment until it is known that its rank is gone."""
        group, gone_since = self._group, 0.0
        whom: Collection[int] = ()
        gone: list[int] = []

        def left() -> float:
            """Seconds until it is to be looked again, 0 when there is nothing to wait for any more."""
            nonlocal whom, gone, gone_since
            if not (whom := missing()):
                return 0.0
            if group.trouble.verdict is not None:
                raise Stopped
            if listen_to and (refused := next((r for r in whom if r in group.lines.refused), None)) is not None:
                self._cut_off(refused)
            now = time.monotonic()
            over = [r for r in whom if listen_to and group.lines.is_over(r)]
            if gone := [r for r in whom if r in over or group.is_gone(r)]:
                gone_since = gone_since or now
                if now - gone_since >= grace or any(group.is_gone(r) for r in over):
                    return 0.0
            if now >= self._deadline:
                return 0.0
            return min(self._deadline - now, 0.05 if gone else 5.0)

        if listen_to:
            group.lines.listen(listen_to, left)
        else:
            with group.news:
                while seconds := left():
                    group.news.wait(seconds)
        if not whom:
            return
        if gone:
            group.trouble.gone(gone)
        else:
            group.trouble.late(self._seq, self._seconds, whom)
        raise Stopped

    # --- on this host -----------------------------------------------------------------------------------------

    def local(self, build: Callable[..., Plan], ins: Sequence[int], outs: Sequence[int], *args: Any) -> None:
        """Run a collective of this host's ranks on memory at these addresses. ``args``: what its plan depends on."""
        self._run(self._group.local._plan(build, *args), tuple(ins), tuple(outs))

    def _run(self, plan: Any, ins: tuple[int, ...], outs: tuple[int, ...]) -> None:
        group = self._group
        left = max(1, int((self._deadline - time.monotonic()) * 1e9))
        status = native.run(group.local._handle, plan, ins, outs, left, self._site) & 0xFF
        if not status:
            return
        if status in (Status.DEAD, Status.LEFT):
            report = native.group_report(group.local._handle)["ranks"]
            group.trouble.gone([self.layout.here[seen["rank"]] for seen in report if seen["gone"]])
        elif status == Status.TIMEOUT:
            group.trouble.late(self._seq, self._seconds, [r for r in self.layout.here if r != self.layout.rank])
        elif status == Status.MISMATCH:
            group.trouble.mismatch()
        else:
            group.trouble.await_news()
        raise Stopped

    def combine(self, target: int, sources: Sequence[int], count: int, dtype: int, redop: int) -> None:
        """Memory at ``sources``, in that order, into ``target``, which may be one of them."""
        if count:
            native.reduce(dtype, redop, target, list(sources), count, 0.0)

    # --- between hosts ----------------------------------------------------------------------------------------

    def expect(self, receives: Pieces) -> Expected | None:
        """Make room for bytes that others will send: before ranks meet, so that the first need not wait for that."""
        moves = [Move(False, address, nbytes, rank, 0, self._match) for rank, address, nbytes in receives if nbytes]
        return self._group.engine.expect(moves) if moves else None

    def start(self, sends: Pieces, expected: Expected | None = None) -> Transfer | None:
        """Begin to send, and go on with what was expected. None: nothing moves."""
        group = self._group
        moves = [Move(True, address, nbytes, rank, 0, self._match) for rank, address, nbytes in sends if nbytes]
        return group.engine.start(moves, group.ring, expected) if moves or expected is not None else None

    def finish(self, transfer: Transfer | None) -> None:
        """Wait until bytes are where they belong."""
        if transfer is None:
            return
        self.wait_for(lambda: [] if transfer.ended else transfer.peers, LATE_BYTES)
        if transfer.error is not None:
            self._group.trouble_with(transfer)
            raise Stopped

    # --- memory -----------------------------------------------------------------------------------------------

    def borrow(self, nbytes: int) -> int:
        """Address of memory that all ranks of the host can read; the operation's until ``give_back`` or its end."""
        piece = self._group.scratch.take(nbytes)
        self._borrowed.append(piece)
        return piece.address

    def zeros(self, nbytes: int) -> int:
        """Address of so many bytes of zeros, which nobody writes."""
        return self._group.scratch.zeros(nbytes)

    def give_back(self, address: int) -> None:
        piece = next(p for p in self._borrowed if p.address == address)
        self._borrowed.remove(piece)
        self._group.scratch.give(piece)

    def end(self) -> None:
        """Give all memory back. After a failure it is kept instead, since the engine may still write there."""
        for piece in self._borrowed:
            self._group.scratch.give(piece)
        self._borrowed = []

    # --- chunks -----------------------------------------------------------------------------------------------

    def pipeline(self, chunks: Iterable[Chunk]) -> None:
        """Meet, then work on several chunks in turns: the network carries one while the host works on others.

        All ranks take the same turns, whatever arrives first, since their hosts' collectives must keep one order."""
        under_way: deque[tuple[Chunk, Transfer | None]] = deque()
        coming = iter(chunks)
        for chunk in islice(coming, IN_FLIGHT):
            under_way.append((chunk, next(chunk)))
        self.meet()
        while under_way:
            chunk, transfer = under_way.popleft()
            self.finish(transfer)
            if not self._goes_on(chunk, under_way) and (further := next(coming, None)) is not None:
                next(further)
                self._goes_on(further, under_way)

    @staticmethod
    def _goes_on(chunk: Chunk, under_way: deque[tuple[Chunk, Transfer | None]]) -> bool:
        """Work on a chunk until it has to wait; False when it is done."""
        for awaited in chunk:
            under_way.append((chunk, awaited))
            return True
        return False
