"""Messages between two ranks of a group.

The core matches sends and receives in each rank's mailbox, which its peers have mapped. Works say how they ended."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.errors import format_seconds
from symcomm.group.buffers import Buffer, read_buffer, write_buffer
from symcomm.group.chains import Continuation, continued
from symcomm.group.failure import Site, Status, call_site
from symcomm.group.standoff import ANY_SOURCE, format_message, format_standoff
from symcomm.group.state import GroupState
from symcomm.group.work import LOOK, Outcome, Timeout, to_ns
from symcomm.types import DType

__all__ = ["ANY_SOURCE", "LocalMessages", "Message", "MessageWork", "Messages", "wait_in_thread"]

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
    """What all works of messages have in common, on one host and across hosts."""

    wait: Callable[..., bool]

    def __init__(self, message: Message, group_name: str):
        self.message, self._group_name = message, group_name
        self._error: BaseException | None = None

    @property
    def what(self) -> str:
        return format_message(self.message.is_send, self.message.peer, self.message.tag)

    def misfit(self, sender: int, nbytes: int, dtype: int, buffer: Buffer) -> errors.BadArgumentError:
        return errors.BadArgumentError(
            f"{self.what} on group {self._group_name!r}: rank {sender} sent {nbytes} bytes of {DType(dtype).label}, "
            f"the tensor here has {buffer.nbytes} of {buffer.dtype.label}; make size and dtype equal."
        )

    def _late(self, seconds: float, awaited: Sequence[int], why: str = "") -> errors.DeadlineError:
        """The error of a message that was withdrawn at its deadline, which does not harm the group."""
        return errors.DeadlineError(
            f"{self.what} on group {self._group_name!r} timed out after {format_seconds(seconds)}: "
            f"the other side did not come{f': {why}' if why else ''}. The group can still be used.",
            awaited,
        )

    def result(self) -> list[Any]:
        self.wait()
        return [self.message.tensor]

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """``callback()`` runs once the message has left or arrived, or has failed."""
        wait_in_thread(self, callback)


class MessageWork(AnyMessageWork):
    """A send or receive in flight."""

    def __init__(self, state: GroupState, message: Message, buffer: Buffer, site: Site):
        super().__init__(message, state.name)
        self._state = state
        self._group: Any = state.whole()  # held until the message has ended: the caller may not hold the group
        self.op: Any = None  # None until it is posted; for good if an interrupt came first
        self.buffer = buffer
        self._site = site
        self.started = time.monotonic()
        self.outcome: tuple[int, int, int, int] | None = None
        self.kept_in: dict[int, MessageWork] = {}  # what holds this work while the core uses its tensor

    def settle(self, outcome: tuple[int, int, int, int]) -> None:
        self._over(outcome)
        self._group = None
        status, peer, got, dtype = outcome
        if status == STATUS_SIZE:
            self._error = self.misfit(peer, got, dtype, self.buffer)
        elif status:
            seconds = time.monotonic() - self.started
            self._error = self._state.fail_with_status(status, self.what, self._site, seconds)
        elif not self.message.is_send:
            self.buffer.finish()

    def wait(self, timeout: Timeout = None) -> bool:
        """Block until the message has left (send) or arrived (receive)."""
        if self.outcome is None:
            given = self._state.timeout_ns if not timeout else to_ns("wait", timeout)
            self._conclude(native.p2p_wait(self.op, given, True), given)
        if self._error is not None:
            raise self._error
        return True

    def failure_of(self, outcome: tuple[int, int, int, int], given_ns: int) -> BaseException:
        """The error after the core itself waited ``given_ns`` for the message."""
        self._conclude(outcome, given_ns)
        assert self._error is not None
        return self._error

    def _over(self, outcome: tuple[int, int, int, int]) -> None:
        self.outcome = outcome
        self.kept_in.pop(id(self), None)

    def _conclude(self, outcome: tuple[int, int, int, int], given_ns: int) -> None:
        """A wait of ``given_ns`` has ended. After a time-out that withdrew the message the group stays usable."""
        if outcome[0] != Status.TIMEOUT or self._state.handle.report()["status"]:
            self.settle(outcome)
            return
        self._over(outcome)
        peer = self.message.peer
        awaited = [] if peer == ANY_SOURCE else [peer]
        self._error = self._late(given_ns / 1e9, awaited, format_standoff(self._state, peer))

    def is_completed(self) -> bool:
        if self.outcome is None and self.op is None:
            return False
        if self.outcome is None:
            outcome = native.p2p_wait(self.op, LOOK, False)
            if outcome[0] == Status.TIMEOUT:
                return False
            self.settle(outcome)
        return True

    def hold(self) -> bool:
        """Keep messages from matching this receive until ``resume()``. False: one has matched it already."""
        return native.p2p_hold(self.op)

    def resume(self) -> None:
        native.p2p_resume(self.op)

    def fill(self, status: Status = Status.OK) -> bool:
        """End a receive that is held: its message came another way, or it was given up. False: it is not held."""
        filled = native.p2p_fill(self.op, status)
        if filled:
            self._over((Status.TIMEOUT, ANY_SOURCE, 0, 0))
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


class Messages(ABC):
    """The messages of one rank of a group, whatever connects its ranks."""

    def __init__(self, state: GroupState):
        self.state = state

    @abstractmethod
    def post(self, message: Message, call: str, background: bool) -> Any:
        """Start a message that ``call`` asks for. ``background``: the caller may do other things before it waits."""

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether messages are under way."""

    def send(self, tensor: Any, peer: int, tag: int, timeout: Timeout) -> None:
        if timeout is not None:
            to_ns("send", timeout)  # a wrong one is refused before anything is sent
        self.post(Message.send(tensor, peer, tag), "send", False).wait(timeout)

    def recv(self, tensor: Any, peer: int, tag: int, timeout: Timeout) -> int:
        if timeout is not None:
            to_ns("recv", timeout)
        work = self.post(Message.receive(tensor, peer, tag), "recv", False)
        work.wait(timeout)
        return work.source

    def isend(self, tensor: Any, peer: int, tag: int) -> Any:
        return self.post(Message.send(tensor, peer, tag), "isend", True)

    def irecv(self, tensor: Any, peer: int, tag: int) -> Any:
        return self.post(Message.receive(tensor, peer, tag), "irecv", True)

    def batch(self, messages: Sequence[Message]) -> list[Any]:
        return [self.post(m, "batch", True) for m in messages]

    def view(self, message: Message, call: str) -> Buffer:
        """The message's tensor; raises if there is anything wrong with the message, or the group."""
        self.state.check_usable()
        if not isinstance(message, Message):
            fix = "make them with Message.send and Message.receive"
            raise errors.bad_argument(call, "messages", message, "a list of Message", fix)
        lowest = 0 if message.is_send else ANY_SOURCE
        if not isinstance(message.peer, int) or not lowest <= message.peer < self.state.size:
            also = "" if message.is_send else ", or ANY_SOURCE (-1)"
            refuse = errors.bad_argument if isinstance(message.peer, int) else errors.wrong_type
            raise refuse(call, "peer", message.peer, f"a rank of this group, 0 to {self.state.size - 1}{also}")
        if not isinstance(message.tag, int) or not -(1 << 63) <= message.tag < 1 << 63:
            refuse = errors.bad_argument if isinstance(message.tag, int) else errors.wrong_type
            raise refuse(call, "tag", message.tag, "a whole number of at most 64 bits")
        return (read_buffer if message.is_send else write_buffer)(call, "tensor", message.tensor)

    def failure_of(self, outcome: tuple[int, int, int, int], message: Message) -> BaseException:
        """The error of a message that the core sent or received by itself."""
        view, call = (read_buffer, "send") if message.is_send else (write_buffer, "recv")
        work = MessageWork(self.state, message, view(call, "tensor", message.tensor), call_site(2))
        return work.failure_of(outcome, self.state.timeout_ns)

    def after_fork(self) -> None:
        """In a forked child: a thread of the parent may have held a lock."""
        return


class LocalMessages(Messages):
    """The messages of ranks that share memory."""

    def __init__(self, state: GroupState):
        super().__init__(state)
        self._in_flight: dict[int, MessageWork] = {}
        self._sweep_at = 16  # messages in flight
        self._keep_lock = threading.Lock()

    def post(self, message: Message, call: str, background: bool) -> MessageWork:
        buffer, site = self.view(message, call), call_site(3)
        state, work = self.state, MessageWork(self.state, message, buffer, site)
        if background:  # the core uses the tensor whether or not the caller keeps the work, or ever gets it
            self._keep(work)
        try:
            work.op = state.handle.post(
                message.is_send,
                message.peer,
                message.tag,
                buffer.dtype,
                buffer.address,
                buffer.nbytes,
                background,
                state.arena.flight.site(site),
                buffer.written,
            )
        except OSError as error:
            self._in_flight.pop(id(work), None)
            raise errors.no_thread("messages that nobody waits for", error) from None
        return work

    def _keep(self, work: MessageWork) -> None:
        work.kept_in = self._in_flight
        self._in_flight[id(work)] = work
        if len(self._in_flight) < self._sweep_at or not self._keep_lock.acquire(blocking=False):
            return  # or another thread sweeps; perhaps this very one, interrupted by a signal handler
        try:
            for earlier in list(self._in_flight.values()):
                earlier.is_completed()
            self._sweep_at = 2 * len(self._in_flight) + 16  # so that a new one does not cost a look at all in flight
        finally:
            self._keep_lock.release()

    @property
    def is_busy(self) -> bool:
        return bool(self._in_flight)

    def after_fork(self) -> None:
        self._keep_lock = threading.Lock()
