"""What a worker found out before it ended, for the client, to whom vLLM only says that there was an issue.

The client's process has a file without a name, which workers reach by ``/proc`` and the number of its descriptor.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from symcomm.undo import replace

VARIABLE = "SYMCOMM_VLLM_LAST_WORDS"
PATIENCE = 0.5  # seconds; who found it out may be slower than who tells that something happened
MORE = 0.1  # seconds for somebody who knows better than who has told
AGAIN = 5.0  # seconds in which nobody waits any more, since somebody has
MOST = 2000
RECENT = 30.0  # seconds; what is older was said about an engine that this process had before

_fd = -1
_waited = -AGAIN  # when somebody here last waited in vain for sure words


def listen() -> bool:
    """Whether this process is the first of its kind here, to which workers speak."""
    global _fd
    if VARIABLE in os.environ:
        return False
    _fd = os.memfd_create("symcomm-last-words", os.MFD_CLOEXEC)
    os.environ[VARIABLE] = f"/proc/{os.getpid()}/fd/{_fd}"
    return True


def leave(why: BaseException | str, sure: bool = True) -> None:
    """From a worker: why a call failed. Or what somebody knows who was in none; that is told if nobody says more."""
    if (path := os.environ.get(VARIABLE)) is None:
        return
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, f"{time.monotonic()} {sure:d} {' '.join(str(why).split())[:MOST]}\n".encode())
        finally:
            os.close(fd)


def heard(patience: float = PATIENCE) -> str:
    """What was said first of late, or nothing. Only the first of many clients waits for it."""
    global _waited
    if time.monotonic() - _waited < AGAIN:
        patience = 0.0
    end, unsure = time.monotonic() + patience, ""
    while _fd >= 0:
        for line in os.pread(_fd, 1 << 20, 0).decode(errors="replace").splitlines():
            when, sure, said = line.split(" ", 2)
            if float(when) > time.monotonic() - RECENT:
                if sure == "1":
                    return said
                if not unsure:
                    unsure, end = said, min(end, time.monotonic() + MORE)
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    if patience:
        _waited = time.monotonic()
    return unsure


def tell_clients() -> None:
    """vLLM's error of a dead engine says it, too."""
    from vllm.v1.engine.exceptions import EngineDeadError

    init = EngineDeadError.__init__

    def with_words(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if said := heard():
            self.args = (f"{self.args[0]} {said}", *self.args[1:])

    replace(EngineDeadError, "__init__", with_words)
