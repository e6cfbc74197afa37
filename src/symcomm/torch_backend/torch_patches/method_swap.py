"""Swaps methods of our groups while one of torch's dispatch modes is active.

At other times calls cost nothing extra. Several threads may enter and leave modes in any order: a method is always the
class's own, wrapped for each kind of mode that is active in some thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from symcomm.undo import Undo, all_of, replace

# (the name, the class's own method, the current method) -> the method to use meanwhile, or None for no change
Wrapper = Callable[[str, Callable[..., Any], Callable[..., Any]], Callable[..., Any] | None]

_lock = threading.RLock()
_own: dict[tuple[type, str], Callable[..., Any]] = {}  # methods that are swapped now


class _Layer:
    """How one kind of mode wraps a class's methods."""

    def __init__(self, wrapper: Wrapper):
        self.wrapper = wrapper
        self.entered = 0  # how often it is active, in all threads


_layers: dict[type, list[_Layer]] = {}


def own(owner: type, name: str) -> Callable[..., Any]:
    """The class's own method, even while it is swapped."""
    with _lock:
        return _own.get((owner, name)) or getattr(owner, name)


def wrap_inside(mode: Any, owner: type, wrapper: Wrapper) -> Undo:
    """Wrap the methods of ``owner`` while ``mode`` is active; later wrappers go around earlier ones."""
    layer = _Layer(wrapper)
    with _lock:
        _layers.setdefault(owner, []).append(layer)
    enter, leave = mode.__enter__, mode.__exit__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        inside = enter(self)
        _count(owner, layer, +1)
        return inside

    @functools.wraps(leave)
    def left(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            _count(owner, layer, -1)

    def forget() -> None:
        with _lock:
            _layers[owner].remove(layer)
            _swap(owner)

    return all_of(forget, replace(mode, "__enter__", entered), replace(mode, "__exit__", left))


def _count(owner: type, layer: _Layer, change: int) -> None:
    with _lock:
        before, layer.entered = layer.entered, layer.entered + change
        if bool(before) != bool(layer.entered):
            _swap(owner)


def _swap(owner: type) -> None:
    for (whose, name), method in list(_own.items()):
        if whose is owner:
            setattr(owner, name, method)
            del _own[owner, name]
    for name, method in list(vars(owner).items()):
        now = method
        for layer in _layers[owner]:
            if layer.entered and callable(method):
                now = layer.wrapper(name, method, now) or now
        if now is not method:
            _own[owner, name] = method
            setattr(owner, name, now)
