"""What torch expects of any group in Python: names, a store, and hooks on its calls."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import torch.distributed as dist

from symcomm import errors
from symcomm.group.call_hooks import HookMethods
from symcomm.torch_backend import values
from symcomm.torch_backend.work import WorkInfo


class Names:
    """A group's name and description, which torch may change."""

    def __init__(self, name: str = "", desc: str = ""):
        self.name = name
        self.desc = desc


class CompletionHook:
    """The function, if any, that is called when an operation of a group has ended."""

    hook: Callable[[WorkInfo], Any] | None = None

    def register(self, hook: Callable[[WorkInfo], Any]) -> None:
        call = "_register_on_completion_hook"
        if not callable(hook):
            raise errors.wrong_type(call, "hook", hook, "a function of one argument")
        if self.hook is not None:
            raise errors.CallerError(f"{call}: a hook is registered already.")
        self.hook = hook

    def teller(self, op_type: Any, seq: int, ago: float) -> Callable[..., None]:
        """A function to call when the operation that began ``ago`` seconds ago has ended."""
        hook, begun = self.hook, datetime.now() - timedelta(seconds=ago)
        assert hook is not None

        def ended(*_: Any) -> None:
            now = datetime.now()
            hook(WorkInfo(op_type, seq, begun, now, now - begun))

        return ended


class PythonGroup(HookMethods, dist.ProcessGroup):
    """The base of TorchGroup and of c10d's ProcessGroup."""

    def __init__(self, rank: int, size: int, store: Any, names: Names):
        super().__init__(rank, size)
        self.names = names
        self.completion = CompletionHook()
        self.group_store = store

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def getGroupName(self) -> str:
        return self.names.name

    def setGroupName(self, name: str) -> None:
        self.names.name = values.text("_set_group_name", name)

    def getGroupDesc(self) -> str:
        return self.names.desc

    def setGroupDesc(self, desc: str) -> None:
        self.describe(values.text("_set_group_desc", desc))

    def describe(self, desc: str) -> None:
        """Changes the group's description."""
        self.names.desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def get_group_store(self) -> Any:
        return self.group_store

    def set_intercepted(self, is_intercepted: bool) -> None:
        """Called when hooks begin or cease to watch this group's methods. Nothing to do: no call of this class bypasses
        them."""

    def _register_on_completion_hook(self, hook: Callable[[WorkInfo], Any]) -> None:
        """``hook(WorkInfo)`` is called when an operation of this group has ended, in whichever thread noticed it."""
        self.completion.register(hook)

    def _has_hooks(self) -> bool:
        return self.completion.hook is not None

    def _enable_collectives_timing(self) -> None:
        """Nothing to enable: times are always recorded."""
