"""Who am I, who else is there, and where do we meet.

``identify`` reads what a launcher left in the environment; ``rendezvous`` turns that, or a URL, into a store::

    env://                                what torchrun, `symcomm run`, mpirun or srun say
    tcp://host:port?rank=0&world_size=4   rank 0 serves the store at that address
    file:///path?rank=0&world_size=4      a FileStore

Launchers that do not name a meeting place get one: the host is Slurm's first node, or 127.0.0.1 if all ranks are on
one machine; the port is ``20000 + crc32(job id) % 10000``, which every rank computes alike (29500 without a job id).
Set MASTER_PORT where that port is taken.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from symcomm.errors import RendezvousError
from symcomm.store.base import DEFAULT_TIMEOUT, Store, Timeout, to_seconds
from symcomm.store.file import FileStore
from symcomm.store.hash import HashStore
from symcomm.store.prefix import PrefixStore

__all__ = ["Identity", "Rendezvous", "identify", "rendezvous"]

DEFAULT_PORT = 29500
PORTS_FROM, PORTS_COUNT = 20000, 10000  # below 32768, where Linux begins to hand out ports by itself

WHAT_TO_DO = (
    "start with `symcomm run -n 4 script.py`, torchrun, mpirun or srun, "
    "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
)


class Identity(NamedTuple):
    """What the environment says about this process; None where it does not say."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    source: str = "nothing"


class Rendezvous(NamedTuple):
    """The result: a store that all ranks share, and who we are. ``host`` is this machine's name."""

    store: Store
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    host: str
    how: str


# --- what the environment says -----------------------------------------------------------------------

# launcher -> variables for rank, world size, rank and number of ranks on this machine (the first one set counts)
LAUNCHERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "environment variables": (("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    "Open MPI": (
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    "MPICH": (("PMI_RANK", "PMIX_RANK"), ("PMI_SIZE", "WORLD_SIZE"), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
    "Slurm": (("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), ()),
}
JOB_IDS = {
    "Open MPI": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    "MPICH": ("PMI_JOBID", "PMI_NAMESPACE", "PMIX_NAMESPACE"),
    "Slurm": ("SLURM_JOB_ID", "SLURM_JOBID"),
}


def identify(environ: Mapping[str, str]) -> Identity:
    """Read the first launcher that says both rank and world size. Plain variables win over Open MPI, MPICH, Slurm.

    (Open MPI wins over Slurm because of mpirun in a batch job, where Slurm's variables speak of the job's one script.)
    """
    found = Identity(master_addr=environ.get("MASTER_ADDR") or None, master_port=_number(environ, "MASTER_PORT"))
    for launcher, (rank, size, local_rank, local_size) in LAUNCHERS.items():
        if (me := _number(environ, *rank)) is None or (everyone := _number(environ, *size)) is None:
            continue
        found = found._replace(
            rank=me,
            world_size=everyone,
            local_rank=_number(environ, *local_rank),
            local_world_size=_slurm_local_size(environ) if launcher == "Slurm" else _number(environ, *local_size),
            source="torchrun" if launcher == "environment variables" and "TORCHELASTIC_RUN_ID" in environ else launcher,
        )
        return _with_meeting_place(found, launcher, environ)
    # Half of it: the caller may give the other half.
    one, all_of_us = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    half = one is not None or all_of_us is not None
    return found._replace(rank=one, world_size=all_of_us, source="environment variables" if half else found.source)


def _with_meeting_place(found: Identity, launcher: str, environ: Mapping[str, str]) -> Identity:
    """Fill in address and port where a launcher that names the job, but no place, leaves them out."""
    if launcher == "environment variables":
        return found
    addr, port = found.master_addr, found.master_port
    if addr is None and found.local_world_size == found.world_size:
        addr = "127.0.0.1"
    if addr is None and (nodes := _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")):
        addr = first_host(nodes)
    if addr is not None and port is None:
        job = _first(environ, *JOB_IDS[launcher]) or _first(environ, *JOB_IDS["Slurm"])
        port = port_for_job(job) if job else DEFAULT_PORT
    return found._replace(master_addr=addr, master_port=port)


def first_host(nodelist: str) -> str:
    """The first name in a Slurm node list: ``gpu[03-07,9],cpu1`` -> ``gpu03``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group() if first else "")


def port_for_job(job: str) -> int:
    """A port that all ranks of a job agree on without talking."""
    return PORTS_FROM + zlib.crc32(job.encode()) % PORTS_COUNT


def hydra_job(pid: int | None = None) -> str | None:
    """A job id for MPICH's launcher, which names none: the process above all ranks of this machine, if there is one.

    Without it, two jobs on one machine would meet at one port, and the ranks of one could join the other.
    """
    pid = os.getpid() if pid is None else pid
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                name, rest = file.read().rsplit(b")", 1)
        except OSError:
            return None
        if name.endswith(b"(hydra_pmi_proxy"):
            return f"hydra {pid}"
        pid = int(rest.split()[1])
    return None


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    """Tasks on this node, from ``SLURM_*TASKS_PER_NODE`` (``4(x2),3``: two nodes with 4, one with 3) and our node."""
    counts: list[int] = []
    for tasks, repeat in re.findall(
        r"(\d+)(?:\(x(\d+)\))?", _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or ""
    ):
        counts += [int(tasks)] * int(repeat or 1)
    node = _number(environ, "SLURM_NODEID")
    if node is not None and node < len(counts):
        return counts[node]
    if len(set(counts)) == 1:
        return counts[0]
    return _number(environ, "SLURM_NTASKS_PER_NODE")


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if text := environ.get(name):
            if not re.fullmatch(r"\s*\d+\s*", text):
                raise RendezvousError(f"rendezvous: {name} must be a number, got {text!r}.")
            return int(text)
    return None


# --- the meeting ---------------------------------------------------------------------------------------


def rendezvous(
    url: str = "env://",
    rank: int = -1,
    world_size: int = -1,
    timeout: Timeout = DEFAULT_TIMEOUT,
    environ: Mapping[str, str] | None = None,
) -> Rendezvous:
    """Find out who we are and return a store that all ranks share.

    ``rank`` and ``world_size``, where given, win over the environment. ``timeout`` is also the store's.
    """
    if environ is None:
        job = hydra_job() if "PMI_RANK" in os.environ else None
        environ = {"PMI_JOBID": job, **os.environ} if job else os.environ
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
    """Rank and world size that the caller gave, as arguments or in the URL; not both ways."""
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    given: dict[str, int] = {}
    for name, argument in (("rank", rank), ("world_size", world_size)):
        if not isinstance(argument, int) or isinstance(argument, bool):
            raise RendezvousError(f"rendezvous: {name} must be an int, got {argument!r}.")
        if argument != -1 and name in query:
            raise RendezvousError(f"rendezvous: {name} is given twice, as an argument and in {url!r}; give it once.")
        if argument != -1:
            given[name] = argument
        elif (number := _number(query, name)) is not None:
            given[name] = number
    return given


def _overridden(me: Identity, given: Mapping[str, int]) -> Identity:
    changed = {name: value for name, value in given.items() if value != getattr(me, name)}
    if not changed:
        return me
    source = "arguments" if len(given) == 2 else f"arguments and {me.source}"
    # The launcher's idea of this machine does not fit another rank or world size.
    me = me._replace(local_rank=None, local_world_size=None, source=source)
    return me._replace(
        rank=given.get("rank", me.rank),
        world_size=given.get("world_size", me.world_size),
    )


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
    plain = [*(name for group in LAUNCHERS["environment variables"] for name in group), "MASTER_ADDR", "MASTER_PORT"]
    others = [name for groups in list(LAUNCHERS.values())[1:] for names in groups[:2] for name in names]
    names = dict.fromkeys([*plain, *others])
    found = ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name)) or "none of the known variables"
    return RendezvousError(f"rendezvous: nobody says the {what} (found {found}); {WHAT_TO_DO}.")


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
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if agent and (addr, str(port)) == (environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")):
        store = TCPStore(addr, port, me.world_size, is_master=False, timeout=timeout, wait_for_workers=False)
        # The agent's store outlives a restart of the workers: each attempt has its own keys.
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"attempt_{attempt}", store), f"the agent's store at {where}, attempt {attempt}"
    return TCPStore(addr, port, me.world_size, is_master=me.rank == 0, timeout=timeout), f"TCP store at {where}"
