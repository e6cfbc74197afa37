"""What: with TORCH_DISTRIBUTED_DEBUG=DETAIL, groups of ours get no wrapper.
Why: the wrapper makes a Gloo group beside each group, and compares less than each call of ours does.
Versions: all.
Undo: the function is torch's again.
"""

from __future__ import annotations

from typing import Any

from symcomm.torch_backend.torch_patches.patch import ask_ours_first
from symcomm.undo import Undo


def apply() -> Undo:
    return ask_ours_first("_create_process_group_wrapper", _wrapper)


def _wrapper(wrapped_pg: Any, *_: Any, **__: Any) -> Any:
    if not getattr(wrapped_pg, "is_symcomm", False):
        return NotImplemented
    wrapped_pg.enable_debug_checks()
    return wrapped_pg
