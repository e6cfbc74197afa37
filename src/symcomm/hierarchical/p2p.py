"""Point-to-point messages between ranks of several hosts: eager, or by rendezvous.

Ranks of one host use the mailboxes of their ProcessGroup. Between hosts the sender's control channel sends an envelope;
a small payload travels with it (eager), a large one through the engine, once the receiver has a buffer and has sent
clear-to-send (rendezvous). So the engine never carries anything that nobody waits for, and a receive can be cancelled.
A send may be cancelled while its clear-to-send is in flight: then zeros travel, and the sender says that they are not
the message.
"""

from __future__ import annotations

import ctypes
import itertools
import time
import weakref
from collections import deque
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.group.buffers import Buffer, read_buffer, write_buffer
from symcomm.group.failure import Status
from symcomm.group.p2p import ANY_SOURCE, AnyMessageWork, Message, MessageCalls, MessageWork
from symcomm.group.work import Timeout, to_ns
from symcomm.hierarchical.engines.base import Move, Transfer
from symcomm.hierarchical.frames import EAGER_MAX_BLOCKING
from symcomm.hierarchical.operation import LATE_BYTES
from symcomm.hierarchical.session import ProtocolViolation
from symcomm.types import DType

EAGER_MAX_NONBLOCKING = 4096  # bytes that travel with the envelope
BACKLOG = 1 << 20  # bytes of envelopes that may be queued for a slow receiver
TAG = 1  # of the engine's; collectives use 0
ARRIVING = 10.0  # seconds beyond a deadline, at least, for a message in flight: giving up on it ends the group
CANCELLED_MAX = 4096  # cancelled sends remembered, since their clear-to-send may be in flight
SLICE = 0.002  # seconds between looks at the host's mailbox, for receives from any source


class _Envelope:
    """An incoming message that no receive has matched yet."""

    def __init__(self, sender: int, header: dict[str, Any], payload: bytes | bytearray):
        self.sender, self.number, self.tag = sender, header["number"], header["tag"]
        self.dtype, self.nbytes = header["dtype"], header["nbytes"]
        self.payload = bytes(payload) if header["inline"] else None


class _Remote(AnyMessageWork):
    """One end of a message between hosts."""

    def __init__(self, matcher: MessageMatcher, message: Message, buffer: Buffer):
        self._matcher = matcher
        self._group = matcher.group
        self._message = message
        self._buffer = buffer
        self._started = time.monotonic()
        self.ended = False
        self.moving = False  # the engine has it
        self.moved = False  # and has carried it
        # a receive: whether the engine carries the message, or zeros for a cancelled one, once known
        self.is_real: bool | None = None
        self._error: BaseException | None = None
        self.sender = message.peer

    def end(self, error: BaseException | None = None) -> None:
        """With the group's condition held."""
        self._error, self.ended = error, True
        self._group.cond.notify_all()

    def _awaited(self) -> list[int]:
        return [self.sender] if self.sender != ANY_SOURCE else []

    def wait(self, timeout: Timeout = None) -> bool:
        """Block until the message has left (send) or is there (receive)."""
        seconds = self._group.timeout if not timeout else to_ns("wait", timeout) / 1e9
        if not self._await(time.monotonic() + seconds, seconds):
            self._give_up(seconds)
        self.settle()
        if self._error is not None:
            raise self._error
        return True

    def _await(self, deadline: float, seconds: float, while_moving: bool = False) -> bool:
        """Wait until it ends or cannot any more; with ``while_moving`` only as long as the engine has it."""
        group, gone_since = self._group, 0.0
        with group.cond:
            while not self.ended and group.failures.verdict is None and (self.moving or not while_moving):
                now = time.monotonic()
                if any(group.is_gone(r) for r in self._awaited()):
                    gone_since = gone_since or now  # a receiver may leave before the engine reports completion
                    if not self.moving or now - gone_since >= LATE_BYTES:
                        break
                if now >= deadline and (not self.moving or now >= deadline + max(seconds, ARRIVING)):
                    break
                group.cond.wait(0.05 if gone_since else min(1.0, max(0.001, deadline - now)))
            return self.ended

    def repost(self) -> None:
        """What arrived was not the message."""
        self.moving, self.moved, self.is_real, self.sender = False, False, None, self._message.peer

    def _give_up(self, seconds: float) -> None:
        """Gone, stopped or late. A message that is only late is cancelled, which does not harm the group."""
        group = self._group
        gone = [r for r in self._awaited() if group.is_gone(r)]
        if group.failures.verdict is None and gone:
            group.failures.gone(gone)
        if group.failures.verdict is None and not self._matcher.cancel(self):
            group.failures.late(0, seconds, self._awaited())
        if group.failures.verdict is not None:
            group.await_engine()
        with group.cond:
            if self.ended:
                return
            if group.failures.verdict is not None:
                self.end(group.fail_operation(f"{self.what} on group {group.name!r}", time.monotonic() - self._started))
            else:
                self.end(self._late(seconds, self._awaited()))

    def settle(self) -> None:
        if not self._message.is_send and self._error is None and self._buffer.target is not None:
            self._buffer.finish()
            self._buffer.target = None

    def is_completed(self) -> bool:
        if self.ended:
            self.settle()
        elif self._group.failures.verdict is not None:
            self._give_up(0.0)
        return self.ended

    @property
    def source(self) -> int:
        """The rank a receive's message came from."""
        self.wait()
        return self.sender


class _Local(AnyMessageWork):
    """A message between ranks of one host, with the group's ranks instead of the host's."""

    def __init__(self, group: Any, work: MessageWork, message: Message):
        self._group, self._work, self._message = group, work, message
        self._error: BaseException | None = None

    def wait(self, timeout: Timeout = None) -> bool:
        if self._error is None:
            seconds = to_ns("wait", timeout) / 1e9 if timeout else self._group.timeout
            try:
                return self._work.wait(seconds)
            except errors.BadArgumentError:
                raise
            except errors.SymcommError as error:
                self._error = self._translated(error, seconds)
        raise self._error

    def _translated(self, error: errors.SymcommError, seconds: float) -> BaseException:
        peer, group = self._message.peer, self._group
        if isinstance(error, errors.DeadlineError) and group.local.failure is None:
            return self._late(seconds, [peer])
        if isinstance(error, errors.RankFailedError):
            group.failures.gone([group.layout.here[r] for r in error.ranks])
        elif isinstance(error, errors.DeadlineError):
            group.failures.late(0, group.timeout, [peer])
        else:
            group.failures.await_verdict()
        return group.fail_operation(f"{self.what} on group {group.name!r}", time.monotonic() - self._work._started)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        error = self._work.exception()
        if error is not None and self._error is None and isinstance(error, errors.SymcommError):
            self._error = (
                error if isinstance(error, errors.BadArgumentError) else self._translated(error, self._group.timeout)
            )
        return self._error

    @property
    def source(self) -> int:
        self.wait()
        return self._group.layout.here[self._work.source]


class _AnySource(_Remote):
    """A receive from any source. Messages of this host are found by polling, here, while somebody waits."""

    def __init__(self, matcher: MessageMatcher, message: Message, buffer: Buffer, local: MessageWork):
        super().__init__(matcher, message, buffer)
        self._local = local

    def _awaited(self) -> list[int]:
        group = self._group
        living = [r for r in range(group.size) if r != group.rank and not group.is_gone(r)]
        return [] if living else [r for r in range(group.size) if r != group.rank]

    def look(self) -> bool:
        """Whether it has completed: from this host, or (after cancelling the receive there) from another."""
        if self.ended or self.moving:
            return self.ended
        if self._local.is_completed():
            self._matcher.forget(self)
            with self._group.cond:
                error = _Local(self._group, self._local, self._message).exception()
                if error is None:
                    self.sender = self._group.layout.here[self._local.source]
                    self._buffer.target = None  # the host's own receive has filled it
                self.end(error)
            return True
        if self._matcher.has_match(self):
            outcome = native.p2p_wait(self._local.op, 1, True)
            if outcome[0] == Status.TIMEOUT:
                self._local.outcome = outcome
                self._matcher.match(self)
            else:
                self._local.settle(outcome)
        return self.ended

    def wait(self, timeout: Timeout = None) -> bool:
        seconds = self._group.timeout if not timeout else to_ns("wait", timeout) / 1e9
        deadline = time.monotonic() + seconds
        while not self.look():
            if self.moving and not self._await(deadline, seconds, while_moving=True) and self.moving:
                self._give_up(seconds)
                break
            left = deadline - time.monotonic()
            is_alone = any(self._group.is_gone(r) for r in self._awaited())
            if left <= 0 or is_alone or self._group.failures.verdict is not None:
                outcome = native.p2p_wait(self._local.op, 1, True)
                if outcome[0] != Status.TIMEOUT:
                    self._local.settle(outcome)
                    continue
                self._give_up(seconds)
                break
            with self._group.cond:
                self._group.cond.wait(SLICE)
        self.settle()
        if self._error is not None:
            raise self._error
        return True

    def repost(self) -> None:
        super().repost()
        m = self._message
        self._local = self._group.local._post(Message(False, m.tensor, ANY_SOURCE, m.tag), "recv", True)

    def is_completed(self) -> bool:
        return self.look() and super().is_completed()


class MessageMatcher:
    """Matches a rank's messages to and from other hosts. All state is guarded by the group's ``cond``."""

    def __init__(self, group: Any):
        self._ref = weakref.ref(group)
        self._numbers = itertools.count()
        self._sends: dict[int, _Remote] = {}  # envelope sent, waiting for clear-to-send
        self._cancelled: dict[int, tuple[int, int]] = {}  # (receiver, bytes): its clear-to-send may be in flight
        self._posted: list[_Remote] = []  # receives without an envelope
        self._incoming: dict[tuple[int, int], _Remote] = {}  # by sender and number: clear-to-send sent
        self._unexpected: deque[_Envelope] = deque()  # envelopes without a receive

    @property
    def group(self) -> Any:
        return self._ref()

    # --- sending ----------------------------------------------------------------------------------------------

    def send(self, message: Message, buffer: Buffer, eager_max: int) -> _Remote:
        work, group = _Remote(self, message, buffer), self.group
        number, nbytes = next(self._numbers), buffer.nbytes
        inline = nbytes <= eager_max
        to = group.endpoint(message.peer)
        header = {
            "kind": "envelope", "number": number, "tag": message.tag, "dtype": int(buffer.dtype), "nbytes": nbytes,
            "inline": inline,
        }  # fmt: skip
        payload = native.peek(buffer.address, nbytes) if inline and nbytes else b""
        if inline:
            self._throttle(to.nonce)
        else:
            with group.cond:
                self._sends[number] = work
        if group.tell(message.peer, header, payload) and inline:  # otherwise its wait finds the rank gone
            with group.cond:
                work.end()
        return work

    def _throttle(self, nonce: str) -> None:
        """Bound the envelopes that are queued for a receiver that does not read."""
        deadline = time.monotonic() + self.group.timeout
        while self.group.control.backlog(nonce) > BACKLOG and time.monotonic() < deadline:
            time.sleep(0.001)

    def on_clear_to_send(self, rank: int, header: dict[str, Any]) -> None:
        """The receiver has a buffer, and its engine waits: if the message was cancelled meanwhile, zeros go there."""
        number = header["number"]
        with self.group.cond:
            work = self._sent_to(rank, number)
            expected = self._cancelled.pop(number, None) if work is None else (rank, work._buffer.nbytes)
            if expected != (rank, header["nbytes"]):
                raise ProtocolViolation(f"made a place of {header['nbytes']} bytes for a message that it was not sent")
            self.group.tell(rank, {"kind": "sending", "number": number, "real": work is not None})
            if work is None:
                zeros = (ctypes.c_uint8 * header["nbytes"])()
                buffer = Buffer(ctypes.addressof(zeros), len(zeros), DType.UINT8, zeros)
                work = _Remote(self, Message.send(zeros, rank), buffer)
            self._move(work, rank)

    def _sent_to(self, rank: int, number: int) -> _Remote | None:
        """The message that ``rank`` answers, no longer waiting for an answer; None when it was cancelled."""
        work = self._sends.get(number)
        if work is not None and work._message.peer != rank:
            raise ProtocolViolation("answered a message that was sent to another rank")
        return self._sends.pop(number, None)

    # --- receiving --------------------------------------------------------------------------------------------

    def receive(self, work: _Remote) -> _Remote:
        with self.group.cond:
            if isinstance(work, _AnySource) or not self.match(work):
                self._posted.append(work)
        return work

    def on_envelope(self, rank: int, header: dict[str, Any], payload: bytes | bytearray) -> None:
        envelope = _Envelope(rank, header, payload)
        with self.group.cond:
            if (rank, envelope.number) in self._incoming:
                raise ProtocolViolation(f"announced message {envelope.number} twice")
            for work in self._posted:
                if not isinstance(work, _AnySource) and _matches(work, envelope):
                    self._posted.remove(work)
                    self._accept(work, envelope)
                    return
            self._unexpected.append(envelope)
            self.group.cond.notify_all()  # for receives from any source

    def has_match(self, work: _Remote) -> bool:
        with self.group.cond:
            return any(_matches(work, envelope) for envelope in self._unexpected)

    def match(self, work: _Remote) -> bool:
        with self.group.cond:
            envelope = next((item for item in self._unexpected if _matches(work, item)), None)
            if envelope is None:
                return False
            self._unexpected.remove(envelope)
            self.forget(work)
            self._accept(work, envelope)
            return True

    def forget(self, work: _Remote) -> None:
        with self.group.cond:
            if work in self._posted:
                self._posted.remove(work)

    def _accept(self, work: _Remote, envelope: _Envelope) -> None:
        work.sender = envelope.sender
        buffer = work._buffer
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
        """The sender says whether what it sends is the message."""
        with self.group.cond:
            if (work := self._incoming.get((rank, header["number"]))) is not None:
                work.is_real = header["real"]
                self._received(work, rank, header["number"])

    def _received(self, work: _Remote, rank: int, number: int) -> None:
        """Once the engine is done, and we know what it carried, the receive ends or is posted again."""
        if not work.moved or work.is_real is None:
            return
        del self._incoming[rank, number]
        if work.is_real:
            work.end()
        else:
            work.repost()
            self.receive(work)
            self.group.cond.notify_all()

    def on_refused(self, rank: int, header: dict[str, Any]) -> None:
        """The receiver's buffer had another size: for the sender the message is done."""
        with self.group.cond:
            work = self._sent_to(rank, header["number"])
            self._cancelled.pop(header["number"], None)
            if work is not None:
                work.end()

    def _move(self, work: _Remote, rank: int, number: int = 0) -> None:
        """Both ends are ready: let the engine carry it. Both sides start moves in the order of clear-to-sends."""
        work.moving = True
        group, message = self.group, work._message
        move = Move(message.is_send, work._buffer.address, work._buffer.nbytes, rank, TAG)

        def then(transfer: Transfer) -> None:
            if transfer.error is not None:
                group.on_transfer_error(transfer)
                return
            with group.cond:
                work.moved = True
                if message.is_send:
                    work.end()
                else:
                    self._received(work, rank, number)

        group.engine.start([move], then)

    # --- cancelling -------------------------------------------------------------------------------------------

    def cancel(self, work: _Remote) -> bool:
        """Cancel a message that is not matched yet; False when it is in flight."""
        with self.group.cond:
            if work.ended or work in self._posted:
                self.forget(work)
                return True
            for number, other in list(self._sends.items()):
                if other is work:
                    del self._sends[number]
                    self._cancelled[number] = (work._message.peer, work._buffer.nbytes)
                    if len(self._cancelled) > CANCELLED_MAX:
                        del self._cancelled[next(iter(self._cancelled))]
                    self.group.tell(work._message.peer, {"kind": "cancelled", "number": number})
                    return True
            return not work.moving

    def on_cancelled(self, rank: int, header: dict[str, Any]) -> None:
        with self.group.cond:
            for envelope in self._unexpected:
                if envelope.sender == rank and envelope.number == header["number"]:
                    self._unexpected.remove(envelope)
                    return


def _matches(work: _Remote, envelope: _Envelope) -> bool:
    m = work._message
    return m.tag == envelope.tag and m.peer in (ANY_SOURCE, envelope.sender)


class HierarchicalMessages(MessageCalls):
    """Mixed into HierarchicalGroup."""

    local: Any
    layout: Any
    matcher: MessageMatcher

    def send(self, tensor: Any, peer: int, tag: int = 0, timeout: Timeout = None) -> None:
        """Returns once ``tensor`` may be changed again."""
        if timeout is not None:
            to_ns("send", timeout)
        self._post(Message.send(tensor, peer, tag), "send", True, EAGER_MAX_BLOCKING).wait(timeout)

    def recv(self, tensor: Any, peer: int = ANY_SOURCE, tag: int = 0, timeout: Timeout = None) -> int:
        """Fill ``tensor`` from ``peer`` (or from whoever sends first); returns the sender's rank."""
        if timeout is not None:
            to_ns("recv", timeout)
        work = self._post(Message.receive(tensor, peer, tag), "recv", True)
        work.wait(timeout)
        return work.source

    def _post(self, message: Message, call: str, background: bool, eager_max: int = EAGER_MAX_NONBLOCKING) -> Any:
        self.check_usable()
        self._check_message(call, message)
        buffer = (read_buffer if message.is_send else write_buffer)(call, "tensor", message.tensor)
        here = self.layout.host_of.get(message.peer) == self.layout.host
        if here or message.peer == ANY_SOURCE:
            peer = self.layout.local_of[message.peer] if here else ANY_SOURCE
            local = self.local._post(Message(message.is_send, message.tensor, peer, message.tag), call, True)
            if here:
                return _Local(self, local, message)
            return self.matcher.receive(_AnySource(self.matcher, message, buffer, local))
        if message.is_send:
            return self.matcher.send(message, buffer, eager_max)
        return self.matcher.receive(_Remote(self.matcher, message, buffer))
