"""An arena: one rank's shared memory.

It is one memfd, far larger than its contents will ever be (pages exist only where something was allocated). So peers
map it once, and (rank, offset) stays a tensor's place for ever. It has no name in any file system: the memory is gone
with the last process that maps it.

Header of an arena, in its first page::

    0    magic
    8    nonce (16 bytes): peers read it to prove that they see the same memory
    24   process id
    64   life: the word that the kernel marks when the owner dies (see _core/memory/life.h); the cores that the
         owner may use, and how its long waits ended
    2048 what the watchdog of the interpreter lock says, 1024 bytes (see _core/observe/gil_watchdog.c)

The flight recorder (see flight.py) starts at the second page. Behind it is the place where other processes ask where
the rank is (see _core/observe/whereabouts.h). Then come the allocations.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import secrets
import stat
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from symcomm._core import native
from symcomm.errors import CallerError, ResourceError
from symcomm.memory.control_groups import watch_quotas
from symcomm.memory.flight import CAPACITY, Flight, flight_bytes
from symcomm.memory.heap import PAGE, Heap
from symcomm.memory.limits import ENLARGE, check_room, format_bytes, physical_bytes
from symcomm.memory.numa import UNBOUND, current_node
from symcomm.memory.shared_heap import open_heap, room, say_ordinary

MAGIC = 0x53594D434F4D4D32  # names this layout
LIFE = 64
MAX_ADDRESSES = 1 << 46  # for all arenas that a process maps, of the 47 bits that it has
RANKS_PLANNED_FOR = 64
HUGE = 2 << 20
NAME = "symcomm-"  # how the names of named arenas begin
SWEEP_AGE = 60  # seconds: the owner of a younger file may not have locked it yet
# Small allocations check the memory left once per this many bytes: a check takes 0.14 ms, the rest 0.02.
ASK_BYTES = 1 << 20
KEEP_BYTES = 256 << 20  # freed pages that are kept for the next allocation; more go back to the kernel


@functools.lru_cache(maxsize=1024)
def bytes_type(nbytes: int) -> type[ctypes.Array[Any]]:
    """The ctypes array type of ``nbytes`` bytes. Making one takes 0.1 ms, and programs reuse the same sizes."""
    return ctypes.c_char * nbytes


def _no_arena(error: OSError, directory: str | None) -> str:
    if error.filename == "set_robust_list":
        return (
            f"symmetric memory: the kernel refuses set_robust_list ({error.strerror}), without which nobody would "
            "notice that this rank died; allow that system call where programs are confined (seccomp)."
        )
    where = f" in {directory} (SYMCOMM_SHM_DIR)" if directory is not None else ""
    fixes = {
        errno.EMFILE: "; raise the limit on open files (ulimit -n)",
        errno.EFBIG: "; raise the limit on the size of files (ulimit -f unlimited)",
        errno.EAGAIN: "; raise the limit on threads (ulimit -u, or the container's limit on processes)",
        errno.ENOENT: "; name a folder that exists",
        errno.ENOSPC: f"; {ENLARGE}",
    }
    return f"symmetric memory: none can be made{where}: {error.strerror}{fixes.get(error.errno or 0, '')}."


def _map(fd: int, nbytes: int) -> int:
    try:
        return native.map_shared(fd, nbytes)
    except OSError as error:
        raise ResourceError(
            f"symmetric memory: mapping {format_bytes(nbytes)} of addresses failed ({error.strerror}); "
            "raise the limit on address space (ulimit -v unlimited)."
        ) from error


def _not_an_arena() -> ResourceError:
    return ResourceError("symmetric memory: what a peer passed is not an arena; are all ranks on one version?")


@dataclass
class Peer:
    """An arena as this process sees it, its own or another rank's. It stays mapped as long as this object lives."""

    nonce: bytes
    pid: int
    base: int
    nbytes: int

    def __post_init__(self) -> None:
        weakref.finalize(self, native.unmap, self.base, self.nbytes).atexit = False
        native.add_rank(self.life)

    @property
    def life(self) -> int:
        """Address of the word that says whether the owner lives."""
        return self.base + LIFE + native.LIFE_WORD

    @property
    def flight(self) -> int:
        """Address of the owner's flight recorder."""
        return self.base + PAGE

    @property
    def whereabouts(self) -> int:
        """The address at which others ask the owner where it is."""
        return self.base + whereabouts_at(native.peek(self.flight, 16))

    @classmethod
    def map(cls, fd: int, nbytes: int) -> Peer:
        """Map the file that a peer passed, after checking that reads cannot raise SIGBUS."""
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size < nbytes or len(head := os.pread(fd, 32, 0)) < 32:
            raise _not_an_arena()
        magic, nonce, pid = struct.unpack("<Q16sQ", head)
        if magic != MAGIC:
            raise _not_an_arena()
        return cls(nonce, pid, _map(fd, nbytes), nbytes)


def whereabouts_at(flight_head: bytes) -> int:
    """The offset where others ask the owner where it is: behind the flight recorder, which begins with these bytes."""
    return PAGE + flight_bytes(int.from_bytes(flight_head[8:16], "little"))


def read_waits(fd: int) -> tuple[int, ...]:
    """How many long waits ended while looking, yielding and sleeping, for the rank whose arena is open as ``fd``."""
    return struct.unpack("<3Q", os.pread(fd, 24, LIFE + native.LIFE_WAITS))


_peers: weakref.WeakValueDictionary[bytes, Peer] = weakref.WeakValueDictionary()  # arenas mapped by this process
_peers_lock = threading.RLock()
_with_heaps: list[Peer] = []  # mapped for ever: forked children use tensors in their parent's heap


def peer_by_nonce(nonce: bytes) -> Peer | None:
    return _peers.get(nonce)


def peers_mapped() -> list[Peer]:
    """All arenas that this process has mapped now."""
    return list(_peers.values())


def add_peer(peer: Peer) -> Peer:
    """The one object for an arena, remembered while it is in use."""
    with _peers_lock:
        return _peers.setdefault(peer.nonce, peer)


class Arena:
    """This rank's own memory. With ``directory`` it is a named file there, unlinked once all peers have mapped it. The
    last ``heap_bytes`` of it are the shared heap."""

    def __init__(self, directory: str | None = None, heap_bytes: int = 0):
        self.nonce = secrets.token_bytes(16)
        self.directory = directory
        self.path: str | None = None
        self.own_bytes = own_bytes = min(physical_bytes(), MAX_ADDRESSES // RANKS_PLANNED_FOR) & -HUGE
        self.nbytes = own_bytes + (min(heap_bytes, own_bytes) & -HUGE)
        self.fd, base = -1, 0
        watch_quotas()
        try:
            self._make_file()
            base = _map(self.fd, self.nbytes)
            life = native.life_start(base + LIFE, base + _WHEREABOUTS)
        except BaseException as error:
            if base:
                native.unmap(base, self.nbytes)
            if self.fd >= 0:
                os.close(self.fd)
            self.unlink()
            if isinstance(error, OSError):
                raise ResourceError(_no_arena(error, directory)) from error
            raise
        native.poke(base, struct.pack("<Q16sQ", MAGIC, self.nonce, os.getpid()))
        self.peer = add_peer(Peer(self.nonce, os.getpid(), base, self.nbytes))
        self.base = base
        self.flight = Flight(base + PAGE, CAPACITY)
        self.thread = threading.get_ident()  # the rank's, as far as we know
        _own[base + _WHEREABOUTS] = self
        self._heap = Heap(_HEAP, own_bytes)
        if heap_bytes:
            open_heap(base + own_bytes, self.nbytes - own_bytes, self.fd, own_bytes)
            _with_heaps.append(self.peer)
        self._lock = threading.RLock()
        self._busy = False  # the lock's holder is changing the heap
        self.spares: dict[Any, list[int]] = {}  # parts of groups that were not made; only the same ranks may reuse them
        self._dropped: deque[int] = deque()  # offsets to take back once the lock is free
        self._idle = 0  # roughly how many freed bytes still have pages
        self._unasked = ASK_BYTES  # allocated since we last asked how much memory is left
        self._pid = os.getpid()
        weakref.finalize(self, _close, self._pid, self.fd, life, self.peer).atexit = False
        self.huge_pages = native.advise_huge(base, self.nbytes)
        self.node = UNBOUND
        self.move_to(current_node())

    def move_to(self, node: int) -> None:
        """Take pages from this NUMA node while it has some; UNBOUND: from the node that first touches them."""
        if node not in (self.node, UNBOUND) and native.prefer_node(self.base, self.nbytes, node):
            self.node = node

    def _make_file(self) -> None:
        if self.directory is None:
            self.fd = os.memfd_create("symcomm", os.MFD_CLOEXEC)
        else:
            sweep(self.directory)
            path = os.path.join(self.directory, f"{NAME}{self.nonce.hex()}")
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self.path = path
            _remove_at_exit(self, path)
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends, however it does
        os.ftruncate(self.fd, self.nbytes)
        # A file system may become full. Pages that we write without a check are reserved now.
        native.set_pages(self.fd, 0, 2 * PAGE if self.directory is None else _HEAP, True)

    def allocate(self, nbytes: int) -> int:
        """Offset of ``nbytes`` bytes whose pages exist; raises ResourceError when there is no room."""
        return self.allocate_sparse(nbytes, nbytes)

    @property
    def must_reserve(self) -> bool:
        """Whether every page must be reserved before use: a named arena's file system may be full."""
        return self.directory is not None

    def allocate_sparse(self, nbytes: int, touched: int) -> int:
        """Like allocate, but only the first ``touched`` bytes get pages now, the rest when they are first used."""
        self._settle()
        with self._lock, self._alone():
            if (offset := self._heap.take_kept(nbytes)) is not None:
                self._idle = max(0, self._idle - self._heap.length_of(offset))
        self._settle()
        if offset is not None:
            return offset
        self._check_room(touched)
        with self._lock, self._alone():
            self._heap.merge_kept()
            offset = self._heap.allocate(nbytes)
            if offset is not None:
                self._idle = max(0, self._idle - self._heap.length_of(offset))
        self._settle()
        if offset is None:
            raise ResourceError(
                f"symmetric memory: {format_bytes(nbytes)} asked, but {format_bytes(self._heap.used_bytes)} of "
                f"this rank's {format_bytes(self.nbytes)} are in use; free some tensors."
            )
        try:
            self._make_pages(offset, max(touched, 1))
        except ResourceError:
            self.free(offset)
            raise
        return offset

    def reserve(self, offset: int, nbytes: int) -> None:
        """Give pages to a part of an allocate_sparse() range; raises ResourceError if there is no room."""
        self._check_room(nbytes)
        self._make_pages(offset, nbytes)

    def _make_pages(self, offset: int, nbytes: int) -> None:
        try:
            native.set_pages(self.fd, offset, nbytes, True)
        except OSError as error:
            fix = "free memory or allocate less" if self.directory is None else ENLARGE
            raise ResourceError(
                f"symmetric memory: the kernel refused {format_bytes(nbytes)} ({error.strerror}); {fix}."
            ) from error

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Within it, with the lock held, the heap may change. The lock alone would let the same thread in again."""
        if self._busy:
            raise CallerError(
                "symmetric memory: asked for by a signal handler (or a finalizer) while its thread is allocating. "
                "Set a flag there and allocate later."
            )
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _check_room(self, nbytes: int) -> None:
        self._unasked += nbytes
        if self._unasked >= ASK_BYTES:
            check_room(nbytes, self.directory)
            self._unasked = 0

    def free(self, offset: int) -> None:
        """Give a range back. Its pages return to the kernel once more than KEEP_BYTES are idle."""
        if os.getpid() != self._pid:
            return  # a forked child drops its copy of the object, not the memory
        self._dropped.append(offset)
        self._settle()

    def _settle(self) -> None:
        """Take back dropped ranges, without ever waiting: the garbage collector may call this while the same thread
        changes the heap, and that thread settles afterwards."""
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                if self._busy:
                    return
                with self._alone():
                    while self._dropped:
                        self._take_back(self._dropped.popleft())
            finally:
                self._lock.release()

    def _take_back(self, offset: int) -> None:
        """With the lock held: release pages before the range can be reused. A range that was isolated from a stopped
        peer is never shared again."""
        length = self._heap.length_of(offset)
        if native.is_isolated(self.base + offset, length):
            return
        if self._idle + length > KEEP_BYTES:
            native.set_pages(self.fd, offset, length, False)
            self._heap.free(offset)
            return
        self._idle += length
        if self.must_reserve:  # a group's part may lack pages
            self._heap.free(offset)
        else:
            self._heap.keep(offset)

    def offset_of(self, address: int, nbytes: int) -> int:
        """The offset at which peers find what is at ``address`` here."""
        if native.is_isolated(address, nbytes):
            raise ResourceError(
                "symmetric memory: this tensor is not shared any more, since a rank was stopped while it wrote to it "
                "in an operation that failed; allocate another."
            )
        return address - self.base

    def trim(self) -> int:
        """Return the pages of all freed ranges to the kernel; returns how many bytes that were."""
        self._settle()
        with self._lock, self._alone():
            self._heap.merge_kept()
            before = self.reserved_bytes
            for start, length in self._heap.free_ranges:
                native.set_pages(self.fd, start, length, False)
            self._idle = 0
            after = self.reserved_bytes
        self._settle()
        return max(0, before - after)

    def buffer(self, nbytes: int) -> ctypes.Array[Any]:
        """``nbytes`` of the arena as a writable Python buffer; freed when nothing refers to it any more."""
        offset = self.allocate(nbytes)
        view = bytes_type(nbytes).from_address(self.base + offset)
        weakref.finalize(view, self.free, offset).atexit = False
        return view

    @property
    def used_bytes(self) -> int:
        return self._heap.used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._heap.peak_bytes

    @property
    def idle_bytes(self) -> int:
        """Freed, but kept for the next allocation."""
        return self._idle

    @property
    def reserved_bytes(self) -> int:
        """The memory that this arena really takes: pages in use, and idle ones kept for the next allocation."""
        return os.fstat(self.fd).st_blocks * 512

    def unlink(self) -> None:
        """Remove the name of a named arena; the memory lives on while anyone maps it."""
        if self.path is not None:
            os.unlink(self.path)
            self.path = None


_WHEREABOUTS = PAGE + flight_bytes(CAPACITY)
_HEAP = _WHEREABOUTS + native.WHEREABOUTS_BYTES
_own: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()  # this process's, by where they are asked


def own_arena_at(whereabouts: int) -> Arena | None:
    """The arena of this process whose rank is asked at that address."""
    return _own.get(whereabouts)


def _close(pid: int, fd: int, life: int, peer: Peer) -> None:
    """Called when no tensor and no group uses the arena. ``peer``, in which ``life`` lies, kept it mapped so far."""
    if os.getpid() == pid:
        native.life_stop(life)
        os.close(fd)


def _remove_at_exit(arena: Arena, path: str) -> None:
    """At exit, remove the name if no group has done so."""
    remove = functools.partial(_remove, path, os.getpid())
    weakref.finalize(arena, remove)
    if (util := sys.modules.get("multiprocessing.util")) is not None:  # its processes do not run atexit's functions
        util.Finalize(None, remove, exitpriority=0)


def _remove(path: str, pid: int) -> None:
    with contextlib.suppress(OSError):
        if os.getpid() == pid:
            os.unlink(path)


def sweep(directory: str) -> None:
    """Remove named arenas whose owners were killed before any rank could unlink them."""
    for entry in os.scandir(directory):
        if not entry.name.startswith(NAME):
            continue
        with contextlib.suppress(OSError):  # it is another user's, in use, or just swept by another rank
            facts = entry.stat(follow_symlinks=False)
            if facts.st_uid != os.getuid() or time.time() - facts.st_mtime < SWEEP_AGE:
                continue
            fd = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            finally:
                os.close(fd)


_process_arena: Arena | None = None
_thread = threading.local()
_arena_lock = threading.RLock()  # garbage may be collected while an arena is made, and finalizers may ask for the arena


def named_directory() -> str | None:
    """The folder for arenas that are files; None if arenas are passed as descriptors (the default)."""
    if os.environ.get("SYMCOMM_SHARE", "fd") == "named":
        return os.environ.get("SYMCOMM_SHM_DIR", "/dev/shm")
    return None


def current_arena() -> Arena:
    """The arena of the rank that runs here: the thread's if threads are ranks, otherwise the process's."""
    global _process_arena
    mine = _own_arena()
    if mine is not None:  # without the lock, which a signal handler's thread may hold
        return mine
    with _arena_lock:
        if (mine := _own_arena()) is None:
            mine = _process_arena = _make_process_arena()
        return mine


def _make_process_arena() -> Arena:
    """An arena, with the shared heap if it is wanted and there are enough addresses for both."""
    if heap_bytes := room():
        try:
            return Arena(named_directory(), heap_bytes)
        except ResourceError as error:
            say_ordinary(str(error).rstrip("."))
    return Arena(named_directory())


def _own_arena() -> Arena | None:
    """The arena of the rank that runs here, if it has one. A forked child is not the rank it was forked from."""
    mine = getattr(_thread, "arena", None) or _process_arena
    return mine if mine is not None and mine._pid == os.getpid() else None


def has_arena() -> bool:
    """Whether the rank that runs here has made its arena yet."""
    return _own_arena() is not None


def _after_fork_in_child() -> None:
    """Make new locks: another thread may have held the old ones."""
    global _arena_lock, _peers_lock
    _arena_lock, _peers_lock = threading.RLock(), threading.RLock()
    _thread.arena = None


os.register_at_fork(after_in_child=_after_fork_in_child)


def use_arena(arena: Arena | None) -> None:
    """Make ``arena`` the current one of this thread (threads as ranks)."""
    _thread.arena = arena
    if arena is not None:
        arena.thread = threading.get_ident()
