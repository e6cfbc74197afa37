"""How ranks map each other's arenas.

The first rank listens on a Unix socket without a name in the file system. The others send it the descriptor of their
arena and receive all ranks' in return. Both ends check the other's user id, and drop connections that are not a rank's.
If descriptors cannot be passed (ranks in separate network namespaces, or SYMCOMM_SHARE=named), arenas are files in
SYMCOMM_SHM_DIR (/dev/shm), opened by name and unlinked once all ranks have mapped them. Either way, every rank then
reads each peer's nonce from the mapped memory. Only this decides whether ranks are on one host.

If ``connect`` finds several hosts, it says which ranks share memory. Each host's ranks then map their arenas in the
next exchange (``HostArenas``), for a group across hosts (symcomm.hierarchical) has a group on each host.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from symcomm import __version__, errors
from symcomm.memory.arena import Arena, Peer, add_peer, current_arena, named_directory, peer_by_nonce, peers_mapped
from symcomm.memory.hosts import alike, all_mapped, boot_id, check_versions, hosts_of, network, pretended_host, short

__all__ = [
    "Connected", "Deadline", "Exchange", "GroupNotBuilt", "HostArenas", "OthersShortage", "check_descriptors",
    "connect", "named_directory", "naming_shortages", "peer_of",
]  # fmt: skip

# An all-gather of bytes, in rank order: how ranks bootstrap a group. It may have a method check(), which raises once
# some rank cannot arrive any more.
Exchange = Callable[[bytes], list[bytes]]
FDS_PER_MESSAGE = 200  # the kernel takes 253
SLICE = 0.05  # seconds between two checks that all others can still come
REASON_LOOKS = 20

log = logging.getLogger("symcomm.memory")


class GroupNotBuilt(errors.RankFailedError):
    """An exchange for a new group failed: no rank uses what was exchanged."""


class OthersShortage(errors.ResourceError):
    """Another rank said that it cannot take part."""


class Connected(NamedTuple):
    """What ``connect`` found out."""

    peers: list[Peer]  # the ranks' arenas, mapped; none where there are several hosts
    extras: list[dict[str, Any]]  # what each rank said
    hosts: list[list[int]]  # the ranks that share memory, host by host
    infos: list[dict[str, Any]]  # where each rank's arena is
    held: list[Peer]  # arenas that stay mapped while this object lives
    is_mapped: bool  # whether all ranks of this host have mapped all its arenas


def connect(rank: int, world: int, exchange: Exchange, extra: dict[str, Any], timeout: float) -> Connected:
    """Map every rank's arena, if all ranks are on one host. ``extra``: what else to tell the others.

    Ranks say which arenas they have already mapped, so that all know at once whether any must be passed."""
    arena = current_arena()
    held = peers_mapped()  # arenas without a holder are unmapped
    listener = _listen() if rank == 0 and world > 1 else None
    try:
        info = {
            "nonce": arena.nonce.hex(), "nbytes": arena.nbytes, "boot": boot_id(), "uid": os.getuid(),
            "net": network(), "path": arena.path, "named": arena.directory is not None,
            "host_id": pretended_host(), "socket": listener.getsockname().hex() if listener else None, "extra": extra,
            "mapped": short([peer.nonce for peer in held]), "version": __version__,
        }  # fmt: skip
        infos = [json.loads(item) for item in exchange(json.dumps(info).encode())]
        check_versions(infos)
        hosts = hosts_of(infos)
        here = _host_with(rank, hosts)
        by_name, is_mapped = _is_by_name(infos, here), all_mapped([infos[r] for r in here])
        if any(_is_by_name(infos, ranks) for ranks in hosts):
            hosts = _connect_by_name(exchange, infos, here, held)
        elif len(hosts) == 1 and not is_mapped:
            held += _pass_descriptors(rank, arena, listener, infos, Deadline.of(exchange, timeout))
        if by_name or (len(hosts) == 1 and not is_mapped):
            arena.unlink()  # all have it
    finally:
        if listener is not None:
            listener.close()
    peers = _prove(infos, range(world)) if len(hosts) == 1 else []
    return Connected(peers, [c["extra"] for c in infos], hosts, infos, held, by_name or is_mapped)


def _is_by_name(infos: Sequence[dict[str, Any]], ranks: Sequence[int]) -> bool:
    """Whether these ranks of one host have to open each other's files; the same on all ranks.

    The arena of a rank that has been in a group before has lost its name."""
    some = [infos[r] for r in ranks]
    return not all_mapped(some) and all(c["path"] for c in some)


def _connect_by_name(
    exchange: Exchange, infos: Sequence[dict[str, Any]], here: Sequence[int], held: list[Peer]
) -> list[list[int]]:
    """Open the files of this rank's host. Returns the hosts: ranks that cannot open each other's files are apart."""
    seen = list(here)  # as these ranks will pass descriptors
    if _is_by_name(infos, here):
        held += _open_named(infos, [r for r in here if peer_by_nonce(_nonce(infos[r])) is None])
        seen = [r for r in here if peer_by_nonce(_nonce(infos[r])) is not None]
    return alike([min(json.loads(item)) for item in exchange(json.dumps(seen).encode())])


def _host_with(rank: int, hosts: Sequence[list[int]]) -> list[int]:
    return next(ranks for ranks in hosts if rank in ranks)


class HostArenas:
    """One host's arenas, where there are several hosts. ``with HostArenas(...) as arenas``: all ranks exchange
    ``arenas.socket`` of each, and then call ``connect``."""

    def __init__(self, rank: int, found: Connected):
        self.ranks, self._found = _host_with(rank, found.hosts), found
        self._rank = self.ranks.index(rank)
        self._listener: socket.socket | None = None

    def __enter__(self) -> HostArenas:
        if self._rank == 0 and not self._found.is_mapped:
            self._listener = _listen()
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            self._listener.close()

    @property
    def socket(self) -> str | None:
        """The socket at which this host's first rank passes descriptors, if it must."""
        return self._listener.getsockname().hex() if self._listener is not None else None

    def connect(self, sockets: Sequence[str | None], deadline: Deadline) -> list[Peer]:
        """Map the arenas of this host's ranks. ``sockets``: every rank's ``socket``."""
        found, arena = self._found, current_arena()
        if not found.is_mapped:
            infos = [{**found.infos[r], "socket": sockets[self.ranks[0]], "number": r} for r in self.ranks]
            found.held.extend(_pass_descriptors(self._rank, arena, self._listener, infos, deadline))
            arena.unlink()
        return _prove(found.infos, self.ranks)


def _nonce(info: dict[str, Any]) -> bytes:
    return bytes.fromhex(info["nonce"])


def _prove(infos: Sequence[dict[str, Any]], ranks: Sequence[int]) -> list[Peer]:
    peers = []
    for r in ranks:
        peer = peer_by_nonce(_nonce(infos[r]))
        if peer is None:
            raise errors.InternalError(f"rank {r}'s memory was mapped but holds another nonce than it published.")
        peers.append(peer)
    return peers


# --- by descriptor ---------------------------------------------------------------------------------

HELLO = struct.Struct("<Q16s")  # a rank, and the nonce that it published, which only ranks can know
FIRST = struct.Struct("<Q")  # the rank that the first descriptor of a message belongs to
DONE = b"done"  # from a rank: it has mapped all arenas; from rank 0: all ranks have
SORRY = b"sorry: "  # instead of anything else: why there will be no group
REASON_BYTES = 1000
MESSAGE_BYTES = len(SORRY) + REASON_BYTES
BACKLOG = 1024
GREETING_SECONDS = 5.0  # for a connection to say which rank it is
STRANGERS = 16  # how many silent connections may be open at a time
SHORTAGES = {
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit on open files (sysctl fs.file-max)",
    errno.ETOOMANYREFS: "raise the limit on open files (ulimit -n), which holds for descriptors on their way, too",
    errno.ENOBUFS: "free memory",
    errno.ENOMEM: "free memory",
}


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(b"\0symcomm-" + secrets.token_hex(16).encode())
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel reports them."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _check_user(sock: socket.socket) -> None:
    pid, uid = peer_of(sock)
    if uid != os.getuid():
        raise errors.ResourceError(
            f"process {pid} of user id {uid} answers for rank 0, and we are user id {os.getuid()}; refused."
        )


class Deadline:
    """How long to wait for others: until a deadline passes, or ``check`` raises."""

    def __init__(self, seconds: float, check: Callable[[], None] | None):
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._check = check

    @classmethod
    def of(cls, exchange: Exchange, seconds: float) -> Deadline:
        """For ranks that take part in ``exchange``."""
        return cls(seconds, getattr(exchange, "check", None))

    def look(self, poll: select.poll) -> list[tuple[int, int]]:
        """Poll for a moment; returns what is ready. Raises TimeoutError when the time is over."""
        if (left := self._end - time.monotonic()) <= 0:
            raise TimeoutError
        if not (ready := poll.poll(min(left, SLICE) * 1e3)) and self._check is not None:
            self._check()
        return ready

    def await_readable(self, sock: socket.socket) -> None:
        """Wait until there is something to read. Raises TimeoutError when the time is over."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while not self.look(poll):
            pass

    def pause(self) -> None:
        """Wait before another try. Raises TimeoutError when the time is over."""
        self.look(select.poll())

    def get(self, answers: queue.SimpleQueue[Any]) -> Any:
        """The next item that a thread puts there. Raises queue.Empty when the time is over."""
        while (left := self._end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                return answers.get(timeout=left if self._check is None else min(left, SLICE))
            if self._check is not None:
                self._check()
        raise queue.Empty

    def await_reason(self) -> None:
        """A peer hung up. If it gave a reason, ``check`` will soon raise it."""
        if self._check is not None:
            for _ in range(REASON_LOOKS):
                self._check()
                time.sleep(SLICE)


def _pass_descriptors(
    rank: int, arena: Arena, listener: socket.socket | None, infos: Sequence[dict[str, Any]], deadline: Deadline
) -> list[Peer]:
    try:
        if rank == 0:
            assert listener is not None
            with _DescriptorServer(listener, infos, arena) as server:
                return server.serve(deadline)
        return _join(rank, arena, infos, deadline)
    except (OSError, EOFError) as error:
        if isinstance(error, errors.SymcommError):
            raise
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            raise _shortage("exchange of arenas", _name(infos, rank), error) from error
        deadline.await_reason()
        missing = [_name(infos, r) for r in getattr(error, "missing", [0] if rank else [])]
        raise errors.deadline("exchange of arenas", deadline.seconds, missing=missing) from error


def _name(infos: Sequence[dict[str, Any]], rank: int) -> int:
    """The number by which users know a rank of this host: that among the ranks of all hosts."""
    return infos[rank].get("number", rank)


def _shortage(what: str, rank: int | None, error: OSError) -> errors.ResourceError:
    text = f"{what}: {'this rank' if rank is None else f'rank {rank}'} cannot take part: {error.strerror}"
    return errors.ResourceError(f"{text}; {SHORTAGES[error.errno or 0]}.")


@contextlib.contextmanager
def naming_shortages(what: str, rank: int | None = None) -> Iterator[None]:
    """Within it, running out of descriptors or memory becomes a ResourceError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, errors.SymcommError) or error.errno not in SHORTAGES:
            raise
        raise _shortage(what, rank, error) from error


def check_descriptors(what: str, rank: int, needed: int) -> None:
    """Raise ResourceError unless this process can open so many more. For libraries that end the process otherwise."""
    with naming_shortages(what, rank), contextlib.ExitStack() as stack:
        for _ in range(needed):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _check_received(flags: int) -> None:
    """Raise if descriptors were lost: the kernel drops those that a process has no room for, and sets only a flag."""
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class _Missing(OSError):
    def __init__(self, missing: list[int]):
        super().__init__("not all ranks came")
        self.missing = missing


class _DescriptorServer:
    """Rank 0's end: takes a descriptor from each rank and sends all of them to all ranks.

    The socket's name is public. Connections of other users are closed at once. A connection of our own user must name a
    rank and its nonce. One that stays silent holds no rank up."""

    def __init__(self, listener: socket.socket, infos: Sequence[dict[str, Any]], arena: Arena):
        self._listener, self._infos = listener, infos
        self._ranks: dict[int, socket.socket] = {}
        self._descriptors = {0: os.dup(arena.fd)}
        self._silent: dict[int, tuple[socket.socket, float]] = {}  # silent connections, and until when they may be
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self.dropped = 0

    def __enter__(self) -> _DescriptorServer:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            error = _shortage("exchange of arenas", _name(self._infos, 0), error)
        for sock in self._ranks.values():
            _apologize(sock, error)
        for fd in self._descriptors.values():
            os.close(fd)
        for sock in [*self._ranks.values(), *(sock for sock, _ in self._silent.values())]:
            sock.close()

    def serve(self, deadline: Deadline) -> list[Peer]:
        while missing := [r for r in range(1, len(self._infos)) if r not in self._ranks]:
            try:
                ready = deadline.look(self._poll)
            except TimeoutError:
                raise _Missing(missing) from None
            for fd, _ in ready:
                if fd == self._listener.fileno():
                    self._accept()
                elif fd in self._silent:
                    self._greet(self._silent.pop(fd)[0])
            self._drop_late()
        for rank, sock in self._ranks.items():
            self._send_all(rank, sock, deadline.seconds)
        peers = _map_unknown(self._infos, self._descriptors)
        for rank, sock in self._ranks.items():
            try:
                _await_done(sock, deadline)
            except (OSError, EOFError):
                raise _Missing([rank]) from None
        for sock in self._ranks.values():
            with contextlib.suppress(OSError):  # the rank died meanwhile; the group's first operation will say so
                sock.send(DONE)
        return peers

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        pid, uid = peer_of(sock)
        if uid != os.getuid():
            self._drop(sock, f"process {pid} of user id {uid}")
            return
        sock.setblocking(False)
        self._silent[sock.fileno()] = sock, time.monotonic() + GREETING_SECONDS
        self._poll.register(sock, select.POLLIN)

    def _greet(self, sock: socket.socket) -> None:
        """Take a descriptor, if the connection is a rank's."""
        self._poll.unregister(sock)
        try:
            data, fds, flags, _ = socket.recv_fds(sock, HELLO.size + 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            data, fds, flags = b"", [], 0
        rank, nonce = HELLO.unpack(data) if len(data) == HELLO.size else (0, b"")
        expected = 0 < rank < len(self._infos) and rank not in self._ranks
        is_rank = expected and nonce == bytes.fromhex(self._infos[rank]["nonce"])
        if is_rank and len(fds) == 1:
            self._ranks[rank], self._descriptors[rank] = sock, fds[0]
            return
        for fd in fds:
            os.close(fd)
        if is_rank and flags & socket.MSG_CTRUNC:
            self._ranks[rank] = sock  # so that it is told why
            _check_received(flags)
        self._drop(sock, f"process {peer_of(sock)[0]} of our own user")

    def _drop_late(self) -> None:
        """Drop connections that have been silent for too long, and the oldest ones if there are too many."""
        now, late = time.monotonic(), len(self._silent) - STRANGERS - len(self._infos)
        for position, (fd, (sock, until)) in enumerate(list(self._silent.items())):
            if position < late or now > until:
                del self._silent[fd]
                self._poll.unregister(sock)
                self._drop(sock, f"process {peer_of(sock)[0]}, which said nothing")

    def _drop(self, sock: socket.socket, who: str) -> None:
        self.dropped += 1
        if self.dropped == 1:
            log.warning("symcomm: %s connected to the ranks' socket and is none of them; dropped, as all like it.", who)
        sock.close()

    def _send_all(self, rank: int, sock: socket.socket, seconds: float) -> None:
        sock.settimeout(seconds)
        try:
            for start in range(0, len(self._infos), FDS_PER_MESSAGE):
                some = range(start, min(start + FDS_PER_MESSAGE, len(self._infos)))
                socket.send_fds(sock, [FIRST.pack(start)], [self._descriptors[r] for r in some])
        except OSError as error:
            if error.errno in SHORTAGES:
                raise
            raise _Missing([rank]) from error


def _join(rank: int, arena: Arena, infos: Sequence[dict[str, Any]], deadline: Deadline) -> list[Peer]:
    with _connected(bytes.fromhex(infos[0]["socket"]), deadline) as sock:
        _check_user(sock)
        socket.send_fds(sock, [HELLO.pack(rank, bytes.fromhex(infos[rank]["nonce"]))], [arena.fd])
        try:
            peers = _receive_all(sock, infos, deadline)
        except (OSError, errors.SymcommError) as error:
            if isinstance(error, OSError) and error.errno in SHORTAGES:
                error = _shortage("exchange of arenas", _name(infos, rank), error)
            _apologize(sock, error)
            raise error from None
        sock.send(DONE)
        _await_done(sock, deadline)
        return peers


def _receive_all(sock: socket.socket, infos: Sequence[dict[str, Any]], deadline: Deadline) -> list[Peer]:
    peers: list[Peer] = []
    received = 0
    while received < len(infos):
        deadline.await_readable(sock)
        data, fds, flags, _ = socket.recv_fds(sock, MESSAGE_BYTES, FDS_PER_MESSAGE, socket.MSG_CMSG_CLOEXEC)
        try:
            _check_not_sorry(data)
            if data != FIRST.pack(received):
                raise EOFError("rank 0 closed the connection")
            _check_received(flags)
            if not 0 < len(fds) <= len(infos) - received:
                raise EOFError("rank 0 did not send what it has to")
            peers += _map_unknown(infos, dict(enumerate(fds, received)))
            received += len(fds)
        finally:
            for fd in fds:
                os.close(fd)
    return peers


def _await_done(sock: socket.socket, deadline: Deadline) -> None:
    deadline.await_readable(sock)
    data = sock.recv(MESSAGE_BYTES)
    _check_not_sorry(data)
    if data != DONE:
        raise EOFError("the connection was closed")


def _check_not_sorry(data: bytes) -> None:
    if data.startswith(SORRY):
        raise OthersShortage(data.removeprefix(SORRY).decode(errors="replace"))


def _apologize(sock: socket.socket, error: BaseException | None) -> None:
    """Tell the others what only this process knows. They notice dead and late ranks themselves."""
    if isinstance(error, errors.ResourceError):
        with contextlib.suppress(OSError):
            sock.send(SORRY + str(error).encode(errors="replace")[:REASON_BYTES])


def _connected(name: bytes, deadline: Deadline) -> socket.socket:
    """Connect to rank 0. The kernel refuses us at once while others fill the socket's queue, so we try again."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(deadline.seconds)
        while True:
            try:
                sock.connect(name)
                return sock
            except BlockingIOError:
                deadline.pause()
    except BaseException:
        sock.close()
        raise


def _map_unknown(infos: Sequence[dict[str, Any]], descriptors: dict[int, int]) -> list[Peer]:
    return [
        add_peer(Peer.map(fd, infos[r]["nbytes"]))
        for r, fd in descriptors.items()
        if peer_by_nonce(_nonce(infos[r])) is None
    ]


# --- by name ---------------------------------------------------------------------------------------


def _open_named(infos: Sequence[dict[str, Any]], unknown: Sequence[int]) -> list[Peer]:
    """Map the memory of the ranks of ``unknown`` whose files exist here."""
    peers = []
    for r in unknown:
        path = infos[r]["path"]
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise errors.ResourceError(
                f"rank {r}'s memory {path} cannot be opened ({error.strerror}); "
                "let the containers share /dev/shm (--ipc=host) or run the ranks in one container."
            ) from error
        try:
            if (owner := os.fstat(fd).st_uid) != os.getuid():
                raise errors.ResourceError(
                    f"rank {r}'s memory {path} belongs to user id {owner}, and we are user id {os.getuid()}; refused."
                )
            peers.append(add_peer(Peer.map(fd, infos[r]["nbytes"])))
        finally:
            os.close(fd)
    return peers
