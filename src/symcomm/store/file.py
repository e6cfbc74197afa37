"""FileStore: a store in one file that processes share.

The file is a log of changes (see file_formats.py). Writers hold the file's lock (``flock``, which the kernel drops when
a process dies), read what is new, and append their change. A writer that is killed half way leaves part of a change:
readers see that it is incomplete and stop before it, and the next writer cuts it off. With checksums, readers can tell
what is complete and take no lock; in PyTorch's format they share one. The file only grows.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from symcomm import errors
from symcomm.store.base import poll_until, to_int
from symcomm.store.file_formats import FRAMES, Format, LoggedTable, format_of
from symcomm.store.hash import Result, Table, TableStore

NAMELESS = "/proc/self/fd/"  # a file without a name, which vanishes with the last process that holds it
_leaving: deque[tuple[Log, int]] = deque()  # logs to leave once their thread holds no file's lock
_thread = threading.local()  # .holds: the file whose lock this thread holds, or ""


# --- the log ---------------------------------------------------------------------------------------


class Log:
    """The open file and the table made from it. ``offset`` is the end of the last whole change we have read;
    ``format`` is the file's, and while it is empty the one that it will have."""

    def __init__(self, path: str, preferred: Format) -> None:
        self.path = path
        self.format = preferred
        self.owner = os.getpid()
        self._open(path)

    def _open(self, path: str) -> None:
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (OSError, ValueError) as error:  # the second is for a name with a zero in it
            reason = getattr(error, "strerror", None) or str(error)
            allowed = f"a file we can read and write ({reason})"
            raise errors.bad_argument("FileStore", "file_name", self.path, allowed) from None
        self.pid = os.getpid()
        self.threads = threading.RLock()
        self.busy = False  # its holder is in the middle of a call
        self._start_over()

    def _start_over(self) -> None:
        self.offset = 0
        self.table = LoggedTable()

    def join(self, seconds: float) -> None:
        """Count ourselves as a user of the file; create it if necessary."""
        while True:
            with self.locked(seconds):
                # Between our opening and our locking it, the last user may have removed the file.
                if os.fstat(self.fd).st_nlink > 0 or self.path.startswith(NAMELESS):
                    self.edit(lambda table: table.change("open", ""))
                    return
            os.close(self.fd)
            self._open(self.path)

    def leave(self, world_size: int) -> None:
        """Take ourselves off the count; the last of ``world_size`` users removes the file. Never raises: we are
        closing.

        The garbage collector may call this in a thread that holds the lock of the same file for another store."""
        if getattr(_thread, "holds", ""):
            _leaving.append((self, world_size))
            return
        with contextlib.suppress(OSError, errors.SymcommError):
            if os.getpid() == self.owner and os.fstat(self.fd).st_nlink > 0:
                with self.locked(5.0):
                    self.edit(lambda table: table.change("close", ""))
                    if 0 <= world_size <= self.table.closed_stores and self.table.open_stores == 0:
                        os.unlink(self.path)
        os.close(self.fd)

    @contextlib.contextmanager
    def mine(self, seconds: float) -> Iterator[None]:
        """Keep the other threads of this process off the table."""
        if self.pid != os.getpid():
            self._reopen_after_fork()
        if getattr(_thread, "holds", "") == self.path:
            raise self._nested()
        if not self.threads.acquire(timeout=seconds):
            waiting = f"FileStore: waiting for another thread at {self.path}"
            raise errors.deadline(waiting, seconds, kind=errors.StoreDeadlineError)
        if self.busy:  # by this very thread
            self.threads.release()
            raise self._nested()
        try:
            self.busy = True
            yield
        except errors.SymcommError:
            raise
        except BaseException:
            self._start_over()  # an interrupt may have come between a change and our note of it
            raise
        finally:
            self.busy = False
            self.threads.release()

    def _nested(self) -> errors.CallerError:
        return errors.CallerError(
            "FileStore: called by a signal handler (or a finalizer) while its thread is in another call on "
            f"{self.path}. Set a flag there and make the call later."
        )

    @contextlib.contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        with self.mine(seconds):
            self._lock(seconds)
            try:
                _thread.holds = self.path
                yield
            finally:
                fcntl.flock(self.fd, fcntl.LOCK_UN)
                _thread.holds = ""
        while _leaving:
            with contextlib.suppress(IndexError):  # another thread took it
                log, world_size = _leaving.popleft()
                log.leave(world_size)

    def _lock(self, seconds: float, how: int = fcntl.LOCK_EX) -> None:
        end = time.monotonic() + seconds
        pause = 0.0001
        while True:
            try:
                return fcntl.flock(self.fd, how | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    locking, fix = f"FileStore: locking {self.path}", "Another process holds it; is one stopped?"
                    raise errors.deadline(locking, seconds, fix=fix, kind=errors.StoreDeadlineError) from None
            except OSError as error:
                refused = f"FileStore: this file system cannot lock {self.path}: {error.strerror}."
                raise errors.ResourceError(refused) from None
            time.sleep(pause * random.random())  # at random, so that many writers take turns
            pause = min(pause * 2, 0.005)

    def _reopen_after_fork(self) -> None:
        """Open the file again: a forked child shares its parent's lock, and maybe a half-made table."""
        inherited = self.fd
        self._open(f"/proc/self/fd/{inherited}")
        os.close(inherited)

    def edit(self, step: Callable[[LoggedTable], Result]) -> Result:
        """With the lock held: catch up, run ``step`` and write what it changed."""
        self._mend()
        result = step(self.table)
        if self.table.unwritten:
            self._write(self.format.encode(self.table, self.offset))
            self.table.unwritten.clear()
        return result

    def _mend(self) -> None:
        """With the lock held: read what is new, and cut off what a killed writer left behind."""
        if self._read_sound() == "torn":
            os.ftruncate(self.fd, self.offset)
        if self.offset == 0:
            self._write(self.format.opening)

    def catch_up(self, seconds: float) -> None:
        """Read what is new, without the file's lock if that is safe."""
        # We may have read while a writer replaced a torn frame. Look again while no one writes.
        if not self.format.is_checked or self._read() == "damaged":
            self._lock(seconds, fcntl.LOCK_SH)
            try:
                self._read_sound()
            finally:
                fcntl.flock(self.fd, fcntl.LOCK_UN)

    def _read_sound(self) -> str:
        """While no one can write: read what is new, and say whether part of a change follows."""
        what_follows = self._read()
        if what_follows == "damaged":
            raise errors.StoreConnectionError(
                f"FileStore: {self.path} is damaged at byte {self.offset}; remove it and start the job again."
            )
        return what_follows

    def _read(self) -> str:
        size = os.fstat(self.fd).st_size
        if size == self.offset:
            return "end"
        if size < self.offset:
            return "damaged"  # another process cut off frames that we have seen
        data = self._bytes(size - self.offset)
        if self.offset == 0:
            found = format_of(data)
            if found is None:
                allowed = "a new file, or one that a FileStore made"
                raise errors.bad_argument("FileStore", "file_name", self.path, allowed, "use another name")
            self.format = found
            if len(data) < len(found.first):
                return "torn"
            self.offset, data = len(found.opening), data[len(found.opening) :]
        changes, taken, what_follows = self.format.decode(data, self.offset)
        for change in changes:
            self.table.replay(*change)
        self.offset += taken
        return what_follows

    def _bytes(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count > 0 and (part := os.pread(self.fd, count, self.offset + sum(map(len, parts)))):
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _write(self, data: bytes) -> None:
        """Append ``data``, all of it or nothing (if the disk is full, say)."""
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self.fd, data[written:], self.offset + written)
        except OSError as error:
            os.ftruncate(self.fd, self.offset)
            self._start_over()  # the table has changes that the file has not
            raise errors.ResourceError(f"FileStore: could not write to {self.path}: {error.strerror}.") from None
        self.offset += len(data)


# --- the store -------------------------------------------------------------------------------------


class FileStore(TableStore):
    """A store in the file ``file_name``, for processes (and threads) that can all reach it.

    With ``world_size`` given, the file is removed when that many stores have been closed and none is left open. Use a
    new name for each job: an earlier job's keys are still in the file. The store keeps the format of a file that
    PyTorch's store made.

    Raises: BadArgumentError, StoreDeadlineError, QueueEmptyError, StoreConnectionError for a damaged file,
    ResourceError.
    """

    _preferred: Format = FRAMES  # for a new file

    def __init__(self, file_name: str | bytes | os.PathLike[Any], world_size: int = -1) -> None:
        if isinstance(file_name, bytearray):
            file_name = bytes(file_name)
        if not isinstance(file_name, str | bytes | os.PathLike):
            raise errors.wrong_type("FileStore", "file_name", file_name, "a path")
        self._path = os.fsdecode(file_name)
        if not self._path:
            raise errors.bad_argument("FileStore", "file_name", file_name, "a path")
        self._world_size = to_int("FileStore", "world_size", world_size, range(-(2**31), 2**31), "an int")
        self._log = Log(os.path.abspath(self._path), self._preferred)
        self._log.join(self._seconds(None))
        weakref.finalize(self, self._log.leave, self._world_size)

    @property
    def path(self) -> str:
        return self._path

    @staticmethod
    def _another(*args: Any, **named: Any) -> FileStore:
        """For ``clone``: a subclass overrides this to make clones of its own class."""
        return FileStore(*args, **named)

    def clone(self) -> FileStore:
        """Another store on the same file."""
        other = self._another(self._path, self._world_size)
        other.set_timeout(self.timeout)
        return other

    def _look(self, step: Callable[[Table], Result]) -> Result:
        seconds = self._seconds(None)
        with self._log.mine(seconds):
            self._log.catch_up(seconds)
            return step(self._log.table)

    def _look_until(self, step: Callable[[Table], Result | None], seconds: float) -> Result | None:
        for _ in poll_until(seconds):
            if result := self._look(step):
                return result
        return None

    def _edit(self, step: Callable[[Table], Result]) -> Result:
        with self._log.locked(self._seconds(None)):
            return self._log.edit(step)
