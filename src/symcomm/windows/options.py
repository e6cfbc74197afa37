"""What the calls of a window take and tell, with the names of torch 2.15."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from symcomm.group.work import to_ns

__all__ = ["PutOptions", "SignalOptions", "WaitSignalOptions", "WindowAccessType", "WindowAttr", "seconds_of"]

UNSET = timedelta(milliseconds=-1)  # the group's timeout


class WindowAccessType(enum.IntEnum):
    """How a peer's memory is reached."""

    UNIFIED = 0  # mapped: loads and stores see what the peer sees
    SEPARATE = 1  # not mapped: what was put is there once the signal after it was taken


@dataclass(slots=True)
class WindowAttr:
    access_type: WindowAccessType = WindowAccessType.UNIFIED


@dataclass(slots=True)
class PutOptions:
    timeout: timedelta = UNSET
    hints: dict[str, str] = field(default_factory=dict)  # for other backends; ours needs none


@dataclass(slots=True)
class SignalOptions:
    timeout: timedelta = UNSET
    hints: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class WaitSignalOptions:
    timeout: timedelta = UNSET
    hints: dict[str, str] = field(default_factory=dict)


def seconds_of(call: str, opts: Any) -> float | None:
    """The timeout in options of ours or torch's; None: the group's."""
    timeout = getattr(opts, "timeout", None)
    if timeout is None or (isinstance(timeout, timedelta) and timeout.days < 0):
        return None
    return to_ns(call, timeout) / 1e9
