"""A store's server whose client's connection somebody else holds too, as a forked child does for a moment."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from symcomm.store import TCPStore

pytestmark = pytest.mark.unused_process


def _accepted(port: int) -> int:
    """This process's end of the connection from ``port``."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        for name in os.listdir("/proc/self/fd"):
            try:
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.getpeername()[1] == port and copy.getsockname()[1] != port:
                        return int(name)
            except OSError:
                continue
    raise AssertionError("the server did not accept")


def _ticks(clock: int = 13) -> int:
    """Processor time of this process's other threads, in hundredths of a second."""
    used = 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid():
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            used += int(fields[clock - 2]) + int(fields[clock - 1])
    return used


def _drop_a_held_connection() -> bool:
    """Whether the server forgets a connection that it has closed, though its socket lives on."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    guest = socket.create_connection(("127.0.0.1", server.port))
    held = os.dup(_accepted(guest.getsockname()[1]))
    guest.sendall(b"garbage")
    guest.close()
    time.sleep(0.2)
    before = _ticks()
    time.sleep(0.5)
    burnt = _ticks() - before
    server.set("key", "value")
    works = server.get("key") == b"value"
    os.close(held)
    return works and burnt < 20


def test_the_server_forgets_a_connection_whose_socket_lives_on():
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if _drop_a_held_connection() else 3)
        finally:
            os._exit(4)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status != 3, "the server's thread spins on a connection that it has freed"
    assert status == 0
