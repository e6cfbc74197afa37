"""Ends: what a queue's and a board's writer and readers have in common."""

from __future__ import annotations

from types import TracebackType
from typing import Any, ClassVar, TypeVar

from symcomm import arguments, errors
from symcomm._core import native
from symcomm.sharing.door import Door, ask, check_name, token_or_job_token
from symcomm.sharing.region import TIMEOUT, Clock, ReaderRegion, Turn, WriterRegion, duplicate

E = TypeVar("E", bound="End")

MOST_BYTES = 1 << 46  # of a queue's capacity: as much as a process can map


def check_number(call: str, argument: str, value: Any, least: int, most: int | None, expected: str) -> int:
    """``value`` as an int within these bounds; NumPy's ints count."""
    number = None if isinstance(value, bool) else arguments.as_int(value)
    if number is None or number < least or (most is not None and number > most):
        raise errors.bad_argument(call, argument, value, expected)
    return number


class End:
    """An end is closed once, by hand or as a context."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: E) -> E:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class WriterEnd(End):
    """The one process that writes, and the name by which others find it."""

    KIND: ClassVar[str]
    REGION: ClassVar[int]
    CONTROL_BYTES: ClassVar[int] = native.REGION_CONTROL_BYTES

    def __init__(self, name: str | None, payload_bytes: int, timeout: float, token: str | None):
        if name is not None:
            check_name(type(self).__name__, name)
        self.name, self._timeout = name, timeout
        whose = f"{self.KIND} {name!r}" if name else f"the {self.KIND}"
        self._region = WriterRegion(whose, self.REGION, self.CONTROL_BYTES, payload_bytes)
        self._turn = Turn(whose)
        self._door = Door(self.KIND, name, self._region.fd, token_or_job_token(token)) if name else None

    @property
    def readers(self) -> list[int]:
        """The processes that read, one entry for each reader."""
        return [pid for pid, _ in self._region.readers.values()]

    def await_readers(self, count: int, timeout: float | None = None) -> None:
        """Wait until there are ``count`` readers.

        Raises: ProcessDiedError if a queue's reader died, DeadlineError, QueueClosedError, BadArgumentError."""
        clock = Clock("await_readers", timeout, self._timeout)
        most = native.REGION_READERS
        count = check_number("await_readers", "count", count, 0, most, f"a number from 0 to {most}")
        self._region.check_open("await_readers")
        with self._turn.take("await_readers", clock):
            self._region.await_readers(count, clock, lambda: self._drop_gone("await_readers"))

    def _drop_gone(self, call: str) -> None:
        """Forget readers that left or died."""
        self._region.drop_gone()

    def fileno(self) -> int:
        """The descriptor that a reader takes in a process that has inherited or been sent it.

        Raises: nothing."""
        return self._region.fd

    def close(self) -> None:
        """Close it. Readers keep what they have; a queue's get all that was sent, and then QueueClosedError.

        Raises: nothing."""
        if self._door is not None:
            self._door.close()
        self._region.close()

    def __del__(self) -> None:
        if door := getattr(self, "_door", None):
            door.close()


class ReaderEnd(End):
    """A process that reads. It knows the writer by its name or by a descriptor."""

    KIND: ClassVar[str]
    REGION: ClassVar[int]
    CONTROL_BYTES: ClassVar[int] = native.REGION_CONTROL_BYTES

    def __init__(self, source: str | int, *, timeout: float = TIMEOUT, token: str | None = None):
        call = type(self).__name__
        Clock(call, timeout, timeout)
        self._timeout, self._name, self._token = timeout, "", token_or_job_token(token)
        if isinstance(source, int) and not isinstance(source, bool):
            self._region = ReaderRegion(f"the {self.KIND}", duplicate(call, source), self.REGION, self.CONTROL_BYTES)
        else:
            self._name = check_name(call, source)
            self._region = self._open(timeout)

    def _open(self, seconds: float) -> ReaderRegion:
        fd = ask(self.KIND, self._name, self._token, seconds)
        return ReaderRegion(f"{self.KIND} {self._name!r}", fd, self.REGION, self.CONTROL_BYTES)

    @property
    def writer(self) -> int:
        """The process that writes, or wrote last."""
        return self._region.writer

    def close(self) -> None:
        """Close it. Objects that were taken stay, and the writer does not wait for this reader any more.

        Raises: nothing."""
        self._region.close()
