"""Hooks of a c10d ProcessGroup: around its own calls, whichever backend they go to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from symcomm.group.call_hooks import CallHooks, HookMethods
from symcomm.group.interception import Interception
from symcomm.torch_backend.call_hooks import TorchCalls


class _Calls(TorchCalls):
    """The same methods as our engine's; there is no way around them."""

    def changed(self, owner: Any, is_intercepted: bool) -> None:
        """Nothing to do."""


def of_default_backend(name: str) -> property:
    """What the default backend says; False where it says nothing."""
    return property(lambda self: bool(getattr(self._default_backend(), name, False)))


class OwnHooks(HookMethods):
    """Mixed into ProcessGroup. Aborts are the default backend's to tell."""

    _default_backend: Callable[[], Any]

    @property
    def call_hooks(self) -> CallHooks:
        made = vars(self).get("_call_hooks")
        if made is None:
            interception = Interception()
            interception.add_facade(self, _Calls())
            made = vars(self).setdefault("_call_hooks", CallHooks(interception))
        return made

    def register_abort_hook(self, hook_id: int, hook: Callable[[], Any]) -> None:
        self._default_backend().register_abort_hook(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        self._default_backend().unregister_abort_hook(hook_id)

    supports_abort_hooks = of_default_backend("supports_abort_hooks")
    supports_completion_hooks = of_default_backend("supports_completion_hooks")
