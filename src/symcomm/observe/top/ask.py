"""Asks a running job's processes on demand: where its ranks are in the program, and the store's keys.

A rank with a server (``symcomm run --server``) is asked over HTTP. One that traces (``symcomm run --trace DIR``) finds
the question in its folder of dumps, and answers there. Of others, py-spy and the kernel know a little.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from symcomm import errors
from symcomm.observe import server_registry
from symcomm.observe.recorder.dump import PREFIXES, answer_name, ask_name
from symcomm.observe.recorder.processes import environment_of, open_file, user_of
from symcomm.observe.recorder.stacks import ThreadStack
from symcomm.observe.recorder.trace import parse_dump

ANSWER = 2.0  # seconds for all ranks to report where they are
LOOK = 0.02  # seconds between two polls for answers in files
ANSWER_BYTES = 64 << 20  # that a rank's answer may have
PIECE = 64 << 10  # bytes of it that are read at a time
AT_ONCE = 64  # servers asked at the same time
SPY_DEADLINE = 10.0
STORE_DEADLINE = 3.0
KEYS_SHOWN = 2000


# --- stacks ----------------------------------------------------------------------------------------------------------


def ask_stacks(pids: Mapping[int, int], seconds: float = ANSWER) -> dict[int, list[ThreadStack]]:
    """Stacks of ranks, given with their pids; ``[]`` for a rank that could have answered and did not."""
    deadline = time.monotonic() + seconds
    servers = _servers_of(pids)
    folders = {rank: folder for rank, pid in pids.items() if rank not in servers and (folder := _folder_of(pid))}
    found: dict[int, list[ThreadStack]] = {rank: [] for rank in [*servers, *folders]}
    ranks = sorted(servers)
    for first in range(0, len(ranks), AT_ONCE):
        found |= _from_servers({rank: servers[rank] for rank in ranks[first : first + AT_ONCE]}, deadline)
    if folders:
        found |= _from_folders(folders, pids, deadline)
    return found


def _servers_of(pids: Mapping[int, int]) -> dict[int, dict[str, Any]]:
    """Where the ranks' own servers are."""
    try:
        known = server_registry.on_this_host()
    except (errors.ResourceError, OSError):  # the directory is not as it should be
        return {}
    by_process = {(facts["pid"], facts["rank"]): facts for facts in known}
    found = {rank: by_process.get((pid, rank)) or by_process.get((pid, None)) for rank, pid in pids.items()}
    return {rank: facts for rank, facts in found.items() if facts is not None}


def _from_servers(servers: Mapping[int, dict[str, Any]], deadline: float) -> dict[int, list[ThreadStack]]:
    """Ask all before reading the first answer, so that one that hangs delays no other."""
    asked: dict[int, http.client.HTTPConnection] = {}
    found = {}
    troubles = (OSError, ValueError, KeyError, TypeError, http.client.HTTPException)
    for rank, facts in servers.items():
        with contextlib.suppress(*troubles):
            asked[rank] = request(facts["address"], facts["token"], "/api/v1/stacks", deadline)
    for rank, connection in asked.items():
        with contextlib.closing(connection), contextlib.suppress(*troubles):
            connection.sock.settimeout(_left(deadline))
            answer = connection.getresponse()
            if answer.status == 200:
                found[rank] = [ThreadStack.from_dict(stack) for stack in json.loads(read_answer(answer, deadline))]
    return found


def _left(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())


def read_answer(answer: http.client.HTTPResponse, deadline: float) -> bytes:
    """The body, read as it comes, since an announced length may be a lie. OSError if it does not end."""
    body = bytearray()
    while piece := answer.read(PIECE):
        body += piece
        if len(body) > ANSWER_BYTES or time.monotonic() > deadline:
            raise ConnectionAbortedError(f"an answer of more than {len(body)} bytes")
    return bytes(body)


def request(address: str, token: str, path: str, deadline: float) -> http.client.HTTPConnection:
    """Ask a rank's server at ``unix:/path``, ``http://host:port`` or ``https://host:port``."""
    place = urlsplit(address)
    kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    connection = kind(place.hostname or "localhost", place.port, timeout=_left(deadline))
    try:
        if place.scheme == "unix":
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(_left(deadline))
            connection.sock.connect(place.path)
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
    except BaseException:
        connection.close()
        raise
    return connection


def _folder_of(pid: int) -> str | None:
    """Where the process writes dumps, if it traces."""
    variables = environment_of(pid)
    prefix = next((variables[name] for name in PREFIXES if variables.get(name)), None)
    folder = variables.get("SYMCOMM_TRACE_DIR") or (os.path.dirname(prefix) if prefix is not None else None)
    with contextlib.suppress(OSError):
        return None if folder is None else os.path.join(os.readlink(f"/proc/{pid}/cwd"), folder)
    return None


class _Folder:
    """The folder in which a process writes dumps, and is asked by a file of a certain name.

    The process names the folder. When root asks, that is another user's word: then the folder must belong to that user,
    we make nothing there, and we follow no link."""

    def __init__(self, path: str, pid: int):
        self._user, as_root = user_of(pid), os.geteuid() == 0
        if not as_root or self._user == 0:
            os.makedirs(path, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if as_root else 0)
        self._descriptor = os.open(path, flags)
        if as_root and os.fstat(self._descriptor).st_uid != self._user:
            self.close()
            raise PermissionError(errno.EPERM, "the folder belongs to another user than the process", path)

    def close(self) -> None:
        os.close(self._descriptor)

    def ask(self, name: str) -> None:
        with contextlib.suppress(FileExistsError):  # another viewer has asked
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(name, flags, 0o600, dir_fd=self._descriptor))

    def has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except OSError:
            return False
        return True

    def read(self, name: str) -> bytes:
        """What the process wrote under that name."""
        with open(open_file(name, dir_fd=self._descriptor), "rb") as file:
            facts = os.fstat(file.fileno())
            if facts.st_uid != self._user or facts.st_size > ANSWER_BYTES:
                raise PermissionError(errno.EPERM, "not an answer of the process", name)
            return file.read(ANSWER_BYTES)

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._descriptor)


def _from_folders(folders: Mapping[int, str], pids: Mapping[int, int], deadline: float) -> dict[int, list[ThreadStack]]:
    """Tracers answer in files, which we remove."""
    found: dict[int, list[ThreadStack]] = {}
    asked: dict[int, _Folder] = {}
    with contextlib.ExitStack() as stack:
        for rank, path in folders.items():
            with contextlib.suppress(OSError):
                folder = stack.enter_context(contextlib.closing(_Folder(path, pids[rank])))
                folder.ask(ask_name(pids[rank]))
                asked[rank] = folder
        while asked and time.monotonic() < deadline:
            for rank, folder in list(asked.items()):
                if folder.has(answer := answer_name(pids[rank], rank)):
                    with contextlib.suppress(Exception):
                        found[rank] = parse_dump(rank, folder.read(answer)).stacks
                    folder.remove(answer)
                    del asked[rank]
            time.sleep(LOOK)
        for rank, folder in asked.items():
            folder.remove(ask_name(pids[rank]))
    return found


def format_stacks(stacks: list[ThreadStack]) -> str:
    """Every thread, innermost frame first."""
    return "\n\n".join(
        "\n".join([f"Thread {stack.name}{' (rank)' if stack.is_rank else ''}", *(f"    {f}" for f in stack.frames)])
        for stack in stacks
    )


def spied_stacks(pid: int) -> str | None:
    """Python frames of a process, without its help: py-spy reads them, where it is installed and permitted."""
    spy = shutil.which("py-spy")
    if spy is None:
        return None
    try:
        done = subprocess.run([spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=SPY_DEADLINE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def kernel_stacks(pid: int) -> str:
    """What the kernel says about each thread: its name, its state, and what it sleeps in."""
    advice = "for Python frames, start the job with `symcomm run --server`, or `pip install py-spy` here"
    lines = [f"pid {pid}: what the kernel says ({advice})", ""]
    with contextlib.suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda t: int(t.name)):
            with contextlib.suppress(OSError):  # the thread ended meanwhile
                name = (task / "comm").read_text().strip()
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                wait = (task / "wchan").read_text().strip().strip("0") or "-"
                lines.append(f"  thread {task.name:>7}  {name:<16} {STATES.get(state, state):<10} in {wait}")
    return "\n".join(lines)


STATES = {"R": "running", "S": "sleeping", "D": "in the disk", "T": "stopped", "t": "traced", "Z": "dead", "I": "idle"}


def list_store(pid: int | None) -> list[str]:
    """Keys of the rendezvous store of process ``pid``; raises ResourceError where there is none."""
    env = environment_of(pid) if pid is not None else {}
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise errors.ResourceError("the ranks' environment names no store (MASTER_ADDR, MASTER_PORT).")
    from symcomm.store.tcp import TCPStore

    token = env.get("SYMCOMM_TOKEN") or os.environ.get("SYMCOMM_TOKEN") or None
    store = TCPStore(host, int(port), is_master=False, timeout=STORE_DEADLINE, token=token, wait_for_workers=False)
    try:
        return sorted(store.list_keys())[:KEYS_SHOWN]
    finally:
        store.close()
