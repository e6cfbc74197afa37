"""DeviceGroup: the collectives of a process group on tensors in a GPU's memory.

An operation meets twice. First the hosts: with the operation's signature, through the group's own core, which finds
mismatches, dead ranks and passed deadlines as it does for host memory, and notes the operation in the flight recorder.
Then the streams, each behind whatever it had to do before. Nothing on the host waits for the GPU.

What a host says at a meeting besides the signature, its card, is where its tensors are, if they are symmetric and that
matters, and where its new staging area is, when the old one is too small for the operation.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.collectives.all_gather import streamed_all_gather
from symcomm.collectives.chunks import Pieces
from symcomm.collectives.plan import Plan
from symcomm.collectives.select import ON_DEVICE
from symcomm.cuda import devices, kernels
from symcomm.cuda.departure import Departure
from symcomm.cuda.driver import HANDLE_BYTES, driver
from symcomm.cuda.execution import CudaExecution, Move, Signature, device_views
from symcomm.cuda.failure import trouble_of
from symcomm.cuda.flag_words import Pads, pad_bytes, show
from symcomm.cuda.kernels import PACK
from symcomm.cuda.p2p import device_mail
from symcomm.cuda.pool import Piece, find_block, hold, opened, pool_of
from symcomm.cuda.single_kernel import MOST_RANKS, SpinningMover, flags_bytes, most_blocks
from symcomm.cuda.stream_collectives import Meetings, Mover
from symcomm.cuda.tensor_views import Place, torch_stream
from symcomm.cuda.via_host import HALF_BYTES, STAGE_BYTES, HostMover
from symcomm.cuda.watchdog import Lane
from symcomm.cuda.work import DeviceWork
from symcomm.group.call_hooks import GROUP_CALLS
from symcomm.group.failure import call_site, explain
from symcomm.group.process_group import ProcessGroup
from symcomm.group.request import Request
from symcomm.group.work import Timeout, to_ns
from symcomm.types import DType, RedOpType

__all__ = ["DeviceGroup", "Limits", "device_group"]


@dataclass(frozen=True)
class Limits:
    """Where one algorithm takes over from another; the same on all ranks. Measured on one H200 with two ranks."""

    first_half: int = 4 << 20  # bytes of half a staging area, at first
    most_half: int = 64 << 20  # and at most: it grows with the tensors that need it
    one_shot_bytes: int = 16 << 20  # tensor x ranks: up to here all_reduce is one-shot
    direct_bytes: int = 4 << 20  # from here on symmetric tensors take part without copies
    direct_reduce_bytes: int | None = None  # and from here on in all_reduce; None: where it is not one-shot


SLICED = Limits(one_shot_bytes=128 << 20, direct_bytes=128 << 20)  # a meeting costs 150 us: one, not two, up to 64 MiB
# One kernel: 54 us at 16 MiB, where meetings and a kernel take 59 to 80.
SPINNING = Limits(one_shot_bytes=32 << 20, direct_reduce_bytes=4 << 20)


CARD = struct.Struct(
    f"<{HANDLE_BYTES}sq{HANDLE_BYTES}sq"
)  # a tensor's block and place, and those of a new staging area
CARD_BYTES = CARD.size
NOTHING = bytes(HANDLE_BYTES)  # a handle of zeros: the tensor is not symmetric, or there is no new staging area


_living: weakref.WeakSet[DeviceGroup] = weakref.WeakSet()


def device_group(core: ProcessGroup, device: int) -> DeviceGroup:
    """The group's DeviceGroup for a GPU of this process, made on first use, by all ranks at once."""
    if core.spans_hosts:
        raise errors.ResourceError(
            f"CUDA tensors on group {core.name!r}: its ranks are on several hosts; "
            'use backend "cpu:symcomm,cuda:nccl" between hosts.'
        )
    made = core.__dict__.setdefault("_device_groups", {})
    if device not in made:
        devices.need_cuda("DeviceGroup")
        with devices.current(device):
            made[device] = DeviceGroup(core, device)
    return made[device]


@atexit.register
def _finish_all() -> None:
    """A process that goes away takes along what its streams have not done yet, for which peers may wait."""
    for group in list(_living):
        with contextlib.suppress(BaseException):
            group.finish()


class DeviceGroup(CudaExecution):
    """Made by every rank of ``core`` at once, each with the number of its GPU, which may be the same for all."""

    def __init__(self, core: ProcessGroup, device: int, limits: Limits | None = None):
        import torch

        devices.need_cuda("DeviceGroup")
        torch.cuda._lazy_init()
        self.core = core
        core.interception.add_facade(self, GROUP_CALLS)
        self.rank, self.size, self.name = core.rank, core.size, core.name
        self.device = device
        self.views = device_views(device)
        self._stream_of, self._captures = torch._C._cuda_getCurrentRawStream, torch._C._cuda_isCurrentStreamCapturing
        self._device_here = torch._C._cuda_getDevice
        driver().enter(device)
        everyone = self._introduce(core, device)
        devices.check_reach(core, device, everyone)
        pids = [c["pid"] for c in everyone]
        gpus = {c["gpu"] for c in everyone}
        shares_gpu = len(gpus) < core.size
        # On one GPU, one-shot moves W * (W + 3) times the tensor's bytes, two-shot through staging areas W * 6 times.
        self.prefers_one_shot = len(gpus) == 1 and core.size <= 3
        self.time_sliced = shares_gpu and not all(c["mps"] for c in everyone) and len(set(pids)) > 1
        # Ranks that are threads share their default stream, in which one's wait would block the other's signal.
        self._aside = len(set(pids)) < core.size
        host = [peer.base + c["pad"] for peer, c in zip(core._peers, everyone, strict=True)]
        self.pads = Pads(core.rank, core.size, host, list(core._peers))
        self.meetings = Meetings(self.pads, driver())
        spins = len(gpus) == 1 and not self.time_sliced and all(c["spins"] for c in everyone) and not self._aside
        self.limits = limits or (SLICED if self.time_sliced else SPINNING if spins else Limits())
        self.mover = self._make_spinning_mover() if spins else Mover(core.rank, core.size, device, self.meetings)
        self._small_stages = [peer.base + c["stage"] for peer, c in zip(core._peers, everyone, strict=True)]
        self._small_half = HALF_BYTES if self.time_sliced else -1
        self._lock = threading.RLock()
        self._stages: list[Piece] = []
        self._plans: dict[Any, Any] = {}
        self._last: int | None = None  # the stream of the last operation
        self._queued = 0  # operations whose hosts have not met yet
        self._pending: deque[DeviceWork] = deque()
        self._side: Any = None
        self.rescue = torch.cuda.Stream(device)  # ends waits of other streams; making one then would wait for them
        self.trouble = trouble_of(core, device)
        self.trouble.departure.pads = self.pads
        self._lane = self.trouble.watch.lane = Lane(self.pads, self.meetings)
        self._watch = self.trouble.watch
        self._recipes: dict[Any, Any] = {}  # all_reduces seen before, see _again()
        self._spare_cards: list[_Cards] = []
        self._places: dict[bytes, list[int] | None] = {}  # where symmetric tensors are, by what ranks' cards said
        self._shown: dict[int, Any] = {}  # by stream: the event behind its last use of peers' tensors
        _living.add(self)
        weakref.finalize(self, _part, self.trouble.departure, self._stages).atexit = False
        core._before_leaving.append(self.finish)
        core.barrier()  # nobody's GPU writes a pad that its owner has not cleared

    def _introduce(self, core: ProcessGroup, device: int) -> list[dict[str, Any]]:
        """What every rank says about itself; makes this rank's pad."""
        nbytes = pad_bytes(core.size)
        self._pad_offset = core._arena.allocate(nbytes)
        native.poke(core._arena.base + self._pad_offset, bytes(nbytes))
        mps = driver().has_mps(device)
        spins = mps and kernels.can_spin(device) and 1 < core.size <= MOST_RANKS
        card = {**devices.describe(device), "mps": mps, "spins": spins, "pad": self._pad_offset}
        self._small_offset = core._arena.allocate_sparse(STAGE_BYTES, 1)  # whose pages come when it is used
        return self._tell({**card, "stage": self._small_offset})

    def _tell(self, card: dict[str, Any]) -> list[dict[str, Any]]:
        """What all ranks tell, in rank order."""
        return [json.loads(item) for item in self.core.all_gather_bytes(json.dumps(card).encode())]

    @functools.cached_property
    def _small(self) -> HostMover:
        """For small operations of ranks that take turns on a GPU. Made by the first of them: it pins memory."""
        self.core._arena.reserve(self._small_offset, STAGE_BYTES)
        for stage, peer in zip(self._small_stages, self.core._peers, strict=True):
            show(stage, STAGE_BYTES, peer)
        return HostMover(self.rank, self.size, self.device, self.meetings, self._small_stages)

    @functools.cached_property
    def mail(self) -> Any:
        """This rank's messages."""
        return device_mail(self.core, self.device)

    def _make_spinning_mover(self) -> SpinningMover:
        """For small all_reduces of ranks that share a GPU at the same time."""
        import torch

        piece = pool_of(self.device).allocate(flags_bytes(self.size))
        driver().fill32(piece.address, 0, piece.nbytes // 4, 0)
        torch.cuda.synchronize(self.device)
        units = torch.cuda.get_device_properties(self.device).multi_processor_count
        everyone = self._tell({"handle": piece.block.handle.hex(), "offset": piece.offset, "units": units})
        flags = [
            piece.address if r == self.rank else self._open(r, bytes.fromhex(c["handle"])) + c["offset"]
            for r, c in enumerate(everyone)
        ]
        blocks = most_blocks(min(c["units"] for c in everyone), self.size)
        return SpinningMover(self.rank, self.size, self.device, self.meetings, flags, blocks, piece)

    def _mover_for(self, nbytes: int) -> Mover:
        """Whoever moves ``nbytes`` of each rank's: the same on all ranks."""
        return self._small if nbytes <= self._small_half else self.mover

    @property
    def _timeout_ns(self) -> int:  # type: ignore[override]
        return self.core._timeout_ns

    def __repr__(self) -> str:
        return f"<DeviceGroup {self.name!r}: rank {self.rank} of {self.size} on cuda:{self.device}>"

    # --- meeting ----------------------------------------------------------------------------------------------

    def _plan(self, signature: Signature, with_cards: bool) -> Any:
        """The hosts' part: arrive with the signature; with cards, gather them."""
        key = (signature, with_cards)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) > 4096:
                self._plans.clear()
            s = signature
            made = Plan(s.collective, self.rank, self.size, s.elements | ON_DEVICE, s.dtype, s.redop, s.root, "arrival")
            if with_cards and self.size > 1:
                streamed_all_gather(made, Pieces((CARD_BYTES,) * self.size, False), self.core._limits)
            plan = self._plans[key] = self.core.load_plan(made)
        return plan

    @devices.on_its_device
    def _perform(
        self,
        request: Request,
        signature: Signature,
        move: Move,
        async_op: bool,
        timeout: Timeout,
    ) -> DeviceWork | None:
        """Meet, then put the operation into a stream."""
        import torch

        call, need, may_be_direct = request.call, move.need, move.may_be_direct
        timeout_ns = self.core._timeout_ns if timeout is None else to_ns(call, timeout)
        self.trouble.check_usable(call)
        half = self._promised if self._mover_for(need) is self.mover else self._small_half
        grow = need > half and half < self.limits.most_half and self.size > 1
        if grow:
            self._promised = self._grown(need)
        cards = self._cards() if grow or may_be_direct else None
        new_stage = self._fill(cards, need if grow else 0, move.symmetric) if cards is not None else None
        ins, outs = (cards.ins, cards.outs) if cards is not None else ((), ())
        plan = self._plan(signature, cards is not None)

        def put(stream: int) -> None:
            """Runs when all hosts have met."""
            if cards is not None and grow:
                self._use_stage(cards, new_stage)
            self._order(stream)
            places = self._symmetric(cards) if cards is not None and may_be_direct else None
            if cards is not None:
                self._spare_cards.append(cards)
            move.enqueue(stream, places)
            if places is not None:
                self._show(stream)
            for output in request.outputs:
                if output.target is not None:
                    with torch.cuda.stream(torch_stream(stream, self.device)):
                        output.finish()
            self._note(call, timeout_ns / 1e9)

        if not async_op and not self._aside:
            with self._lock:
                if not self._queued:
                    started = time.monotonic()
                    status = native.run(self.core._handle, plan, ins, outs, timeout_ns, self.core._site(1))
                    if status:
                        raise self._failed(status, call, call_site(1), time.monotonic() - started)
                    put(torch._C._cuda_getCurrentRawStream(self.device))
                    return None
        work = self._submit(call, plan, ins, outs, put, request.result, (request, cards, plan), timeout_ns)
        if async_op:
            return work
        work.wait()
        return None

    def _remember(
        self, tensor: Any, op: Any, signature: Signature, dtype: DType, mover: Mover, may_be_direct: bool
    ) -> None:
        """Let the next call of this kind take the short way."""
        redop = RedOpType(signature.redop)
        if not signature.elements or self.size == 1 or self._aside or redop is RedOpType.PREMUL_SUM:
            return
        if tensor.dtype.is_complex:  # they may be conjugated
            return
        put = mover.again(dtype, redop, signature.elements)
        if put is None:
            return
        if len(self._recipes) > 1024:
            self._recipes.clear()
        plan, site = self._plan(signature, may_be_direct), self.core._site(2)  # of the first call of this kind
        direct = functools.partial(mover.reduce_in_place, dtype, redop) if may_be_direct else None
        self._recipes[tensor.dtype, signature.elements, op] = (plan, put, direct, site)

    def _again(self, tensor: Any, op: Any) -> bool:
        """A blocking one-shot all_reduce of a kind seen before, with as little as possible around it; False: it has to
        go the long way."""
        try:
            plan, put, direct, site = self._recipes[tensor.dtype, tensor.numel(), op]
        except (KeyError, AttributeError, TypeError):
            return False
        core, stream, address = self.core, self._stream_of(self.device), tensor.data_ptr()
        if (
            not address or address % PACK or core._failure is not None or tensor.get_device() != self.device
            or self._device_here() != self.device or not tensor.is_contiguous() or tensor.is_neg() or self._captures()
        ):  # fmt: skip
            return False
        with self._lock:
            if stream != self._last or self._queued:
                return False
            cards: _Cards | None = None
            ins: tuple[int, ...] = ()
            outs: tuple[int, ...] = ()
            if direct is not None:
                cards = self._cards()
                CARD.pack_into(cards.mine, 0, *self._block_of(address), NOTHING, 0)
                ins, outs = cards.ins, cards.outs
            status = native.run(core._handle, plan, ins, outs, core._timeout_ns, site)
            if status:
                raise self._failed(status, "all_reduce", call_site(1), None)
            places = self._symmetric(cards) if cards is not None else None
            if places is None:
                put(stream, address)
            else:
                direct(places, tensor.numel(), stream)
                self._show(stream)
            if cards is not None:
                self._spare_cards.append(cards)
            self._note("all_reduce", core._timeout_ns / 1e9)
        return True

    def _submit(
        self, call: str, plan: Any, ins: Any, outs: Any, put: Callable[[int], None], result: Sequence[Any], keep: Any,
        timeout_ns: int,
    ) -> DeviceWork:  # fmt: skip
        """The hosts meet in the core's thread, which then puts the operation into our own stream."""
        import torch

        site = call_site(1)
        work = DeviceWork(self, call, result, keep)
        with self._lock:
            if self._side is None:
                self._side = torch.cuda.Stream(self.device, priority=-1)
            side = self._side
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.device))

            def met(status: int) -> None:
                try:
                    if status:
                        work._settle(self._failed(status, call, site, time.monotonic() - work._started))
                        return
                    driver().enter(self.device)
                    with torch.cuda.device(self.device):
                        side.wait_event(ready)
                        put(side.cuda_stream)
                        done = torch.cuda.Event()
                        done.record(side)
                    work._settle(None, done, side)
                except BaseException as error:
                    work._settle(error)
                finally:
                    self._queued -= 1

            self._queued += 1
            number = self.core._arena.flight.site(site)
            try:
                work._request = native.submit(self.core._handle, plan, ins, outs, timeout_ns, number, met)
            except BaseException:
                self._queued -= 1
                raise
            while self._pending and self._pending[0].is_completed():
                self._pending.popleft()
            self._pending.append(work)
            self.trouble.add(work)
        return work

    def _order(self, stream: int) -> None:
        """Operations of a group follow each other, in whichever streams they are."""
        if stream != self._last:
            if self._last is not None:
                import torch

                event = torch.cuda.Event()
                event.record(torch_stream(self._last, self.device))
                event.wait(torch_stream(stream, self.device))
            self._last = self.trouble.departure.last_stream = stream
            for stage in self._stages:
                stage.streams.add(stream)

    # --- memory -----------------------------------------------------------------------------------------------

    def _cards(self) -> _Cards:
        try:
            return self._spare_cards.pop()
        except IndexError:
            return _Cards(self.size)

    def _fill(self, cards: _Cards, need: int, symmetric: Place | None) -> Piece | None:
        """My card; with ``need``, a new staging area for halves of so many bytes."""
        stage = pool_of(self.device).allocate(2 * self._grown(need)) if need else None
        tensor = self._block_of(symmetric.address) if symmetric is not None else (NOTHING, 0)
        at = (stage.block.handle, stage.offset) if stage is not None else (NOTHING, 0)
        CARD.pack_into(cards.mine, 0, *tensor, *at)
        return stage

    def _block_of(self, address: int) -> tuple[bytes, int]:
        found = find_block(self.device, address)
        return (NOTHING, 0) if found is None else (found[0].handle, found[1])

    def _use_stage(self, cards: _Cards, stage: Piece | None) -> None:
        assert stage is not None
        places = [
            stage.address if r == self.rank else self._open(r, handle) + offset
            for r, (_, _, handle, offset) in enumerate(CARD.iter_unpack(cards.all))
        ]
        self.mover.use_stage(places, stage.nbytes // 2)
        self._recipes.clear()
        if self._last is not None:
            stage.streams.add(self._last)
        self._stages.append(stage)  # the old ones live on, since peers may be reading them; each is twice the last

    _promised = 0  # bytes of half a staging area once all operations so far have met: the same on all ranks

    def _grown(self, need: int) -> int:
        """Bytes of half a staging area in which ``need`` have room, as far as one may grow."""
        half = self.limits.first_half
        while half < min(need, self.limits.most_half):
            half *= 2
        return half

    def _symmetric(self, cards: _Cards) -> list[int] | None:
        """Where all ranks' tensors are, when all of them are symmetric."""
        said = bytes(cards.all)
        if said not in self._places:
            if len(self._places) > 1024:
                self._places.clear()
            blocks = [(handle, offset) for handle, offset, _, _ in CARD.iter_unpack(said)]
            is_whole = all(handle != NOTHING for handle, _ in blocks)
            found = [self._open(r, handle) + offset for r, (handle, offset) in enumerate(blocks)] if is_whole else None
            self._places[said] = found
        return self._places[said]

    def _open(self, rank: int, handle: bytes) -> int:
        driver().enter(self.device)
        return opened(handle, f"rank {rank}")

    # --- trouble ----------------------------------------------------------------------------------------------

    def _failed(self, status: int, call: str, site: Any, seconds: float | None) -> errors.SymcommError:
        """The hosts could not meet. Streams that still use peers' tensors, or have theirs used, are left first."""
        error = self.core._failed(status, call, site, seconds, explain)
        self.trouble.found()
        return error

    def _show(self, stream: int) -> None:
        """Peers use this rank's tensors, and it theirs, until the stream comes past this point."""
        import torch

        event = self._shown.get(stream)
        if event is None:
            event = self._shown[stream] = torch.cuda.Event()
        event.record(torch_stream(stream, self.device))
        self._lane.shown = self.meetings.count
        self.trouble.departure.touch(event)

    def _note(self, call: str, timeout: float) -> None:
        """Have the watch look after what was put into a stream."""
        lane = self._lane
        lane.what, lane.timeout = call, timeout
        if self._watch.thread is None and self.size > 1:
            self._watch.wake()

    # --- the end ----------------------------------------------------------------------------------------------

    @devices.on_its_device
    def synchronize(self, timeout: Timeout = None) -> None:
        """The host waits until the GPU has done all operations of this group; raises if one of them failed."""
        import torch

        seconds = self.core.timeout if timeout is None else to_ns("synchronize", timeout) / 1e9
        end = time.monotonic() + seconds
        for work in list(self._pending):
            work._await_queued(max(0.001, end - time.monotonic()))
        with self._lock:
            event = torch.cuda.Event()
            if self._last is not None:
                event.record(torch_stream(self._last, self.device))
        while not event.query():
            if time.monotonic() > end:
                raise errors.deadline(f"synchronize on group {self.name!r}", seconds)
            time.sleep(0.0002)
        self.trouble.look()

    def finish(self, timeout: float = 10.0) -> None:
        """Before this rank leaves: let the GPU do what peers may wait for. What fails here fails for them too."""
        if self.core._failure is None:
            with contextlib.suppress(errors.SymcommError):
                self.synchronize(timeout)
                self.trouble.departure.leave()


def _part(departure: Departure, stages: list[Piece]) -> None:
    """A group is gone: its peers may still read its staging areas, and write them."""
    if stages:
        hold(stages, departure.is_left_alone)


class _Cards:
    """The cards of all ranks, as the meeting's plan reads and writes them."""

    def __init__(self, world: int):
        self.mine, self.all = bytearray(CARD_BYTES), bytearray(CARD_BYTES * world)
        # Viewed, they stay where they are.
        self._views = [ctypes.c_char.from_buffer(memory) for memory in (self.mine, self.all)]
        mine, everyone = map(ctypes.addressof, self._views)
        self.ins, self.outs = (mine,), (everyone,)
