"""What observers may want to know. Groups tell it here; they do not know who listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ending", "joined", "on_end", "on_join"]

_on_join: list[Callable[[Any, Any], None]] = []
_on_end: list[Callable[[], None]] = []


def on_join(listener: Callable[[Any, Any], None]) -> None:
    """Call ``listener(group, store)`` whenever a rank has met the others; ``store`` is where, None if elsewhere."""
    _on_join.append(listener)


def joined(group: Any, store: Any = None) -> None:
    for listener in _on_join:
        listener(group, store)


def on_end(listener: Callable[[], None]) -> None:
    """Call ``listener()`` before a process that was only a rank ends, which may be without Python's usual farewell."""
    _on_end.append(listener)


def ending() -> None:
    for listener in _on_end:
        listener()
