"""CudaGroup: the collectives of a process group on tensors in a GPU's memory.

An operation synchronizes twice. First the hosts: with the operation's signature, through the group's own core, which
detects mismatches, dead ranks and missed deadlines as it does for host memory, and notes the operation in the flight
recorder. Then the streams, each behind its earlier work. Nothing on the host waits for the GPU.

Besides the signature, hosts may exchange a MemoryInfo: where its tensors are, if they are symmetric and that matters,
and where its new staging area is, when the old one is too small for the operation.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.collectives.all_gather import streamed_all_gather
from symcomm.collectives.chunks import Pieces
from symcomm.collectives.plan import Plan
from symcomm.collectives.select import ON_DEVICE, WITH_INFOS
from symcomm.cuda import devices, kernels
from symcomm.cuda.departure import Departure
from symcomm.cuda.driver import HANDLE_BYTES, driver
from symcomm.cuda.execution import CudaExecution, CudaSignature, HostsStep, Move, device_views
from symcomm.cuda.failure import failures_of
from symcomm.cuda.flag_words import FlagWords, flag_words_bytes, register_with_gpu
from symcomm.cuda.kernels import PACK
from symcomm.cuda.memory_infos import INFO, INFO_BYTES, MemoryInfos
from symcomm.cuda.p2p import cuda_messages
from symcomm.cuda.pool import PoolBuffer, find_block, hold, opened, opened_pieces, pool_of
from symcomm.cuda.single_kernel import MOST_RANKS, SingleKernelCollectives, flags_bytes, most_blocks
from symcomm.cuda.stream_collectives import PreparedAllReduce, StreamBarriers, StreamCollectives
from symcomm.cuda.tensor_views import TensorView, torch_stream
from symcomm.cuda.via_host import HALF_BYTES, STAGE_BYTES, ViaHostCollectives
from symcomm.cuda.watchdog import CollectiveSequence
from symcomm.cuda.work import CudaWork
from symcomm.group.call_hooks import GROUP_CALLS
from symcomm.group.failure import call_site, explain
from symcomm.group.process_group import ProcessGroup
from symcomm.group.refusal import Settled
from symcomm.group.request import Request
from symcomm.group.torch_layout import gpu_keys
from symcomm.group.work import Timeout, batch_of, to_ns
from symcomm.types import DType, RedOpType


@dataclass(frozen=True)
class Limits:
    """Where one algorithm takes over from another; the same on all ranks. Measured on one H200 with two ranks."""

    first_half: int = 4 << 20  # bytes of half a staging area, at first
    most_half: int = 64 << 20  # and at most: it grows with the tensors that need it
    one_shot_bytes: int = 16 << 20  # tensor x ranks: up to here all_reduce is one-shot
    direct_bytes: int = 4 << 20  # from here on symmetric tensors take part without copies
    direct_reduce_bytes: int | None = None  # and from here on in all_reduce; None: where it is not one-shot


TIME_SLICED = Limits(one_shot_bytes=128 << 20, direct_bytes=128 << 20)  # a barrier costs 150 us: one, not two
# Single kernels choose by themselves. In place, 8 MiB take 30 us, 20 through the staging areas; 16 MiB 30 and 38.
SINGLE_KERNEL = Limits(one_shot_bytes=1 << 62, direct_reduce_bytes=8 << 20)


NOTHING = bytes(HANDLE_BYTES)  # a handle of zeros: the tensor is not symmetric, or there is no new staging area


_living: weakref.WeakSet[CudaGroup] = weakref.WeakSet()


def device_group(core: ProcessGroup, device: int) -> CudaGroup:
    """The group's CudaGroup for a GPU of this process, made on first use, by all ranks at once."""
    if core.spans_hosts:
        raise errors.ResourceError(
            f"CUDA tensors on group {core.name!r}: its ranks are on several hosts; "
            'use backend "cpu:symcomm,cuda:nccl" between hosts.'
        )
    made = core.__dict__.setdefault("_device_groups", {})
    if device not in made:
        devices.need_cuda("CudaGroup")
        with devices.current(device):
            made[device] = CudaGroup(core, device)
    return made[device]


@atexit.register
def _finish_all() -> None:
    """A process that exits loses what its streams have not done yet, for which peers may wait."""
    for group in list(_living):
        with contextlib.suppress(BaseException):
            group.finish()


class CudaGroup(CudaExecution):
    """Made by every rank of ``core`` at once, each with the number of its GPU, which may be the same for all."""

    def __init__(self, core: ProcessGroup, device: int, limits: Limits | None = None):
        import torch

        devices.need_cuda("CudaGroup")
        torch.cuda._lazy_init()
        self.core = core
        core.interception.add_facade(self, GROUP_CALLS)
        self.rank, self.size, self.name = core.rank, core.size, core.name
        self.device = device
        self.views = device_views(device)
        self._stream_of, self._captures = torch._C._cuda_getCurrentRawStream, torch._C._cuda_isCurrentStreamCapturing
        self._device_here = torch._C._cuda_getDevice
        native.use_gpu_keys(gpu_keys(torch, device))
        driver().enter(device)
        everyone = self._exchange_info(core, device)
        devices.check_reach(core, device, everyone)
        pids = [c["pid"] for c in everyone]
        gpus = {c["gpu"] for c in everyone}
        shares_gpu = len(gpus) < core.size
        # On one GPU, one-shot moves W * (W + 3) times the tensor's bytes, two-shot through staging areas W * 6 times.
        self.prefers_one_shot = len(gpus) == 1 and core.size <= 3
        self.time_sliced = shares_gpu and not all(c["mps"] for c in everyone) and len(set(pids)) > 1
        # Ranks that are threads share their default stream, in which one's wait would block the other's signal.
        self._ranks_are_threads = len(set(pids)) < core.size
        host = [peer.base + c["flags"] for peer, c in zip(core.peers, everyone, strict=True)]
        self.flag_words = FlagWords(core.rank, core.size, host, list(core.peers))
        self.barriers = StreamBarriers(self.flag_words, driver())
        single_kernel = (
            len(gpus) == 1
            and not self.time_sliced
            and all(c["single_kernel"] for c in everyone)
            and not self._ranks_are_threads
        )
        self.limits = limits or (TIME_SLICED if self.time_sliced else SINGLE_KERNEL if single_kernel else Limits())
        self.collectives = (
            self._make_single_kernel()
            if single_kernel
            else StreamCollectives(core.rank, core.size, device, self.barriers)
        )
        self._small_stages = [peer.base + c["stage"] for peer, c in zip(core.peers, everyone, strict=True)]
        self._small_half = HALF_BYTES if self.time_sliced else -1
        self._lock = threading.RLock()
        self._stages: list[PoolBuffer] = []
        self._last: int | None = None  # the stream of the last operation
        self._queued = 0  # operations whose hosts have not synchronized yet
        self.pending: deque[CudaWork] = deque()
        self._side_stream: Any = None
        self.rescue = torch.cuda.Stream(device)  # ends waits of other streams; making one then would wait for them
        self.failures = failures_of(core, device)
        self.failures.departure.flag_words = self.flag_words
        self._sequence = self.failures.watchdog.sequence = CollectiveSequence(self.flag_words, self.barriers)
        self._watchdog = self.failures.watchdog
        self._fast_paths: dict[Any, Any] = {}  # all_reduces seen before, see _run_fast_path()
        self._spare_infos: list[MemoryInfos] = []
        self._places: dict[bytes, list[int] | None] = {}  # where symmetric tensors are, by what ranks' infos said
        self._shown: dict[int, Any] = {}  # by stream: (the event behind its last use of peers' tensors, the stream)
        _living.add(self)
        weakref.finalize(self, _hold_stages, self.failures.departure, self._stages).atexit = False
        core.before_leaving.append(self.finish)
        core.barrier()  # nobody's GPU writes a block of flag words that its owner has not cleared

    def _exchange_info(self, core: ProcessGroup, device: int) -> list[dict[str, Any]]:
        """All-gather facts about the ranks; allocates this rank's flag words."""
        nbytes = flag_words_bytes(core.size)
        self._flags_offset = core.arena.allocate(nbytes)
        native.poke(core.arena.base + self._flags_offset, bytes(nbytes))
        mps = driver().has_mps(device)
        single_kernel = mps and kernels.supports_single_kernel(device) and 1 < core.size <= MOST_RANKS
        info = {**devices.describe(device), "mps": mps, "single_kernel": single_kernel, "flags": self._flags_offset}
        self._small_offset = core.arena.allocate_sparse(STAGE_BYTES, 1)  # whose pages come when it is used
        return self._all_gather_info({**info, "stage": self._small_offset})

    def _all_gather_info(self, info: dict[str, Any]) -> list[dict[str, Any]]:
        """All ranks' facts, in rank order."""
        return [json.loads(item) for item in self.core.all_gather_bytes(json.dumps(info).encode())]

    @functools.cached_property
    def _small(self) -> ViaHostCollectives:
        """For small operations of ranks that time-slice a GPU. Built on first use, since it pins memory."""
        self.core.arena.reserve(self._small_offset, STAGE_BYTES)
        for stage, peer in zip(self._small_stages, self.core.peers, strict=True):
            register_with_gpu(stage, STAGE_BYTES, peer)
        return ViaHostCollectives(self.rank, self.size, self.device, self.barriers, self._small_stages)

    @functools.cached_property
    def messages(self) -> Any:
        """This rank's messages. Made by the first one, which a CUDA graph cannot hold."""
        self.failures.check_usable("a message")
        return cuda_messages(self.core, self.device)

    def _make_single_kernel(self) -> SingleKernelCollectives:
        """For small all_reduces of ranks that share a GPU at the same time."""
        import torch

        piece = pool_of(self.device).allocate(flags_bytes(self.size))
        driver().fill32(piece.address, 0, piece.nbytes // 4, 0)
        torch.cuda.synchronize(self.device)
        units = torch.cuda.get_device_properties(self.device).multi_processor_count
        everyone = self._all_gather_info({"handle": piece.block.handle.hex(), "offset": piece.offset, "units": units})
        flags = opened_pieces(everyone)
        blocks = most_blocks(min(c["units"] for c in everyone), self.size)
        return SingleKernelCollectives(self.rank, self.size, self.device, self.barriers, flags, blocks, piece)

    def _collectives_for(self, nbytes: int) -> StreamCollectives:
        """How to run an operation on ``nbytes`` of each rank: the same on all ranks."""
        return self._small if nbytes <= self._small_half else self.collectives

    @property
    def timeout_ns(self) -> int:  # type: ignore[override]
        return self.core.timeout_ns

    def __repr__(self) -> str:
        return f"<CudaGroup {self.name!r}: rank {self.rank} of {self.size} on cuda:{self.device}>"

    # --- synchronization --------------------------------------------------------------------------------------

    def _plan(self, signature: CudaSignature, with_infos: bool) -> Any:
        """The hosts' part: arrive with the signature; with memory infos, gather them."""

        def make() -> Any:
            s, count = signature, signature.elements | ON_DEVICE
            count = count ^ WITH_INFOS if with_infos else count
            plan = Plan(s.collective, self.rank, self.size, count, s.dtype, s.redop, s.root, "arrival")
            if with_infos and self.size > 1:
                streamed_all_gather(plan, Pieces((INFO_BYTES,) * self.size, False), self.core.plan_limits)
            return self.core.load_plan(plan)

        return self.core.kept_plan((signature, with_infos), make)

    @devices.on_its_device
    def _perform(
        self,
        request: Request,
        signature: CudaSignature,
        move: Move,
        async_op: bool,
        timeout: Timeout,
    ) -> CudaWork | None:
        """Meet, then put the operation into a stream."""
        import torch

        call, need, may_be_direct = request.call, move.need, move.may_be_direct
        timeout_ns = self.core.timeout_ns if timeout is None else to_ns(call, timeout)
        self.failures.check_usable(call)
        before = self._promised
        half = self._promised if self._collectives_for(need) is self.collectives else self._small_half
        grow = need > half and half < self.limits.most_half and self.size > 1
        if grow:
            self._promised = self._grown(need)
        infos = self._infos() if grow or may_be_direct else None
        new_stage = self._fill(infos, need if grow else 0, move.symmetric) if infos is not None else None
        ins, outs = (infos.ins, infos.outs) if infos is not None else ((), ())
        plan = self._plan(signature, infos is not None)

        def put(stream: int) -> None:
            """Runs when all hosts have synchronized."""
            if infos is not None and grow:
                self._use_stage(infos, new_stage)
            self._order(stream)
            places = self._symmetric(infos) if infos is not None and may_be_direct else None
            if infos is not None:
                self._spare_infos.append(infos)
            move.enqueue(stream, places)
            if places is not None:
                self._note_in_place_use(stream)
            for output in request.outputs:
                if output.target is not None:
                    with torch.cuda.stream(torch_stream(stream, self.device)):
                        output.finish()
            self._note(call, timeout_ns / 1e9)

        if not async_op and not self._ranks_are_threads:
            with self._lock:
                if not self._queued:
                    started = time.monotonic()
                    status = self.core.handle.run(
                        plan, ins, outs, timeout_ns, self.core.site_number(1), request.written
                    )
                    if status:
                        self._promised = before
                        raise self.fail_with_status(status, call, call_site(1), time.monotonic() - started)
                    with Settled():
                        put(torch._C._cuda_getCurrentRawStream(self.device))
                    return None

        def not_put() -> None:
            """Runs when they have not. Calls behind this one that count on it are seen to differ by WITH_INFOS."""
            if self._queued == 1:
                self._promised = before

        step = HostsStep(plan, ins, outs, timeout_ns, batch_of(async_op))
        work = self._submit(request, step, infos, put, not_put)
        if async_op:
            return work
        work.wait()
        return None

    def _capture(self, request: Request, signature: CudaSignature, async_op: bool, timeout: Timeout) -> None:
        """Into the CUDA graph that is being captured. Hosts compare the call now, and no longer when it is replayed."""
        timeout_ns = self.core.timeout_ns if timeout is None else to_ns(request.call, timeout)
        self.failures.check_usable(request.call, may_be_captured=True)
        can = request.op.name == "all_reduce" and not async_op and self.size > 1 and not self._queued
        redop = RedOpType.SUM if request.redop is RedOpType.PREMUL_SUM else request.redop
        if not can or not self.collectives.can_capture(request.dtype, redop):
            raise errors.CallerError(
                f"{request.call}: a CUDA graph is being captured, which can hold blocking all_reduces of ranks that "
                "share a GPU through MPS, of dtypes and operations that were used before. Call it outside of the graph."
            )
        [source], [out], plan = request.inputs, request.outputs, self._plan(signature, False)
        status = self.core.handle.run(
            plan, (), (), timeout_ns, self.core.site_number(1), request.written
        )  # fmt: skip
        if status:
            raise self.fail_with_status(status, request.call, call_site(1), None)
        stream = self._stream_of(self.device)
        with Settled():
            self.collectives.reduce_captured(request.dtype, redop, source.address, out.address, request.sizes, stream)
            out.finish()
            self.failures.watch_captured()

    def _add_fast_path(
        self,
        tensor: Any,
        op: Any,
        signature: CudaSignature,
        dtype: DType,
        collectives: StreamCollectives,
        may_be_direct: bool,
    ) -> None:
        """Let the next call of this kind take the short way."""
        redop = RedOpType(signature.redop)
        if not signature.elements or self.size == 1 or self._ranks_are_threads or redop is RedOpType.PREMUL_SUM:
            return
        if tensor.dtype.is_complex:  # they may be conjugated
            return
        if may_be_direct:
            run: PreparedAllReduce | None = self._prepare_large(collectives, dtype, redop, signature.elements)
        else:
            run = collectives.prepare(dtype, redop, signature.elements)
        if run is None:
            return
        if len(self._fast_paths) > 1024:
            self._fast_paths.clear()
        plan, site = self._plan(signature, may_be_direct), self.core.site_number(2)  # of the first call of this kind
        self._fast_paths[signature.elements, int(dtype), op] = (run, plan, site)

    def _prepare_large(
        self, collectives: StreamCollectives, dtype: DType, redop: RedOpType, count: int
    ) -> PreparedAllReduce:
        """Of tensors that are combined in place where all ranks' are symmetric."""

        def run(handle: Any, plan: Any, timeout_ns: int, site: int, stream: int, address: int) -> int:
            infos = self._infos()
            INFO.pack_into(infos.mine, 0, *self._block_of(address), NOTHING, 0)
            status = handle.run(plan, infos.ins, infos.outs, timeout_ns, site, ())
            if status:
                return status
            places = self._symmetric(infos)
            self._spare_infos.append(infos)
            if places is None:
                collectives.reduce_small(dtype, redop, address, address, count, stream)
            else:
                collectives.reduce_in_place(dtype, redop, places, count, stream)
                self._note_in_place_use(stream)
            return 0

        return run

    def _run_fast_path(self, tensor: Any, op: Any) -> bool:
        """A blocking all_reduce of a kind seen before, with as little as possible around it; False: it has to go the
        long way."""
        view = native.view_gpu_tensor(tensor, self.device)
        if view is None:
            return False
        address, count, dtype = view
        try:
            run, plan, site = self._fast_paths[count, dtype, op]
        except (KeyError, TypeError):
            return False
        core, stream = self.core, self._stream_of(self.device)
        if address % PACK or core.failure is not None or self._device_here() != self.device or self._captures():
            return False
        with self._lock:
            if stream != self._last or self._queued:
                return False
            native.change_tensors(tensor)
            status = run(core.handle, plan, core.timeout_ns, site, stream, address)
            if status:
                raise self.fail_with_status(status, "all_reduce", call_site(1), None)
            self._note("all_reduce", core.timeout_ns / 1e9)
        return True

    def _submit(
        self, request: Request, step: HostsStep, infos: Any, put: Callable[[int], None], fail: Callable[[], None]
    ) -> CudaWork:
        """The hosts synchronize in the core's thread; then it puts the operation into our own stream, or calls
        ``fail``."""
        import torch

        site, begun, call = call_site(1), time.monotonic(), request.call
        work = CudaWork(self, call, request.result, (request, infos, step.plan))
        with self._lock:
            if self._side_stream is None:
                self._side_stream = torch.cuda.Stream(self.device, priority=-1)
            side = self._side_stream
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.device))

            def on_arrival(status: int) -> None:
                try:
                    if status:
                        fail()
                        work.settle(self.fail_with_status(status, call, site, time.monotonic() - begun))
                        return
                    driver().enter(self.device)
                    driver().allow_in_captures()
                    with torch.cuda.device(self.device):
                        side.wait_event(ready)
                        put(side.cuda_stream)
                        done = torch.cuda.Event()
                        done.record(side)
                    work.settle(None, done, side)
                except BaseException as error:
                    work.settle(error)
                finally:
                    self._queued -= 1

            self._queued += 1
            number = self.core.arena.flight.site(site)
            try:
                work.request = self.core.handle.submit(
                    step.plan,
                    step.ins,
                    step.outs,
                    step.timeout_ns,
                    number,
                    request.written,
                    on_arrival,
                    step.batch,
                )
            except BaseException:
                self._queued -= 1
                raise
            while self.pending and self.pending[0].is_completed():
                self.pending.popleft()
            self.pending.append(work)
            self.failures.add(work)
        return work

    def _order(self, stream: int) -> None:
        """Operations of a group run one after another, whatever their streams."""
        if stream != self._last:
            if self._last is not None:
                import torch

                event = torch.cuda.Event()
                event.record(torch_stream(self._last, self.device))
                event.wait(torch_stream(stream, self.device))
            self._last = self.failures.departure.last_stream = stream
            for stage in self._stages:
                stage.streams.add(stream)

    # --- memory -----------------------------------------------------------------------------------------------

    def _infos(self) -> MemoryInfos:
        try:
            return self._spare_infos.pop()
        except IndexError:
            return MemoryInfos(self.size)

    def _fill(self, infos: MemoryInfos, need: int, symmetric: TensorView | None) -> PoolBuffer | None:
        """My info; with ``need``, a new staging area for halves of so many bytes."""
        stage = pool_of(self.device).allocate(2 * self._grown(need)) if need else None
        tensor = self._block_of(symmetric.address) if symmetric is not None else (NOTHING, 0)
        at = (stage.block.handle, stage.offset) if stage is not None else (NOTHING, 0)
        INFO.pack_into(infos.mine, 0, *tensor, *at)
        return stage

    def _block_of(self, address: int) -> tuple[bytes, int]:
        found = find_block(self.device, address)
        return (NOTHING, 0) if found is None else (found[0].handle, found[1])

    def _use_stage(self, infos: MemoryInfos, stage: PoolBuffer | None) -> None:
        assert stage is not None
        addresses = [
            stage.address if r == self.rank else self._open(r, handle) + offset
            for r, (_, _, handle, offset) in enumerate(INFO.iter_unpack(infos.all))
        ]
        self.collectives.use_stage(addresses, stage.nbytes // 2)
        self._fast_paths.clear()
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

    def _symmetric(self, infos: MemoryInfos) -> list[int] | None:
        """Where all ranks' tensors are, when all of them are symmetric."""
        said = bytes(infos.all)
        if said not in self._places:
            if len(self._places) > 1024:
                self._places.clear()
            blocks = [(handle, offset) for handle, offset, _, _ in INFO.iter_unpack(said)]
            is_whole = all(handle != NOTHING for handle, _ in blocks)
            found = [self._open(r, handle) + offset for r, (handle, offset) in enumerate(blocks)] if is_whole else None
            self._places[said] = found
        return self._places[said]

    def _open(self, rank: int, handle: bytes) -> int:
        driver().enter(self.device)
        return opened(handle, f"rank {rank}")

    # --- failures ---------------------------------------------------------------------------------------------

    def fail_with_status(self, status: int, call: str, site: Any, seconds: float | None) -> errors.SymcommError:
        """The hosts could not synchronize. No stream uses peers' tensors any more, nor peers this rank's."""
        return self.core.fail_with_status(status, call, site, seconds, explain)

    def _note_in_place_use(self, stream: int) -> None:
        """Peers use this rank's tensors, and it theirs, until the stream comes past this point."""
        import torch

        try:
            event, on = self._shown[stream]
        except KeyError:
            event, on = self._shown[stream] = torch.cuda.Event(), torch_stream(stream, self.device)
        event.record(on)
        self._sequence.last_in_place = self.barriers.count
        self.failures.departure.touch(event)

    def _note(self, call: str, timeout: float) -> None:
        """Have the watchdog look after what was put into a stream."""
        sequence = self._sequence
        sequence.what, sequence.timeout = call, timeout
        if self._watchdog.thread is None and self.size > 1:
            self._watchdog.wake()

    # --- the end ----------------------------------------------------------------------------------------------

    @devices.on_its_device
    def synchronize(self, timeout: Timeout = None) -> None:
        """The host waits until the GPU has done all operations of this group; raises if one of them failed."""
        seconds = self.core.timeout if timeout is None else to_ns("synchronize", timeout) / 1e9
        end = time.monotonic() + seconds
        for work in list(self.pending):
            work.await_queued(max(0.001, end - time.monotonic()))
        try:
            self._await_streams(end, seconds)
        except RuntimeError as error:
            self.failures.raise_cause(error, "synchronize")
        self.failures.raise_if_failed()

    def _await_streams(self, end: float, seconds: float) -> None:
        import torch

        with self._lock:
            event = torch.cuda.Event()
            if self._last is not None:
                event.record(torch_stream(self._last, self.device))
        while not event.query():
            if time.monotonic() > end:
                raise errors.deadline(f"synchronize on group {self.name!r}", seconds)
            time.sleep(0.0002)

    def finish(self, timeout: float = 10.0) -> None:
        """Before this rank leaves: let the GPU do what peers may wait for. What fails here fails for them too."""
        if self.core.failure is None:
            with contextlib.suppress(errors.SymcommError):
                self.synchronize(timeout)
                self.failures.departure.leave()


def _hold_stages(departure: Departure, stages: list[PoolBuffer]) -> None:
    """A group is gone: its peers may still read its staging areas, and write them."""
    if stages:
        hold(stages, departure.is_left_alone)
