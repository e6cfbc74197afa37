"""A queue that knows its readers: one process writes, others of its host read, and each reader gets every message.

No death loses or tears a message: one that a writer has not finished is not there, and memory that a dead reader held
is taken back. A process that waits for a dead one learns of it in milliseconds.

A message goes into one of 64 slots. One that is too long for a slot goes into a part of the writer's memory, which is
free again when the last reader has let go of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.memory.limits import format_bytes
from symcomm.sharing.ends import MOST_BYTES, ReaderEnd, WriterEnd, check_number
from symcomm.sharing.messages import Message, from_part, from_slot
from symcomm.sharing.region import (
    DEAD,
    LEFT,
    OK,
    SLOW,
    TIMEOUT,
    Clock,
    Turn,
    WriterRegion,
    named,
    state_of,
)

QUEUE_CONTROL_BYTES = native.REGION_CONTROL_BYTES + native.QUEUE_BYTES
CAPACITY = 256 << 20
LOOK_FOR_CANCEL = 0.05  # seconds

log = logging.getLogger("symcomm.sharing")


class Queue(WriterEnd):
    """The writer's end of a queue. Readers are ``QueueReader(name)`` in any process of this user and host.

    Args:
        name: by which readers find it; without one, they get ``fileno()``, which forked processes inherit.
        capacity: the most bytes of long messages that readers may hold.
        readers: the first message waits for so many readers, later ones for one. 0: without readers, messages are
            dropped.
        timeout: seconds that a call waits at most, unless it says otherwise.
        token: what readers have to hold; by default the job's, in SYMCOMM_TOKEN.

    Raises: BadArgumentError, CallerError if the name is taken, ResourceError."""

    KIND, REGION, CONTROL_BYTES = "queue", native.REGION_QUEUE, QUEUE_CONTROL_BYTES

    def __init__(
        self,
        name: str | None = None,
        *,
        capacity: int = CAPACITY,
        readers: int = 1,
        timeout: float = TIMEOUT,
        token: str | None = None,
    ):
        Clock("Queue", timeout, timeout)
        self.capacity = check_number("Queue", "capacity", capacity, 1, MOST_BYTES, "a number of bytes")
        most = native.REGION_READERS
        self._least = check_number("Queue", "readers", readers, 0, most, f"a number from 0 to {most}")
        self._lent: list[tuple[int, int]] = []  # parts and their offsets
        super().__init__(name, self.capacity, timeout, token)

    def put(self, obj: Any, timeout: float | None = None) -> None:
        """Send ``obj`` to every reader. Waits while the slowest has 64 messages or ``capacity`` bytes to read.

        bytes go as they are. Other objects are pickled, except the memory of CPU tensors and arrays, which is copied
        once. If a reader has died, the call names it and does not send the message; the next call goes on without that
        reader. A reader that keeps the writer waiting for a second is named in the log.

        Raises: ProcessDiedError, DeadlineError, QueueClosedError, BadArgumentError, ResourceError."""
        clock = Clock("put", timeout, self._timeout)
        self._region.check_open("put")
        message = Message(obj)
        if message.nbytes > self.capacity:
            size = f"{format_bytes(message.nbytes)} of {format_bytes(self.capacity)} capacity"
            raise errors.bad_argument("put", "obj", size, "smaller", "give the queue more capacity=")
        with self._turn.take("put", clock):
            waiting = _Waiting(self._region, clock, self.capacity)
            self._drop_gone("put")
            if message.is_inline:
                self._send(message, waiting, -1, 0)
                return
            part, offset = self._borrow(message.nbytes, waiting)
            try:
                message.write(self._region.base + offset)
                self._send(message, waiting, part, offset)
            except BaseException:
                self._give_back(part, offset)
                raise
            self._lent.append((part, offset))

    def _send(self, message: Message, waiting: _Waiting, part: int, offset: int) -> None:
        base, inline = self._region.base, message.inline
        while True:
            least, wait_ns = self._least, waiting.slice_ns()
            status = native.queue_put(base, inline, part, offset, message.nbytes, least, wait_ns)
            if status == OK:
                self._least = min(least, 1)
                return
            if status == LEFT:
                self._region.check_open("put")  # another thread may have closed it
                self._drop_gone("put")
            else:
                waiting.note()

    def _borrow(self, nbytes: int, waiting: _Waiting) -> tuple[int, int]:
        region = self._region
        while True:
            seen = native.region_room(region.base)
            self._take_back()
            if region.free_parts and (offset := region.heap.allocate(nbytes)) is not None:
                try:
                    region.reserve_below(offset + nbytes)
                except BaseException:
                    region.heap.free(offset)
                    raise
                return region.free_parts.pop(), offset
            if native.region_await_room(region.base, seen, waiting.slice_ns()) == LEFT:
                region.check_open("put")
                self._drop_gone("put")
            else:
                waiting.note()

    def _take_back(self) -> None:
        lent, self._lent = self._lent, []
        for part, offset in lent:
            if native.part_take_back(self._region.base, part):
                self._give_back(part, offset)
            else:
                self._lent.append((part, offset))

    def _give_back(self, part: int, offset: int) -> None:
        self._region.heap.free(offset)
        self._region.free_parts.append(part)

    def _drop_gone(self, call: str) -> None:
        if dead := self._region.drop_gone():
            raise errors.ProcessDiedError(
                f"{call} on {self._region.whose}: its reader {named(dead)} ended without closing it; nothing was sent. "
                "Call again to go on without it.",
                dead,
            )

    async def put_async(self, obj: Any, timeout: float | None = None) -> None:
        """``put`` for coroutines. A call that is cancelled while it waits may still send the message.

        Raises: as ``put``."""
        await asyncio.get_running_loop().run_in_executor(_threads(), self.put, obj, timeout)

    @property
    def backlog(self) -> dict[int, int]:
        """Reading process -> how many messages it has not taken."""
        return self._region.backlog


class _Waiting:
    """A put that waits for readers. It names them after a second, and when its time is over."""

    def __init__(self, region: WriterRegion, clock: Clock, capacity: int):
        self._region, self._clock, self._capacity = region, clock, capacity
        self._warned = False

    def slice_ns(self) -> int:
        return self._clock.left_ns(SLOW if not self._warned else 1e9)

    def note(self) -> None:
        whose, clock = self._region.whose, self._clock
        behind = self._region.backlog
        slowest = [pid for pid, count in behind.items() if count == max(behind.values())]
        who = f"for {named(slowest)}, which has {max(behind.values())} messages to read" if slowest else "for a reader"
        held = self._region.heap.used_bytes
        holds = f"; readers hold {format_bytes(held)} of {format_bytes(self._capacity)}" if held else ""
        if not clock.left:
            raise errors.deadline(f"put on {whose}", clock.seconds, fix=f"It waited {who}{holds}; nothing was sent.")
        if not self._warned:
            self._warned = True
            log.warning("symcomm: put on %s has waited 1 s %s%s.", whose, who, holds)


class QueueReader(ReaderEnd):
    """A reader's end. It gets every message that is sent after it was made.

    Args:
        source: the queue's name, or a descriptor of it, which stays the caller's.
        timeout: seconds that a call waits at most, unless it says otherwise; also for the name to exist.
        token: the same as the writer's.

    Raises: BadArgumentError, DeadlineError if no writer opens the name, CallerError if the token differs,
    ResourceError."""

    KIND, REGION, CONTROL_BYTES = "queue", native.REGION_QUEUE, QUEUE_CONTROL_BYTES

    def __init__(self, source: str | int, *, timeout: float = TIMEOUT, token: str | None = None):
        super().__init__(source, timeout=timeout, token=token)
        self._turn = Turn(self._region.whose)
        self.taken = 0

    def get(self, timeout: float | None = None) -> Any:
        """The next message. Its tensors and arrays are this process's to write. If the message is of 256 KiB or more,
        they are private views of the writer's memory, which the writer gets back when they are gone.

        Raises: QueueClosedError after the last message, or when another thread closes this end; ProcessDiedError if the
        writer died and everything it sent was read; DeadlineError, ResourceError."""
        clock = Clock("get", timeout, self._timeout)
        self._region.check_open("get")
        with self._turn.take("get", clock):
            return self._get(clock)

    def _get(self, clock: Clock) -> Any:
        region, warned = self._region, False
        while True:
            with region.borrowing():
                # Do not wait in here: other threads may want to let go of parts, or to close this end.
                region.check_open("get")
                seen = native.region_news(region.base)
                found = native.queue_take(region.base, region.reader, 0)
                if isinstance(found, tuple) and found[1] >= 0:
                    region.hold(found[1])
            if isinstance(found, tuple):
                self.taken += 1
                inline, part, offset, nbytes = found
                return from_part(inline, region.view(part, offset, nbytes)) if part >= 0 else from_slot(inline)
            self._check(found, clock)
            status = native.queue_await(region.base, region.reader, seen, clock.left_ns(1e9 if warned else SLOW))
            if status not in (OK, LEFT, DEAD) and not warned and state_of(self.writer):
                warned = True
                log.warning("symcomm: get on %s has waited 1 s for %s.", region.whose, named([self.writer]))

    def _check(self, status: int, clock: Clock) -> None:
        """Raise if no message can come any more, or the time is over."""
        whose, told = self._region.whose, f"{self.taken} messages were read"
        if status == LEFT:
            raise errors.QueueClosedError(f"get on {whose}: process {self.writer} closed it; {told}.")
        if status == DEAD:
            raise errors.ProcessDiedError(
                f"get on {whose}: its writer, process {self.writer}, ended without closing it; {told}, which "
                "is all that was sent.",
                [self.writer],
            )
        if not clock.left:
            fix = f"{named([self.writer])} has sent nothing."
            raise errors.deadline(f"get on {whose}", clock.seconds, fix=fix[0].upper() + fix[1:])

    def __iter__(self) -> Iterator[Any]:
        """Messages until the writer closes the queue."""
        while True:
            try:
                message = self.get()
            except errors.QueueClosedError:
                return
            yield message

    async def get_async(self, timeout: float | None = None) -> Any:
        """``get`` for coroutines. A call that is cancelled has taken no message.

        Raises: as ``get``."""
        clock = Clock("get", timeout, self._timeout)
        cancelled = threading.Event()
        try:
            while True:
                try:
                    return self.get(0)
                except errors.DeadlineError:
                    if not clock.left:
                        raise
                await asyncio.get_running_loop().run_in_executor(_threads(), self._await, clock, cancelled)
        finally:
            cancelled.set()

    def _await(self, clock: Clock, cancelled: threading.Event) -> None:
        base, reader = self._region.base, self._region.reader
        while clock.left and not cancelled.is_set():
            seen = native.region_news(base)
            if self._region.is_closed:
                return
            if native.queue_await(base, reader, seen, clock.left_ns(LOOK_FOR_CANCEL)) in (OK, LEFT, DEAD):
                return

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            try:
                message = await self.get_async()
            except errors.QueueClosedError:
                return
            yield message


_executor: tuple[int, ThreadPoolExecutor] | None = None


def _threads() -> ThreadPoolExecutor:
    """This process's threads for coroutines that wait."""
    global _executor
    if _executor is None or _executor[0] != os.getpid():
        _executor = os.getpid(), ThreadPoolExecutor(64, "symcomm-queue")
    return _executor[1]
