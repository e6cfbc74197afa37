"""Where a TCPStore server listens, who shares it, and where its log lines go. The server itself is C (_core)."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import resource
import socket
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

from symcomm._core import native
from symcomm.errors import ResourceError, StoreConnectionError, bad_argument, format_seconds
from symcomm.store.tcp_wire import port_taken

log = logging.getLogger("symcomm.store")

_SPARE_DESCRIPTORS = 64  # for everything in the process that is not a store client
_NAME_PAUSE = 0.5  # seconds between two questions for an address
LINES_A_SECOND = 20  # of complaints that are logged one by one


@dataclass(frozen=True)
class StoreLimits:
    """What one client may ask of a server. Sizes are in bytes. A client that asks for more is disconnected."""

    max_key: int = 64 << 10
    max_value: int = 1 << 30
    max_frame: int = (1 << 30) + (16 << 20)  # one whole call, and the answer to one multi_get
    max_keys: int = 128 << 10  # in one call
    max_memory: int = 16 << 30  # held for all clients together: keys, values, buffers
    handshake_s: float = 30.0  # to say hello and prove the token


class StoreServer:
    """A running server. It ends when this object is garbage, or at ``stop()``."""

    def __init__(
        self, sockets: list[socket.socket], token: bytes | None, limits: StoreLimits, token_is_optional: bool = False
    ):
        self.port: int = sockets[0].getsockname()[1]
        self.addresses = [sock.getsockname()[0] for sock in sockets]
        with contextlib.ExitStack() as unless_it_starts:
            try:
                reader, writer = os.pipe2(os.O_CLOEXEC)
                unless_it_starts.callback(os.close, reader)
                os.set_blocking(writer, False)
                self._native = native.StoreServer(
                    [s.detach() for s in sockets], token, writer, **vars(limits), token_is_optional=token_is_optional
                )
            except OSError as error:
                raise ResourceError(f"the store's server cannot start: {error.strerror}.") from None
            unless_it_starts.pop_all()
        threading.Thread(target=_log_reports, args=(reader, self.port), name="symcomm-store-log", daemon=True).start()
        _servers.add(self)

    @property
    def connect_host(self) -> str:
        """An address at which this process reaches the server."""
        return {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(self.addresses[0], self.addresses[0])

    def stats(self) -> dict[str, Any]:
        """Counters (clients, accepted, refused, requests, keys, bytes) and the last ``reasons`` for refusals."""
        return self._native.stats()

    def stop(self) -> None:
        self._native.stop()


_servers: weakref.WeakSet[StoreServer] = weakref.WeakSet()
_shared: weakref.WeakValueDictionary[int, StoreServer] = weakref.WeakValueDictionary()  # multi-tenant ones, by port
_shared_lock = threading.Lock()


def _after_fork_in_child() -> None:
    """A forked child must not keep the parent's sockets open, or clients would not see the parent die."""
    global _shared_lock
    _shared_lock = threading.Lock()
    for server in list(_servers):
        server._native.after_fork_in_child()
    _servers.clear()
    _shared.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def start_server(
    host: str,
    port: int,
    *,
    bind: str | list[str] | None,
    listen_fd: int | None,
    token: bytes | None,
    token_is_optional: bool,
    limits: StoreLimits,
    world_size: int | None,
    multi_tenant: bool,
    seconds: float,
) -> StoreServer:
    """Start a server, or join the one that this process already runs on ``port`` if that is multi-tenant."""
    _ensure_descriptors(world_size or 0)
    with _shared_lock if multi_tenant else contextlib.nullcontext():
        if multi_tenant and port and (shared := _shared.get(port)):
            return shared
        server = StoreServer(_sockets(host, port, bind, listen_fd, seconds), token, limits, token_is_optional)
        if multi_tenant:
            _shared[server.port] = server
        return server


def _ensure_descriptors(clients: int) -> None:
    needed = _descriptors() + clients + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed <= soft or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ResourceError(
            f"TCPStore: world_size={clients} needs {needed} file descriptors in the server's process, "
            f"the limit is {hard}; raise it (`ulimit -Hn`, LimitNOFILE=, or the container's nofile)."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _descriptors() -> int:
    """How many this process has."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # as many as it may have
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


# --- where to listen -----------------------------------------------------------------------------------


def _sockets(
    host: str, port: int, bind: str | list[str] | None, listen_fd: int | None, seconds: float
) -> list[socket.socket]:
    if listen_fd is not None:
        return [_adopt(listen_fd, port)]
    addresses = _bind_addresses(host, bind) if bind is not None else _addresses_in_time(host, seconds)
    try:
        return _listen(addresses, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL and bind is None:
            log.warning(
                "store: %s is no address of this machine, so the server listens on all of its addresses; "
                "pass bind= to choose one, and a job token to keep others out",
                host,
            )
            return _listen(["::"], port)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise ResourceError(f"the store's server cannot listen: {error.strerror}; raise `ulimit -n`.") from None
        words = (
            "The server socket has failed to listen on any local network address: TCPStore cannot listen on "
            f"{' and '.join(addresses)} port {port}: {error.strerror}"
        )
        if error.errno == errno.EADDRINUSE:
            raise port_taken(f"{words}; another server has that port: choose another, or 0.") from None
        raise StoreConnectionError(f"{words}.") from None


def _adopt(listen_fd: int, port: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=listen_fd)
        bound = sock.getsockname()[1]
    except (OSError, IndexError, TypeError):
        raise bad_argument("TCPStore", "master_listen_fd", listen_fd, "the descriptor of a bound TCP socket") from None
    if port not in (0, bound):
        sock.detach()
        raise bad_argument("TCPStore", "port", port, f"{bound}, the port master_listen_fd is bound to, or 0")
    return sock


def _bind_addresses(host: str, bind: str | list[str] | None) -> list[str]:
    """The numeric addresses to listen on; ``::`` stands for all addresses of the machine, IPv4 and IPv6."""
    if bind is not None:
        names = [bind] if isinstance(bind, str) else list(bind)
        return ["::" if name == "*" else address for name in names for address in _resolve(name)]
    addresses = _resolve(host)
    own_name = host != "localhost" and not _is_literal(host)
    if own_name and any(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses):
        return ["::"]  # /etc/hosts maps a machine's own name to 127.0.1.1, where its peers could never reach it
    return addresses


def _addresses_in_time(host: str, seconds: float) -> list[str]:
    """The addresses to listen on for ``host``, once its name resolves: that may take a while for a starting pod."""
    end = time.monotonic() + seconds
    warned = False
    while True:
        try:
            return _bind_addresses(host, None)
        except StoreConnectionError as error:
            left = end - time.monotonic()
            if left <= 0:
                raise
            if not warned:
                log.warning("%s Trying again for %s.", error, format_seconds(seconds))
                warned = True
            time.sleep(min(left, _NAME_PAUSE))


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        return False


def _resolve(host: str) -> list[str]:
    if host in ("", "*"):
        return ["::"]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise StoreConnectionError(f"TCPStore: the name {host!r} has no address: {error.strerror}.") from None
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    return sorted(addresses, key=lambda address: ":" in address)  # IPv4 first: it is the one that must work


def _listen(addresses: list[str], port: int) -> list[socket.socket]:
    """Sockets on all ``addresses`` with one port. Addresses that are not this machine's are left out."""
    for attempt in range(20):
        sockets: list[socket.socket] = []
        problem: OSError | None = None
        for address in addresses[:8]:
            try:
                sockets.append(bound_socket(address, sockets[0].getsockname()[1] if sockets else port))
            except OSError as error:
                problem = problem or error
                if error.errno == errno.EADDRINUSE:
                    break
        if sockets and (problem is None or problem.errno != errno.EADDRINUSE):
            return sockets
        for sock in sockets:
            sock.close()
        if not sockets or port != 0 or attempt == 19:
            break  # with port 0, the port we were given on one address may be taken on another: try again
    assert problem is not None
    raise problem


def bound_socket(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        if address != "::":
            raise
        return bound_socket("0.0.0.0", port)  # a machine without IPv6
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address != "::")
        name, _, scope = address.partition("%")
        sock.bind((name, port, 0, socket.if_nametoindex(scope)) if scope else (name, port))
    except OSError as error:
        sock.close()
        if address == "::" and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return bound_socket("0.0.0.0", port)
        raise
    return sock


# --- complaints ----------------------------------------------------------------------------------------


def _log_reports(reader: int, port: int) -> None:
    """A thread: passes the server's lines to logging until the server ends."""
    capped = CappedLog(log, f"store on port {port}: %d more clients were refused")
    with os.fdopen(reader, "r", errors="replace") as pipe:
        for line in pipe:
            capped.warn("store on port %d: %s", port, line.rstrip())
    capped.end_second()


class CappedLog:
    """Complaints about clients, which cannot flood the log. ``rest``: how it says how many more there were."""

    def __init__(self, log: logging.Logger, rest: str):
        self._log, self._rest = log, rest
        self._second, self._lines, self._muted = 0, 0, 0

    def warn(self, text: str, *words: object) -> None:
        now = int(time.monotonic())
        if now != self._second:
            self.end_second()
            self._second, self._lines = now, 0
        self._lines += 1
        if self._lines <= LINES_A_SECOND:
            self._log.warning(text, *words)
        else:
            self._muted += 1

    def end_second(self) -> None:
        if self._muted:
            self._log.warning(self._rest, self._muted)
        self._muted = 0
