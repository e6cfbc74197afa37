"""Once something is compiled, torch's compiler is told of us; until then it is not even loaded.

A finder at the front of ``sys.meta_path`` waits for some of the compiler's modules. It asks the other finders for them,
and has something done after a module's own code has run:

* Calls of our groups become nodes of graphs that ``make_fx`` traces, and ``CommDebugMode`` counts them.
* Dynamo leaves our own code alone. When C++ calls a group (DDP does, in its forward), it would compile that as well.
* Inductor gets our lowerings, from ``symcomm.compile``.
* Inductor can allocate comm buffers on the CPU, while ``torch.ops.symm_mem`` takes CPU tensors.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["close_comm_buffers", "open_comm_buffers", "when_loaded"]

_installer = "symcomm.compile.install"  # above this layer, so they are loaded by name
_codegen = "symcomm.compile.codegen"


def _leave_alone(trace_rules: Any) -> None:
    for package in ("backend", "compile", "group", "symm_mem"):
        trace_rules.add(f"symcomm.{package}")


def _install(_: Any) -> None:
    importlib.import_module(_installer).install()


def _trace(proxy_tensor: Any) -> None:
    from symcomm.backend.group import TorchGroup
    from symcomm.backend.traced import watch

    watch(proxy_tensor, TorchGroup)


def _count(comm_mode: Any) -> None:
    from symcomm.backend.counted import watch
    from symcomm.backend.group import TorchGroup

    watch(comm_mode.CommDebugMode, TorchGroup)


def _allocate(_: Any) -> None:
    importlib.import_module(_codegen).write_for_cpu("operators")


_ALLOCATES = "torch._inductor.codegen.wrapper"
_THEN: dict[str, Callable[[Any], None]] = {
    "torch.fx.experimental.proxy_tensor": _trace,
    "torch.distributed.tensor.debug._comm_mode": _count,
    "torch._dynamo.trace_rules": _leave_alone,
    "torch._inductor.compile_fx": _install,
    _ALLOCATES: _allocate,
}
_wanted: set[str] = set()
_done: set[str] = set()


def when_loaded() -> None:
    """Tell the compiler now if it is loaded, else when it will be. Harmless when called twice."""
    _want(_THEN.keys() - {_ALLOCATES})


def open_comm_buffers() -> None:
    """torch's own lowerings of symm_mem operators allocate their inputs: let them do so on the CPU."""
    _want({_ALLOCATES})


def close_comm_buffers() -> None:
    _wanted.discard(_ALLOCATES)
    if _ALLOCATES in _done:
        _done.discard(_ALLOCATES)
        importlib.import_module(_codegen).release("operators")
    if not _wanted:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


def _want(names: Iterable[str]) -> None:
    _wanted.update(names)
    for name in names:
        if name in sys.modules:
            _tell(name)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _tell(name: str) -> None:
    if name in _wanted and name not in _done:
        _done.add(name)
        _THEN[name](sys.modules[name])


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._asking = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name not in _wanted or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Another loader, and then something more."""

    def __init__(self, theirs: Any):
        self._theirs = theirs

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._theirs.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._theirs.exec_module(module)
        _tell(module.__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)
