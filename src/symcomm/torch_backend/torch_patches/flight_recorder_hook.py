"""What: torch does not attach its flight recorder to groups of ours by itself; a program still can.
Why: our own recorder sees every call; torch's hook would send every call through C++.
Versions: torch attaches it by itself since 2.14.
Undo: the function is torch's again.
"""

from __future__ import annotations

from typing import Any

from symcomm.torch_backend.torch_patches.patch import ask_ours_first
from symcomm.undo import Undo


def apply() -> Undo:
    return ask_ours_first("_maybe_attach_flight_recorder", _recorder)


def _recorder(pg: Any, *_: Any, **__: Any) -> Any:
    return None if getattr(pg, "is_symcomm", False) else NotImplemented
