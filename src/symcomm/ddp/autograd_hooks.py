"""Hooks on autograd's nodes that accumulate gradients: they tell the reducer which gradient has come.

Compiled autograd traces Python hooks into its graph, where buckets could not be reduced in order. It skips the hooks of
PyTorch's Reducer, which are C++, and refuses a Reducer that was not made for it. Our hooks do both themselves.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from symcomm import errors


def _accumulators(params: Sequence[Any]) -> list[Any]:
    with torch.enable_grad():
        return [param.expand_as(param).grad_fn.next_functions[0][0] for param in params]


def _in_compiled_autograd() -> bool:
    """Whether this backward pass is being traced, or is a traced graph (which a trivial compiler runs as it is)."""
    if torch.compiler.is_compiling():
        return True
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and module.in_compiled_autograd_region


def _hook(method: weakref.WeakMethod[Callable[[int], None]], index: int, is_left_out: bool) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        if _in_compiled_autograd():
            if is_left_out:
                return
            raise errors.CallerError(
                "Compiled autograd is not compatible with C++ DDP Reducer, nor with ours, please use "
                'torch._dynamo.config.optimize_ddp="python_reducer" before the model is wrapped.'
            )
        if (call := method()) is not None:
            call(index)

    return hook


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


class AutogradHooks:
    """Calls ``method(index)``, while its object lives, when parameter ``index``'s gradient has been accumulated.

    ``left_out``: within compiled autograd these hooks do nothing, instead of raising: the graph has its own reductions.
    """

    def __init__(self, params: Sequence[Any], method: Callable[[int], None], left_out: bool):
        self.nodes = _accumulators(params)  # kept alive, since hooks die with their nodes
        target = weakref.WeakMethod(method)
        self._handles = [node.register_hook(_hook(target, i, left_out)) for i, node in enumerate(self.nodes)]
        weakref.finalize(self, _remove, self._handles).atexit = False

    def remove(self) -> None:
        _remove(self._handles)
