"""The control plane: a small HTTP server in every rank that enables it.

``start()`` opens it on a Unix socket in a private directory, or on a loopback port. connection.py decides who may ask
what, handlers.py and api.py answer, server_registry.py finds servers. ``WorkerServer`` is the same server under
PyTorch's name.

One thread waits for clients, asleep in the kernel; one more serves each client (acceptor.py). None takes the
interpreter lock while there are no requests. A forked child closes its copies of the sockets and serves nothing.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import secrets
import socket
import stat
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

from symcomm import errors
from symcomm.observe import server_registry
from symcomm.observe.server.acceptor import ConnectionAcceptor
from symcomm.observe.server.connection import RankSession, RateLimit
from symcomm.observe.server.http_session import load_h11

BACKLOG = 64
TRUSTED_RATE, TRUSTED_BURST = 200.0, 400.0  # requests a second; a viewer of 64 ranks asks each one twice a second
STRANGER_RATE, STRANGER_BURST = 20.0, 40.0

_servers: weakref.WeakSet[Server] = weakref.WeakSet()


class ServedRank:
    """The rank of a server. ``group``: its first, ``store``: where ranks met; None: not yet, or gone."""

    def __init__(self, group: Any = None, store: Any = None):
        self.started = time.time()
        self.address = ""
        self.acceptor: Any = None
        self.stop_watching: Any = None
        self.join(group, store)

    def join(self, group: Any, store: Any) -> None:
        self._group = None if group is None else weakref.ref(group)  # a server keeps no group alive
        self.thread = None if group is None else threading.get_ident()  # the rank's; None: the main one
        self.store = store

    @property
    def group(self) -> Any:
        return None if self._group is None else self._group()

    @property
    def rank(self) -> int | None:
        group = self.group
        return server_registry.rank_from_environment() if group is None else group.global_ranks[group.rank]


class Server:
    """Serves the handlers and routes of this process on a socket that listens. Use ``start()``."""

    port: int
    address: str

    def __init__(
        self,
        listener: socket.socket,
        *,
        token: str | None = None,
        hosts: Sequence[str] = (),
        tls: Any = None,
        rank: ServedRank | None = None,
    ):
        from symcomm.observe.server import api  # noqa: F401  (its routes)

        self.rank = rank or ServedRank()
        self.token = token or os.environ.get("SYMCOMM_TOKEN") or secrets.token_urlsafe(32)
        self.hosts = [*hosts, socket.gethostname()]
        self.tls = tls
        self.trusted_bucket = RateLimit(TRUSTED_RATE, TRUSTED_BURST)
        self.stranger_bucket = RateLimit(STRANGER_RATE, STRANGER_BURST)
        self._listener = listener
        self._lock = threading.Lock()
        self._closed = False
        self.files = server_registry.OwnFiles()
        if listener.family == socket.AF_UNIX:
            self.files.add(listener.getsockname())
        self.port, self.address = _place_of(listener, tls)
        self.rank.address = self.address
        try:
            load_h11()
            self._acceptor = ConnectionAcceptor(
                listener, lambda sock: RankSession(sock, self), "the rank's server", tls
            )
        except (OSError, RuntimeError, errors.ResourceError) as error:
            self.files.remove()
            listener.close()
            if isinstance(error, errors.ResourceError):
                raise
            why = getattr(error, "strerror", None) or error
            raise errors.ResourceError(f"server: it cannot start: {why}.") from error
        self.rank.acceptor = self._acceptor
        _servers.add(self)
        if multiprocessing.parent_process() is not None:  # such a process ends without running atexit's list
            multiprocessing.util.Finalize(None, _at_exit, exitpriority=0)

    # --- the end -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Stop listening, hang up, and remove the socket's file. Call it from any thread, any number of times."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.files.remove()
        self._acceptor.shutdown()
        if self.rank.stop_watching is not None:
            self.rank.stop_watching()

    def _drop(self) -> None:
        """In a forked child: close our copies of the sockets, silently."""
        self._lock = threading.Lock()
        self._closed = True
        self._acceptor.drop()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _after_fork() -> None:
    for server in list(_servers):
        server._drop()


@atexit.register
def _at_exit() -> None:
    for server in list(_servers):
        server.shutdown()


os.register_at_fork(after_in_child=_after_fork)


def _place_of(listener: socket.socket, tls: Any) -> tuple[int, str]:
    """The TCP port, 0 for a Unix socket; and ``unix:/path``, or the URL that clients begin with."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return 0, f"unix:{name}"
    host = name[0] if name[0] not in ("0.0.0.0", "::") else socket.gethostname()
    return name[1], f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{name[1]}"


# --- starting --------------------------------------------------------------------------------------


def start(
    where: str = "unix",
    *,
    group: Any = None,
    store: Any = None,
    token: str | None = None,
    bind: str = "127.0.0.1",
    hosts: Sequence[str] = (),
    cert: str | None = None,
    key: str | None = None,
    gil_seconds: float | None = None,
) -> Server:
    """Serve this rank: ``where`` is "unix", "unix:/path", "tcp" (any free port) or "tcp:PORT".

    Everything but ``ping`` needs the job's token (``token``, or SYMCOMM_TOKEN, or a random one that only this user can
    read, see server_registry.py); our own user needs none on a Unix socket.
    ``bind`` opens a port to other machines: then give ``cert`` and ``key`` too (PEM files), or the token travels in
    the clear. ``hosts``: names by which clients call us.
    ``group`` (the rank's first one) and ``store`` fill the pages; the address is published in the store.
    ``gil_seconds``: see gil.py; SYMCOMM_GIL_SECONDS or 30 by default, 0 for never.
    """
    kind, _, rest = where.partition(":")
    rank = ServedRank(group, store if store is not None else getattr(group, "store", None))
    if kind == "unix":
        listener = listen_unix(rest or server_registry.socket_path(rank.rank))
    elif kind == "tcp":
        if rest and not (rest.isdecimal() and int(rest) < 65536):
            raise errors.bad_argument("start", "where", where, "tcp:PORT with a port of 0 to 65535")
        listener = listen_tcp(bind, int(rest or 0))
        if not _is_loopback(listener) and cert is None:
            warnings.warn(f"symcomm: the server on {bind} is open to a network without TLS; pass cert= and key=.")
    else:
        raise errors.bad_argument("start", "where", where, "'unix', 'unix:/path', 'tcp' or 'tcp:PORT'")
    server = Server(listener, token=token, hosts=hosts, tls=_tls(cert, key), rank=rank)
    server_registry.publish(server)
    from symcomm.observe.recorder import gil

    seconds = gil.seconds_from_environment() if gil_seconds is None else gil_seconds
    if seconds and group is not None:
        rank.stop_watching = gil.watch(group, seconds)
    return server


def start_from_environment(group: Any, store: Any = None) -> Server | None:
    """What SYMCOMM_SERVER asks for: ``1``, ``unix``, ``tcp``, or ``tcp:PORT``: local ranks count up from PORT.

    SYMCOMM_SERVER_BIND, _CERT and _KEY are ``start``'s arguments."""
    wish = os.environ.get("SYMCOMM_SERVER", "")
    if wish in ("", "0"):
        return None
    kind, _, rest = wish.partition(":")
    if wish not in ("1", "unix", "tcp") and not (kind == "tcp" and rest.isdecimal()):
        raise errors.bad_argument("server", "SYMCOMM_SERVER", wish, "1, unix, tcp or tcp:PORT")
    if rest and rest != "0":
        wish = f"tcp:{int(rest) + int(os.environ.get('LOCAL_RANK', group.rank))}"
    bind = os.environ.get("SYMCOMM_SERVER_BIND") or "127.0.0.1"
    cert, key = (os.environ.get(f"SYMCOMM_SERVER_{name}") or None for name in ("CERT", "KEY"))
    return start("unix" if wish == "1" else wish, group=group, store=store, bind=bind, cert=cert, key=key)


def listen_unix(path: str) -> socket.socket:
    """A socket at ``path`` that only this user may connect to. It replaces a dead server's."""
    if len(os.fsencode(path)) > 107:
        raise errors.bad_argument("server", "path", path, "at most 107 bytes long, as the kernel wants it")
    try:
        if os.path.lexists(path) and not _removed_dead(path):
            raise errors.CallerError(f"{path} already exists")
        listener = socket.socket(socket.AF_UNIX)
        os.fchmod(listener.fileno(), 0o600)  # before bind, so that it never is anything else
        return _listen(listener, path)
    except OSError as error:
        raise errors.ResourceError(f"Error binding to {path}: {error.strerror}.") from error


def _removed_dead(path: str) -> bool:
    """Remove a socket of ours on which no process listens."""
    facts = os.lstat(path)
    if not stat.S_ISSOCK(facts.st_mode) or facts.st_uid != os.getuid():
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return True
        except OSError:
            pass
    return False


def listen_tcp(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, place = found[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _listen(listener, place)
    except OSError as error:
        raise errors.ResourceError(f"Error binding to {host}:{port}: {error.strerror or error}.") from error


def _listen(listener: socket.socket, place: Any) -> socket.socket:
    try:
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _is_loopback(listener: socket.socket) -> bool:
    return listener.getsockname()[0].startswith("127.") or listener.getsockname()[0] == "::1"


def _tls(cert: str | None, key: str | None) -> Any:
    if cert is None:
        if key is not None:
            raise errors.bad_argument("start", "cert", cert, "given together with key")
        return None
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise errors.bad_argument("start", "cert and key", (cert, key), f"readable PEM files ({error})") from error
    return context


class WorkerServer(Server):
    """PyTorch's ``_WorkerServer(host_or_file, port=-1)``: a file's name, or with a port a host to listen on.

    As in PyTorch a host may be open to a network; unlike there, TCP clients need the job's token.

    Raises: TypeError, BadArgumentError, CallerError, ResourceError when the address cannot be listened on."""

    def __init__(self, host_or_file: str, port: int = -1):
        if not isinstance(host_or_file, str) or not isinstance(port, int):
            given = (type(host_or_file).__name__, type(port).__name__)
            raise TypeError(f"_WorkerServer: takes host_or_file (str) and port (int), got {given}.")
        if not -1 <= port <= 65535:
            raise errors.bad_argument("_WorkerServer", "port", port, "0 to 65535, or -1 for a Unix socket")
        super().__init__(listen_unix(host_or_file) if port == -1 else listen_tcp(host_or_file, port))
