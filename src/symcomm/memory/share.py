"""How ranks come to map each other's arenas.

The first rank listens on a Unix socket without a name in the file system; the others send it the descriptor of their
arena and get everybody's in return. Both ends check the other's user id. Where descriptors cannot be passed (ranks in
separate network namespaces, or SYMCOMM_SHARE=named) arenas are files in SYMCOMM_SHM_DIR (/dev/shm), opened by name and
unlinked as soon as all have mapped them. Either way every rank then reads each peer's nonce from the mapped memory:
that, and nothing else, is what counts as being on the same host.

Ranks that cannot share memory are refused with SeveralHostsError, which says who shares with whom: a group across hosts
(symcomm.hosts) is made of one such group per host. SYMCOMM_HOST_ID makes ranks of one machine count as being on
different hosts, to try that out.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from symcomm import errors
from symcomm.memory.arena import (
    Arena,
    Peer,
    add_peer,
    current_arena,
    named_directory,
    peer_by_nonce,
    peers_mapped,
)

__all__ = ["Exchange", "NotMade", "Patience", "SeveralHostsError", "connect", "named_directory", "pretend_host"]

# Everybody's bytes, in rank order. It may have a method check(), which raises once somebody cannot come any more.
Exchange = Callable[[bytes], list[bytes]]
FDS_PER_MESSAGE = 200  # the kernel takes 253
SLICE = 0.05  # seconds between two looks whether all others can still come
REASON_LOOKS = 20


class NotMade(errors.PeerError):
    """An exchange for a new group ended without one: nobody uses what was told in it."""


class SeveralHostsError(errors.ResourceError):
    """The ranks do not all share memory. ``hosts``: the ranks that do, host by host."""

    def __init__(self, message: str, hosts: Sequence[Sequence[int]]):
        super().__init__(message)
        self.hosts = [list(ranks) for ranks in hosts]

    def __reduce__(self):
        return type(self), (str(self), self.hosts)


_thread = threading.local()


def pretend_host(name: str | None) -> None:
    """Let the rank that runs in this thread count as being on a host of that name; None: where it really is."""
    _thread.host = name


def _pretended_host() -> str:
    mine: str | None = getattr(_thread, "host", None)
    return mine if mine else os.environ.get("SYMCOMM_HOST_ID", "")


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def connect(
    rank: int, world: int, exchange: Exchange, extra: dict[str, Any], timeout: float
) -> tuple[list[Peer], list[dict]]:
    """Map every rank's arena. Returns the peers and each rank's ``extra``. Collective over ``exchange``.

    Ranks say which arenas they have mapped already, so that all of them know at once whether any has to be passed."""
    arena = current_arena()
    held = peers_mapped()  # what nobody holds is unmapped
    listener = _listen() if rank == 0 and world > 1 else None
    try:
        card = {
            "nonce": arena.nonce.hex(), "nbytes": arena.nbytes, "boot": _boot_id(),
            "host": socket.gethostname(), "uid": os.getuid(), "net": _link("/proc/self/ns/net"), "path": arena.path,
            "named": arena.directory is not None, "host_id": _pretended_host(),
            "socket": listener.getsockname().hex() if listener else None, "extra": extra,
            "mapped": _short([peer.nonce for peer in held]),
        }  # fmt: skip
        cards = [json.loads(item) for item in exchange(json.dumps(card).encode())]
        _check_one_host(cards)
        if not _all_mapped(cards):
            if all(c["path"] for c in cards):  # a rank that has been in a group before has no name any more
                unknown = [r for r, c in enumerate(cards) if peer_by_nonce(bytes.fromhex(c["nonce"])) is None]
                held += _open_named(cards, unknown)
                seen = [r for r, c in enumerate(cards) if peer_by_nonce(bytes.fromhex(c["nonce"])) is not None]
                _check_all_mapped([json.loads(item) for item in exchange(json.dumps(seen).encode())], cards)
            else:
                patience = Patience(timeout, getattr(exchange, "check", None))
                held += _pass_descriptors(rank, arena, listener, cards, patience)
            arena.unlink()  # all have it
    finally:
        if listener is not None:
            listener.close()
    return _prove(cards), [c["extra"] for c in cards]


SHORT = 8  # characters by which ranks tell arenas apart: 48 random bits


def _short(nonces: Sequence[bytes]) -> str:
    """Nonces in few characters each, one after the other."""
    return "".join(base64.b64encode(nonce[:6]).decode() for nonce in nonces)


def _all_mapped(cards: Sequence[dict]) -> bool:
    """Whether every rank has mapped every arena; the same on all ranks."""
    everyone = {_short([bytes.fromhex(card["nonce"])]) for card in cards}
    mapped = ([card["mapped"][i : i + SHORT] for i in range(0, len(card["mapped"]), SHORT)] for card in cards)
    return all(everyone.issubset(names) for names in mapped)


@functools.cache
def _boot_id() -> str:
    return _read("/proc/sys/kernel/random/boot_id")


def _check_one_host(cards: Sequence[dict]) -> None:
    """Refuse ranks that cannot share memory; what they say here is proved later, by what they have mapped."""
    hosts = _alike([_host_key(card) for card in cards])
    for ranks in hosts:
        first = cards[ranks[0]]
        for r in ranks:
            if cards[r]["uid"] != first["uid"]:
                raise errors.ResourceError(
                    f"rank {ranks[0]} runs as user id {first['uid']} and rank {r} as {cards[r]['uid']}; "
                    "start all ranks as one user."
                )
    if len(hosts) == 1:
        return
    first, other = cards[0], cards[r := hosts[1][0]]
    if other["boot"] == first["boot"] and other.get("host_id") == first.get("host_id"):
        raise SeveralHostsError(
            f"ranks 0 and {r} are in different network namespaces, so descriptors cannot be passed; "
            "set SYMCOMM_SHARE=named on all ranks and let the containers share /dev/shm (--ipc=host).",
            hosts,
        )
    raise SeveralHostsError(
        f"ranks 0 ({first['host']}) and {r} ({other['host']}) are on different hosts; symmetric memory reaches "
        "no farther than one; use a backend that crosses hosts (gloo, nccl) for this group.",
        hosts,
    )


def _host_key(card: dict) -> tuple[str, ...]:
    """Equal for ranks that should be able to map each other's memory."""
    named = card.get("named", bool(card["path"]))
    return card.get("host_id", ""), card["boot"], "" if named else card["net"]


def _alike(keys: Sequence[Any]) -> list[list[int]]:
    """Positions of equal keys, in the order in which they first occur."""
    found: dict[Any, list[int]] = {}
    for position, key in enumerate(keys):
        found.setdefault(key, []).append(position)
    return list(found.values())


def _check_all_mapped(seen: Sequence[Sequence[int]], cards: Sequence[dict]) -> None:
    """``seen[r]``: the ranks whose named memory rank r could open. Who does not see everybody is on another host."""
    hosts = _alike([min(ranks) for ranks in seen])
    if len(hosts) > 1:
        r = hosts[1][0]
        raise SeveralHostsError(
            f"rank 0's memory {cards[0]['path']} cannot be opened by rank {r}; "
            "let the containers share /dev/shm (--ipc=host) or run the ranks in one container.",
            hosts,
        )


def _prove(cards: Sequence[dict]) -> list[Peer]:
    peers = []
    for r, card in enumerate(cards):
        peer = peer_by_nonce(bytes.fromhex(card["nonce"]))
        if peer is None:
            raise errors.InternalError(f"rank {r}'s memory was mapped but holds another nonce than it published.")
        peers.append(peer)
    return peers


# --- by descriptor ---------------------------------------------------------------------------------


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(b"\0symcomm-" + secrets.token_hex(16).encode())
    listener.listen(1024)
    return listener


def _check_user(sock: socket.socket) -> None:
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise errors.ResourceError(
            f"process {pid} of user id {uid} tried to join ranks of user id {os.getuid()}; refused."
        )


class Patience:
    """How long to wait for others: until a deadline, or until ``check`` raises."""

    def __init__(self, seconds: float, check: Callable[[], None] | None):
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._check = check

    def readable(self, sock: socket.socket) -> bool:
        """Whether there is something to read, in the time there is."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while (left := self._end - time.monotonic()) > 0:
            if poll.poll((left if self._check is None else min(left, SLICE)) * 1e3):
                return True
            if self._check is not None:
                self._check()
        return False

    def get(self, answers: queue.SimpleQueue[Any]) -> Any:
        """What a thread puts there; raises queue.Empty when the time is over."""
        while (left := self._end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                return answers.get(timeout=left if self._check is None else min(left, SLICE))
            if self._check is not None:
                self._check()
        raise queue.Empty

    def await_reason(self) -> None:
        """Somebody hung up on us. If it had a reason, ``check`` is about to know it, and raises it."""
        if self._check is not None:
            for _ in range(REASON_LOOKS):
                self._check()
                time.sleep(SLICE)


def _pass_descriptors(
    rank: int, arena: Arena, listener: socket.socket | None, cards: Sequence[dict], patience: Patience
) -> list[Peer]:
    try:
        if rank == 0:
            assert listener is not None
            return _serve_all(arena, listener, cards, patience)
        return _join(rank, arena, cards, patience)
    except (OSError, EOFError) as error:
        if isinstance(error, errors.SymcommError):
            raise
        patience.await_reason()
        missing = getattr(error, "missing", [0] if rank else [])
        raise errors.deadline("exchange of arenas", patience.seconds, missing=missing) from error


class _Missing(OSError):
    def __init__(self, missing: list[int]):
        super().__init__("not all ranks came")
        self.missing = missing


def _serve_all(arena: Arena, listener: socket.socket, cards: Sequence[dict], patience: Patience) -> list[Peer]:
    clients: dict[int, socket.socket] = {}
    descriptors = {0: os.dup(arena.fd)}
    try:
        while len(clients) < len(cards) - 1:
            sock = listener.accept()[0] if patience.readable(listener) else None
            if sock is None or not patience.readable(sock):
                raise _Missing([r for r in range(1, len(cards)) if r not in clients])
            sock.settimeout(patience.seconds)
            _check_user(sock)
            data, fds, _, _ = socket.recv_fds(sock, 8, 1)
            if len(data) != 8 or len(fds) != 1:
                sock.close()
                continue
            peer = struct.unpack("<Q", data)[0]
            clients[peer], descriptors[peer] = sock, fds[0]
        for sock in clients.values():
            for start in range(0, len(cards), FDS_PER_MESSAGE):
                some = range(start, min(start + FDS_PER_MESSAGE, len(cards)))
                socket.send_fds(sock, [struct.pack("<Q", start)], [descriptors[r] for r in some])
        return _map_unknown(cards, descriptors)
    finally:
        for fd in descriptors.values():
            os.close(fd)
        for sock in clients.values():
            sock.close()


def _join(rank: int, arena: Arena, cards: Sequence[dict], patience: Patience) -> list[Peer]:
    descriptors: dict[int, int] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(patience.seconds)
        sock.connect(bytes.fromhex(cards[0]["socket"]))
        _check_user(sock)
        socket.send_fds(sock, [struct.pack("<Q", rank)], [arena.fd])
        try:
            while len(descriptors) < len(cards):
                if not patience.readable(sock):
                    raise TimeoutError
                data, fds, _, _ = socket.recv_fds(sock, 8, FDS_PER_MESSAGE)
                if len(data) != 8:
                    raise EOFError("rank 0 closed the connection")
                start = struct.unpack("<Q", data)[0]
                descriptors.update({start + i: fd for i, fd in enumerate(fds)})
            return _map_unknown(cards, descriptors)
        finally:
            for fd in descriptors.values():
                os.close(fd)


def _map_unknown(cards: Sequence[dict], descriptors: dict[int, int]) -> list[Peer]:
    return [
        add_peer(Peer.map(descriptors[r], card["nbytes"]))
        for r, card in enumerate(cards)
        if peer_by_nonce(bytes.fromhex(card["nonce"])) is None
    ]


# --- by name ---------------------------------------------------------------------------------------


def _open_named(cards: Sequence[dict], unknown: Sequence[int]) -> list[Peer]:
    """The memory of those ranks of ``unknown`` whose files are to be found here."""
    peers = []
    for r in unknown:
        path = cards[r]["path"]
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise errors.ResourceError(
                f"rank {r}'s memory {path} cannot be opened ({error.strerror}); "
                "let the containers share /dev/shm (--ipc=host) or run the ranks in one container."
            ) from error
        try:
            peers.append(add_peer(Peer.map(fd, cards[r]["nbytes"])))
        finally:
            os.close(fd)
    return peers
