"""Point-to-point calls of a process group."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.errors import format_seconds
from symcomm.group.buffers import Buffer, read_buffer, write_buffer
from symcomm.group.chains import Continuation, continued
from symcomm.group.facade import Collectives
from symcomm.group.failure import Site, Status, call_site, explain
from symcomm.group.standoff import ANY_SOURCE, format_message, format_standoff, warn
from symcomm.group.work import Outcome, Timeout, no_thread, to_ns
from symcomm.types import DType

__all__ = ["ANY_SOURCE", "Message", "MessageCalls", "MessageWork", "wait_in_thread"]

STATUS_SIZE = native.STATUS_SIZE


@dataclass
class Message:
    """One entry of a batch: ``Message.send(tensor, peer, tag)`` or ``Message.receive(tensor, peer, tag)``.

    Raises: nothing; ``batch`` checks what it is given."""

    is_send: bool
    tensor: Any
    peer: int
    tag: int = 0

    @classmethod
    def send(cls, tensor: Any, peer: int, tag: int = 0) -> Message:
        return cls(True, tensor, peer, tag)

    @classmethod
    def receive(cls, tensor: Any, peer: int = ANY_SOURCE, tag: int = 0) -> Message:
        return cls(False, tensor, peer, tag)


def wait_in_thread(work: Any, callback: Callable[[], None]) -> None:
    """``callback()`` runs once ``work`` has ended, in a thread that waits for it; here if it has ended already."""
    if work.is_completed():
        callback()
        return
    later = continued(callback)

    def attend() -> None:
        with contextlib.suppress(BaseException):  # exception() returns it
            work.wait()
        later()

    try:
        threading.Thread(target=attend, name="symcomm-future", daemon=True).start()
    except RuntimeError:
        if isinstance(later, Continuation):
            later.cancel()
        raise


class AnyMessageWork(Outcome):
    """What works of messages have in common, wherever the messages go."""

    _group: Any
    _message: Message
    wait: Callable[..., bool]

    @property
    def what(self) -> str:
        return format_message(self._message.is_send, self._message.peer, self._message.tag)

    def misfit(self, sender: int, nbytes: int, dtype: int, buffer: Buffer) -> errors.BadArgumentError:
        return errors.BadArgumentError(
            f"{self.what} on group {self._group.name!r}: rank {sender} sent {nbytes} bytes of {DType(dtype).label}, "
            f"the tensor here has {buffer.nbytes} of {buffer.dtype.label}; make size and dtype equal."
        )

    def _late(self, seconds: float, awaited: Sequence[int], why: str = "") -> errors.DeadlineError:
        """The message was withdrawn, which does not harm the group."""
        return errors.DeadlineError(
            f"{self.what} on group {self._group.name!r} timed out after {format_seconds(seconds)}: "
            f"the other side did not come{f': {why}' if why else ''}. The group can still be used.",
            awaited,
        )

    def result(self) -> list[Any]:
        self.wait()
        return [self._message.tensor]

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """``callback()`` runs once the message has left or arrived, or has failed."""
        wait_in_thread(self, callback)


class MessageWork(AnyMessageWork):
    """A send or receive in flight."""

    def __init__(self, group: Any, message: Message, buffer: Buffer, site: Site):
        self._group = group
        self.op: Any = None  # until it is posted; for good if an interrupt came first
        self._message = message
        self.buffer = buffer
        self._site = site
        self.started = time.monotonic()
        self.outcome: tuple[int, int, int, int] | None = None
        self._error: BaseException | None = None

    def settle(self, outcome: tuple[int, int, int, int]) -> None:
        self.outcome = outcome
        status, peer, got, dtype = outcome
        if status == STATUS_SIZE:
            self._error = self.misfit(peer, got, dtype, self.buffer)
        elif status:
            seconds = time.monotonic() - self.started
            self._error = self._group.fail_with_status(status, self.what, self._site, seconds, explain)
        elif not self._message.is_send:
            self.buffer.finish()

    def wait(self, timeout: Timeout = None) -> bool:
        """Block until the message has left (send) or arrived (receive)."""
        if self.outcome is None:
            given = self._group.timeout_ns if not timeout else to_ns("wait", timeout)
            self._conclude(native.p2p_wait(self.op, given, True), given)
        if self._error is not None:
            raise self._error
        return True

    def _conclude(self, outcome: tuple[int, int, int, int], given_ns: int) -> None:
        """The end of a wait of ``given_ns``. After a time-out that withdrew the message the group stays usable."""
        if outcome[0] != Status.TIMEOUT or self._group.handle.report()["status"]:
            self.settle(outcome)
            return
        self.outcome, peer = outcome, self._message.peer
        awaited = [] if peer == ANY_SOURCE else [peer]
        self._error = self._late(given_ns / 1e9, awaited, format_standoff(self._group, peer))

    def is_completed(self) -> bool:
        if self.outcome is None and self.op is None:
            return False
        if self.outcome is None:
            outcome = native.p2p_wait(self.op, -1, False)
            if outcome[0] == Status.TIMEOUT:
                return False
            self.settle(outcome)
        return True

    def hold(self) -> bool:
        """Whether no message has matched this receive; then none can, until ``resume()``."""
        return native.p2p_hold(self.op)

    def resume(self) -> None:
        native.p2p_resume(self.op)

    def fill(self, status: Status = Status.OK) -> bool:
        """A receive that is held is over: its message came another way, or it was given up. False: it is not held."""
        filled = native.p2p_fill(self.op, status)
        if filled:
            self.outcome = (Status.TIMEOUT, ANY_SOURCE, 0, 0)
        return filled

    @property
    def was_withdrawn(self) -> bool:
        return self.outcome is not None and self.outcome[0] == Status.TIMEOUT

    @property
    def source(self) -> int:
        """The rank a receive's message came from."""
        self.wait()
        assert self.outcome is not None
        return self.outcome[1]


class MessageCalls(Collectives):
    """Mixed into ProcessGroup."""

    handle: native.Group
    arena: Any
    _failure: Any
    _in_flight: list[MessageWork]
    _sweep_at: int
    _keep_lock: threading.Lock
    check_usable: Callable[[], None]

    def send(self, tensor: Any, peer: int, tag: int = 0, timeout: Timeout = None) -> None:
        """Returns once ``tensor`` may be changed again.

        Raises: BadArgumentError, RankFailedError, DeadlineError, GroupUnusableError."""
        if timeout is None and self._failure is None:  # a plain torch tensor: one call of the core
            outcome = self.handle.exchange(True, peer, tag, tensor)
            if type(outcome) is int:
                return
            self._raise_failure(outcome, Message.send(tensor, peer, tag), read_buffer)
        self.check_usable()
        if timeout is not None:
            to_ns("send", timeout)  # a wrong one is refused before anything is sent
        self._post(Message.send(tensor, peer, tag), "send", False).wait(timeout)

    def recv(self, tensor: Any, peer: int = ANY_SOURCE, tag: int = 0, timeout: Timeout = None) -> int:
        """Fill ``tensor`` from ``peer`` (or from whoever sends first); returns the sender's rank.

        Raises: BadArgumentError, RankFailedError, DeadlineError, GroupUnusableError."""
        if timeout is None and self._failure is None:
            outcome = self.handle.exchange(False, peer, tag, tensor)
            if type(outcome) is int:
                return outcome
            self._raise_failure(outcome, Message.receive(tensor, peer, tag), write_buffer)
        self.check_usable()
        if timeout is not None:
            to_ns("recv", timeout)
        work = self._post(Message.receive(tensor, peer, tag), "recv", False)
        work.wait(timeout)
        return work.source

    def _raise_failure(self, outcome: tuple[Any, ...] | None, message: Message, view: Callable[..., Any]) -> None:
        """The result of a message that the core tried; None: it could not, and Python has to look at the tensor."""
        if outcome is None:
            return
        buffer = view("send" if message.is_send else "recv", "tensor", message.tensor)
        work = MessageWork(self, message, buffer, call_site(3))
        work._conclude(outcome, self.timeout_ns)
        work.wait()

    def isend(self, tensor: Any, peer: int, tag: int = 0) -> MessageWork:
        """Start a send; ``wait()`` before changing ``tensor``.

        Raises: BadArgumentError, GroupUnusableError; ``wait()`` raises RankFailedError, DeadlineError."""
        return self._post(Message.send(tensor, peer, tag), "isend", True)

    def irecv(self, tensor: Any, peer: int = ANY_SOURCE, tag: int = 0) -> MessageWork:
        """Start a receive; ``wait()`` before reading ``tensor``.

        Raises: BadArgumentError, GroupUnusableError; ``wait()`` raises RankFailedError, DeadlineError."""
        return self._post(Message.receive(tensor, peer, tag), "irecv", True)

    def batch(self, messages: Sequence[Message]) -> list[MessageWork]:
        """Start several sends and receives at once.

        Raises: BadArgumentError, GroupUnusableError; ``wait()`` raises RankFailedError, DeadlineError."""
        return [self._post(m, "batch", True) for m in messages]

    def on_standoff(self, is_send: bool, peer: int, tag: int) -> None:
        """The core has seen for a second that ``peer`` waits in a collective, and this rank for a message."""
        if words := format_standoff(self, peer, f"rank {self.rank}"):
            warn(self, format_message(is_send, peer, tag), words)

    def _check_message(self, call: str, message: Message) -> None:
        if not isinstance(message, Message):
            fix = "make them with Message.send and Message.receive"
            raise errors.bad_argument(call, "messages", message, "a list of Message", fix)
        lowest = 0 if message.is_send else ANY_SOURCE
        if not isinstance(message.peer, int) or not lowest <= message.peer < self.size:
            also = "" if message.is_send else ", or ANY_SOURCE (-1)"
            refuse = errors.bad_argument if isinstance(message.peer, int) else errors.wrong_type
            raise refuse(call, "peer", message.peer, f"a rank of this group, 0 to {self.size - 1}{also}")
        if not isinstance(message.tag, int) or not -(1 << 63) <= message.tag < 1 << 63:
            refuse = errors.bad_argument if isinstance(message.tag, int) else errors.wrong_type
            raise refuse(call, "tag", message.tag, "a whole number of at most 64 bits")

    def _post(self, message: Message, call: str, background: bool) -> MessageWork:
        self.check_usable()
        self._check_message(call, message)
        buffer = (read_buffer if message.is_send else write_buffer)(call, "tensor", message.tensor)
        site = call_site(3)
        work = MessageWork(self, message, buffer, site)
        if background:  # the core uses the tensor whether or not the caller keeps the work, or ever gets it
            self._keep_message(work)
        try:
            work.op = self.handle.post(
                message.is_send,
                message.peer,
                message.tag,
                buffer.dtype,
                buffer.address,
                buffer.nbytes,
                background,
                self.arena.flight.site(site),
                buffer.written,
            )
        except OSError as error:
            self._in_flight.remove(work)
            raise no_thread("messages that nobody waits for", error) from None
        return work

    def _keep_message(self, work: MessageWork) -> None:
        self._in_flight.append(work)
        if len(self._in_flight) < self._sweep_at or not self._keep_lock.acquire(blocking=False):
            return  # or somebody is already looking; perhaps this very thread, interrupted by a signal handler
        try:
            before = list(self._in_flight)
            self._in_flight[: len(before)] = [w for w in before if not w.is_completed()]
            self._sweep_at = 2 * len(self._in_flight) + 16  # so that a new one does not cost a look at all in flight
        finally:
            self._keep_lock.release()
