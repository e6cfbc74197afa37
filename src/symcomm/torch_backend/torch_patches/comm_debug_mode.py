"""What: a ``CommDebugMode`` counts every call of our groups as the operator that torch's own groups would call.
Why: it counts torch's operators, and our groups' calls use none.
Versions: all.
Undo: methods are no longer swapped while such a mode counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from symcomm.ops import OPERATORS
from symcomm.torch_backend.torch_patches import method_swap
from symcomm.undo import Undo

_TRACES = torch._C._TorchDispatchModeKey.PROXY  # make_fx.py traces operators, which are counted anyway


class _Shown:
    """Stands for the operator that a mode sees; calling it makes the group's call."""

    def __init__(self, operator: Any, call: Callable[[], Any]):
        self._overloadpacket = operator
        self._call = call

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._call()

    def __repr__(self) -> str:
        return f"{self._overloadpacket}.default"


def apply(mode: Any, group_class: type) -> Undo:
    """Have ``mode``, which is CommDebugMode, count the calls of this class of groups from now on."""
    operators = {method_swap.own(group_class, method): operator for method, operator in OPERATORS.items()}

    def counted(_: str, own: Callable[..., Any], now: Callable[..., Any]) -> Callable[..., Any] | None:
        return _counted(now, getattr(torch.ops.c10d, operators[own]), mode) if own in operators else None

    return method_swap.wrap_inside(mode, group_class, counted)


def _counted(ours: Callable[..., Any], operator: Any, mode: type) -> Callable[..., Any]:
    @functools.wraps(ours)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        modes = _get_current_dispatch_mode_stack()  # of this thread
        counters = [m for m in modes if isinstance(m, mode)]
        if not counters or any(getattr(m, "_mode_key", None) == _TRACES for m in modes):
            return ours(self, *args, **kwargs)
        run: Any = functools.partial(ours, self, *args, **kwargs)
        for counter in counters:
            run = functools.partial(counter.__torch_dispatch__, _Shown(operator, run), (), args)  # type: ignore[attr-defined]
        with _disable_current_modes():  # calls within this one do not count
            return run()

    return call
