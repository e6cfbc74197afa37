"""Where observers hook in. Groups call the functions in these lists, and do not know whose they are.

The observing layer lies above this one, so it is loaded by name, and only when the environment asks for it, when a wait
lasts long, or when another process asks where this one is.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any

from symcomm.errors import bad_argument

on_group: list[Callable[[Any], None]] = []  # called with every new group
on_join: list[Callable[[Any, Any], None]] = []  # with a rank's first group and the store it met the others in, or None
on_end: list[Callable[[], None]] = []  # before a process that was only a rank ends, maybe without atexit handlers
on_failure: list[Callable[[Any, BaseException], None]] = []  # with a group and its first error

TRACER = "symcomm.observe.recorder.tracer"
WHEREABOUTS = "symcomm.observe.recorder.whereabouts"
LONG_WAITS = "symcomm.observe.long_waits"
LONG_WAITS_ACROSS_HOSTS = "symcomm.observe.long_waits_across_hosts"
ASKS_FOR_TRACES = (
    "SYMCOMM_TRACE_DIR",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_FR_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
)


def made(group: Any) -> None:
    if any(os.environ.get(name) for name in ASKS_FOR_TRACES):
        importlib.import_module(TRACER)
    for observer in list(on_group):
        observer(group)


def failed(group: Any, error: BaseException) -> None:
    """Call the observers of failures. The caller gets ``error``, whatever an observer raises."""
    for observer in list(on_failure):
        with contextlib.suppress(Exception):
            observer(group, error)


def where_am_i(place: int) -> bytes:
    """The stacks of the rank that a question at ``place`` asks for (``Peer.whereabouts``)."""
    told: bytes = importlib.import_module(WHEREABOUTS).answer(place)
    return told


def seconds_of_long_waits() -> float:
    """SYMCOMM_HANG_SECONDS: after how long a wait is reported; 0: never."""
    return seconds_from("SYMCOMM_HANG_SECONDS", 1.0, "ProcessGroup")


def seconds_from(variable: str, default: float, call: str) -> float:
    """The seconds that an environment variable gives; 0: never."""
    text = os.environ.get(variable, "")
    try:
        seconds = float(text or default)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 1e6:
        raise bad_argument(call, variable, text, "a number of seconds, or 0 for never")
    return seconds


def waits(group: Any, site: Any, wait: int, kind: int, missing: int, seconds: float, status: int) -> float:
    """Report that a call of ``group``, made at ``site``, has waited for ``seconds``. Returns the seconds until the next
    report; 0: none. The wait goes on, whatever an observer raises."""
    with contextlib.suppress(Exception):
        pause: float = importlib.import_module(LONG_WAITS).told(group, site, wait, kind, missing, seconds, status)
        return pause
    return 0.0


def watch(group: Any) -> None:
    """Report long waits of ``group``, which is across hosts: the core sees only those on this host."""
    if seconds := seconds_of_long_waits():
        importlib.import_module(LONG_WAITS_ACROSS_HOSTS).watch(group, seconds)


def place_of(thread: int) -> str:
    """Where in its program a thread is: ``loader.py:40 in next_batch``; empty: not known."""
    with contextlib.suppress(Exception):
        place: str = importlib.import_module(WHEREABOUTS).place_of(thread)
        return place
    return ""


def joined(group: Any, store: Any = None) -> None:
    for observer in list(on_join):
        observer(group, store)


def ending() -> None:
    for observer in list(on_end):
        observer()
