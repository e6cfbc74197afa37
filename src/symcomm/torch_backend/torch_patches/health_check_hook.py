"""What: when torch attaches its HealthCheckHook to a group of ours, ours is attached too.
Why: torch attaches one to every group, but asks only C++ backends to call it.
Versions: those that have it (2.15).
Undo: ``attach`` is C++'s again.
"""

from __future__ import annotations

import functools
from typing import Any

from symcomm.group.hook_classes import HealthCheckHook
from symcomm.torch_backend import versions
from symcomm.undo import Undo, all_of, replace


def apply() -> Undo:
    theirs: Any = versions.hook_classes().get("HealthCheckHook")
    if theirs is None:
        return all_of()
    attach = theirs.attach

    @functools.wraps(attach)
    def attached(pg: Any) -> None:
        attach(pg)
        if getattr(pg, "is_symcomm", False):
            HealthCheckHook.attach(pg)

    return replace(theirs, "attach", staticmethod(attached))
