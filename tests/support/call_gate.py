"""Holds a thread at the entry of a system call, before the kernel looks at its arguments (seccomp's listener).

A rank calls ``gate.close(number)`` in the thread that will make the call. The first such call waits there; the test
learns of it by ``words[HIT]``, may stop or kill the rank, and lets it go on by ``gate.open()``. Later calls pass.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import struct
import threading

from tests.support.page_gate import Words

_libc = ctypes.CDLL(None, use_errno=True)
_ALLOW, _REFUSE, _ASK = 0x7FFF0000, 0x00050001, 0x7FC00000  # a filter's answers: yes, EPERM, or ask the listener
NUMBERS = {
    "process_vm_readv": {"x86_64": 310, "aarch64": 270}[platform.machine()],
    "process_vm_writev": {"x86_64": 311, "aarch64": 271}[platform.machine()],
}


def _filter(call: str, answer: int, flags: int) -> int:
    load, equal, end = 0x20, 0x15, 0x06
    steps = [(load, 0, 0, 0), (equal, 0, 1, NUMBERS[call]), (end, 0, 0, answer), (end, 0, 0, _ALLOW)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    filters = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program))
    assert _libc.prctl(38, 1, 0, 0, 0) == 0  # NO_NEW_PRIVS
    seccomp = {"x86_64": 317, "aarch64": 277}[platform.machine()]
    got = _libc.syscall(seccomp, 1, flags, filters)
    assert got >= 0, os.strerror(ctypes.get_errno())
    return got


def refuse(call: str) -> None:
    """From now on the kernel answers this call, in this thread and those it starts, with EPERM."""
    _filter(call, _REFUSE, 0)


class CallGate:
    """Made before the ranks are forked."""

    RECEIVE, SEND = 0xC0502100, 0xC0182101

    def __init__(self, words: Words, hit: int):
        self._words, self._hit = words, hit
        self._go, self._open = os.pipe()

    def close(self, call: str) -> None:
        ready = threading.Event()
        listener: list[int] = []

        def serve() -> None:
            ready.wait()
            for number in range(1 << 30):
                asked = bytearray(80)
                fcntl.ioctl(listener[0], self.RECEIVE, asked)
                if number == 0:
                    self._words[self._hit] = 1
                    os.read(self._go, 1)
                try:  # let the kernel go on with it
                    fcntl.ioctl(listener[0], self.SEND, struct.pack("QqiI", *struct.unpack_from("Q", asked), 0, 0, 1))
                except FileNotFoundError:
                    pass  # a signal came meanwhile: the kernel asks again

        threading.Thread(target=serve, daemon=True).start()  # before: a filter is inherited
        listener.append(_filter(call, _ASK, 8))  # NEW_LISTENER
        ready.set()

    def open(self) -> None:
        os.write(self._open, b".")

    def discard(self) -> None:
        os.close(self._go)
        os.close(self._open)
