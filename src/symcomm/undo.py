"""Changing what others made, torch above all, so that it can be changed back. There is no other way to do it.

A change is made by ``replace`` or ``replace_item``, which return the function that undoes it. ``all_of`` joins the
undos of several changes into one. A ``Switch`` makes a set of changes once, whichever thread asks first.

Who changes torch: ``torch_backend/torch_patches`` (a file for each change), ``symm_mem/install.py`` and
``compile/install.py``. Each says what it changes, why, for which versions of torch, and how that is undone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from typing import Any

Undo = Callable[[], None]


def replace(owner: Any, name: str, value: Any) -> Undo:
    """Set an attribute. Undoing keeps what others have set there since."""
    is_own = name in vars(owner)  # and not a base class's
    known = vars(owner).get(name)
    setattr(owner, name, value)
    placed = vars(owner)[name]

    def undo() -> None:
        if vars(owner).get(name) is not placed:
            return
        if is_own:
            setattr(owner, name, known)
        else:
            delattr(owner, name)

    return undo


def replace_item(table: MutableMapping[Any, Any], key: Any, value: Any) -> Undo:
    """Set an item that is there. Undoing keeps what others have set there since."""
    known = table[key]
    table[key] = value

    def undo() -> None:
        if table.get(key) is value:
            table[key] = known

    return undo


def all_of(*undos: Undo) -> Undo:
    """Undoes all of them, the last one first."""

    def undo() -> None:
        for each in reversed(undos):
            each()

    return undo


class Switch:
    """A set of changes that is made as a whole, and stays while it has holders."""

    def __init__(self, change: Callable[[], Undo]):
        self._change = change
        self._undo: Undo | None = None
        self._holders: set[str] = set()
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return self._undo is not None

    def on(self, holder: str = "") -> None:
        with self._lock:
            if self._undo is None:
                self._undo = self._change()
            self._holders.add(holder)

    def off(self, holder: str = "") -> None:
        with self._lock:
            self._holders.discard(holder)
            if self._undo is not None and not self._holders:
                undo, self._undo = self._undo, None
                undo()
