"""LocalGroup: ranks of one host that act together on symmetric memory.

A request becomes a plan, from the cache or from ``collectives``, which the core runs."""

from __future__ import annotations

import atexit
import functools
import os
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from symcomm import collectives, errors
from symcomm._core import native
from symcomm.collectives.plan import Plan
from symcomm.group import hooks, registry
from symcomm.group.buffers import Buffer
from symcomm.group.custom_plans import CustomCall
from symcomm.group.failure import Site, Status, call_site, check_living, explain, format_site
from symcomm.group.inline_async import inline_polls
from symcomm.group.leaving import await_others, retire
from symcomm.group.meeting import Meeting, meet_again
from symcomm.group.process_group import ProcessGroup
from symcomm.group.refusal import Refusals, Settled, pack, refused, settled
from symcomm.group.request import Request
from symcomm.group.work import Timeout, Work, batch_of, no_thread, to_ns
from symcomm.memory.arena import Arena, current_arena
from symcomm.memory.share import Exchange, GroupNotBuilt

# How often a waiting rank polls first (about 10 us). If it has a core of its own it then goes on spinning, for longer
# than a peer is away whose core is taken for a time slice; with more ranks than cores it yields. Then it sleeps, which
# costs two context switches (about 10 us). See _core/sync/backoff.h.
SPIN_COUNT = 4000
SPIN_NS = 5_000_000
YIELD_NS = 100_000
MEETING_LOOKS = 1000  # for ranks that are about to have made the group, too; about 10 us
MEETING_FIRST, MEETING_LAST = 0.00002, 0.005  # seconds between two such looks
GAVE_UP = b"!"  # before why a rank cannot take part; what others say is JSON
FIRST_STAGE = 16 << 10  # bytes of a staging half that the first call that stages anything reserves; then it doubles


Buffers = tuple[Sequence[Buffer], Sequence[Buffer]]  # read, and written


def _locate() -> int:
    """Where the program calls us from, as the flight recorder of this rank knows it."""
    return current_arena().flight.site(call_site())


native.use_call_site_callback(_locate)
_living: weakref.WeakSet[LocalGroup] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """End the threads of asynchronous operations while there still is an interpreter that they may call."""
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
    """Made from what its ranks, which share memory, learned of each other when they met (see factory.py)."""

    _spin_ns, _yield_ns = SPIN_NS, YIELD_NS
    _operations = 0  # that count as done when a group is made; the same on all ranks

    def __init__(self, met: Meeting, name: str = "world", timeout: Timeout = None):
        super().__init__(met.rank, met.size, name, timeout, met.part.given, met.members)
        self._sweep_at = 16
        with met.part.at_risk():
            self._build(met)
        registry.add(self)
        hooks.made(self)

    def _build(self, met: Meeting) -> None:
        met.check_alike(self.name)
        self.peers, self.plan_limits, part = list(met.peers), met.limits(), met.part
        self._offset, self._stage, self._reserved = part.offset, part.offset + part.stage, 0
        starts = [peer.base + f["offset"] for peer, f in zip(self.peers, met.facts, strict=True)]
        own_process = sum(p.pid == os.getpid() for p in self.peers) == 1
        self._inline_polls = inline_polls(self.size, own_process)
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
            flight_group=self.arena.flight.add_group(self.name, self.rank, self.global_ranks),
            own_process=own_process,
            spin=SPIN_COUNT,
            poll_ns=self._spin_ns,
            yield_ns=self._yield_ns,
            operations=self._operations,
            timeout_ns=self.timeout_ns,
        )
        self._run_cached = self.handle.run_cached
        self.handle.keep((self.arena, *self.peers))
        _living.add(self)
        self._retire = weakref.finalize(self, retire, self.handle, self.arena, part.offset, self.exposed)
        self._retire.atexit = False  # the kernel takes it all

    def meet(self, exchange: Exchange) -> None:
        check, pause = getattr(exchange, "check", None), MEETING_FIRST
        end = time.monotonic() + self.timeout
        while check is not None and not self.handle.announce(MEETING_LOOKS):
            if time.monotonic() > end or self.gone_ranks():
                return  # the first operation says so
            check()
            time.sleep(pause)
            pause = min(1.5 * pause, MEETING_LAST)

    def change_timeout(self, nanoseconds: int) -> None:
        super().change_timeout(nanoseconds)
        self.handle.set_timeout(nanoseconds)

    def load_plan(self, plan: Plan) -> Any:
        """``plan`` as the core runs it. The memory that it stages in is reserved here, so that running out of it is an
        error at this line. A group that stages nothing has none."""
        loaded = native.make_plan(plan.encode())
        self._reserve_stage(native.plan_stage_bytes(loaded))
        return loaded

    def _reserve_stage(self, nbytes: int) -> None:
        """Make the pages of ``nbytes`` of each half of this rank's staging area exist."""
        if nbytes <= self._reserved:
            return
        half = self.plan_limits.stage_bytes
        reach = min(half, max(FIRST_STAGE, 1 << (nbytes - 1).bit_length()))
        for start in (0, half):
            self.arena.reserve(self._stage + start, reach)
        self.handle.reserved(reach)
        self._reserved = max(self._reserved, reach)

    # --- running ----------------------------------------------------------------------------------------------

    def execute(self, request: Request, async_op: bool, timeout: Timeout) -> Work | None:
        """Run what was asked for, here and now or, with ``async_op``, in the group's thread."""
        refusal = request.ask_autograd()
        op, plan = request.op, self._plan_of(request)
        if request.key is not None and op.number >= 0:
            self.handle.cache_plan(op.number, *request.key, plan, self.site_number(3), request.effects)
        request.keep_apart(self.rank, self.size)
        buffers = request.inputs, request.outputs
        work = self._run(request.call, plan, buffers, request.written, request.result, async_op, timeout)
        if refusal is not None:
            raise refusal
        return work

    def _plan_of(self, request: Request) -> Any:
        op = request.op
        if op.plan == "barrier":
            return self.cached_plan(_barrier)
        args = [request.sizes, request.dtype]
        if op.reduces:
            args.append(request.redop)
        if op.rooted:
            args.append(request.root)
        if op.listed is not None:
            args.append(op.listed)
        return self.cached_plan(getattr(collectives, op.plan), *args)

    def cached_plan(self, build: Callable[..., Plan], *args: Any) -> Any:
        """The loaded plan for these arguments; plans are kept for the life of the group."""
        make = functools.partial(build, self.rank, self.size, *args, limits=self.plan_limits)
        return self.kept_plan((build, args), lambda: self.load_plan(make()))

    def run_plan(
        self, name: str, plan: Plan, inputs: Any = (), outputs: Any = (), async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:  # fmt: skip
        with Refusals(self):
            own = CustomCall(self, name, plan, inputs, outputs)
            checked, loaded = self.kept_plan(own.key, own.load)
            own.check_tensors(checked)
            written = tuple([buffer.written for buffer in own.outputs])
            return self._run(name, loaded, (own.inputs, own.outputs), written, own.result, async_op, timeout)

    def _run(
        self, call: str, plan: Any, buffers: Buffers, written: tuple[Any, ...], result: Sequence[Any], async_op: bool,
        timeout: Timeout,
    ) -> Work | None:  # fmt: skip
        """``buffers``: inputs and outputs; ``written``: tensors that autograd shall know to be written."""
        inputs, outputs = buffers
        timeout_ns = self.timeout_ns if timeout is None else to_ns(call, timeout)
        if self.pending:
            self._refresh_copies([b for b in (*outputs, *inputs) if b.original is not None])
        ins = tuple([b.address for b in inputs])
        outs = tuple([b.address for b in outputs])
        if self._failure is not None:
            self.check_usable()
        if async_op:
            return self._submit(
                call, plan, buffers, written, result, (ins, outs), timeout_ns, batch_of(async_op)
            )  # fmt: skip
        started = time.monotonic()
        status = self.handle.run(plan, ins, outs, timeout_ns, self.site_number(3), written)
        if status:
            raise self.fail_with_status(status, call, call_site(3), time.monotonic() - started, explain)
        for buffer in outputs:
            if buffer.target is not None:
                with Settled():
                    buffer.finish()
        return None

    def _submit(
        self, call: str, plan: Any, buffers: Buffers, written: tuple[Any, ...], result: Sequence[Any],
        addresses: tuple[Any, Any], timeout_ns: int, batch: Any,
    ) -> Work:  # fmt: skip
        site, (inputs, outputs) = call_site(4), buffers
        work = Work(self, call, site, outputs, result, (inputs, written, plan))
        callback = work.copy_out_in_core if any(b.target is not None for b in outputs) else None
        where = self.arena.flight.site(site)
        self._keep(work)
        try:
            work.request = self.handle.submit(plan, *addresses, timeout_ns, where, written, callback, batch)
        except OSError as error:
            self.pending.remove(work)
            raise no_thread("asynchronous operations", error) from None
        except BaseException:
            self.handle.abort()  # an interrupt: nobody knows whether it was submitted
            raise
        return work

    def _refresh_copies(self, copies: Sequence[Buffer]) -> None:
        """A copy of a tensor must hold what operations before this one make of it."""
        for copy in copies:
            before = [w for w in list(self.pending) if any(copy.touches(out) for out in w.outputs)]
            for work in before:
                work.poll(0)
            if before:
                copy.refresh()

    def site_number(self, depth: int) -> int:
        """The caller's place, as the flight recorder knows it."""
        return self.arena.flight.site(call_site(depth + 1))

    def raise_failure(self, status: int, call: str) -> None:
        """What the dispatch cache's run ended with: nothing to say, or why the operation failed."""
        if status:
            raise self.fail_with_status(status, call, call_site(2), None, explain)

    def fail_with_status(
        self, status: int, call: str, site: Site, seconds: float | None, explain: Callable[..., Any]
    ) -> errors.SymcommError:
        """The exception for an operation that the core ended with ``status``."""
        if status & 0xFF == Status.NESTED:
            return errors.nested(call, self.name)
        if status & 0xFF == Status.REFUSED:
            told = self.handle.refusal(status >> 8)
            return refused(f"{call} #{status >> 8} on group {self.name!r}", told and told[1])
        return self.fail(lambda: explain(self, status, call, site, seconds))

    def refuse(self, error: Exception) -> None:
        if self.size > 1 and self._failure is None:
            site = call_site(2)
            told = pack(self.rank, error, format_site(site))
            self.handle.refuse(told, self.timeout_ns, self.arena.flight.site(site))

    def may_run_inline(self) -> bool:
        """Whether an asynchronous call may run inline: nothing is queued before it, and all others have arrived."""
        last = self.pending[-1:]
        return (
            self._inline_polls > 0
            and self._failure is None
            and (not last or last[0].settled)  # they end in order
            and self.handle.announce(self._inline_polls)
        )

    # --- state ------------------------------------------------------------------------------------------------

    @property
    def sequence_number(self) -> int:
        """How many collectives this rank has started on the group."""
        return self.handle.report()["seq"]

    def call_stats(self) -> dict[str, dict[str, int]]:
        return self.handle.ways()

    def wait_stats(self) -> dict[str, int]:
        return dict(zip(("looked", "yielded", "slept"), self.handle.waits(), strict=False))

    def abort(self) -> None:
        self.run_abort_hooks()
        self.handle.abort()

    def _leave(self) -> None:
        self._retire()
        self.pending = []

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
        """What is left of this group when only ``ranks`` go on."""
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
    """How ``ranks`` of a group make another: one exchange, in which the whole group takes part, since it runs there.

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


def _barrier(rank: int, world: int, limits: Any) -> Plan:
    return collectives.barrier(rank, world)
