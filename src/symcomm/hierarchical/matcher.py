"""Matches a rank's messages to and from other hosts.

Messages of one sender and tag never overtake each other: envelopes arrive in the order of the sends, and each takes the
first posted receive that fits, from any source or not.

The sender's control channel sends an envelope. A small payload travels with it (eager). A large one goes through the
engine, once the receiver has a buffer and has sent clear-to-send (rendezvous). So the engine carries only messages that
a receiver waits for, and a receive can be cancelled. If a send is cancelled while its clear-to-send is in flight, zeros
travel, and the sender says that they are not the message.

All of that happens in the control channel's thread and the engine's, so the receive's owner need not take part.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import itertools
import threading
import time
import weakref
from collections import deque
from typing import Any

from symcomm._core import native
from symcomm.group.buffers import Buffer
from symcomm.group.p2p import ANY_SOURCE, Message
from symcomm.hierarchical.engines.base import Move, Transfer
from symcomm.hierarchical.message_works import RemoteWork
from symcomm.hierarchical.session import ProtocolViolation
from symcomm.types import DType

BACKLOG = 1 << 20  # bytes of envelopes that may be queued for a slow receiver
TAG = 1  # the engine's tag for messages; collectives use 0
CANCELLED_MAX = 4096  # cancelled sends remembered, since their clear-to-send may be in flight


class _Envelope:
    """An incoming message that no receive has matched yet."""

    def __init__(self, sender: int, header: dict[str, Any], payload: bytes | bytearray):
        self.sender, self.number, self.tag = sender, header["number"], header["tag"]
        self.dtype, self.nbytes = header["dtype"], header["nbytes"]
        self.payload = bytes(payload) if header["inline"] else None


class MessageMatcher:
    """All state is guarded by the group's ``cond``."""

    def __init__(self, group: Any):
        self._ref = weakref.ref(group)
        self._numbers, self._places = itertools.count(), itertools.count()
        self._sends: dict[int, RemoteWork] = {}  # envelope sent, waiting for clear-to-send
        self._cancelled: dict[int, tuple[int, int]] = {}  # (receiver, bytes): its clear-to-send may be in flight
        self._posted: list[RemoteWork] = []  # receives without an envelope, ordered by place
        self._moving: set[RemoteWork] = set()  # messages that the engine carries
        self._incoming: dict[tuple[int, int], RemoteWork] = {}  # by sender and number: clear-to-send sent
        self._unexpected: deque[_Envelope] = deque()  # envelopes without a receive

    @property
    def group(self) -> Any:
        return self._ref()

    # --- sending ----------------------------------------------------------------------------------------------

    def send(self, message: Message, buffer: Buffer, eager_max: int) -> RemoteWork:
        work, group = RemoteWork(self, message, buffer), self.group
        number, nbytes = next(self._numbers), buffer.nbytes
        inline = nbytes <= eager_max
        header = {
            "kind": "envelope", "number": number, "tag": message.tag, "dtype": int(buffer.dtype), "nbytes": nbytes,
            "inline": inline,
        }  # fmt: skip
        payload = native.peek(buffer.address, nbytes) if inline and nbytes else b""
        if inline:
            self._throttle(message.peer)
        else:
            with group.cond:
                self._sends[number] = work
        if group.tell(message.peer, header, payload) and inline:  # otherwise its wait finds the rank gone
            with group.cond:
                work.end()
        return work

    def _throttle(self, rank: int) -> None:
        """Bound the envelopes that are queued for a receiver that does not read."""
        deadline = time.monotonic() + self.group.timeout
        while self.group.backlog(rank) > BACKLOG and time.monotonic() < deadline:
            time.sleep(0.001)

    def on_clear_to_send(self, rank: int, header: dict[str, Any]) -> None:
        """The receiver has a buffer, and its engine waits. If the message was cancelled meanwhile, send zeros."""
        number = header["number"]
        with self.group.cond:
            if self.group.failures.verdict is not None:  # sends have raised, or will
                return
            work = self._sent_to(rank, number)
            expected = self._cancelled.pop(number, None) if work is None else (rank, work.buffer.nbytes)
            if expected != (rank, header["nbytes"]):
                raise ProtocolViolation(f"made a place of {header['nbytes']} bytes for a message that it was not sent")
            self.group.tell(rank, {"kind": "sending", "number": number, "real": work is not None})
            if work is None:
                zeros = (ctypes.c_uint8 * header["nbytes"])()
                buffer = Buffer(ctypes.addressof(zeros), len(zeros), DType.UINT8, zeros)
                work = RemoteWork(self, Message.send(zeros, rank), buffer)
            self._move(work, rank)

    def _sent_to(self, rank: int, number: int) -> RemoteWork | None:
        """The message that ``rank`` answers, which then waits for no answer any more; None if it was cancelled."""
        work = self._sends.get(number)
        if work is not None and work.message.peer != rank:
            raise ProtocolViolation("answered a message that was sent to another rank")
        return self._sends.pop(number, None)

    # --- receiving --------------------------------------------------------------------------------------------

    def receive(self, work: RemoteWork) -> RemoteWork:
        with self.group.cond:
            work.place = next(self._places)
            self._seek(work)
        return work

    def _seek(self, work: RemoteWork) -> None:
        """Find the receive's message among those that have come, or post the receive."""
        envelope = next((item for item in self._unexpected if _matches(work, item)), None)
        if envelope is None:
            bisect.insort(self._posted, work, key=lambda other: other.place)
        elif work.claim():
            self._unexpected.remove(envelope)
            self._accept(work, envelope)

    def on_envelope(self, rank: int, header: dict[str, Any], payload: bytes | bytearray) -> None:
        envelope = _Envelope(rank, header, payload)
        with self.group.cond:
            if (rank, envelope.number) in self._incoming:
                raise ProtocolViolation(f"announced message {envelope.number} twice")
            if self.group.failures.verdict is not None:  # receives have raised, or will
                return
            for work in [work for work in self._posted if _matches(work, envelope)]:
                self._posted.remove(work)
                if work.claim():  # otherwise a message of this host was faster
                    self._accept(work, envelope)
                    return
            self._unexpected.append(envelope)

    def forget(self, work: RemoteWork) -> None:
        """Let no envelope from now on end this receive."""
        with self.group.cond:
            if work in self._posted:
                self._posted.remove(work)

    def on_left(self, rank: int) -> None:
        """Drop messages that a rank only announced before it left: they will not come."""
        with self.group.cond:
            for envelope in [e for e in self._unexpected if e.sender == rank and e.payload is None]:
                self._unexpected.remove(envelope)

    def _accept(self, work: RemoteWork, envelope: _Envelope) -> None:
        work.sender = envelope.sender
        buffer = work.buffer
        if envelope.nbytes != buffer.nbytes or envelope.dtype != buffer.dtype:
            work.end(work.misfit(envelope.sender, envelope.nbytes, envelope.dtype, buffer))
            self.group.tell(envelope.sender, {"kind": "refused", "number": envelope.number})
        elif envelope.payload is not None:
            if envelope.payload:
                native.poke(buffer.address, envelope.payload)
            work.end()
        else:
            self._incoming[envelope.sender, envelope.number] = work
            self.group.tell(
                envelope.sender, {"kind": "clear_to_send", "number": envelope.number, "nbytes": envelope.nbytes}
            )
            self._move(work, envelope.sender, envelope.number)

    def on_sending(self, rank: int, header: dict[str, Any]) -> None:
        """The sender says whether it sends the message, or zeros."""
        with self.group.cond:
            if (work := self._incoming.get((rank, header["number"]))) is not None:
                work.is_real = header["real"]
                self._received(work, rank, header["number"])

    def _received(self, work: RemoteWork, rank: int, number: int) -> None:
        """End a receive, or post it again, once the engine is done and the sender has said what it carried."""
        if not work.moved or work.is_real is None:
            return
        del self._incoming[rank, number]
        self._moving.discard(work)
        if work.is_real:
            work.end()
        else:
            work.repost()
            self._seek(work)
            self.group.cond.notify_all()

    def on_refused(self, rank: int, header: dict[str, Any]) -> None:
        """The receiver's buffer had another size: for the sender the message is done."""
        with self.group.cond:
            work = self._sent_to(rank, header["number"])
            self._cancelled.pop(header["number"], None)
            if work is not None:
                work.end()

    def _move(self, work: RemoteWork, rank: int, number: int = 0) -> None:
        """Both ends are ready: let the engine carry it. Both sides start moves in the order of clear-to-sends."""
        work.moving = True
        self._moving.add(work)
        group, message = self.group, work.message
        move = Move(message.is_send, work.buffer.address, work.buffer.nbytes, rank, TAG)

        def then(transfer: Transfer) -> None:
            if transfer.error is not None:
                self._tell_broken(transfer)
                return
            with group.cond:
                work.moved = True
                if message.is_send:
                    self._moving.discard(work)
                    work.end()
                else:
                    self._received(work, rank, number)

        group.engine.start([move], then)

    def _tell_broken(self, transfer: Transfer) -> None:
        """Report it in another thread: this one may be the channel's, which has to learn first which rank is gone."""
        if self.group.failures.verdict is None:
            tell = threading.Thread(target=self.group.failures.on_transfer_error, args=(transfer,), daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                tell.start()

    @property
    def is_moving(self) -> bool:
        """Whether the engine reads or writes the tensors of messages."""
        with self.group.cond:
            return bool(self._moving)

    # --- cancelling -------------------------------------------------------------------------------------------

    def cancel(self, work: RemoteWork) -> bool:
        """Cancel a message that is not matched yet; False if it is in flight."""
        with self.group.cond:
            if work.ended or work in self._posted:
                self.forget(work)
                return True
            for number, other in list(self._sends.items()):
                if other is work:
                    del self._sends[number]
                    self._cancelled[number] = (work.message.peer, work.buffer.nbytes)
                    if len(self._cancelled) > CANCELLED_MAX:
                        del self._cancelled[next(iter(self._cancelled))]
                    self.group.tell(work.message.peer, {"kind": "cancelled", "number": number})
                    return True
            return not work.moving

    def on_cancelled(self, rank: int, header: dict[str, Any]) -> None:
        with self.group.cond:
            for envelope in self._unexpected:
                if envelope.sender == rank and envelope.number == header["number"]:
                    self._unexpected.remove(envelope)
                    return


def _matches(work: RemoteWork, envelope: _Envelope) -> bool:
    m = work.message
    return m.tag == envelope.tag and m.peer in (ANY_SOURCE, envelope.sender)
