"""The shared heap: the part of the process's arena from which ordinary tensors are allocated.

Peers map a whole arena, so collectives use such a tensor without copies, although the program only called
``torch.empty``. The core has the allocator (``_core/memory/heap.h`` says what it guarantees). This file decides whether
to use it, and where it lies. ``torch_patches/cpu_allocator.py`` makes torch allocate there.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from symcomm._core import native
from symcomm.errors import ResourceError
from symcomm.memory.limits import physical_bytes

__all__ = [
    "LEAST_BYTES",
    "NEVER",
    "VARIABLE",
    "HeapStats",
    "heap_stats",
    "least_bytes",
    "open_heap",
    "room",
    "say_ordinary",
    "serve_from",
]

VARIABLE = "SYMCOMM_HEAP"
# `symcomm bench all --heap`: with 16 ranks tensors of 16 KiB and more gain, and smaller ones would share pages.
LEAST_BYTES = 16 << 10
NEVER = 1 << 62
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_OFF = ("", "0", "off", "no", "false")
_ON = ("1", "on", "yes", "true")

NOT_LOADED = "torch has not loaded Symcomm: is the package installed, and TORCH_DEVICE_BACKEND_AUTOLOAD not 0?"
_is_open = _is_served = False
_reason = f"{VARIABLE} is not set"  # why tensors are ordinary; "" when they come from the heap


@dataclass(frozen=True)
class HeapStats:
    """What the shared heap of this process holds, in bytes."""

    in_use: int
    idle: int  # freed, and kept for a moment for the next tensor
    held: int  # freed, but forked children may still read it
    most: int  # in use at once so far
    served: int  # allocations so far
    refused: int  # allocations that became ordinary memory for lack of room
    why_not: str  # why tensors are ordinary here; empty if the heap serves them


def heap_stats() -> HeapStats:
    """What the shared heap of this process holds, or why there is none.

    Raises: nothing."""
    return HeapStats(*native.heap_stats(), _reason)


@functools.cache
def _least_bytes(text: str) -> int | None:
    if text.lower() in _OFF:
        return None
    if text.lower() in _ON:
        return LEAST_BYTES
    found = re.fullmatch(r"(\d+)([KMG]?)(?:iB|B)?", text, re.IGNORECASE)
    if found is None:
        warnings.warn(f"{VARIABLE} must be 1 or a size such as 64K, got {text!r}: tensors are ordinary.", stacklevel=2)
        return None
    return int(found[1]) * _UNITS[found[2].upper()]


def least_bytes() -> int | None:
    """Tensors of at least this size come from the heap; None: no heap is wanted."""
    return _least_bytes(os.environ.get(VARIABLE, ""))


def _unsuitable() -> str:
    """Why a memfd's memory cannot replace ordinary memory on this system; empty if it can."""
    if os.environ.get("SYMCOMM_SHARE", "fd") == "named":
        return "arenas are files (SYMCOMM_SHARE=named), whose file system may become full while a tensor is written"
    try:
        strict = Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        strict = False
    return "the system does not overcommit memory (vm.overcommit_memory=2)" if strict else ""


def room() -> int:
    """How many bytes of an arena the heap gets; 0 if no heap is wanted or possible."""
    if least_bytes() is None:
        return 0
    if why := _unsuitable():
        say_ordinary(why)
        return 0
    return physical_bytes()


def open_heap(base: int, nbytes: int, fd: int, offset: int) -> None:
    """Open the heap in a part of this process's arena, which is never unmapped."""
    global _is_open, _reason
    try:
        native.open_heap(base, nbytes, fd, offset)
    except OSError as error:
        raise ResourceError(f"symmetric memory: no shared heap: {error.strerror}.") from error
    _is_open, _reason = True, "" if _is_served else NOT_LOADED


def is_open() -> bool:
    """Whether the heap is open, so that torch could allocate there."""
    return _is_open


def note_served(is_served: bool) -> None:
    """Note whether torch allocates there."""
    global _is_served, _reason
    _is_served, _reason = is_served, "" if is_served else NOT_LOADED


def serve_from(nbytes: int) -> None:
    """From now on tensors of fewer bytes are ordinary; with ``NEVER`` all are."""
    native.set_heap_least(nbytes)


def say_ordinary(why: str) -> None:
    """Warn that there is no heap, and why; the program runs on without it."""
    global _reason
    _reason = why
    warnings.warn(f"{VARIABLE}: tensors are ordinary memory, since {why}.", stacklevel=3)


def _after_fork_in_child() -> None:
    global _reason
    if not _reason:
        _reason = "this process was forked and has not made an arena of its own"


os.register_at_fork(after_in_child=_after_fork_in_child)
