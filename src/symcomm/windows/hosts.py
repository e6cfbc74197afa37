"""Windows into CPU tensors of ranks on several hosts.

Ranks of one host write to each other's memory as in memory.py. A put to another host travels over the control channel,
in frames that the target's channel thread copies into place; the target's program takes no part. A signal follows the
puts on the same connection, so it arrives after them.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

from symcomm import errors
from symcomm._core import native
from symcomm.group.buffers import Buffer
from symcomm.group.failure import Status
from symcomm.group.failure_words import peer_late
from symcomm.group.segments import Shortcut, TensorRef
from symcomm.hierarchical.frames import is_number, need
from symcomm.hierarchical.session import ProtocolViolation
from symcomm.windows.memory import HostMemory, no_shortcut

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

KIND = "window"  # of these control messages
FRAME = 1 << 20  # bytes of a put in one frame
BACKLOG = 4 << 20  # bytes that may wait for a slow connection; beyond that, a put waits
SLICE = 0.05  # seconds between checks for lost ranks


class Arrivals:
    """Puts and signals that arrive for one window of this rank, in the control channel's thread, with ``cond`` held."""

    def __init__(self, tensor: torch.Tensor, cond: threading.Condition):
        self._address = tensor.data_ptr()
        self._nbytes = tensor.numel() * tensor.element_size()
        self._memory: Any = tensor.untyped_storage()  # the thread may be writing there when the window is dropped
        self._cond = cond
        self.messages: Counter[int] = Counter()  # frames of puts, and signals, by sender
        self.signals: Counter[int] = Counter()  # signals not taken yet, by sender

    def note(self, rank: int, header: dict[str, Any], payload: bytes | bytearray) -> None:
        start = need(header, "start", is_number) if "start" in header else None
        if (start or 0) + len(payload) > (0 if start is None else self._nbytes):
            raise ProtocolViolation(f"put {len(payload)} bytes at {start} into a window of {self._nbytes}")
        with self._cond:
            if self._memory is None:
                return
            self.messages[rank] += 1
            if start is not None:
                native.poke(self._address + start, bytes(payload))
            else:
                self.signals[rank] += 1
            self._cond.notify_all()

    def close(self) -> None:
        """Write nothing from now on."""
        with self._cond:
            self._memory = None


Inbox = MutableMapping[int, Arrivals]  # by the number of the window; dropped windows get no messages
_inboxes: weakref.WeakKeyDictionary[Any, Inbox] = weakref.WeakKeyDictionary()


def _inbox_of(group: Any) -> Inbox:
    if group not in _inboxes:
        _inboxes[group] = weakref.WeakValueDictionary()
        group.on_control(KIND, partial(deliver, _inboxes[group]))
    return _inboxes[group]


def deliver(inbox: Inbox, rank: int, header: dict[str, Any], payload: bytes | bytearray) -> None:
    """Called in the control channel's thread."""
    arrivals = inbox.get(need(header, "window", is_number))
    if arrivals is not None:
        arrivals.note(rank, header, payload)


class HostsMemory(HostMemory):
    """One window's memory on all ranks of a HierarchicalGroup."""

    def __init__(self, group: Any, tensor: torch.Tensor, number: int):
        super().__init__(group, group.local, tensor)
        self._number = number
        self._sent: Counter[int] = Counter()  # messages, by target
        self._arrivals = Arrivals(tensor, group.cond)
        _inbox_of(group)[number] = self._arrivals  # before any rank can know of it

    def connect(self, infos: Sequence[dict[str, Any]], tensor: TensorRef) -> None:
        self.infos, self.tensor = infos, tensor
        self._segment.connect([infos[r] for r in self.group.layout.here], tensor)

    def shortcuts(self) -> tuple[Shortcut, Shortcut, Shortcut]:
        return no_shortcut, no_shortcut, no_shortcut  # a call first has to find out which host a rank is on

    def is_mapped(self, rank: int) -> bool:
        return self.group.layout.host_of[rank] == self.group.layout.host

    def _here(self, rank: int) -> int:
        """The number in this host's group of a rank of this host."""
        return self.group.layout.local_of[rank]

    def _address_of(self, rank: int) -> int:
        return self._segment.address_of(self._here(rank))

    # --- puts -------------------------------------------------------------------------------------------------

    def put(self, source: Buffer, rank: int, offset: int, seconds: float) -> int:
        start = offset * source.dtype.itemsize
        if self.is_mapped(rank):
            return self._segment.write(self._here(rank), start, source.address, source.nbytes)
        deadline = time.monotonic() + seconds
        for done in range(0, source.nbytes, FRAME):
            if status := self._await_room(rank, deadline):
                return status
            piece = native.peek(source.address + done, min(FRAME, source.nbytes - done))
            if status := self._tell(rank, {"start": start + done}, piece):
                return status
        return Status.OK

    def _tell(self, rank: int, header: dict[str, Any], piece: bytes = b"") -> int:
        self._sent[rank] += 1
        told = self.group.tell(rank, {"kind": KIND, "window": self._number, **header}, piece)
        return Status.OK if told else Status.DEAD

    def _await_room(self, rank: int, deadline: float) -> int:
        """Wait until the connection has taken most of its data."""
        while self.group.backlog(rank) > BACKLOG:
            if status := self._stopped(rank):
                return status
            if time.monotonic() >= deadline:
                return Status.TIMEOUT
            time.sleep(0.001)
        return self._stopped(rank)

    def _stopped(self, rank: int) -> int:
        """A Status: why ``rank`` will not answer any more, or OK."""
        if self.group.failures.verdict is not None:
            return Status.ABORTED
        return Status.DEAD if self.group.is_gone(rank) else Status.OK

    def close(self) -> None:
        """Ranks tell each other how many messages they sent, and wait until all of them have arrived."""
        sent = [self._sent[r] for r in range(self.group.size)]
        told = [json.loads(item) for item in self.group.all_gather_bytes(json.dumps(sent).encode())]
        seconds = self.group.timeout
        deadline = time.monotonic() + seconds
        for rank, counts in enumerate(told):
            with self.group.cond:
                while self._arrivals.messages[rank] < counts[self.group.rank]:
                    status = self._stopped(rank) or (Status.TIMEOUT if time.monotonic() >= deadline else 0)
                    if status:
                        raise self.explain("tensor_deregister", status, rank, seconds)
                    self.group.cond.wait(SLICE)

    def end(self) -> None:
        self._arrivals.close()

    # --- signals ----------------------------------------------------------------------------------------------

    def signal(self, rank: int, seconds: float) -> int:
        if self.is_mapped(rank):
            return self._segment.signal(self._here(rank))
        return self._stopped(rank) or self._tell(rank, {})

    def take(self, peer: int, timeout_ns: int) -> int:
        if self.is_mapped(peer):
            return self._segment.wait_signal(self._here(peer), timeout_ns)
        deadline = time.monotonic() + timeout_ns / 1e9
        with self.group.cond:
            while not self._arrivals.signals[peer]:
                if status := self._stopped(peer):
                    return status
                left = deadline - time.monotonic()
                if left <= 0:
                    return Status.TIMEOUT
                self.group.cond.wait(min(left, SLICE))
            self._arrivals.signals[peer] -= 1
        self.changed()
        return Status.OK

    def explain(self, what: str, status: int, peer: int, seconds: float) -> errors.SymcommError:
        """A call's error. A rank that is gone ends the group, as in every call across hosts; a deadline does not."""
        text, pid = f"{what} on group {self.group.name!r}", self.group.peer_info[peer]["pid"]
        if status == Status.TIMEOUT:
            return peer_late(text, seconds, peer, pid)
        if status in (Status.DEAD, Status.LEFT):
            self.group.failures.gone([peer])
        else:
            self.group.failures.await_verdict()
        return self.group.state.fail_operation(text, 0.0)
