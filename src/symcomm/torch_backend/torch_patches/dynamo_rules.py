"""What: Dynamo leaves our own code alone.
Why: when C++ calls a group, as DDP's forward does, Dynamo would compile our method.
Versions: all.
Undo: Dynamo no longer skips our folders.
"""

from __future__ import annotations

from typing import Any

from symcomm.undo import Undo


def apply(trace_rules: Any) -> Undo:
    skipped = trace_rules.SKIP_DIRS
    before = len(skipped)
    for package in ("torch_backend", "compile", "group", "symm_mem"):
        trace_rules.add(f"symcomm.{package}")
    added = skipped[before:]

    def undo() -> None:
        for folder in added:
            skipped.remove(folder)
        trace_rules._recompile_re()

    return undo
