"""Messages between two ranks of a group.

The core matches sends and receives in each rank's mailbox, which its peers have mapped. Works say how they ended."""

from __future__ import annotations

import contextlib
import threading
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
AT_ONCE = 1  # ns: a wait that ends before it has begun


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

    message: Message
    _group_name: str
    _error: BaseException | None

    def __init__(self, message: Message, group_name: str):
        self.message, self._group_name, self._error = message, group_name, None

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


class MessageWork(native.MessageRequest, AnyMessageWork):
    """A send or receive in flight. The core knows whose it is and what it holds until it has ended.

    ``buffer``: of its tensor; None: the core viewed that itself."""

    __slots__ = ()

    def __init__(self, state: GroupState, message: Message, buffer: Buffer, site: Site):
        super().__init__(state, state.whole(), message.is_send, message.tensor, message.peer, message.tag, site)
        if buffer.owner is not message.tensor:
            self._buffer = buffer

    @property
    def message(self) -> Message:  # type: ignore[override]
        return Message(self.is_send, self.tensor, self.peer, self.tag)

    @property
    def _group_name(self) -> str:  # type: ignore[override]
        return self._state.name

    @property
    def buffer(self) -> Buffer:
        view = read_buffer if self.is_send else write_buffer
        return self._buffer or view("send" if self.is_send else "recv", "tensor", self.tensor)

    def settle(self, outcome: tuple[int, int, int, int]) -> None:
        status, peer, got, dtype = outcome
        if status == STATUS_SIZE:
            self._error = self.misfit(peer, got, dtype, self.buffer)
        elif status:
            self._error = self._state.fail_with_status(status, self.what, self._site, self.age)
        elif self._buffer is not None and not self.is_send:
            self._buffer.finish()
        self._end(outcome)

    def _wait(self, timeout: Timeout) -> bool:
        """``wait(timeout)``, where its end needs more than the core, or the wait has a time of its own."""
        if self.outcome is None:
            given = self._state.timeout_ns if not timeout else to_ns("wait", timeout)
            self._conclude(self._await(given, True), given)
        if self._error is not None:
            raise self._error
        return True

    def failure_of(self, outcome: tuple[int, int, int, int], given_ns: int) -> BaseException:
        """The error after the core itself waited ``given_ns`` for the message."""
        self._conclude(outcome, given_ns)
        assert self._error is not None
        return self._error

    def _conclude(self, outcome: tuple[int, int, int, int], given_ns: int) -> None:
        """A wait of ``given_ns`` has ended. After a time-out that withdrew the message the group stays usable."""
        if outcome[0] != Status.TIMEOUT or self._state.handle.report()["status"]:
            self.settle(outcome)
            return
        awaited = [] if self.peer == ANY_SOURCE else [self.peer]
        self._error = self._late(given_ns / 1e9, awaited, format_standoff(self._state, self.peer))
        self._end(outcome)

    def is_completed(self) -> bool:
        if self.outcome is None:
            if not self.is_posted:
                return False  # an interrupt came first
            outcome = self._await(LOOK, False)
            if outcome[0] == Status.TIMEOUT:
                return False
            self.settle(outcome)
        return True

    def withdraw(self) -> None:
        """A message that is only half here is lost, as any that is given up."""
        outcome = self._await(AT_ONCE, True)
        if outcome[0] == Status.TIMEOUT:
            self._end(outcome)
        else:
            self.settle(outcome)

    def fill(self, status: Status = Status.OK) -> bool:
        """End a receive that is held: its message came another way, or it was given up. False: it is not held."""
        filled = self._fill(status)
        if filled:
            self._end((Status.TIMEOUT, ANY_SOURCE, 0, 0))
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


class LocalMessages(native.SeenMessages, Messages):
    """The messages of ranks that share memory. The core starts those of plain tensors (``isend``, ``irecv``)."""

    def __init__(self, state: GroupState):
        Messages.__init__(self, state)
        self._in_flight: set[MessageWork] = set()
        self._sweep_at = 16  # messages in flight
        self._keep_lock = threading.Lock()
        self._bind(state.handle, state, MessageWork, state.arena.flight.site)

    def _start(self, is_send: bool, tensor: Any, peer: int, tag: int) -> MessageWork:
        return self.post(Message(is_send, tensor, peer, tag), "isend" if is_send else "irecv", True)

    def post(self, message: Message, call: str, background: bool) -> MessageWork:
        buffer, site = self.view(message, call), call_site(3)
        state, work = self.state, MessageWork(self.state, message, buffer, site)
        if background:  # the core uses the tensor whether or not the caller keeps the work, or ever gets it
            self._keep(work)
        number = state.arena.flight.site(site)
        try:
            work.post(
                state.handle, buffer.dtype, buffer.address, buffer.nbytes, background, number, buffer.written
            )  # fmt: skip
        except OSError as error:
            self._in_flight.discard(work)
            raise errors.no_thread("messages that nobody waits for", error) from None
        return work

    def _keep(self, work: MessageWork) -> None:
        work.kept_in = self._in_flight
        self._in_flight.add(work)
        if len(self._in_flight) < self._sweep_at or not self._keep_lock.acquire(blocking=False):
            return  # or another thread sweeps; perhaps this very one, interrupted by a signal handler
        try:
            for earlier in list(self._in_flight):
                earlier.is_completed()
            self._sweep_at = 2 * len(self._in_flight) + 16  # so that a new one does not cost a look at all in flight
        finally:
            self._keep_lock.release()

    @property
    def is_busy(self) -> bool:
        return bool(self._in_flight)

    def after_fork(self) -> None:
        self._keep_lock = threading.Lock()
