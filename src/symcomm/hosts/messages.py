"""Point-to-point between ranks of several hosts.

Ranks of one host use the mailboxes of their ProcessGroup. Between hosts the sender's office announces a message; its
bytes travel with the announcement where they are few, otherwise through the engine, once the receiver has a place for
them and has said so. So the engine never carries anything that nobody waits for, and a receive can be withdrawn. A
send may be withdrawn while its receiver says so: then zeros travel, and the sender says that they are not the message.
"""

from __future__ import annotations

import ctypes
import itertools
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.errors import words_for_seconds
from symcomm.group.buffers import Buffer, read_buffer, write_buffer
from symcomm.group.failure import Status
from symcomm.group.messages import ANY_SOURCE, AnyMessageWork, Message, MessageCalls, MessageWork
from symcomm.group.work import Timeout, to_ns
from symcomm.hosts.engine import Move, Transfer
from symcomm.hosts.frames import EAGER
from symcomm.hosts.operation import LATE_BYTES
from symcomm.hosts.session import Refused
from symcomm.types import DType

__all__ = ["HostsMessages", "Mail"]

INLINE = 4096  # bytes that travel with the announcement
BACKLOG = 1 << 20  # bytes of announcements that may wait for a slow receiver
TAG = 1  # of the engine's; collectives use 0
ARRIVING = 10.0  # seconds beyond a deadline, at least, for a message that has set out: to give up on it ends the group
WITHDRAWN = 4096  # sends remembered, since a receiver that has not heard yet may make a place for them
SLICE = 0.002  # seconds between looks at the host's mailbox, for receives from anybody


class _Letter:
    """A message that was announced to us and not taken yet."""

    def __init__(self, sender: int, header: dict[str, Any], payload: bytes | bytearray):
        self.sender, self.number, self.tag = sender, header["number"], header["tag"]
        self.dtype, self.nbytes = header["dtype"], header["nbytes"]
        self.payload = bytes(payload) if header["inline"] else None


def _words_for(m: Message) -> str:
    peer = "any rank" if m.peer == ANY_SOURCE else f"rank {m.peer}"
    return f"send to {peer}, tag {m.tag}," if m.is_send else f"receive from {peer}, tag {m.tag},"


class _Remote(AnyMessageWork):
    """One end of a message between hosts."""

    def __init__(self, mail: Mail, message: Message, buffer: Buffer):
        self._mail = mail
        self._group = mail.group
        self._message = message
        self._buffer = buffer
        self._started = time.monotonic()
        self.ended = False
        self.moving = False  # the engine has it
        self.moved = False  # and has carried it
        self.is_real: bool | None = None  # a receive: whether what the engine carries is the message, once we know
        self.error: BaseException | None = None
        self.sender = message.peer

    @property
    def what(self) -> str:
        return _words_for(self._message)

    def end(self, error: BaseException | None = None) -> None:
        """With the group's news held."""
        self.error, self.ended = error, True
        self._group.news.notify_all()

    def _awaited(self) -> list[int]:
        return [self.sender] if self.sender != ANY_SOURCE else []

    def wait(self, timeout: Timeout = None) -> bool:
        """Block until the message has left (send) or is there (receive)."""
        seconds = self._group.timeout if not timeout else to_ns("wait", timeout) / 1e9
        if not self._await(time.monotonic() + seconds, seconds):
            self._give_up(seconds)
        self._settle()
        if self.error is not None:
            raise self.error
        return True

    def _await(self, deadline: float, seconds: float, while_moving: bool = False) -> bool:
        """Until it ends or there is no hope; with ``while_moving`` only as long as the engine has it."""
        group, gone_since = self._group, 0.0
        with group.news:
            while not self.ended and group.trouble.verdict is None and (self.moving or not while_moving):
                now = time.monotonic()
                if any(group.is_gone(r) for r in self._awaited()):
                    gone_since = gone_since or now  # a receiver that has everything may leave before the engine says so
                    if not self.moving or now - gone_since >= LATE_BYTES:
                        break
                if now >= deadline and (not self.moving or now >= deadline + max(seconds, ARRIVING)):
                    break
                group.news.wait(0.05 if gone_since else min(1.0, max(0.001, deadline - now)))
            return self.ended

    def again(self) -> None:
        """What came was not the message."""
        self.moving, self.moved, self.is_real, self.sender = False, False, None, self._message.peer

    def _give_up(self, seconds: float) -> None:
        """Gone, stopped or late. A message that is only late is withdrawn, which does not harm the group."""
        group = self._group
        gone = [r for r in self._awaited() if group.is_gone(r)]
        if group.trouble.verdict is None and gone:
            group.trouble.gone(gone)
        if group.trouble.verdict is None and not self._mail.withdraw(self):
            group.trouble.late(0, seconds, self._awaited())
        if group.trouble.verdict is not None:
            group.await_engine()
        with group.news:
            if self.ended:
                return
            if group.trouble.verdict is not None:
                self.end(group._fail(f"{self.what} on group {group.name!r}", time.monotonic() - self._started))
            else:
                self.end(
                    errors.DeadlineError(
                        f"{self.what} on group {group.name!r} timed out after {words_for_seconds(seconds)}: "
                        "the other side did not come. The group can still be used.",
                        self._awaited(),
                    )
                )

    def _settle(self) -> None:
        if not self._message.is_send and self.error is None and self._buffer.target is not None:
            self._buffer.finish()
            self._buffer.target = None

    def is_completed(self) -> bool:
        if self.ended:
            self._settle()
        elif self._group.trouble.verdict is not None:
            self._give_up(0.0)
        return self.ended

    def is_success(self) -> bool:
        return self.is_completed() and self.error is None

    def exception(self) -> BaseException | None:
        self.is_completed()
        return self.error

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
        m, group = self._message, self._group
        what = f"{_words_for(m)} on group {group.name!r}"
        if isinstance(error, errors.DeadlineError) and group.local._failure is None:
            return errors.DeadlineError(
                f"{what} timed out after {words_for_seconds(seconds)}: the other side did not come. "
                "The group can still be used.",
                [m.peer],
            )
        if isinstance(error, errors.RankFailedError):
            group.trouble.gone([group.layout.here[r] for r in error.ranks])
        elif isinstance(error, errors.DeadlineError):
            group.trouble.late(0, group.timeout, [m.peer])
        else:
            group.trouble.await_news()
        return group._fail(what, time.monotonic() - self._work._started)

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


class _FromAnybody(_Remote):
    """A receive from whoever sends first. Who of this host sends is found by looking, here, when somebody waits."""

    def __init__(self, mail: Mail, message: Message, buffer: Buffer, local: MessageWork):
        super().__init__(mail, message, buffer)
        self._local = local

    def _awaited(self) -> list[int]:
        group = self._group
        living = [r for r in range(group.size) if r != group.rank and not group.is_gone(r)]
        return [] if living else [r for r in range(group.size) if r != group.rank]

    def look(self) -> bool:
        """Whether it is there: from this host, or (after taking the receive back there) from another."""
        if self.ended or self.moving:
            return self.ended
        if self._local.is_completed():
            self._mail.forget(self)
            with self._group.news:
                error = _Local(self._group, self._local, self._message).exception()
                if error is None:
                    self.sender = self._group.layout.here[self._local.source]
                    self._buffer.target = None  # which the host's own receive has filled
                self.end(error)
            return True
        if self._mail.has_letter_for(self):
            outcome = native.p2p_wait(self._local._op, 1, True)
            if outcome[0] == Status.TIMEOUT:
                self._local._outcome = outcome
                self._mail.take_letter(self)
            else:
                self._local._settle(outcome)
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
            if left <= 0 or is_alone or self._group.trouble.verdict is not None:
                outcome = native.p2p_wait(self._local._op, 1, True)
                if outcome[0] != Status.TIMEOUT:
                    self._local._settle(outcome)
                    continue
                self._give_up(seconds)
                break
            with self._group.news:
                self._group.news.wait(SLICE)
        self._settle()
        if self.error is not None:
            raise self.error
        return True

    def again(self) -> None:
        super().again()
        m = self._message
        self._local = self._group.local._post(Message(False, m.tensor, ANY_SOURCE, m.tag), "recv", True)

    def is_completed(self) -> bool:
        return self.look() and super().is_completed()


class Mail:
    """A rank's messages to and from other hosts. Everything is guarded by the group's ``news``."""

    def __init__(self, group: Any):
        self._ref = weakref.ref(group)
        self._numbers = itertools.count()
        self._sends: dict[int, _Remote] = {}  # announced, the receiver has no place yet
        self._withdrawn: dict[int, tuple[int, int]] = {}  # (to whom, bytes): the receiver may have made a place for it
        self._receives: list[_Remote] = []  # no letter yet
        self._coming: dict[tuple[int, int], _Remote] = {}  # by sender and number: what we have a place for
        self._letters: deque[_Letter] = deque()  # no receive yet

    @property
    def group(self) -> Any:
        return self._ref()

    # --- sending ----------------------------------------------------------------------------------------------

    def send(self, message: Message, buffer: Buffer, most_inline: int) -> _Remote:
        work, group = _Remote(self, message, buffer), self.group
        number, nbytes = next(self._numbers), buffer.nbytes
        inline = nbytes <= most_inline
        to = group.office_card(message.peer)
        header = {
            "kind": "letter", "number": number, "tag": message.tag, "dtype": int(buffer.dtype), "nbytes": nbytes,
            "inline": inline,
        }  # fmt: skip
        payload = native.peek(buffer.address, nbytes) if inline and nbytes else b""
        if inline:
            self._hold_back(to.nonce)
        else:
            with group.news:
                self._sends[number] = work
        if group.tell(message.peer, header, payload) and inline:  # otherwise its wait finds the rank gone
            with group.news:
                work.end()
        return work

    def _hold_back(self, nonce: str) -> None:
        """Announcements wait for a receiver that does not read them; not without limit."""
        deadline = time.monotonic() + self.group.timeout
        while self.group.office.backlog(nonce) > BACKLOG and time.monotonic() < deadline:
            time.sleep(0.001)

    def on_clear(self, rank: int, header: dict[str, Any]) -> None:
        """The receiver has a place, and its engine waits: if the message was withdrawn meanwhile, zeros go there."""
        number = header["number"]
        with self.group.news:
            work = self._sent_to(rank, number)
            expected = self._withdrawn.pop(number, None) if work is None else (rank, work._buffer.nbytes)
            if expected != (rank, header["nbytes"]):
                raise Refused(f"made a place of {header['nbytes']} bytes for a message that it was not sent")
            self.group.tell(rank, {"kind": "going", "number": number, "real": work is not None})
            if work is None:
                zeros = (ctypes.c_uint8 * header["nbytes"])()
                buffer = Buffer(ctypes.addressof(zeros), len(zeros), DType.UINT8, zeros)
                work = _Remote(self, Message.send(zeros, rank), buffer)
            self._move(work, rank)

    def _sent_to(self, rank: int, number: int) -> _Remote | None:
        """A message that ``rank`` has an answer to, no longer waiting for one; None when it was withdrawn."""
        work = self._sends.get(number)
        if work is not None and work._message.peer != rank:
            raise Refused("answered a message that was sent to another rank")
        return self._sends.pop(number, None)

    # --- receiving --------------------------------------------------------------------------------------------

    def receive(self, work: _Remote) -> _Remote:
        with self.group.news:
            if isinstance(work, _FromAnybody) or not self.take_letter(work):
                self._receives.append(work)
        return work

    def on_letter(self, rank: int, header: dict[str, Any], payload: bytes | bytearray) -> None:
        letter = _Letter(rank, header, payload)
        with self.group.news:
            if (rank, letter.number) in self._coming:
                raise Refused(f"announced message {letter.number} twice")
            for work in self._receives:
                if not isinstance(work, _FromAnybody) and _fits(work, letter):
                    self._receives.remove(work)
                    self._accept(work, letter)
                    return
            self._letters.append(letter)
            self.group.news.notify_all()  # for receives from anybody

    def has_letter_for(self, work: _Remote) -> bool:
        with self.group.news:
            return any(_fits(work, letter) for letter in self._letters)

    def take_letter(self, work: _Remote) -> bool:
        with self.group.news:
            letter = next((item for item in self._letters if _fits(work, item)), None)
            if letter is None:
                return False
            self._letters.remove(letter)
            self.forget(work)
            self._accept(work, letter)
            return True

    def forget(self, work: _Remote) -> None:
        with self.group.news:
            if work in self._receives:
                self._receives.remove(work)

    def _accept(self, work: _Remote, letter: _Letter) -> None:
        work.sender = letter.sender
        buffer = work._buffer
        if letter.nbytes != buffer.nbytes or letter.dtype != buffer.dtype:
            work.end(
                errors.BadArgumentError(
                    f"{work.what} on group {self.group.name!r}: rank {letter.sender} sent {letter.nbytes} bytes of "
                    f"{DType(letter.dtype).label}, the tensor here has {buffer.nbytes} of {buffer.dtype.label}; "
                    "make size and dtype equal."
                )
            )
            self.group.tell(letter.sender, {"kind": "refused", "number": letter.number})
        elif letter.payload is not None:
            if letter.payload:
                native.poke(buffer.address, letter.payload)
            work.end()
        else:
            self._coming[letter.sender, letter.number] = work
            self.group.tell(letter.sender, {"kind": "clear", "number": letter.number, "nbytes": letter.nbytes})
            self._move(work, letter.sender, letter.number)

    def on_going(self, rank: int, header: dict[str, Any]) -> None:
        """The sender says whether what it sends is the message."""
        with self.group.news:
            if (work := self._coming.get((rank, header["number"]))) is not None:
                work.is_real = header["real"]
                self._received(work, rank, header["number"])

    def _received(self, work: _Remote, rank: int, number: int) -> None:
        """The engine has carried something, or we know what it carries: when both, the receive ends or starts anew."""
        if not work.moved or work.is_real is None:
            return
        del self._coming[rank, number]
        if work.is_real:
            work.end()
        else:
            work.again()
            self.receive(work)
            self.group.news.notify_all()

    def on_refused(self, rank: int, header: dict[str, Any]) -> None:
        """The receiver had a place of another size: for the sender the message is gone."""
        with self.group.news:
            work = self._sent_to(rank, header["number"])
            self._withdrawn.pop(header["number"], None)
            if work is not None:
                work.end()

    def _move(self, work: _Remote, rank: int, number: int = 0) -> None:
        """Both ends are there: let the engine carry it. Both start their moves in one order, that of the clearances."""
        work.moving = True
        group, message = self.group, work._message
        move = Move(message.is_send, work._buffer.address, work._buffer.nbytes, rank, TAG)

        def then(transfer: Transfer) -> None:
            if transfer.error is not None:
                group.trouble_with(transfer)
                return
            with group.news:
                work.moved = True
                if message.is_send:
                    work.end()
                else:
                    self._received(work, rank, number)

        group.engine.start([move], then)

    # --- taking back ------------------------------------------------------------------------------------------

    def withdraw(self, work: _Remote) -> bool:
        """Take a message back that nobody has met yet; False when it is on its way."""
        with self.group.news:
            if work.ended or work in self._receives:
                self.forget(work)
                return True
            for number, other in list(self._sends.items()):
                if other is work:
                    del self._sends[number]
                    self._withdrawn[number] = (work._message.peer, work._buffer.nbytes)
                    if len(self._withdrawn) > WITHDRAWN:
                        del self._withdrawn[next(iter(self._withdrawn))]
                    self.group.tell(work._message.peer, {"kind": "withdrawn", "number": number})
                    return True
            return not work.moving

    def on_withdrawn(self, rank: int, header: dict[str, Any]) -> None:
        with self.group.news:
            for letter in self._letters:
                if letter.sender == rank and letter.number == header["number"]:
                    self._letters.remove(letter)
                    return


def _fits(work: _Remote, letter: _Letter) -> bool:
    m = work._message
    return m.tag == letter.tag and m.peer in (ANY_SOURCE, letter.sender)


class HostsMessages(MessageCalls):
    """Mixed into HostsGroup."""

    local: Any
    layout: Any
    mail: Mail

    def send(self, tensor: Any, peer: int, tag: int = 0, timeout: Timeout = None) -> None:
        """Returns once ``tensor`` may be changed again."""
        if timeout is not None:
            to_ns("send", timeout)
        self._post(Message.send(tensor, peer, tag), "send", True, EAGER).wait(timeout)

    def recv(self, tensor: Any, peer: int = ANY_SOURCE, tag: int = 0, timeout: Timeout = None) -> int:
        """Fill ``tensor`` from ``peer`` (or from whoever sends first); returns the sender's rank."""
        if timeout is not None:
            to_ns("recv", timeout)
        work = self._post(Message.receive(tensor, peer, tag), "recv", True)
        work.wait(timeout)
        return work.source

    def batch(self, messages: Sequence[Message]) -> list[Any]:
        """Start several sends and receives at once."""
        return [self._post(m, "batch", True) for m in messages]

    def _post(self, message: Message, call: str, background: bool, most_inline: int = INLINE) -> Any:
        self._check_usable()
        self._check_message(call, message)
        buffer = (read_buffer if message.is_send else write_buffer)(call, "tensor", message.tensor)
        here = self.layout.host_of.get(message.peer) == self.layout.host
        if here or message.peer == ANY_SOURCE:
            peer = self.layout.local_of[message.peer] if here else ANY_SOURCE
            local = self.local._post(Message(message.is_send, message.tensor, peer, message.tag), call, True)
            if here:
                return _Local(self, local, message)
            return self.mail.receive(_FromAnybody(self.mail, message, buffer, local))
        if message.is_send:
            return self.mail.send(message, buffer, most_inline)
        return self.mail.receive(_Remote(self.mail, message, buffer))
