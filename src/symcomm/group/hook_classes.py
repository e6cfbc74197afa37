"""Hooks that are ready to use: one finds NaNs before they spread, one notes that a group failed.

``attach(group)`` takes a group of ours or torch's view of one. The group keeps the hook; the handle only removes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from symcomm import errors
from symcomm.group.call_hooks import HookOpName, PreHookArgs


def hooks_of(call: str, group: Any) -> Any:
    """The group of ours that keeps the hooks of ``group``."""
    core = getattr(group, "core", group)
    if not hasattr(core, "call_hooks"):
        raise errors.bad_argument(call, "group", type(group).__name__, "a group of symcomm, or torch's view of one")
    return core


class AttachedHook:
    """A hook that ``attach`` has put on a group. ``kind``: "pre", "post" or "abort"."""

    kind = ""

    def __init__(self, core: Any, hook: Callable[..., None]):
        self._core: Any = core
        self._id = core.call_hooks.own_id()
        core.call_hooks.register(self.kind, self._id, hook)

    def remove(self) -> None:
        """Take the hook off the group. A second call does nothing."""
        core, self._core = self._core, None
        if core is not None:
            core.call_hooks.unregister(self.kind, self._id)


class NanCheckHook(AttachedHook):
    """A call whose input holds a NaN raises, before anything is sent. Only what others would receive is checked:
    inputs of floating-point and complex numbers, and a broadcast's tensor on its root.

    Raises: CallerError from the call that was given a NaN; BadArgumentError from ``attach``."""

    kind = "pre"

    @staticmethod
    def attach(group: Any) -> NanCheckHook:
        core = hooks_of("NanCheckHook.attach", group)
        rank, name = core.rank, core.name

        def check(args: PreHookArgs) -> None:
            if args.name == HookOpName.BROADCAST and args.root != rank:
                return
            for k, tensor in enumerate(args.input_tensors):
                if _holds_nan(tensor):
                    what = f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
                    raise errors.nan_found(args.name.name, k, what, rank, name)

        return NanCheckHook(core, check)


def _holds_nan(tensor: Any) -> bool:
    """For torch's tensors and NumPy's arrays; False for dtypes that have no NaN."""
    if hasattr(tensor, "is_floating_point"):
        if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
            return False
        values = tensor._values() if tensor.is_sparse else tensor
        if values.dtype.itemsize == 1:  # 8-bit floats cannot be compared
            values = values.float()
        return bool(values.isnan().any())
    kind = getattr(getattr(tensor, "dtype", None), "kind", "")
    return kind in ("f", "c") and bool((tensor != tensor).any())


# --- health -----------------------------------------------------------------------------------------------------------

_unhealthy: set[str] = set()
_lock = threading.Lock()


def unhealthy_backends() -> list[str]:
    """Backends with a group that failed or was aborted in this process; ``c10d_health_check`` reports them."""
    with _lock:
        return sorted(_unhealthy)


class HealthCheckHook:
    """Once the group is aborted or fails, this process counts as unhealthy: see ``c10d_health_check``.

    Raises: BadArgumentError from ``attach``."""

    @staticmethod
    def attach(group: Any) -> None:
        core = hooks_of("HealthCheckHook.attach", group)

        def note() -> None:
            with _lock:
                _unhealthy.add("symcomm")

        core.call_hooks.register("abort", core.call_hooks.own_id(), note)
