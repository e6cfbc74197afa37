"""What: ``_set_pg_timeout`` asks groups of ours.
Why: torch knows by name which backends have a timeout.
Versions: all.
Undo: the function is torch's again.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from symcomm.torch_backend.torch_patches.patch import ask_ours_first, our_group
from symcomm.undo import Undo


def apply() -> Undo:
    return ask_ours_first("_set_pg_timeout", _set_timeout)


def _set_timeout(timeout: timedelta, group: Any = None) -> Any:
    target = our_group(group)
    return NotImplemented if target is None else target.set_timeout(timeout)
