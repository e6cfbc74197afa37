"""Point-to-point calls of a DeviceGroup.

The bytes of a message wait in memory that the receiver can open; where, goes to it as a message between the hosts,
which brings order, tags, "from anybody", deadlines and dead ranks with it. The sender's stream counts up when
the bytes are there, the receiver's waits for that, copies, and acknowledges, upon which the memory is used again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from symcomm import errors
from symcomm.gpu.driver import HANDLE_BYTES, driver
from symcomm.gpu.pads import SLOTS, is_behind
from symcomm.gpu.places import Place, place
from symcomm.gpu.pool import Piece, opened, pool_of
from symcomm.gpu.watch import Outstanding
from symcomm.group.messages import ANY_SOURCE
from symcomm.group.work import Timeout, to_ns
from symcomm.types import DType

__all__ = ["DeviceMessages", "DeviceSend", "DeviceReceive"]

WORDS = 8  # of 64 bits in a note, before the handle
MARK = 0x53594D47  # tells a note from a message of host memory


class DeviceMessages:
    """Mixed into DeviceGroup."""

    rank: int
    size: int
    name: str
    device: int
    core: Any
    pads: Any
    _lock: Any
    _watch: Any
    _order: Callable[[int], None]
    _look: Callable[[], None]
    _check_usable: Callable[[str], None]

    def _init_messages(self) -> None:
        self._sent = [0] * self.size  # messages put out for each rank
        self._on_the_way: dict[int, tuple[Piece, int, Any]] = {}  # slot -> memory, its number, the host's message
        self._number = 0  # of messages of this rank, to tell a slot's users apart
        self._last_sender: Any = None  # the stream of the last one

    def send(self, tensor: Any, peer: int, tag: int = 0, timeout: Timeout = None) -> None:
        """``tensor`` may be changed, by what comes later in the current stream, when this returns."""
        self.isend(tensor, peer, tag).wait(timeout)

    def recv(self, tensor: Any, peer: int = ANY_SOURCE, tag: int = 0, timeout: Timeout = None) -> int:
        """Fill ``tensor`` from ``peer`` (or from whoever sends first); returns the sender's rank."""
        work = self.irecv(tensor, peer, tag)
        work.wait(timeout)
        return work.source

    def isend(self, tensor: Any, peer: int, tag: int = 0) -> DeviceSend:
        import torch

        self._check_usable("isend")
        if not isinstance(peer, int) or not 0 <= peer < self.size:
            raise errors.bad_argument("isend", "peer", peer, f"a rank of this group, 0 to {self.size - 1}")
        source = place("isend", "tensor", tensor, self.device)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        with self._lock:
            slot = self._free_slot()
            memory = pool_of(self.device).allocate(source.nbytes)
            self._number += 1
            self._sent[peer] += 1
            self._in_order_with_others(stream)
            if source.nbytes:
                driver().copy(memory.address, source.address, source.nbytes, stream)
            driver().write(stream, self.pads.sent_to(peer), self._sent[peer] & 0xFFFFFFFF)
            note = self._note_of(memory, source, slot, self._sent[peer])
            self._on_the_way[slot] = (memory, self._number, (self.core.isend(note, peer, tag), note))
        return DeviceSend(self, tensor)

    def _in_order_with_others(self, stream: int) -> None:
        """Messages are counted, so the streams they come from follow each other."""
        import torch

        if self._last_sender not in (None, stream):
            where = torch.device("cuda", self.device)
            event = torch.cuda.Event()
            event.record(torch.cuda.ExternalStream(self._last_sender, where))
            event.wait(torch.cuda.ExternalStream(stream, where))
        self._last_sender = stream

    def _free_slot(self) -> int:
        for slot, (_, number, _) in list(self._on_the_way.items()):
            if not is_behind(self.pads.taken(slot), number):
                del self._on_the_way[slot]
        slot = next((s for s in range(SLOTS) if s not in self._on_the_way), SLOTS)
        if slot == SLOTS:
            raise errors.ResourceError(
                f"isend on group {self.name!r}: {SLOTS} messages of this rank have not been received yet; "
                "receive some, or send less at once."
            )
        return slot

    def _note_of(self, memory: Piece, source: Place, slot: int, count: int) -> Any:
        """What the receiver's host is told."""
        import torch

        numbers = [MARK, source.nbytes, int(source.dtype), memory.offset, slot, self._number, count, 0]
        head = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
        return torch.cat([head, torch.frombuffer(bytearray(memory.block.handle), dtype=torch.uint8)])

    def irecv(self, tensor: Any, peer: int = ANY_SOURCE, tag: int = 0) -> DeviceReceive:
        import torch

        self._check_usable("irecv")
        target = place("irecv", "tensor", tensor, self.device, True)
        note = torch.zeros(8 * WORDS + HANDLE_BYTES, dtype=torch.uint8)
        return DeviceReceive(self, target, tensor, self.core.irecv(note, peer, tag), note)

    def _take(self, note: Any, source: int, target: Place, timeout: float) -> None:
        """Put the receive's copy into the current stream, behind the sender's."""
        import torch

        mark, nbytes, dtype, offset, slot, number, count, _ = note[: 8 * WORDS].view(torch.int64).tolist()
        if mark != MARK:
            raise errors.BadArgumentError(
                f"receive from rank {source} on group {self.name!r}: rank {source} sent a CPU tensor, "
                f"the tensor here is on cuda:{self.device}; make both on the same kind of device."
            )
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        pads = self.pads
        driver().enter(self.device)
        with self._lock:
            driver().wait(stream, pads.sent_from(source), count & 0xFFFFFFFF)
            if nbytes == target.nbytes and nbytes:
                base = opened(note[8 * WORDS :].numpy().tobytes(), f"rank {source}")
                driver().copy(target.address, base + offset, nbytes, stream)
            driver().write(stream, pads.taken_by(source, slot), number & 0xFFFFFFFF)

        def missing() -> list[int]:
            return [source] if is_behind(pads.sent(source), count) else []

        self._watch.add(
            Outstanding(
                f"receive from rank {source}", missing, lambda ranks: pads.set_sent(source, count), time.monotonic(),
                timeout,
            )
        )  # fmt: skip
        if nbytes != target.nbytes or dtype != target.dtype:
            raise errors.BadArgumentError(
                f"receive on group {self.name!r}: rank {source} sent {nbytes} bytes of {DType(dtype).label}, "
                f"the tensor here has {target.nbytes} of {target.dtype.label}; make size and dtype equal."
            )
        target.finish()

    def batch(self, messages: Sequence[Any]) -> list[Any]:
        """Start several sends and receives at once."""
        return [(self.isend if m.is_send else self.irecv)(m.tensor, m.peer, m.tag) for m in messages]


class DeviceSend:
    """A send: it never waits for its receiver, since the bytes are copied away in the order of the stream."""

    seconds: float | None = 0.0

    def __init__(self, group: Any, tensor: Any):
        self._group = group
        self._tensor = tensor

    def wait(self, timeout: Timeout = None) -> bool:
        self._group._look()
        return True

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[Any]:
        return [self._tensor]

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        callback()

    when_queued = add_done_callback


class DeviceReceive:
    """A receive: ``wait()`` waits for the sender's host, then puts the copy into the current stream."""

    seconds: float | None = None

    def __init__(self, group: Any, target: Place, tensor: Any, message: Any, note: Any):
        self._group = group
        self._target = target
        self._tensor = tensor
        self._message = message
        self._note = note
        self._done = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: Timeout = None) -> bool:
        self._message.wait(timeout)
        with self._lock:
            if not self._done:
                self._done = True
                seconds = self._group.core.timeout if not timeout else to_ns("wait", timeout) / 1e9
                try:
                    self._group._take(self._note, self._message.source, self._target, seconds)
                except BaseException as error:
                    self._error = error
        if self._error is not None:
            raise self._error
        self._group._look()
        return True

    def is_completed(self) -> bool:
        if not self._done and self._message.is_completed():
            try:
                self.wait()
            except BaseException as error:
                self._error = self._error or error
        return self._done or self._error is not None

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        self.is_completed()
        return self._error

    def result(self) -> list[Any]:
        self.wait()
        return [self._tensor]

    @property
    def source(self) -> int:
        """The rank that the message came from."""
        return self._message.source

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """``callback()`` runs once the message is there, or has failed."""

        def attend() -> None:
            try:
                self.wait()
            except BaseException as error:
                self._error = self._error or error
            callback()

        if self.is_completed():
            callback()
        else:
            threading.Thread(target=attend, name="symcomm-gpu-future", daemon=True).start()

    when_queued = add_done_callback
