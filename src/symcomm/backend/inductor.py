"""Once something is compiled, Inductor is told of our groups; until then it is not even loaded.

A finder at the front of ``sys.meta_path`` waits for Inductor's main module. It asks the other finders,
and has ``symcomm.compile.install()`` run after the module's own code.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["when_loaded"]

_MODULE = "torch._inductor.compile_fx"
_installer = "symcomm.compile.install"  # above this layer, so it is loaded by name


def when_loaded() -> None:
    """Install our lowerings now if Inductor is loaded, else when it will be. Harmless when called twice."""
    if _MODULE in sys.modules:
        importlib.import_module(_installer).install()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, theirs: Any):
        self._theirs = theirs

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._theirs.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._theirs.exec_module(module)
        importlib.import_module(_installer).install()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)
