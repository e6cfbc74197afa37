"""What a window says about itself, by the names of torch 2.15."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class WindowAccessType(enum.IntEnum):
    """How this rank reaches a peer's memory."""

    UNIFIED = 0  # mapped: loads and stores see what the peer sees
    SEPARATE = 1  # not mapped: puts are visible once the signal after them was taken


@dataclass(slots=True)
class WindowAttr:
    access_type: WindowAccessType = WindowAccessType.UNIFIED
