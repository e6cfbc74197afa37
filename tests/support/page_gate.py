"""Stops a rank in the very middle of a copy, whatever the machine's load: a page of its memory is taken away.

A thread that touches the page faults, comes back from the signal handler and faults again, until the page is given
back. Python's own handler of the signal writes to a socket, so the test learns the moment at which the copy came there.

The test makes a ``Gate`` before it forks the ranks. A rank calls ``gate.close(address)``; the test calls
``gate.await_hit()``, stops or kills the rank, does its work, and calls ``gate.open()``. This stops only threads that
take signals: calls that block, not those that the core's own threads run.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import struct
import threading
from pathlib import Path

import torch

from symcomm import symm_mem
from tests.support.faults import readable
from tests.support.ranks import until

PAGE = 4096
# Loads modules for seconds: here, and not when each forked rank makes its first symmetric tensor.
torch._prims_common.make_contiguous_strides_for((1,))
_libc = ctypes.CDLL(None, use_errno=True)


def _protect(address: int, mode: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), mode) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


class Words:
    """Numbers that the test and its forked ranks share."""

    def __init__(self, count: int = 16):
        self._memory = mmap.mmap(-1, 8 * count)

    def __getitem__(self, index: int) -> int:
        return struct.unpack_from("q", self._memory, 8 * index)[0]

    def __setitem__(self, index: int, value: int) -> None:
        struct.pack_into("q", self._memory, 8 * index, value)

    def reach(self, index: int, value: int, seconds: float = 10.0) -> bool:
        """Wait until the number is at least ``value``; False when it is not by then."""
        return until(lambda: self[index] >= value, seconds)


class Gate:
    """A page that stops a thread which touches it. Opened as often as it was closed."""

    def __init__(self) -> None:
        self._hits, self._tell = socket.socketpair()
        self._hits.setblocking(False)
        self._tell.setblocking(False)
        self._go, self._open = os.pipe()
        self._closed = Words(1)
        self._seen = 0

    def close(self, address: int) -> None:
        """In the rank, in its main thread."""
        self._drain()
        page = address & -PAGE
        signal.signal(signal.SIGSEGV, lambda *_: None)
        signal.set_wakeup_fd(self._tell.fileno(), warn_on_full_buffer=False)
        _protect(page, 0)
        self._closed[0] += 1

        def reopen() -> None:
            os.read(self._go, 1)
            _protect(page, mmap.PROT_READ | mmap.PROT_WRITE)

        threading.Thread(target=reopen, daemon=True).start()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._hits.recv(1 << 16):
                pass

    def await_hit(self, seconds: float = 10.0) -> bool:
        """In the test: whether the gate was closed once more and a thread stands there, within that time each."""
        self._seen += 1
        return self._closed.reach(0, self._seen, seconds) and bool(readable([self._hits.fileno()], seconds))

    def open(self) -> None:
        os.write(self._open, b".")

    def discard(self) -> None:
        """In the test, after it."""
        self._hits.close()
        self._tell.close()
        os.close(self._go)
        os.close(self._open)


def state_of(pid: int) -> str:
    """R: runs, S: sleeps, T: is stopped, X: is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def stop(pid: int) -> None:
    """Stop a process; returns once it stands still."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state_of(pid) in "TtZX")


def ordinary(count: int) -> torch.Tensor:
    """A tensor in memory of this process alone that begins at a page."""
    return torch.frombuffer(mmap.mmap(-1, max(4 * count, 1)), dtype=torch.float32, count=count)


def symmetric(count: int) -> torch.Tensor:
    return symm_mem.empty(count)
