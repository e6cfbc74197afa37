"""A board: one process publishes versions of a state; others of its host read the newest, which they map, not copy.

No reader sees a torn version, and N readers take no more memory than one. A version lies in a part of the writer's
memory. It is written before readers hear of it, and not touched again until the last of them has let go of it or died.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.memory.limits import format_bytes
from symcomm.sharing.ends import ReaderEnd, WriterEnd, check_number
from symcomm.sharing.messages import PICKLE_IN_PART, Message, from_part
from symcomm.sharing.region import (
    DEAD,
    LEFT,
    OK,
    TIMEOUT,
    Clock,
    named,
    physical_room,
)


@dataclass(frozen=True)
class Snapshot:
    """One version, as a reader has it. Its tensors are private views of the writer's memory: what a reader writes there
    no other process sees. The version's memory is free for others once nothing refers to the tensors."""

    version: int
    state: Any


class Board(WriterEnd):
    """The writer's end. Readers are ``BoardReader(name)`` in any process of this user and host.

    Args:
        name: by which readers find it; without one, they get ``fileno()``. When a writer dies, another may take its
            name, and readers go over to that one.
        token: what readers have to hold; by default the job's, in SYMCOMM_TOKEN.

    Raises: BadArgumentError, CallerError if the name is taken, ResourceError."""

    KIND, REGION = "board", native.REGION_BOARD

    def __init__(self, name: str | None = None, *, token: str | None = None):
        self.version = 0
        self._up: list[_Place] = []  # versions that readers may hold; the last is the newest
        self._spare: _Place | None = None  # memory whose pages exist, for the next version
        super().__init__(name, physical_room(), TIMEOUT, token)

    def publish(self, state: Any, version: int | None = None) -> int:
        """Publish ``state``, such as ``model.state_dict()``, as the newest version. Returns its number: ``version``, or
        one more than the last.

        Its CPU tensors and arrays are copied once. Never waits for readers.

        Raises: BadArgumentError, QueueClosedError after ``close()``, ResourceError if there is no memory for it beside
        the versions that readers hold."""
        number = self.next_version("publish", version)
        message = Message((number, state), in_part=True)
        with self.draft(message.nbytes, number, "publish") as at:
            message.write(at)
        return number

    def next_version(self, call: str, version: int | None) -> int:
        """``version``, or one more than the last.

        Raises: BadArgumentError, QueueClosedError."""
        least = self.version + 1
        expected = f"a number above {self.version}, the last one"
        number = least if version is None else check_number(call, "version", version, least, None, expected)
        self._region.check_open(call)
        return number

    @contextlib.contextmanager
    def draft(self, nbytes: int, number: int, call: str) -> Iterator[int]:
        """The address of memory for version ``number``, which is put up if nothing goes wrong in the block."""
        with self._turn.take(call, Clock(call, None, TIMEOUT)):
            self._collect()
            place = self._find_place(nbytes)
            try:
                yield self._region.base + place.offset
            except BaseException:
                self._spare = place
                raise
            native.board_publish(self._region.base, place.part, place.offset, nbytes)
            self._up.append(place)
            self.version = number
            self._collect()

    def _find_place(self, nbytes: int) -> _Place:
        region, spare = self._region, self._spare
        if spare is not None and nbytes <= spare.nbytes <= 2 * nbytes + (1 << 20):
            self._spare = None
            return spare
        if spare is not None:
            self._spare = None
            self._free(spare)
        offset = region.heap.allocate(nbytes)
        if offset is None or not region.free_parts:
            held = format_bytes(region.heap.used_bytes)
            raise errors.ResourceError(f"publish on {region.whose}: readers hold {held} in {len(self._up)} versions.")
        try:
            region.reserve(offset, nbytes)
        except BaseException:
            region.heap.free(offset)
            raise
        return _Place(region.free_parts.pop(), offset, region.heap.length_of(offset))

    def _collect(self) -> None:
        """Take back versions that no reader has. The memory of one is kept for the next; the kernel gets the rest."""
        self._region.drop_gone()
        older, newest = self._up[:-1], self._up[-1:]
        kept = []
        for place in older:
            if not native.part_take_back(self._region.base, place.part):
                kept.append(place)
            elif self._spare is None:
                self._spare = place
            else:
                self._free(place)
        self._up = kept + newest

    def _free(self, place: _Place) -> None:
        self._region.release_pages(place.offset, place.nbytes)
        self._region.heap.free(place.offset)
        self._region.free_parts.append(place.part)

    @property
    def versions_held(self) -> int:
        """How many versions are in memory: the newest, and older ones that readers hold."""
        with self._turn.take("versions_held", Clock("versions_held", None, TIMEOUT)):
            self._collect()
            return len(self._up)


@dataclass(frozen=True)
class _Place:
    part: int
    offset: int
    nbytes: int


class BoardReader(ReaderEnd):
    """A reader's end.

    Args:
        source: the board's name, or a descriptor of it, which stays the caller's.
        timeout: seconds that a call waits at most, unless it says otherwise; also for the name to exist.
        token: the same as the writer's.

    Raises: BadArgumentError, DeadlineError if no writer opens the name, CallerError if the token differs,
    ResourceError."""

    KIND, REGION = "board", native.REGION_BOARD

    def __init__(self, source: str | int, *, timeout: float = TIMEOUT, token: str | None = None):
        super().__init__(source, timeout=timeout, token=token)
        self._seen = (self._region, 0)  # of the last snapshot: the writer's memory, and its number there
        self._snapshot: Snapshot | None = None

    def newest(self) -> Snapshot | None:
        """The newest version, mapped in well under a millisecond; None before the first. If the writer is gone, its
        last version, or its successor's newest.

        Raises: QueueClosedError after ``close()``, ResourceError."""
        self._region.check_open("newest")
        if not self._has_news() and (self._status() == OK or not self._go_over() or not self._has_news()):
            return self._snapshot
        region = self._region
        with region.borrowing():
            found = native.board_take(region.base, region.reader)
            assert found is not None  # there is news
            number, part, offset, nbytes = found
            region.hold(part)
        version, state = from_part(PICKLE_IN_PART, region.view(part, offset, nbytes))
        self._seen, self._snapshot = (region, number), Snapshot(version, state)
        return self._snapshot

    def wait(self, timeout: float | None = None) -> Snapshot:
        """Wait for a version that ``newest`` and ``wait`` have not returned yet; the newest if there are several.

        Raises: ProcessDiedError if the writer died and no other has its name, QueueClosedError if it closed the board,
        DeadlineError, ResourceError."""
        clock = Clock("wait", timeout, self._timeout)
        while True:
            before = self._snapshot
            found = self.newest()
            if found is not None and found is not before:
                return found
            status = native.board_await(self._region.base, self._number(), clock.left_ns())
            if status == OK or (status in (DEAD, LEFT) and self._go_over()):
                continue
            self._raise(status, clock)

    def _has_news(self) -> bool:
        return native.board_newest(self._region.base) != self._number()

    def _number(self) -> int:
        region, number = self._seen
        return number if region is self._region else 0

    def _status(self) -> int:
        """OK while the writer is there."""
        status = native.board_await(self._region.base, native.board_newest(self._region.base), 0)
        return status if status in (DEAD, LEFT) else OK

    def _go_over(self) -> bool:
        """Go over to the writer that has the name now, if there is one."""
        if not self._name:
            return False
        try:
            region = self._open(0)
        except errors.DeadlineError:
            return False
        self._region.close()
        self._region = region
        return True

    def _raise(self, status: int, clock: Clock) -> None:
        whose, pid = self._region.whose, self.writer
        if status == DEAD:
            raise errors.ProcessDiedError(
                f"wait on {whose}: its writer, process {pid}, ended without closing it, and no other has opened it; "
                "what was read stays.",
                [pid],
            )
        if status == LEFT:
            raise errors.QueueClosedError(f"wait on {whose}: process {pid} closed it.")
        if not clock.left:
            fix = f"{named([pid])} has published nothing new."
            raise errors.deadline(f"wait on {whose}", clock.seconds, fix=fix[0].upper() + fix[1:])

    def close(self) -> None:
        self._snapshot = None
        super().close()
