"""What a window says about itself, with the names of torch 2.15, and how its calls get their deadline."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from symcomm.group.work import Timeout, to_ns


class WindowAccessType(enum.IntEnum):
    """How this rank reaches a peer's memory."""

    UNIFIED = 0  # mapped: loads and stores see what the peer sees
    SEPARATE = 1  # not mapped: puts are visible once the signal after them was taken


@dataclass(slots=True)
class WindowAttr:
    access_type: WindowAccessType = WindowAccessType.UNIFIED


def seconds_of(call: str, opts: Any, timeout: Timeout) -> float | None:
    """The caller's deadline, from ``timeout`` or from PutOptions and the like (ours or torch's); None: the group's."""
    given = getattr(opts, "timeout", None) if timeout is None else timeout
    if given is None or (timeout is None and isinstance(given, timedelta) and given.days < 0):  # unset is -1 ms
        return None
    return to_ns(call, given) / 1e9
