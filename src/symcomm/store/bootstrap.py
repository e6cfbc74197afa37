"""Which rank is this process, which other ranks are there, and where do they meet.

``identify`` (launchers.py) reads what a launcher left in the environment; ``rendezvous`` turns that, or a URL, into a
store::

    env://                                what torchrun, `symcomm run`, mpirun, srun or Kubernetes say
    tcp://host:port?rank=0&world_size=4   rank 0 serves the store at that address
    file:///path?rank=0&world_size=4      a FileStore
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from symcomm.errors import RendezvousError, StoreConnectionError
from symcomm.store.base import DEFAULT_TIMEOUT, Store, Timeout, to_seconds
from symcomm.store.file import FileStore
from symcomm.store.hash import HashStore
from symcomm.store.launchers import KNOWN, Identity, identify, read_number, surroundings
from symcomm.store.prefix import PrefixStore
from symcomm.store.standing import KEEPS_STORE, LAUNCHED

__all__ = ["Identity", "Rendezvous", "identify", "rendezvous"]

WHAT_TO_DO = (
    "start with `symcomm run -n 4 script.py`, torchrun, mpirun or srun, "
    "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
)
IN_KUBERNETES = (
    "give the pods a `subdomain` and a headless service of that name, and set WORLD_SIZE; or set RANK, WORLD_SIZE, "
    "MASTER_ADDR and MASTER_PORT"
)


class Rendezvous(NamedTuple):
    """The result: a store that all ranks share, and this process's rank. ``host`` is this machine's name."""

    store: Store
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    host: str
    how: str


# --- the meeting ---------------------------------------------------------------------------------------


def rendezvous(
    url: str = "env://",
    rank: int = -1,
    world_size: int = -1,
    timeout: Timeout = DEFAULT_TIMEOUT,
    environ: Mapping[str, str] | None = None,
) -> Rendezvous:
    """Find out this process's rank and return a store that all ranks share.

    ``rank`` and ``world_size``, if given, win over the environment. ``timeout`` is also the store's.

    Raises: RendezvousError, StoreConnectionError, StoreUnreachableError, StoreAuthError.
    """
    if environ is None:
        environ = surroundings()
    wait = timedelta(seconds=to_seconds(timeout, "rendezvous"))
    if not isinstance(url, str) or "://" not in url:
        raise RendezvousError(f"rendezvous: url must be env://, tcp://host:port or file:///path, got {url!r}.")
    parts = urlsplit(url)
    if parts.scheme not in ("env", "tcp", "file"):
        raise RendezvousError(
            f"rendezvous: unknown scheme in {url!r}; use env://, tcp://host:port?rank=..&world_size=.. "
            "or file:///path?rank=..&world_size=.."
        )
    me = _overridden(identify(environ), _from_url(url, parts, rank, world_size))
    _check_ranks(me, environ)
    store, how = _meet(url, parts, me, wait, environ)
    store.set_timeout(wait)
    assert me.rank is not None and me.world_size is not None
    return Rendezvous(
        store, me.rank, me.world_size, me.local_rank, me.local_world_size, os.uname().nodename, f"{me.source}: {how}"
    )


def _from_url(url: str, parts: SplitResult, rank: int, world_size: int) -> dict[str, int]:
    """Rank and world size from the caller: arguments or the URL, not both."""
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    given: dict[str, int] = {}
    for name, argument in (("rank", rank), ("world_size", world_size)):
        if not isinstance(argument, int) or isinstance(argument, bool):
            raise RendezvousError(f"rendezvous: {name} must be an int, got {argument!r}.")
        if argument != -1 and name in query:
            raise RendezvousError(f"rendezvous: {name} is given twice, as an argument and in {url!r}; give it once.")
        if argument != -1:
            given[name] = argument
        elif (number := read_number(query, name)) is not None:
            given[name] = number
    return given


def _overridden(me: Identity, given: Mapping[str, int]) -> Identity:
    changed = {name: value for name, value in given.items() if value != getattr(me, name)}
    if not changed:
        return me
    source = "arguments" if len(given) == 2 else f"arguments and {me.source}"
    # What the launcher says of this machine does not fit another rank or world size.
    me = me._replace(local_rank=None, local_world_size=None, source=source)
    return me._replace(rank=given.get("rank", me.rank), world_size=given.get("world_size", me.world_size))


def _check_ranks(me: Identity, environ: Mapping[str, str]) -> None:
    if me.rank is None or me.world_size is None:
        missing = [name for name, value in (("rank", me.rank), ("world size", me.world_size)) if value is None]
        raise _unknown(" and ".join(missing), environ)
    if me.world_size < 1:
        raise RendezvousError(f"rendezvous: world_size must be 1 or more, got {me.world_size} ({me.source}).")
    if not 0 <= me.rank < me.world_size:
        raise RendezvousError(
            f"rendezvous: rank must be from 0 to {me.world_size - 1} for world_size {me.world_size}, "
            f"got {me.rank} ({me.source})."
        )


def _unknown(what: str, environ: Mapping[str, str]) -> RendezvousError:
    found = ", ".join(f"{name}={environ[name]}" for name in KNOWN if environ.get(name)) or "none of the known variables"
    fix = IN_KUBERNETES if environ.get("KUBERNETES_SERVICE_HOST") else WHAT_TO_DO
    return RendezvousError(f"rendezvous: nobody says the {what} (found {found}); {fix}.")


def _meet(
    url: str, parts: SplitResult, me: Identity, timeout: timedelta, environ: Mapping[str, str]
) -> tuple[Store, str]:
    """The store, and where it is in words."""
    assert me.world_size is not None
    if parts.scheme == "file":
        path = unquote(parts.netloc + parts.path)
        if not path:
            raise RendezvousError(f"rendezvous: {url!r} names no file; write file:///path/to/a/new/file.")
        return FileStore(path, me.world_size), f"file {path}"
    if parts.scheme == "tcp":
        me = me._replace(master_addr=parts.hostname, master_port=_port(url, parts))
        if not me.master_addr or me.master_port is None:
            raise RendezvousError(f"rendezvous: {url!r} must name a host and a port, as in tcp://10.0.0.1:29500.")
    elif me.world_size == 1 and not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
        return HashStore(), "a world of one, in memory"
    if not me.master_addr or me.master_port is None:
        missing = [n for n, v in (("MASTER_ADDR", me.master_addr), ("MASTER_PORT", me.master_port)) if v in (None, "")]
        raise _unknown(f"meeting place ({' and '.join(missing)})", environ)
    if not 0 < me.master_port < 65536:
        raise RendezvousError(f"rendezvous: the port must be from 1 to 65535, got {me.master_port}.")
    return _tcp_store(me, me.master_addr, me.master_port, timeout, environ)


def _port(url: str, parts: SplitResult) -> int | None:
    try:
        return parts.port
    except ValueError:
        raise RendezvousError(f"rendezvous: the port in {url!r} must be a number from 1 to 65535.") from None


def _tcp_store(me: Identity, addr: str, port: int, timeout: timedelta, environ: Mapping[str, str]) -> tuple[Store, str]:
    """Rank 0 serves the store, unless torchrun's agent already does so at that address."""
    from symcomm.store.tcp import TCPStore

    where = f"{addr}:{port}"
    agent = environ.get(KEEPS_STORE) == "True"
    if agent and (addr, str(port)) == (environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")):
        token = None if environ.get(LAUNCHED) else ""  # torchrun's store has no secret, even if the job has a token
        store = TCPStore(addr, port, me.world_size, timeout=timeout, wait_for_workers=False, token=token)
        # The agent's store outlives a restart of the workers: each attempt has its own keys.
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"attempt_{attempt}", store), f"the agent's store at {where}, attempt {attempt}"
    try:
        store = TCPStore(addr, port, me.world_size, is_master=me.rank == 0, timeout=timeout)
    except StoreConnectionError as error:
        from symcomm.store.tcp import store_answers

        if error.errno == errno.EADDRINUSE and store_answers(addr, port):
            error.errno = None  # that one may be about to end
        raise
    return store, f"TCP store at {where}"
