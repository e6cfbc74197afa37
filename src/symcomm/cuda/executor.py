"""CudaExecutor: how requests are executed on a GPU's streams.

An operation synchronizes twice. First the hosts: with the operation's signature, through the group's own core, which
detects mismatches, dead ranks and missed deadlines as it does for host memory, and notes the operation in the flight
recorder. Then the streams, each behind its earlier work. Nothing on the host waits for the GPU.

Besides the signature, hosts may exchange a MemoryInfo: where its tensors are, if they are symmetric and that matters,
and where its new staging area is, when the old one is too small for the operation.
"""

from __future__ import annotations

import array
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from symcomm import errors
from symcomm._core import native
from symcomm.collectives.all_gather import streamed_all_gather
from symcomm.collectives.chunks import Pieces
from symcomm.collectives.plan import Collective, Plan
from symcomm.collectives.select import ON_DEVICE, WITH_INFOS, signature_count
from symcomm.cuda import devices
from symcomm.cuda.driver import driver
from symcomm.cuda.failure import CudaFailures, explain_cuda_errors
from symcomm.cuda.kernels import PACK
from symcomm.cuda.memory_infos import INFO, INFO_BYTES
from symcomm.cuda.recipes import Recipe, Recipes
from symcomm.cuda.staging import NOTHING, Staging
from symcomm.cuda.stream_collectives import PreparedAllReduce, StreamCollectives
from symcomm.cuda.tensor_views import torch_stream
from symcomm.cuda.work import CudaWork
from symcomm.group.executor import Executor, LocalExecutor
from symcomm.group.failure import call_site
from symcomm.group.refusal import Settled
from symcomm.group.request import Request, plain_op
from symcomm.group.work import Timeout, batch_of, to_ns
from symcomm.ops import numbers_of
from symcomm.types import DType, RedOpType

[_ALL_REDUCE] = numbers_of("all_reduce")


class CudaSignature(NamedTuple):
    """What ranks compare before anything happens."""

    collective: Collective
    elements: int
    dtype: int = 0
    redop: int = 0
    root: int = 0


class HostsStep(NamedTuple):
    """What the core runs before anything goes into a stream."""

    plan: Any
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    timeout_ns: int
    batch: Any


class CudaExecutor(Executor):
    """``host``: runs what the hosts do, on the same ranks. ``in_threads``: whether some ranks are threads of one
    process."""

    def __init__(
        self, host: LocalExecutor, recipes: Recipes, staging: Staging, failures: CudaFailures, in_threads: bool
    ):
        import torch

        self.host, self.state, self.name = host, host.state, host.state.name
        self._recipes, self.staging, self.failures = recipes, staging, failures
        self.collectives: Any = recipes.collectives
        self.device = failures.device
        self._watchdog = failures.watchdog
        self._in_threads = in_threads
        self._stream_of, self._captures = torch._C._cuda_getCurrentRawStream, torch._C._cuda_isCurrentStreamCapturing
        self._device_here = torch._C._cuda_getDevice
        self.lock = threading.RLock()
        self.last: int | None = None  # the stream of the last operation
        self._queued = 0  # operations whose hosts have not synchronized yet
        self.pending: deque[CudaWork] = deque()
        self._side_stream: Any = None
        self._fast_paths: dict[Any, Any] = {}  # all_reduces seen before, see run_fast_path()
        self._shown: dict[int, Any] = {}  # by stream: (the event behind its last use of peers' tensors, the stream)

    # --- requests ---------------------------------------------------------------------------------------------

    @explain_cuda_errors
    def execute(self, request: Request, async_op: Any, timeout: Timeout) -> Any:
        """Meet the others, and put the operation into a stream."""
        refusal = request.ask_autograd()
        request.keep_apart(self.state.rank, self.state.size)
        op, signature = request.op, self._signature(request)
        if self._captures():
            return self._capture(request, signature, async_op, timeout)
        recipe = self._recipes.of(request)
        work = self._perform(request, signature, recipe, async_op, timeout)
        if op.number == _ALL_REDUCE and recipe.cached and recipe.symmetric is not None:
            with Settled():
                self._add_fast_path(request, signature, recipe)
        if refusal is not None:
            raise refusal
        return work

    def refuse(self, error: Exception) -> None:
        """Refuse in the core, where ranks meet for operations on the GPU, too."""
        self.host.refuse(error)

    def all_gather_array(
        self, call: str, mine: array.array[Any], dtype: DType, timeout: Timeout, sizes: tuple[int, ...] | None = None
    ) -> array.array[Any]:
        """The hosts meet for this after they have met for all earlier operations, so that the order is kept."""
        for work in list(self.pending):
            work.await_queued(None)
        return self.host.all_gather_array(call, mine, dtype, timeout, sizes)

    def _signature(self, request: Request) -> CudaSignature:
        op = request.op
        elements = signature_count(request.counts(self.state.size)) if op.plan != "barrier" else 0
        collective = Collective[op.plan.upper()]
        return CudaSignature(collective, elements, request.dtype, request.redop if op.reduces else 0, request.root)

    def _plan(self, signature: CudaSignature, with_infos: bool) -> Any:
        """The hosts' part: arrive with the signature; with memory infos, gather them."""

        def make() -> Any:
            s, count, size = signature, signature.elements | ON_DEVICE, self.state.size
            count = count ^ WITH_INFOS if with_infos else count
            plan = Plan(s.collective, self.state.rank, size, count, s.dtype, s.redop, s.root, "arrival")
            if with_infos and size > 1:
                streamed_all_gather(plan, Pieces((INFO_BYTES,) * size, False), self.host.limits)
            return self.host.load_plan(plan)

        return self.host.kept_plan((signature, with_infos), make)

    @devices.on_its_device
    def _perform(
        self, request: Request, signature: CudaSignature, recipe: Recipe, async_op: Any, timeout: Timeout
    ) -> CudaWork | None:
        """Meet, then put the operation into a stream."""
        import torch

        call, need, may_be_direct = request.call, recipe.need, recipe.may_be_direct
        state, staging, recipes = self.state, self.staging, self._recipes
        timeout_ns = state.timeout_ns if timeout is None else to_ns(call, timeout)
        self.failures.check_usable(call)
        before = staging.promised
        half = before if recipes.collectives_for(need) is self.collectives else recipes.small_half
        grow = need > half and half < recipes.limits.most_half and state.size > 1
        if grow:
            staging.promised = staging.grown(need)
        infos = staging.infos() if grow or may_be_direct else None
        new_stage = staging.fill(infos, need if grow else 0, recipe.symmetric) if infos is not None else None
        ins, outs = (infos.ins, infos.outs) if infos is not None else ((), ())
        plan = self._plan(signature, infos is not None)

        def put(stream: int) -> None:
            """Runs when all hosts have synchronized."""
            if infos is not None and grow:
                staging.use(infos, new_stage, self.last)
                self._fast_paths.clear()
            self._order(stream)
            places = staging.symmetric(infos) if infos is not None and may_be_direct else None
            if infos is not None:
                staging.give_back(infos)
            recipe.enqueue(stream, places)
            if places is not None:
                self._note_in_place_use(stream)
            for output in request.outputs:
                if output.target is not None:
                    with torch.cuda.stream(torch_stream(stream, self.device)):
                        output.finish()
            self._note(call, timeout_ns / 1e9)

        if not async_op and not self._in_threads:
            with self.lock:
                if not self._queued:
                    started = time.monotonic()
                    status = state.handle.run(plan, ins, outs, timeout_ns, self.host.site_number(1), request.written)
                    if status:
                        staging.promised = before
                        raise self.state.fail_with_status(status, call, call_site(1), time.monotonic() - started)
                    with Settled():
                        put(torch._C._cuda_getCurrentRawStream(self.device))
                    return None

        def not_put() -> None:
            """Runs when they failed to. Later calls that count on this one are seen to differ by WITH_INFOS."""
            if self._queued == 1:
                staging.promised = before

        step = HostsStep(plan, ins, outs, timeout_ns, batch_of(async_op))
        work = self._submit(request, step, infos, put, not_put)
        if async_op:
            return work
        work.wait()
        return None

    def _capture(self, request: Request, signature: CudaSignature, async_op: Any, timeout: Timeout) -> None:
        """Add to the CUDA graph that is being captured. Hosts compare the call now, and not when it is replayed."""
        state = self.state
        timeout_ns = state.timeout_ns if timeout is None else to_ns(request.call, timeout)
        self.failures.check_usable(request.call, may_be_captured=True)
        can = request.op.name == "all_reduce" and not async_op and state.size > 1 and not self._queued
        redop = RedOpType.SUM if request.redop is RedOpType.PREMUL_SUM else request.redop
        if not can or not self.collectives.can_capture(request.dtype, redop):
            raise errors.CallerError(
                f"{request.call}: a CUDA graph is being captured, which can hold blocking all_reduces of ranks that "
                "share a GPU through MPS, of dtypes and operations that were used before. Call it outside of the graph."
            )
        [source], [out], plan = request.inputs, request.outputs, self._plan(signature, False)
        status = state.handle.run(plan, (), (), timeout_ns, self.host.site_number(1), request.written)
        if status:
            raise self.state.fail_with_status(status, request.call, call_site(1), None)
        stream = self._stream_of(self.device)
        with Settled():
            self.collectives.reduce_captured(request.dtype, redop, source.address, out.address, request.sizes, stream)
            out.finish()
            self.failures.watch_captured()

    # --- calls seen before ------------------------------------------------------------------------------------

    def run_fast_path(self, tensor: Any, op: Any) -> bool:
        """Run a blocking all_reduce of a kind seen before, as fast as we can. False: it has to take the slow path."""
        view = native.view_gpu_tensor(tensor, self.device)
        if view is None:
            return False
        address, count, dtype = view
        try:
            run, plan, site = self._fast_paths[count, dtype, plain_op(op)]
        except (KeyError, TypeError):
            return False
        state, stream = self.state, self._stream_of(self.device)
        try:
            if address % PACK or state.failure is not None or self._device_here() != self.device or self._captures():
                return False
            with self.lock:
                if stream != self.last or self._queued:
                    return False
                native.change_tensors(tensor)
                status = run(state.handle, plan, state.timeout_ns, site, stream, address)
                if status:
                    raise self.state.fail_with_status(status, "all_reduce", call_site(1), None)
                self._note("all_reduce", state.timeout_ns / 1e9)
        except RuntimeError as error:
            self.failures.raise_cause(error, "all_reduce")
        return True

    def _add_fast_path(self, request: Request, signature: CudaSignature, recipe: Recipe) -> None:
        """Let the next call of this kind take the fast path."""
        redop, dtype, [tensor] = RedOpType(signature.redop), request.dtype, request.result
        if not signature.elements or self.state.size == 1 or self._in_threads or redop is RedOpType.PREMUL_SUM:
            return
        if tensor.dtype.is_complex:  # they may be conjugated
            return
        collectives = self._recipes.collectives_for(recipe.need)
        if recipe.may_be_direct:
            run: PreparedAllReduce | None = self._prepare_large(collectives, dtype, redop, signature.elements)
        else:
            run = collectives.prepare(dtype, redop, signature.elements)
        if run is None:
            return
        if len(self._fast_paths) > 1024:
            self._fast_paths.clear()
        plan, site = self._plan(signature, recipe.may_be_direct), self.host.site_number(2)  # of the first of this kind
        assert request.key is not None
        self._fast_paths[signature.elements, int(dtype), request.key[0]] = (run, plan, site)

    def _prepare_large(
        self, collectives: StreamCollectives, dtype: DType, redop: RedOpType, count: int
    ) -> PreparedAllReduce:
        """For tensors that are combined in place if all ranks' are symmetric."""
        staging = self.staging

        def run(handle: Any, plan: Any, timeout_ns: int, site: int, stream: int, address: int) -> int:
            infos = staging.infos()
            INFO.pack_into(infos.mine, 0, *staging.block_of(address), NOTHING, 0)
            status = handle.run(plan, infos.ins, infos.outs, timeout_ns, site, ())
            if status:
                return status
            places = staging.symmetric(infos)
            staging.give_back(infos)
            if places is None:
                collectives.reduce_small(dtype, redop, address, address, count, stream)
            else:
                collectives.reduce_in_place(dtype, redop, places, count, stream)
                self._note_in_place_use(stream)
            return 0

        return run

    # --- streams ----------------------------------------------------------------------------------------------

    def _submit(
        self, request: Request, step: HostsStep, infos: Any, put: Callable[[int], None], fail: Callable[[], None]
    ) -> CudaWork:
        """The hosts synchronize in the core's thread; then it puts the operation into our own stream, or calls
        ``fail``."""
        import torch

        site, begun, call = call_site(1), time.monotonic(), request.call
        work = CudaWork(self, call, request.result, (request, infos, step.plan))
        with self.lock:
            if self._side_stream is None:
                self._side_stream = torch.cuda.Stream(self.device, priority=-1)
            side = self._side_stream
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.device))

            def on_arrival(status: int) -> None:
                try:
                    if status:
                        fail()
                        work.settle(self.state.fail_with_status(status, call, site, time.monotonic() - begun))
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
            number = self.state.arena.flight.site(site)
            try:
                self.state.handle.submit(
                    work.request,
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
        if stream != self.last:
            if self.last is not None:
                import torch

                event = torch.cuda.Event()
                event.record(torch_stream(self.last, self.device))
                event.wait(torch_stream(stream, self.device))
            self.last = self.failures.departure.last_stream = stream
            for stage in self.staging.stages:
                stage.streams.add(stream)

    def _note_in_place_use(self, stream: int) -> None:
        """Note that peers use this rank's tensors, and it theirs, until the stream has passed this point."""
        import torch

        try:
            event, on = self._shown[stream]
        except KeyError:
            event, on = self._shown[stream] = torch.cuda.Event(), torch_stream(stream, self.device)
        event.record(on)
        assert self._watchdog.sequence is not None
        self._watchdog.sequence.last_in_place = self.collectives.barriers.count
        self.failures.departure.touch(event)

    def _note(self, call: str, timeout: float) -> None:
        """Have the watchdog watch what was put into a stream."""
        watchdog = self._watchdog
        assert watchdog.sequence is not None
        watchdog.sequence.what, watchdog.sequence.timeout = call, timeout
        if watchdog.thread is None and self.state.size > 1:
            watchdog.wake()
