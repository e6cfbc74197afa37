"""CudaGroup: the collectives of a process group on tensors in a GPU's memory.

This file has how its ranks meet, and the parts that it owns: executor.py runs its requests, p2p.py sends its messages,
failure.py handles failures."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import time
import weakref
from collections.abc import Sequence
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.cuda import devices, kernels
from symcomm.cuda.departure import Departure
from symcomm.cuda.driver import driver
from symcomm.cuda.executor import CudaExecutor
from symcomm.cuda.failure import failures_of
from symcomm.cuda.flag_words import FlagWords, flag_words_bytes, register_with_gpu
from symcomm.cuda.p2p import CudaMessages, cuda_messages
from symcomm.cuda.pool import PoolBuffer, hold, opened_pieces, pool_of
from symcomm.cuda.recipes import SINGLE_KERNEL, TIME_SLICED, CudaLimits, Recipes
from symcomm.cuda.single_kernel import MOST_RANKS, SingleKernelCollectives, flags_bytes, most_blocks
from symcomm.cuda.staging import Staging
from symcomm.cuda.stream_collectives import StreamBarriers, StreamCollectives
from symcomm.cuda.tensor_views import tensor_view, tensor_view_list, torch_stream
from symcomm.cuda.via_host import HALF_BYTES, STAGE_BYTES, ViaHostCollectives
from symcomm.cuda.watchdog import CollectiveSequence, Outstanding
from symcomm.group.call_hooks import GROUP_CALLS
from symcomm.group.executor import LocalExecutor
from symcomm.group.facade import SUM, GroupCalls
from symcomm.group.process_group import ProcessGroup
from symcomm.group.request import Views
from symcomm.group.torch_layout import gpu_keys
from symcomm.group.work import Timeout, to_ns

_living: weakref.WeakSet[CudaGroup] = weakref.WeakSet()


def device_group(core: ProcessGroup, device: int) -> CudaGroup:
    """The group's CudaGroup for a GPU of this process, made on first use, by all ranks at once."""
    if core.spans_hosts:
        raise errors.ResourceError(
            f"CUDA tensors on group {core.name!r}: its ranks are on several hosts; "
            'use backend "cpu:symcomm,cuda:nccl" between hosts.'
        )
    if (made := core.attached.get(("CudaGroup", device))) is None:
        devices.need_cuda("CudaGroup")
        with devices.current(device):
            made = core.attached["CudaGroup", device] = CudaGroup(core, device)
    return made


@atexit.register
def _finish_all() -> None:
    """Let streams finish: a process that exits loses their outstanding work, for which peers may wait."""
    for group in list(_living):
        with contextlib.suppress(BaseException):
            group.finish()


def device_views(device: int) -> Views:
    """The functions that view tensors on one GPU."""

    def read(call: str, name: str, tensor: Any) -> Any:
        return tensor_view(call, name, tensor, device)

    def write(call: str, name: str, tensor: Any) -> Any:
        return tensor_view(call, name, tensor, device, True)

    def read_list(call: str, name: str, tensors: Any, length: int) -> list[Any]:
        return tensor_view_list(call, name, tensors, length, device)

    def write_list(call: str, name: str, tensors: Any, length: int) -> list[Any]:
        return tensor_view_list(call, name, tensors, length, device, True)

    return Views(read, write, read_list, write_list)


class CudaGroup(GroupCalls):
    """Made by every rank of ``core`` at once, each with the number of its GPU, which may be the same for all."""

    executor: CudaExecutor

    def __init__(self, core: ProcessGroup, device: int, limits: CudaLimits | None = None):
        import torch

        devices.need_cuda("CudaGroup")
        torch.cuda._lazy_init()
        self.core, self.state = core, core.state
        core.interception.add_facade(self, GROUP_CALLS)
        self.rank, self.size, self.name = core.rank, core.size, core.name
        self._call_seen = native.call_unseen
        self.device = device
        self.views = device_views(device)
        native.use_gpu_keys(gpu_keys(torch, device))
        driver().enter(device)
        everyone = self._exchange_info(core, device)
        devices.check_reach(core, device, everyone)
        host = [peer.base + c["flags"] for peer, c in zip(core.peers, everyone, strict=True)]
        self.flag_words = FlagWords(core.rank, core.size, host, list(core.peers))
        self.barriers = StreamBarriers(self.flag_words, driver())
        self.rescue = torch.cuda.Stream(device)  # ends waits of other streams; making one then would wait for them
        self.failures = failures_of(core, device)
        self.failures.departure.flag_words = self.flag_words
        self.failures.watchdog.sequence = CollectiveSequence(self.flag_words, self.barriers)
        self.executor = self._make_executor(everyone, limits)
        _living.add(self)
        stages = self.executor.staging.stages
        weakref.finalize(self, _hold_stages, self.failures.departure, stages).atexit = False
        core.before_leaving.append(self.finish)
        core.barrier()  # nobody's GPU writes a block of flag words that its owner has not cleared

    def _make_executor(self, everyone: list[dict[str, Any]], limits: CudaLimits | None) -> CudaExecutor:
        """Choose how operations are executed, by what the ranks say of their GPUs and processes."""
        core, device = self.core, self.device
        pids, gpus = {c["pid"] for c in everyone}, {c["gpu"] for c in everyone}
        # Ranks that are threads share their default stream, in which one's wait would block the other's signal.
        in_threads = len(pids) < core.size
        self.time_sliced = len(gpus) < core.size and not all(c["mps"] for c in everyone) and len(pids) > 1
        is_single = len(gpus) == 1 and not self.time_sliced and not in_threads
        is_single = is_single and all(c["single_kernel"] for c in everyone)
        self.limits = limits or (TIME_SLICED if self.time_sliced else SINGLE_KERNEL if is_single else CudaLimits())
        self.collectives = (
            self._make_single_kernel() if is_single else StreamCollectives(core.rank, core.size, device, self.barriers)
        )
        # On one GPU, one-shot moves W * (W + 3) times the tensor's bytes, two-shot through staging areas W * 6 times.
        one_shot = len(gpus) == 1 and core.size <= 3
        stages = [peer.base + c["stage"] for peer, c in zip(core.peers, everyone, strict=True)]
        small = functools.cache(functools.partial(_via_host, core, device, self.barriers, self._small_offset, stages))
        small_half = HALF_BYTES if self.time_sliced else -1
        recipes = Recipes(core.rank, core.size, self.limits, one_shot, self.collectives, small, small_half)
        staging = Staging(core.rank, core.size, device, self.limits, self.collectives)
        assert isinstance(core.executor, LocalExecutor)
        return CudaExecutor(core.executor, recipes, staging, self.failures, in_threads)

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

    def watch_wait(
        self, what: str, passed: Any, peers: list[int], words: Sequence[tuple[int, int]], seconds: float
    ) -> None:
        """Have the watchdog look after a stream that waits for ``peers`` until it has passed an event. If they never
        come, it writes the ``words`` that the stream waits for, each an address and a value."""

        def missing() -> list[int]:
            return [] if passed.query() else peers

        def release(_: list[int]) -> None:
            for address, value in words:
                if passed.query():
                    return
                driver().enter(self.device)
                driver().write(self.rescue.cuda_stream, address, value)
                self.rescue.synchronize()

        self.failures.watchdog.add(Outstanding(what, missing, release, time.monotonic(), seconds))

    @functools.cached_property
    def messages(self) -> CudaMessages:
        """This rank's messages, made on first use, which a CUDA graph cannot hold."""
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

    def __repr__(self) -> str:
        return f"<CudaGroup {self.name!r}: rank {self.rank} of {self.size} on cuda:{self.device}>"

    def all_reduce(self, tensor: Any, op: Any = SUM, async_op: bool = False, timeout: Timeout = None) -> Any:
        """Combine ``tensor`` over all ranks, in place."""
        if async_op is False and timeout is None and self.executor.run_fast_path(tensor, op):
            return None
        return super().all_reduce(tensor, op, async_op, timeout)

    # --- the end ----------------------------------------------------------------------------------------------

    @devices.on_its_device
    def synchronize(self, timeout: Timeout = None) -> None:
        """The host waits until the GPU has done all operations of this group; raises if one of them failed."""
        seconds = self.core.timeout if timeout is None else to_ns("synchronize", timeout) / 1e9
        end = time.monotonic() + seconds
        for work in list(self.executor.pending):
            work.await_queued(max(0.001, end - time.monotonic()))
        try:
            self._await_streams(end, seconds)
        except RuntimeError as error:
            self.failures.raise_cause(error, "synchronize")
        self.failures.raise_if_failed()

    def _await_streams(self, end: float, seconds: float) -> None:
        import torch

        with self.executor.lock:
            event = torch.cuda.Event()
            if self.executor.last is not None:
                event.record(torch_stream(self.executor.last, self.device))
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


def _via_host(
    core: ProcessGroup, device: int, barriers: StreamBarriers, offset: int, stages: list[int]
) -> ViaHostCollectives:
    """For small operations of ranks that time-slice a GPU. Built on first use, since it pins memory."""
    core.arena.reserve(offset, STAGE_BYTES)
    for stage, peer in zip(stages, core.peers, strict=True):
        register_with_gpu(stage, STAGE_BYTES, peer)
    return ViaHostCollectives(core.rank, core.size, device, barriers, stages)


def _hold_stages(departure: Departure, stages: list[PoolBuffer]) -> None:
    """Called when a group is gone: peers may still read and write its staging areas."""
    if stages:
        hold(stages, departure.is_left_alone)
