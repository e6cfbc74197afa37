"""Where observers hook in. Groups call these lists; nothing here knows who is on them.

The layer that observes is loaded only when the environment asks for it, by name: this one must not depend on it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any

on_group: list[Callable[[Any], None]] = []  # called with every new group
on_join: list[Callable[[Any, Any], None]] = []  # with a rank's first group and the store it met the others in, or None
on_end: list[Callable[[], None]] = []  # before a process that was only a rank ends, maybe without Python's farewell
on_failure: list[Callable[[Any, BaseException], None]] = []  # with a group and the first error of it

TRACER = "symcomm.observe.recorder.tracer"
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
    """Whatever an observer does, the caller gets the error that it is about."""
    for observer in list(on_failure):
        with contextlib.suppress(Exception):
            observer(group, error)


def joined(group: Any, store: Any = None) -> None:
    for observer in list(on_join):
        observer(group, store)


def ending() -> None:
    for observer in list(on_end):
        observer()
