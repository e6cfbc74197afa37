"""What: our group is a WatchedGroup (watched_group.py) while torch's FlightRecorderHook or NanCheckHook is attached.
Why: these hooks are C++ objects, and see only calls that pass through C++.
Versions: those that have them (2.15).
Undo: ``attach`` and ``remove`` are C++'s again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from symcomm.torch_backend import versions
from symcomm.undo import Undo, all_of, replace

_watching: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # hook -> the group that it watches


def apply() -> Undo:
    there = versions.hook_classes() if versions.HAS_PYTHON_BACKENDS else {}
    undos = []
    for kind in (there[name] for name in ("FlightRecorderHook", "NanCheckHook") if name in there):
        undos.append(replace(kind, "attach", staticmethod(_attaching(kind.attach))))
        undos.append(replace(kind, "remove", _removing(kind.remove)))
    return all_of(*undos)


def _attaching(attach: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(attach)
    def attached(pg: Any, *args: Any, **kwargs: Any) -> Any:
        hook = attach(pg, *args, **kwargs)
        if getattr(pg, "is_symcomm", False):
            from symcomm.torch_backend.watched_group import WatchedGroup

            pg.__class__ = WatchedGroup
            pg.watchers += 1
            _watching[hook] = weakref.ref(pg)
        return hook

    return attached


def _removing(remove: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(remove)
    def removed(hook: Any) -> None:
        remove(hook)
        group = _watching.pop(hook, lambda: None)()
        if group is not None:
            group.watchers -= 1
            if not group.watchers:
                from symcomm.torch_backend.group import TorchGroup

                group.__class__ = TorchGroup

    return removed
