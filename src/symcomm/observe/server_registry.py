"""Where the servers of a job are found.

* In the job's store, under ``symcomm/server/RANK``: JSON with ``address``, ``rank``, ``world_size``, ``pid``, ``host``.
* On this machine, as files ``JOB-rank-RANK.json`` in a directory that only this user can enter: ``$SYMCOMM_RUN_DIR``,
  or ``$XDG_RUNTIME_DIR/symcomm``, or ``/tmp/symcomm-UID``. They hold the token, too, for tools of the same user.
  Sockets are there as well, ``JOB-rank-RANK.sock``.

``on_this_host()`` and ``of_job(store, world_size)`` read them.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import socket
import stat
import tempfile
from datetime import timedelta
from typing import Any

from symcomm.errors import ResourceError
from symcomm.store.lease import root_of

PREFIX = "symcomm/server/"
STORE_SECONDS = 5.0


def rank_from_environment() -> int | None:
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


def job_name() -> str:
    """A name that a job's ranks share, unique on this machine: the launcher's, or our own."""
    names = (os.environ.get(name, "") for name in ("SYMCOMM_LAUNCH_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"))
    parent = multiprocessing.parent_process()  # symcomm.spawn's, which is the same for all ranks
    name = next((name for name in names if name and name != "none"), f"pid{parent.pid if parent else os.getpid()}")
    return re.sub(r"[^\w.-]", "_", name)[:12]


def run_directory() -> str:
    """The private directory, made if missing; refused if other users could write to it."""
    path = os.environ.get("SYMCOMM_RUN_DIR")
    if not path:
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        usable = os.path.isdir(runtime) and os.access(runtime, os.W_OK)
        path = os.path.join(runtime, "symcomm") if usable else f"/tmp/symcomm-{os.getuid()}"
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise ResourceError(f"server: {path} cannot be made ({error.strerror}); set SYMCOMM_RUN_DIR.") from error
    facts = os.lstat(path)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise ResourceError(
            f"server: {path} must be a directory of this user that nobody else can enter (mode 0700); "
            "remove it, or set SYMCOMM_RUN_DIR."
        )
    return path


def socket_path(rank: int | None) -> str:
    return os.path.join(run_directory(), f"{job_name()}-{_rank_words(rank)}.sock")


def _rank_words(rank: int | None) -> str:
    return f"pid-{os.getpid()}" if rank is None else f"rank-{rank}"


class OwnFiles:
    """Files that this process made. A forked child removes none of them."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._made: list[tuple[str, os.stat_result]] = []

    def add(self, path: str) -> None:
        self._made.append((os.path.abspath(path), os.lstat(path)))

    def remove(self) -> None:
        """Remove those that nobody has replaced."""
        for path, made in self._made if os.getpid() == self._pid else ():
            with contextlib.suppress(OSError):
                if os.path.samestat(os.lstat(path), made):
                    os.unlink(path)


# --- saying where we are ---------------------------------------------------------------------------


def facts_of(rank: Any) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "world_size": None if rank.group is None else rank.group.size,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "job": job_name(),
    }


def publish(server: Any) -> None:
    """Publish where ``server`` is: in a file for this user, and in the store for the job."""
    rank = server.rank.rank
    facts = {"address": server.address, **facts_of(server.rank)}
    path = os.path.join(run_directory(), f"{job_name()}-{_rank_words(rank)}.json")
    _write_private(path, json.dumps({**facts, "token": server.token}))
    server.files.add(path)
    if server.rank.store is not None and rank is not None:
        with contextlib.suppress(Exception):  # the store may be gone: the file on this host remains
            root_of(server.rank.store).set(f"{PREFIX}{rank}", json.dumps(facts))


def _write_private(path: str, text: str) -> None:
    descriptor, draft = tempfile.mkstemp(dir=os.path.dirname(path))  # mode 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(draft, path)


# --- finding ---------------------------------------------------------------------------------------


def on_this_host(job: str | None = None) -> list[dict[str, Any]]:
    """The servers of this user's ranks on this machine, by job and rank. Removes files of dead processes."""
    found = []
    directory = run_directory()
    for entry in os.scandir(directory):
        if not entry.name.endswith(".json"):
            continue
        with contextlib.suppress(OSError, ValueError):
            with open(entry.path) as file:
                facts = json.load(file)
            if not _lives(facts["pid"]):
                os.unlink(entry.path)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path.removesuffix(".json") + ".sock")
            elif job is None or facts["job"] == job:
                found.append(facts)
    return sorted(found, key=lambda facts: (facts["job"], -1 if facts["rank"] is None else facts["rank"]))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def of_job(store: Any, world_size: int) -> dict[int, dict[str, Any]]:
    """The servers that ranks have published in the job's store; ranks without one are left out."""
    store = root_of(store)
    keys = {rank: f"{PREFIX}{rank}" for rank in range(world_size)}
    there = [rank for rank, key in keys.items() if store.check([key])]
    if there:
        store.wait([keys[rank] for rank in there], timedelta(seconds=STORE_SECONDS))
    return {rank: json.loads(store.get(keys[rank])) for rank in there}
