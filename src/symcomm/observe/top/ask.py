"""What a viewer asks for on demand: a rank's stacks, and the keys of the job's store."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from symcomm import errors

__all__ = ["environment_of", "kernel_stacks", "list_store", "server_stacks", "spied_stacks"]

ASK_DEADLINE = 10.0  # seconds
STORE_DEADLINE = 3.0
KEYS_SHOWN = 2000


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    items = raw.decode(errors="replace").split("\0")
    return {name: value for name, found, value in (item.partition("=") for item in items) if found}


def server_stacks(pid: int, rank: int) -> str | None:
    """From the rank's own server, where it runs one (SYMCOMM_SERVER=1)."""
    try:
        places = importlib.import_module("symcomm.observe.places")
    except ImportError:
        return None
    facts = next((f for f in places.on_this_host() if f["pid"] == pid and f["rank"] in (rank, None)), None)
    if facts is None:
        return None
    try:
        threads = _get(facts["address"], facts["token"], "/api/v1/stacks")
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return "\n\n".join(_thread_words(thread) for thread in threads)


def _thread_words(thread: dict[str, Any]) -> str:
    frames = (f"    {f['function']} ({os.path.basename(f['file'])}:{f['line']})" for f in thread["frames"])
    return "\n".join([f"Thread {thread['thread']}", *frames])


def _get(address: str, token: str, path: str) -> Any:
    """JSON from a rank's server at ``unix:/path`` or ``http://host:port``."""
    place = urlsplit(address)
    connection: http.client.HTTPConnection
    if place.scheme == "unix":
        connection = http.client.HTTPConnection("localhost", timeout=ASK_DEADLINE)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(ASK_DEADLINE)
        connection.sock.connect(place.path)
    elif place.scheme == "https":
        connection = http.client.HTTPSConnection(place.hostname or "", place.port, timeout=ASK_DEADLINE)
    else:
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=ASK_DEADLINE)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise ValueError(f"{address} answered {answer.status}")
        return json.loads(body)
    finally:
        connection.close()


def spied_stacks(pid: int) -> str | None:
    """Python frames of a process that need not help: py-spy reads them, where it is installed and allowed to."""
    spy = shutil.which("py-spy")
    if spy is None:
        return None
    try:
        done = subprocess.run([spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=ASK_DEADLINE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def kernel_stacks(pid: int) -> str:
    """What the kernel says about each thread: its name, its state, and what it sleeps in."""
    advice = "for Python frames, start ranks with SYMCOMM_SERVER=1, or `pip install py-spy` here"
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
    """Keys of the store that process ``pid`` was told to meet at; raises ResourceError where there is none."""
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
