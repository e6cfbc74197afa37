"""Detects and reports a hung interpreter lock.

Native code that waits while it holds Python's interpreter lock (GIL) stops every thread of a rank, its server too. A
thread of the C core that needs no lock (``_core/observe/gil_watchdog.c``) then writes one sentence to stderr: which
rank, for how long, which thread probably holds the lock, and what the kernel says that thread does. It writes the same
into the first page of the rank's arena, where the peers' servers find it (``GET /api/v1/peers``). Python's own
``faulthandler.dump_traceback_later`` adds the Python stacks. A process has one such timer, so a program that uses it
must set SYMCOMM_GIL_SECONDS=0.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import struct
import threading
from collections.abc import Callable
from typing import Any

from symcomm._core import native
from symcomm.group.hooks import seconds_from
from symcomm.observe.recorder.records import on_this_host

DEFAULT_SECONDS = 30.0
NOTE = 2048  # offset in an arena's first page, of 1024 bytes
STDERR = 2
OURS = ("symcomm-server", "symcomm-request", "symcomm-heartbeat")  # threads that never hold the lock for long
_THREAD = struct.Struct("<i28s")


def seconds_from_environment() -> float:
    """SYMCOMM_GIL_SECONDS: how long the lock may be held before that is reported; 0: never report."""
    return seconds_from("SYMCOMM_GIL_SECONDS", DEFAULT_SECONDS, "server")


def stall_of(peer: Any) -> str | None:
    """The report in a rank's arena that its interpreter lock hangs, if there is one."""
    return native.gil_watchdog_read(peer.base + NOTE).decode(errors="replace") or None


def watch(group: Any, seconds: float, fd: int = STDERR) -> Callable[[], None]:
    """Watch the interpreter lock on behalf of ``group``'s rank. Call the result to stop."""
    here, pid = on_this_host(group), os.getpid()
    peer = here.peers[here.rank]
    label = f"rank {group.global_ranks[group.rank]} (pid {pid})"
    handle = native.gil_watchdog_start(int(seconds * 1e9), fd, peer.base + NOTE, label)
    done = threading.Event()

    def beat() -> None:
        while not done.is_set():
            native.gil_watchdog_beat(handle, _threads())
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # stderr may be closed
                faulthandler.dump_traceback_later(seconds * 1.5, file=fd)  # the sentence comes within 1.25
            done.wait(seconds / 4)

    beater = threading.Thread(target=beat, name="symcomm-heartbeat", daemon=True)
    beater.start()
    keep = [peer]  # mapped while the core may write to it

    def stop() -> None:
        if not keep or os.getpid() != pid:  # a forked child has no such threads
            return
        done.set()
        beater.join(5.0)
        faulthandler.cancel_dump_traceback_later()
        if not beater.is_alive():
            native.gil_watchdog_stop(handle)
            keep.clear()

    return stop


def _threads() -> bytes:
    """The program's threads, the main one first."""
    threads = [t for t in threading.enumerate() if t.native_id and t.name not in OURS]
    threads.sort(key=lambda thread: thread is not threading.main_thread())
    return b"".join(_THREAD.pack(t.native_id, t.name.encode()[:27]) for t in threads)
