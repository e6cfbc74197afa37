"""What: a finder at the front of ``sys.meta_path`` waits until some modules of torch, and one of DeepSpeed, are
imported. It has the other finders load them, and applies more patches after a module's own code has run:

* make_fx.py: calls of our groups become nodes of graphs. comm_debug_mode.py: CommDebugMode counts them.
* dynamo_rules.py: Dynamo leaves our own code alone.
* Inductor gets our lowerings, from ``symcomm.compile``.
* fsdp_buffers.py: FSDP2's buffers are symmetric.
* If Gloo is replaced, two modules that treat its name specially see ours.
* DeepSpeed's inference_all_reduce takes our operator.
* Inductor can allocate comm buffers on the CPU, while ``torch.ops.symm_mem`` takes CPU tensors.

Why: torch's compiler must know of us once something is compiled, but is not loaded before. FSDP2 likewise.
Versions: all.
Undo: the finder is gone, and so are those patches.
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

from symcomm.torch_backend.torch_patches import dynamo_rules, fsdp_buffers
from symcomm.undo import Undo

_installer = "symcomm.compile.install"  # above this layer, so they are loaded by name
_codegen = "symcomm.compile.codegen"
_deepspeed = "symcomm.integrations.deepspeed"


def _trace(proxy_tensor: Any) -> Undo:
    from symcomm.torch_backend.group import TorchGroup
    from symcomm.torch_backend.torch_patches import make_fx

    return make_fx.apply(proxy_tensor, TorchGroup)


def _count(comm_mode: Any) -> Undo:
    from symcomm.torch_backend.group import TorchGroup
    from symcomm.torch_backend.torch_patches import comm_debug_mode

    return comm_debug_mode.apply(comm_mode.CommDebugMode, TorchGroup)


def _install(_: Any) -> Undo:
    module = importlib.import_module(_installer)
    module.install()
    return module.uninstall


def _allocate(_: Any) -> Undo:
    undo: Undo = importlib.import_module(_codegen).write_for_cpu("operators")
    return undo


def _reduce_for_inference(module: Any) -> Undo:
    undo: Undo = importlib.import_module(_deepspeed).apply(module)
    return undo


def _tell_own_name(module: Any) -> Undo:
    from symcomm.torch_backend.torch_patches import replace_gloo

    return replace_gloo.tell_own_name(module)


_ALLOCATES = "torch._inductor.codegen.wrapper"
_THEN: dict[str, Callable[[Any], Undo]] = {
    "torch.fx.experimental.proxy_tensor": _trace,
    "torch.distributed.tensor.debug._comm_mode": _count,
    "torch._dynamo.trace_rules": dynamo_rules.apply,
    "torch._inductor.compile_fx": _install,
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": fsdp_buffers.apply,
    _ALLOCATES: _allocate,
    "deepspeed.comm.torch": _reduce_for_inference,
    "torch.distributed.nn.functional": _tell_own_name,
    "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook": _tell_own_name,
}
_WITH_GROUPS = (
    "torch.fx.experimental.proxy_tensor", "torch.distributed.tensor.debug._comm_mode", "torch._dynamo.trace_rules",
    "torch._inductor.compile_fx", "torch.distributed.fsdp._fully_shard._fsdp_param_group", "deepspeed.comm.torch",
)  # fmt: skip
_wanted: set[str] = set()
_done: dict[str, Undo] = {}


def apply() -> Undo:
    """Patch the modules that work with groups: now if they are loaded, otherwise once they are."""
    return watch(_WITH_GROUPS)


def watch(names: Iterable[str]) -> Undo:
    """Apply the patches for these modules: now to those that are loaded, to the others once they are."""
    _want(names)
    return lambda: _forget(names)


def open_comm_buffers() -> None:
    """torch's own lowerings of symm_mem operators allocate their inputs: let them do so on the CPU."""
    _want({_ALLOCATES})


def close_comm_buffers() -> None:
    _forget({_ALLOCATES})


def _forget(names: Iterable[str]) -> None:
    _wanted.difference_update(names)
    for name in names:
        if name in _done:
            _done.pop(name)()
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
        _done[name] = lambda: None  # while it is being applied
        _done[name] = _THEN[name](sys.modules[name])


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
    """Wraps a loader, and runs a function after it."""

    def __init__(self, theirs: Any):
        self._theirs = theirs

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._theirs.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._theirs.exec_module(module)
        _tell(module.__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)
