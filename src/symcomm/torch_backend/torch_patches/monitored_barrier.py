"""What: ``monitored_barrier`` asks groups of ours.
Why: torch refuses it to every backend but Gloo, by name.
Versions: all.
Undo: the function is torch's again.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from symcomm.torch_backend.torch_patches.patch import ask_ours_first, our_group
from symcomm.undo import Undo


def apply() -> Undo:
    return ask_ours_first("monitored_barrier", _monitored_barrier)


def _monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
    target = our_group(group)
    if target is None:
        return NotImplemented
    if isinstance(timeout, (int, float)):
        timeout = timedelta(seconds=timeout)
    return target.monitored_barrier(timeout, wait_all_ranks)
