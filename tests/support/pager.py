"""Memory with one page that makes readers and writers, even the kernel, wait until the test gives it (userfaultfd)."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import struct

import pytest
import torch

from tests.support.faults import readable
from tests.support.page_gate import PAGE

_libc = ctypes.CDLL(None, use_errno=True)


def needs_pager() -> None:
    try:
        os.close(Pager().fd)
    except OSError as error:
        pytest.skip(f"{error}; `make test` as root, or with vm.unprivileged_userfaultfd=1, runs it")


class Pager:
    REGISTER, ZERO, API = 0xC020AA00, 0xC020AA04, 0xC018AA3F

    def __init__(self) -> None:
        self.fd = _libc.syscall({"x86_64": 323, "aarch64": 282}[platform.machine()], os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "userfaultfd")
        fcntl.ioctl(self.fd, self.API, struct.pack("QQQ", 0xAA, 0, 0))

    def tensor(self, count: int, at: int) -> torch.Tensor:
        """A tensor of ``count`` floats; its page at byte ``at`` is the one that waits."""
        memory = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        tensor = torch.frombuffer(memory, dtype=torch.float32)
        self.page = tensor.data_ptr() + at
        fcntl.ioctl(self.fd, self.REGISTER, struct.pack("QQQQ", self.page, PAGE, 1, 0))
        return tensor

    def await_hit(self) -> bool:
        return bool(readable([self.fd], 10))

    def give(self) -> None:
        fcntl.ioctl(self.fd, self.ZERO, struct.pack("QQQq", self.page, PAGE, 0, 0))
