"""What observers may want to know. Groups tell it here; they do not know who listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["joined", "on_join"]

_on_join: list[Callable[[Any, Any], None]] = []


def on_join(listener: Callable[[Any, Any], None]) -> None:
    """Call ``listener(group, store)`` whenever a rank has met the others; ``store`` is where, None if elsewhere."""
    _on_join.append(listener)


def joined(group: Any, store: Any = None) -> None:
    for listener in _on_join:
        listener(group, store)
