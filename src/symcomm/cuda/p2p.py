"""Point-to-point messages of CUDA tensors.

The bytes of a message are staged in memory that the receiver can open. An envelope between the hosts says where; it
also provides order, tags, any-source receives, deadlines and liveness. The sender's stream counts up in its own flag
words when the bytes are there. The receiver's stream waits for that, copies, and acknowledges in the same block. Only
then is the memory reused, whatever fails meanwhile. So two ranks can talk without the others of their group.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from symcomm import errors
from symcomm._core import native
from symcomm.cuda import devices
from symcomm.cuda.departure import Departure
from symcomm.cuda.driver import HANDLE_BYTES, driver
from symcomm.cuda.failure import CudaFailures, explain_cuda_errors, failures_of
from symcomm.cuda.flag_words import LINE, is_behind, register_with_gpu
from symcomm.cuda.pool import PoolBuffer, hold, opened, pool_of
from symcomm.cuda.tensor_views import TensorView, tensor_view, torch_stream
from symcomm.cuda.watchdog import Outstanding
from symcomm.cuda.work import StreamWork
from symcomm.group.p2p import ANY_SOURCE
from symcomm.group.process_group import ProcessGroup
from symcomm.group.work import Timeout, to_ns
from symcomm.memory.heap import PAGE
from symcomm.types import DType

SLOTS = 1024  # messages in flight from one rank
WORDS = 8  # of 64 bits in an envelope, before the handle
MARK = 0x53594D47  # tells an envelope from a message of host memory


def cuda_messages(core: ProcessGroup, device: int) -> CudaMessages:
    """A rank's messages on a GPU, made on first use, by it alone."""
    if (made := core.attached.get(("CudaMessages", device))) is None:
        devices.need_cuda("messages of CUDA tensors")
        with devices.current(device):
            made = core.attached["CudaMessages", device] = CudaMessages(core, device)
    return made


_living: weakref.WeakSet[CudaMessages] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    for messages in list(_living):
        with contextlib.suppress(BaseException):
            messages.finish()


class _MessageFlags:
    """A sender's flag words, in 32-bit words: 16 * r, how many messages are there for rank r; 16 * W + s, which message
    of slot s has been taken. It lies in the sender's arena, which receivers have mapped."""

    def __init__(self, host: int, world: int, owner: Any):
        nbytes = self.nbytes(world)
        self.words = (ctypes.c_uint32 * (nbytes // 4)).from_address(host)
        self._gpu = register_with_gpu(host, nbytes, owner)
        self._world = world

    @staticmethod
    def nbytes(world: int) -> int:
        return -(-4 * (LINE * world + SLOTS) // PAGE) * PAGE

    def sent(self, rank: int) -> int:
        """Where GPUs find the number of messages for ``rank``."""
        return self._gpu + 4 * LINE * rank

    def taken(self, slot: int) -> int:
        return self._gpu + 4 * (LINE * self._world + slot)

    def has_sent(self, rank: int, count: int) -> bool:
        return not is_behind(self.words[LINE * rank], count)

    def set_sent(self, rank: int, count: int) -> None:
        self.words[LINE * rank] = count & 0xFFFFFFFF

    def was_taken(self, slot: int, number: int) -> bool:
        return not is_behind(self.words[LINE * self._world + slot], number)


class _Sent(NamedTuple):
    """A message that was not taken yet."""

    memory: PoolBuffer
    number: int
    peer: int


def _hold_unreceived(departure: Departure, flags: _MessageFlags, in_flight: dict[int, _Sent]) -> None:
    """Called when a rank's CudaMessages are gone: receivers may still read messages that they have not received."""

    def is_free() -> bool:
        dead = departure.dead()
        for slot, sent in list(in_flight.items()):
            if sent.peer in dead or flags.was_taken(slot, sent.number):
                del in_flight[slot]
        return not in_flight

    if in_flight:
        hold(in_flight, is_free)


class CudaMessages:
    """Messages from and to one rank of a group, in one GPU's memory."""

    def __init__(self, core: ProcessGroup, device: int):
        import torch

        torch.cuda._lazy_init()
        driver().enter(device)
        self.core = core
        self.rank, self.size, self.name, self.device = core.rank, core.size, core.name, device
        nbytes = _MessageFlags.nbytes(core.size)
        self._offset = core.arena.allocate(nbytes)
        native.poke(core.arena.base + self._offset, bytes(nbytes))
        self._flags = _MessageFlags(core.peers[core.rank].base + self._offset, core.size, core.peers[core.rank])
        self._peer_flags: dict[tuple[int, int], _MessageFlags] = {}  # (rank, offset in its arena)
        self.failures: CudaFailures = failures_of(core, device)
        self._lock = threading.RLock()
        self._sent = [0] * core.size  # messages put out for each rank
        self._in_flight: dict[int, _Sent] = {}  # by slot
        self._envelopes: dict[int, Any] = {}  # by slot: what was sent to the receiver's host
        self._number = 0  # messages of this rank so far, to tell a slot's users apart
        self._last_sender: Any = None  # the stream of the last one
        _living.add(self)
        weakref.finalize(self, _hold_unreceived, self.failures.departure, self._flags, self._in_flight).atexit = False
        core.before_leaving.append(self.finish)

    # --- sending ----------------------------------------------------------------------------------------------

    def send(self, tensor: Any, peer: int, tag: int = 0, timeout: Timeout = None) -> None:
        """When this returns, later work in the current stream may change ``tensor``."""
        self.isend(tensor, peer, tag).wait(timeout)

    @explain_cuda_errors
    @devices.on_its_device
    def isend(self, tensor: Any, peer: int, tag: int = 0) -> CudaSend:
        import torch

        self.failures.check_usable("isend")
        if not isinstance(peer, int) or not 0 <= peer < self.size:
            raise errors.bad_argument("isend", "peer", peer, f"a rank of this group, 0 to {self.size - 1}")
        source = tensor_view("isend", "tensor", tensor, self.device)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        with self._lock:
            slot = self._free_slot()
            memory = pool_of(self.device).allocate(source.nbytes)
            self._number += 1
            self._sent[peer] += 1
            self._in_order_with_others(stream)
            if source.nbytes:
                driver().copy(memory.address, source.address, source.nbytes, stream)
            driver().write(stream, self._flags.sent(peer), self._sent[peer] & 0xFFFFFFFF)
            envelope = self._envelope_of(memory, source, slot, self._sent[peer])
            self._envelopes[slot] = (self.core.isend(envelope, peer, tag), envelope)
            self._in_flight[slot] = _Sent(memory, self._number, peer)
            copied = torch.cuda.Event()
            copied.record(torch_stream(stream, self.device))
        return CudaSend(self.failures, tensor, copied, self.device)

    def _in_order_with_others(self, stream: int) -> None:
        """Have this stream wait for the last sender's: messages are counted in order."""
        import torch

        if self._last_sender not in (None, stream):
            event = torch.cuda.Event()
            event.record(torch_stream(self._last_sender, self.device))
            event.wait(torch_stream(stream, self.device))
        self._last_sender = stream

    def _forget_taken(self) -> None:
        for slot, sent in list(self._in_flight.items()):
            if self._flags.was_taken(slot, sent.number):
                del self._in_flight[slot], self._envelopes[slot]

    def finish(self, timeout: float = 10.0) -> None:
        """Called before this rank leaves: wait until its messages were taken, since they lie in its memory."""
        end = time.monotonic() + timeout
        while self.core.failure is None and time.monotonic() < end:
            with self._lock:
                self._forget_taken()
                if not self._in_flight or self.failures.gone():
                    return
            time.sleep(0.001)

    def _free_slot(self) -> int:
        self._forget_taken()
        slot = next((s for s in range(SLOTS) if s not in self._in_flight), SLOTS)
        if slot == SLOTS:
            raise errors.ResourceError(
                f"isend on group {self.name!r}: {SLOTS} messages of this rank have not been received yet; "
                "receive some, or send less at once."
            )
        return slot

    def _envelope_of(self, memory: PoolBuffer, source: TensorView, slot: int, count: int) -> Any:
        """The envelope for the receiver's host."""
        import torch

        numbers = [MARK, source.nbytes, int(source.dtype), memory.offset, slot, self._number, count, self._offset]
        head = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
        return torch.cat([head, torch.frombuffer(bytearray(memory.block.handle), dtype=torch.uint8)])

    # --- receiving --------------------------------------------------------------------------------------------

    def recv(self, tensor: Any, peer: int = ANY_SOURCE, tag: int = 0, timeout: Timeout = None) -> int:
        """Fill ``tensor`` from ``peer`` (or from whoever sends first); returns the sender's rank."""
        work = self.irecv(tensor, peer, tag)
        work.wait(timeout)
        return work.source

    @explain_cuda_errors
    def irecv(self, tensor: Any, peer: int = ANY_SOURCE, tag: int = 0) -> CudaReceive:
        import torch

        self.failures.check_usable("irecv")
        target = tensor_view("irecv", "tensor", tensor, self.device, True)
        envelope = torch.zeros(8 * WORDS + HANDLE_BYTES, dtype=torch.uint8)
        native.change_tensors(target.written)
        return CudaReceive(self, target, tensor, self.core.irecv(envelope, peer, tag), envelope)

    @devices.on_its_device
    def take(self, envelope: Any, source: int, target: TensorView, timeout: float) -> Any:
        """Put the receive's copy into the current stream, behind the sender's; returns an event that follows it."""
        import torch

        mark, nbytes, dtype, offset, slot, number, count, flags_offset = (
            envelope[: 8 * WORDS].view(torch.int64).tolist()
        )
        if mark != MARK:
            raise errors.BadArgumentError(
                f"receive from rank {source} on group {self.name!r}: rank {source} sent a CPU tensor, "
                f"the tensor here is on cuda:{self.device}; make both on the same kind of device."
            )
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        driver().enter(self.device)
        flags = self._flags_of(source, flags_offset)
        fits = nbytes == target.nbytes and dtype == target.dtype
        with self._lock:
            driver().wait(stream, flags.sent(self.rank), count & 0xFFFFFFFF)
            if fits and nbytes:
                base = opened(envelope[8 * WORDS :].numpy().tobytes(), f"rank {source}")
                driver().copy(target.address, base + offset, nbytes, stream)
                native.change_tensors(target.written)
            driver().write(stream, flags.taken(slot), number & 0xFFFFFFFF)
        self._watch_receive(source, flags, count, timeout)
        if not fits:
            raise errors.BadArgumentError(
                f"receive on group {self.name!r}: rank {source} sent {nbytes} bytes of {DType(dtype).label}, "
                f"the tensor here has {target.nbytes} of {target.dtype.label}; make size and dtype equal."
            )
        target.finish()
        taken = torch.cuda.Event()
        taken.record(torch_stream(stream, self.device))
        return taken

    def _watch_receive(self, source: int, flags: _MessageFlags, count: int, timeout: float) -> None:
        me = self.rank

        def missing() -> list[int]:
            return [] if flags.has_sent(me, count) else [source]

        def release(_: list[int]) -> None:
            flags.set_sent(me, count)

        what = f"receive from rank {source}"
        self.failures.watchdog.add(Outstanding(what, missing, release, time.monotonic(), timeout))

    def _flags_of(self, rank: int, offset: int) -> _MessageFlags:
        flags = self._peer_flags.get((rank, offset))
        if flags is None:
            peer = self.core.peers[rank]
            flags = self._peer_flags[rank, offset] = _MessageFlags(peer.base + offset, self.size, peer)
        return flags

    def batch(self, messages: Sequence[Any]) -> list[Any]:
        """Start several sends and receives at once."""
        return [(self.isend if m.is_send else self.irecv)(m.tensor, m.peer, m.tag) for m in messages]


class CudaSend:
    """A send: it never waits for its receiver, since the bytes are copied away in the order of the stream."""

    seconds: float | None = 0.0
    stream = error = None

    def __init__(self, failures: CudaFailures, tensor: Any, copied: Any, device: int):
        self._failures = failures
        self._tensor = tensor
        self._copied = copied
        self._device = device

    def wait(self, timeout: Timeout = None) -> bool:
        """When this returns, later work in the current stream may change the tensor."""
        import torch

        self._failures.raise_if_failed()
        try:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        except RuntimeError as error:
            self._failures.raise_cause(error, "send")
        return True

    def is_completed(self) -> bool:
        return self._copied.query()

    is_success = is_completed

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[Any]:
        return [self._tensor]

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        callback()

    when_queued = add_done_callback


class CudaReceive(StreamWork):
    """A receive: ``wait()`` waits for the sender's host, then puts the copy into the current stream."""

    seconds: float | None = None

    def __init__(self, messages: CudaMessages, target: TensorView, tensor: Any, message: Any, envelope: Any):
        super().__init__(messages.failures)
        self._messages = messages
        self._target = target
        self._tensor = tensor
        self._message = message
        self._envelope = envelope
        self._queued = False  # in a stream, or it failed before
        self._lock = threading.Lock()

    def wait(self, timeout: Timeout = None) -> bool:
        if not self._queued:
            self._message.wait(timeout)
        with self._lock:
            if not self._queued:
                self._failures.raise_if_failed()  # before the copy is in a stream, where nothing takes it back
                self._queued = True
                seconds = self._messages.core.timeout if not timeout else to_ns("wait", timeout) / 1e9
                try:
                    self._event = self._messages.take(self._envelope, self._message.source, self._target, seconds)
                    self._failures.add(self)
                except BaseException as error:
                    self._error = error
        try:
            self._raise()
        except RuntimeError as error:
            self._failures.raise_cause(error, f"receive from rank {self._message.source}")
        if not self._is_valid:
            self._failures.raise_if_failed()
        return True

    def _await_queued(self) -> None:
        try:
            self.wait()
        except BaseException as error:
            self._error = self._error or error

    def is_completed(self) -> bool:
        if not self._queued and self._message.is_completed():
            self._await_queued()
        if self._error is None and not self._is_valid and self.has_passed():
            self._check_outcome()
        return self._is_valid or self._error is not None

    def result(self) -> list[Any]:
        self.wait()
        return [self._tensor]

    @property
    def source(self) -> int:
        """The rank that the message came from."""
        return self._message.source

    def when_queued(self, callback: Callable[[], None]) -> None:
        """``callback()`` runs once the copy is in a stream, or has failed."""
        self._when(lambda: self._queued or self._error is not None, callback)
