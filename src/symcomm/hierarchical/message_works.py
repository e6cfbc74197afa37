"""The works of messages of a group across hosts: to or from another host, within this host, and from any source.

A receive from any source is in two queues: the mailbox of this host, which the core matches, and the matcher's, for
other hosts. Whichever finds a message for it first must take it out of the other queue. So before the matcher accepts
an envelope it holds the receive in the mailbox (``claim``), in the thread that read the envelope: the receive's owner
may be doing something else.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from symcomm import errors
from symcomm._core import native
from symcomm.group.buffers import Buffer
from symcomm.group.failure import Status
from symcomm.group.p2p import ANY_SOURCE, AnyMessageWork, Message, MessageWork
from symcomm.group.work import Timeout, to_ns
from symcomm.hierarchical.operation import LATE_BYTES

ARRIVING = 10.0  # seconds beyond its deadline, at least, for a message in flight: to give it up ends the group
SLICE = 0.002  # seconds between looks at the host's mailbox, for receives from any source
SOON = 0.05  # seconds between checks for ranks that are gone


class Matcher(Protocol):
    """What works need of hierarchical/matcher.py."""

    @property
    def group(self) -> Any: ...

    def cancel(self, work: RemoteWork) -> bool: ...

    def forget(self, work: RemoteWork) -> None: ...


class RemoteWork(AnyMessageWork):
    """One end of a message between hosts."""

    def __init__(self, matcher: Matcher, message: Message, buffer: Buffer):
        self._matcher = matcher
        self.group = self._group = matcher.group
        super().__init__(message, self._group.name)
        self.buffer = buffer
        self.place = 0  # among the receives of this rank, in the order in which they were posted
        self._started = time.monotonic()
        self.ended = False
        self.moving = False  # the engine carries it
        self.moved = False  # the engine has carried it
        # of a receive: whether the engine carries the message, or zeros for a cancelled one; None: not known yet
        self.is_real: bool | None = None
        self.sender = message.peer

    def end(self, error: BaseException | None = None) -> None:
        """The message has ended. Call this with the group's condition held."""
        if error is None and not self.message.is_send:
            native.change_tensors(self.buffer.written)
        self._error, self.ended = error, True
        self._group.cond.notify_all()

    def claim(self) -> bool:
        """Reserve this receive for a message of another host. False: it has another one already."""
        return True

    def repost(self) -> None:
        """Zeros arrived, not the message: wait again."""
        self.moving, self.moved, self.is_real, self.sender = False, False, None, self.message.peer

    def withdraw(self) -> None:
        """Let nothing else end it; called once the matcher has let go of it."""

    def awaited(self) -> list[int]:
        """The ranks that it waits for; a message of one is enough."""
        if self.sender != ANY_SOURCE:
            return [self.sender]
        return [r for r in range(self._group.size) if r != self._group.rank and not self._group.is_gone(r)]

    def _lost(self) -> list[int]:
        """The ranks that are gone, if it therefore waits in vain."""
        return [r for r in self.awaited() if self._group.is_gone(r)]

    def look(self) -> bool:
        """Whether it has ended."""
        return self.ended

    def wait(self, timeout: Timeout = None) -> bool:
        """Block until the message has left (send) or arrived (receive)."""
        seconds = self._group.timeout if not timeout else to_ns("wait", timeout) / 1e9
        if not self.look():
            with self._group.waits.of(self) as wait:
                if not self._await(time.monotonic() + seconds, seconds, wait):
                    self._give_up(seconds)
        self.settle()
        if self._error is not None:
            raise self._error
        return True

    def _await(self, deadline: float, seconds: float, wait: Any) -> bool:
        """Wait until it has ended, or cannot end any more (False)."""
        group, gone_since = self._group, 0.0
        while not self.look():
            wait.look()
            with group.cond:
                now = time.monotonic()
                if self.ended or group.failures.verdict is not None:
                    break
                if self._is_in_vain(now):
                    gone_since = gone_since or now  # a receiver may leave before the engine reports completion
                    if not self.moving or now - gone_since >= LATE_BYTES:
                        break
                if now >= deadline and (not self.moving or now >= deadline + max(seconds, ARRIVING)):
                    break
                group.cond.wait(0.05 if gone_since else self._pause(now, deadline))
        return self.look()  # a rank that is gone may have done its part before that

    def _is_in_vain(self, now: float) -> bool:
        return bool(self._lost())

    def _pause(self, now: float, deadline: float) -> float:
        """Seconds until the next look, if nothing happens."""
        return min(0.25, max(0.001, deadline - now))

    def _give_up(self, seconds: float) -> None:
        """The peer is gone, stopped or late. A message that is only late is cancelled: the group stays usable."""
        group, awaited = self._group, self.awaited()
        if group.failures.verdict is None and (lost := self._lost()):
            group.failures.gone(lost)
        if group.failures.verdict is None and not self._matcher.cancel(self):
            group.failures.late(None, seconds, awaited)
        if group.failures.verdict is not None:
            self._matcher.forget(self)
            group.await_engine()
        self.withdraw()
        if self.look():
            return
        if group.failures.verdict is None:
            named = [] if self.sender == ANY_SOURCE else awaited
            error: BaseException = self._late(seconds, named, group.waits.describe(awaited))
        else:
            error = group.state.fail_operation(f"{self.what} on group {group.name!r}", time.monotonic() - self._started)
        with group.cond:
            if not self.ended:
                self.end(error)

    def settle(self) -> None:
        if not self.message.is_send and self._error is None and self.buffer.target is not None:
            self.buffer.finish()
            self.buffer.target = None

    def is_completed(self) -> bool:
        if self.look():
            self.settle()
        elif self._group.failures.verdict is not None:
            self._give_up(0.0)
        return self.ended

    @property
    def source(self) -> int:
        """The rank a receive's message came from."""
        self.wait()
        return self.sender


class LocalWork(AnyMessageWork):
    """A message between ranks of one host. It names ranks as the group across hosts does, not as the host's group."""

    def __init__(self, group: Any, work: MessageWork, message: Message):
        super().__init__(message, group.name)
        self._group, self._work = group, work

    def awaited(self) -> list[int]:
        return [self.message.peer]

    def wait(self, timeout: Timeout = None) -> bool:
        if self._error is None:
            seconds = to_ns("wait", timeout) / 1e9 if timeout else self._group.timeout
            try:
                with self._group.waits.of(self):
                    return self._work.wait(seconds)
            except errors.SymcommError as error:
                self._error = self._translated(error, seconds)
        raise self._error

    def _translated(self, error: errors.SymcommError, seconds: float) -> BaseException:
        peer, group = self.message.peer, self._group
        if isinstance(error, errors.BadArgumentError) and self._work.outcome is not None:
            _, sender, nbytes, dtype = self._work.outcome
            return self.misfit(group.layout.here[sender], nbytes, dtype, self._work.buffer)
        if isinstance(error, errors.DeadlineError) and group.local.failure is None:
            return self._late(seconds, [peer], group.waits.describe([peer]))
        if isinstance(error, errors.RankFailedError):
            group.failures.gone([group.layout.here[r] for r in error.ranks])
        elif isinstance(error, errors.DeadlineError):
            group.failures.late(None, group.timeout, [peer])
        else:
            group.failures.await_verdict()
        return group.state.fail_operation(f"{self.what} on group {group.name!r}", self._work.age)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        error = self._work.exception()
        if error is not None and self._error is None and isinstance(error, errors.SymcommError):
            self._error = self._translated(error, self._group.timeout)
        return self._error

    @property
    def source(self) -> int:
        self.wait()
        return self._group.layout.here[self._work.source]


class AnySourceWork(RemoteWork):
    """A receive from any source. ``here``: the same receive in the mailbox of this host. No thread waits for ``here``;
    threads that wait for this work look at it from time to time."""

    def __init__(self, matcher: Matcher, message: Message, buffer: Buffer, here: MessageWork):
        super().__init__(matcher, message, buffer)
        self._here = here
        self._look_at = 0.0  # the time of the next check for ranks that are gone

    def claim(self) -> bool:
        return self._here.hold()

    def repost(self) -> None:
        super().repost()
        self._here.resume()

    def end(self, error: BaseException | None = None) -> None:
        self._here.fill()  # if it is held
        super().end(error)

    def _lost(self) -> list[int]:
        """As on one host: give up once one rank has died, or all others have left."""
        if self.sender != ANY_SOURCE:
            return super()._lost()
        group = self._group
        dead = group.rounds.dead()
        gone = [r for r in range(group.size) if r != group.rank and (r in dead or group.is_gone(r))]
        return sorted(dead) or (gone if len(gone) == group.size - 1 else [])

    def _is_in_vain(self, now: float) -> bool:
        if now < self._look_at:
            return False
        self._look_at = now + SOON
        return bool(self._lost())

    def _pause(self, now: float, deadline: float) -> float:
        """At first it looks often, since messages mostly come at once."""
        return min(SLICE, max(0.00005, (now - self._started) / 8))

    def look(self) -> bool:
        """Whether it has ended. The core has filled the tensor if a message of this host came."""
        if self.ended or self.moving or not self._here.is_completed() or self._here.was_withdrawn:
            return self.ended
        self._matcher.forget(self)
        error = LocalWork(self._group, self._here, self.message).exception()
        with self._group.cond:
            if not self.ended:
                if error is None:
                    self.sender = self._group.layout.here[self._here.source]
                    self.buffer.target = None
                self.end(error)
        return True

    def withdraw(self) -> None:
        """Let no message of this host end it any more. One that has come in part is lost, as if it were given up."""
        if self._here.hold():
            self._here.fill(Status.TIMEOUT)
            return
        self._here.withdraw()
