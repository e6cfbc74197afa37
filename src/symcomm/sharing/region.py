"""Regions: memory that one process writes and others read. ``_core/sharing/region.h`` has its layout.

The memory is a memfd: it is in no file system, and goes with the last process that has it. Readers share the control
block, and map the parts that they are lent as private copy-on-write: no reader sees what another one writes there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import secrets
import stat
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from symcomm import errors
from symcomm._core import native
from symcomm.memory.arena import bytes_type
from symcomm.memory.heap import Heap
from symcomm.memory.limits import check_room, format_bytes, physical_bytes
from symcomm.sharing.mappings import Mappings

SLOW = 1.0  # seconds after which a process that others wait for is named
TIMEOUT = 1800.0  # seconds, by default
SEALS = fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
COPIED_BELOW = 256 << 10  # bytes; mapping fewer takes longer than copying them

OK, DEAD, LEFT = native.STATUS_OK, native.STATUS_DEAD, native.STATUS_LEFT


def _pages(nbytes: int) -> int:
    return nbytes + -nbytes % mmap.PAGESIZE


def state_of(pid: int) -> str:
    """``" (stopped)"`` if that is why a process does nothing."""
    with contextlib.suppress(OSError):
        return " (stopped)" if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt" else ""
    return ""


def named(pids: list[int]) -> str:
    return ", ".join(f"process {pid}{state_of(pid)}" for pid in pids) or "nobody"


def duplicate(call: str, fd: int) -> int:
    try:
        return os.dup(fd)
    except OSError as error:
        raise errors.bad_argument(call, "source", fd, "an open descriptor, or a name") from error


class Clock:
    """How long a call may take."""

    def __init__(self, call: str, timeout: float | None, default: float):
        seconds = default if timeout is None else timeout
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
            raise errors.bad_argument(call, "timeout", timeout, "a number of seconds, 0 or more")
        self.seconds = min(seconds, 1e9)
        self._end = time.monotonic() + self.seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def left_ns(self, most: float = 1e9) -> int:
        return int(min(self.left, most) * 1e9)


class Turn:
    """Lets one thread in at a time. A thread that is in already is refused, not blocked."""

    def __init__(self, whose: str):
        self._whose = whose
        self._lock = threading.Lock()
        self._owner = 0

    @contextlib.contextmanager
    def take(self, call: str, clock: Clock) -> Iterator[None]:
        me = threading.get_ident()
        if self._owner == me:
            raise errors.CallerError(
                f"{call} on {self._whose}: called by a signal handler (or a finalizer) while its thread is in such a "
                "call. Set a flag there and make the call later."
            )
        if not self._lock.acquire(timeout=min(clock.left, 1e6)):
            raise errors.deadline(f"{call} on {self._whose}", clock.seconds, fix="Another thread was in this call.")
        self._owner = me
        try:
            yield
        finally:
            self._owner = 0
            self._lock.release()


def _no_memory(whose: str, error: OSError) -> errors.ResourceError:
    fix = "; raise the limit on open files (ulimit -n)" if error.errno == errno.EMFILE else ""
    if error.filename == "set_robust_list":
        fix = "; allow the system call set_robust_list, without which no process would notice a death"
    return errors.ResourceError(f"{whose}: no shared memory: {error.strerror}{fix}.")


def _check_open(whose: str, call: str, pid: int, is_closed: bool) -> None:
    if os.getpid() != pid:
        raise errors.CallerError(
            f"{call} on {whose}: this end belongs to process {pid}, from which this one was forked; open a new "
            "reader's end here."
        )
    if is_closed:
        raise errors.QueueClosedError(f"{call} on {whose}: it was closed here.")


class WriterRegion:
    """The writer's end. ``payload_bytes``: the most that it may lend; pages exist only where it has written."""

    def __init__(self, whose: str, kind: int, control_bytes: int, payload_bytes: int):
        self.whose = whose
        start = _pages(control_bytes)
        self.nbytes = start + _pages(payload_bytes)
        self._pid = os.getpid()
        self.fd, base = -1, 0
        try:
            self.fd = os.memfd_create("symcomm-sharing", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.nbytes)
            fcntl.fcntl(self.fd, *SEALS)
            native.set_pages(self.fd, 0, start, True)
            base = native.map_shared(self.fd, self.nbytes)
            native.region_start(base, kind, secrets.token_bytes(16), self._pid)
            life = native.life_start(base + native.REGION_WRITER_LIFE)
        except OSError as error:
            if base:
                native.unmap(base, self.nbytes)
            if self.fd >= 0:
                os.close(self.fd)
            raise _no_memory(whose, error) from error
        self.base = base
        self.heap = Heap(start, self.nbytes)
        self.free_parts = list(range(native.REGION_PARTS))
        self._made = start  # below this, all pages exist
        self.is_closed = False
        end = functools.partial(_end_writing, base, life)
        weakref.finalize(self, _unmap, self._pid, end, base, self.nbytes, self.fd).atexit = False
        native.advise_huge(base, self.nbytes)

    def check_open(self, call: str) -> None:
        _check_open(self.whose, call, self._pid, self.is_closed)

    @property
    def readers(self) -> dict[int, tuple[int, int]]:
        """Reader's place -> (its process, the number of the message that it reads next)."""
        return native.region_facts(self.base)["readers"]

    @property
    def backlog(self) -> dict[int, int]:
        """Reading process -> how many messages it has not taken."""
        facts = native.region_facts(self.base)
        return {pid: facts["head"] - following for pid, following in facts["readers"].values()}

    def drop_gone(self) -> list[int]:
        """Forget readers that left or died. Returns the processes that died."""
        dead = []
        while (gone := native.region_gone(self.base)) is not None:
            reader, died = gone
            pid = native.region_drop(self.base, reader)
            if died:
                dead.append(pid)
        return dead

    def await_readers(self, count: int, clock: Clock, drop_gone: Callable[[], object]) -> None:
        while True:
            seen = native.region_room(self.base)
            self.check_open("await_readers")  # another thread may have closed it
            drop_gone()
            if (there := len(self.readers)) >= count:
                return
            if not clock.left:
                fix = f"There are {there} of {count}."
                raise errors.deadline(f"await_readers on {self.whose}", clock.seconds, fix=fix)
            native.region_await_room(self.base, seen, clock.left_ns())

    def reserve(self, offset: int, nbytes: int) -> None:
        """Make the pages of a range exist, so that a lack of memory is an error here and not a signal later."""
        try:
            check_room(nbytes)
            native.set_pages(self.fd, offset, nbytes, True)
        except OSError as error:
            raise errors.ResourceError(
                f"{self.whose}: the kernel refused {format_bytes(nbytes)} ({error.strerror}); free memory."
            ) from error

    def reserve_below(self, end: int) -> None:
        """Make all pages up to ``end`` exist, for good."""
        if end > self._made:
            self.reserve(self._made, end - self._made)
            self._made = end

    def release_pages(self, offset: int, nbytes: int) -> None:
        native.set_pages(self.fd, offset, nbytes, False)

    def close(self) -> None:
        if not self.is_closed and os.getpid() == self._pid:
            self.is_closed = True
            native.region_close(self.base)


def _end_writing(base: int, life: int) -> None:
    native.region_close(base)
    native.life_stop(life)


def _unmap(pid: int, end: Callable[[], None], base: int, nbytes: int, fd: int) -> None:
    """An end that nothing refers to is closed. An end that is open when its process exits counts as dead."""
    if os.getpid() == pid:
        end()
    native.unmap(base, nbytes)
    os.close(fd)


_joining = threading.Lock()  # lockf() keeps out other processes, but not other threads


class ReaderRegion:
    """A reader's end. It owns ``fd`` from now on."""

    def __init__(self, whose: str, fd: int, kind: int, control_bytes: int):
        self.whose, self.fd = whose, fd
        self._pid = os.getpid()
        self._control = _pages(control_bytes)
        base = 0
        try:
            self.nbytes = _check(whose, fd, self._control)
            base = native.map_shared(fd, self._control)
            facts = native.region_facts(base)
            if facts["kind"] != kind:
                raise _not_ours(whose)
            self.writer: int = facts["writer"]
            self.reader, life = self._join(base)
        except BaseException as error:
            if base:
                native.unmap(base, self._control)
            os.close(fd)
            if isinstance(error, OSError) and not isinstance(error, errors.SymcommError):
                raise _no_memory(whose, error) from error
            raise
        self.base = base
        self._lock, self._busy = threading.RLock(), 0
        self._held: dict[int, int] = {}  # part -> the number of its views
        self._dropped: deque[int] = deque()
        self._end = functools.partial(_end_reading, base, self.reader, [life])
        self._mappings = Mappings(fd)
        weakref.finalize(self, self._mappings.forget).atexit = False
        weakref.finalize(self, _unmap, self._pid, self._end, base, self._control, fd).atexit = False
        self.is_closed = False

    def _join(self, base: int) -> tuple[int, int]:
        with _joining:
            fcntl.lockf(self.fd, fcntl.LOCK_EX)
            try:
                reader = native.region_claim(base)
                if reader < 0:
                    raise errors.ResourceError(f"{self.whose} has {native.REGION_READERS} readers, and takes no more.")
                life = native.life_start(base + native.REGION_FIRST_LIFE + reader * native.REGION_READER_BYTES)
                native.region_ready(base, reader, self._pid)
                return reader, life
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def check_open(self, call: str) -> None:
        _check_open(self.whose, call, self._pid, self.is_closed)

    @contextlib.contextmanager
    def borrowing(self) -> Iterator[None]:
        """Around code that lends this reader a part, until ``hold`` has counted it."""
        with self._lock:
            self._busy += 1
            try:
                yield
            finally:
                self._busy -= 1
        self._settle()

    def hold(self, part: int) -> None:
        self._held[part] = self._held.get(part, 0) + 1

    def let_go(self, part: int) -> None:
        """Finalizers call this, too, and they run anywhere, so it never waits."""
        if os.getpid() == self._pid:
            self._dropped.append(part)
            self._settle()

    def _settle(self) -> None:
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                if self._busy:
                    return
                self._busy += 1
                while self._dropped:
                    self._give_back(self._dropped.popleft())
                self._busy -= 1
            finally:
                self._lock.release()

    def _give_back(self, part: int) -> None:
        self._held[part] -= 1
        if self._held[part] == 0:
            del self._held[part]
            native.part_release(self.base, part, self.reader)
        if self.is_closed and not self._held:
            self._end()

    def view(self, part: int, offset: int, nbytes: int) -> memoryview:
        """The bytes of a part that this reader holds. A small part is copied, and let go at once; a large one is mapped
        privately, and let go with the mapping."""
        if nbytes < COPIED_BELOW:
            copy = bytearray(nbytes)
            os.preadv(self.fd, [copy], offset)
            self.let_go(part)
            return memoryview(copy)
        try:
            at, mapped = self._mappings.take(offset, nbytes)
        except OSError as error:
            self.let_go(part)
            raise errors.ResourceError(
                f"{self.whose}: mapping {format_bytes(nbytes)} failed ({error.strerror}); let go of earlier ones, or "
                "raise vm.max_map_count or the limit on address space (ulimit -v)."
            ) from error
        array = bytes_type(nbytes).from_address(at)
        weakref.finalize(array, self._end_view, offset, at, mapped, part).atexit = False
        return memoryview(array).cast("B")

    def _end_view(self, offset: int, at: int, mapped: int, part: int) -> None:
        if self.is_closed or os.getpid() != self._pid:
            native.unmap(at, mapped)
        else:
            self._mappings.give_back(offset, at, mapped)
        self.let_go(part)

    def close(self) -> None:
        """Close it. Objects that were taken stay until nothing refers to them."""
        if self.is_closed or os.getpid() != self._pid:
            return
        with self.borrowing():
            self.is_closed = True
            self._mappings.forget()
            native.region_leave(self.base, self.reader)
            if not self._held:
                self._end()


def _end_reading(base: int, reader: int, life: list[int]) -> None:
    if life:  # it has not been called before
        native.region_leave(base, reader)
        native.life_stop(life.pop())


def _not_ours(whose: str) -> errors.CallerError:
    return errors.CallerError(f"{whose}: the descriptor belongs to something else.")


def _check(whose: str, fd: int, control: int) -> int:
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size <= control:
        raise _not_ours(whose)
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK == 0:  # else reads could end in SIGBUS
        raise _not_ours(whose)
    return facts.st_size


def physical_room() -> int:
    return min(physical_bytes(), 1 << 40)
