"""Hooks on torch's view of a group: the methods that they see, in torch's types if torch has them (2.15)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from symcomm.group.call_hooks import HookOpName, PostHookArgs, PreHookArgs
from symcomm.group.interception import CallSpec
from symcomm.ops import OPS, Op
from symcomm.torch_backend import versions
from symcomm.torch_backend.arguments import is_async, root_of

_TORCHS_NAMES: Any = versions.hook_classes().get("HookOpName")


def _spec_of(op: Op) -> CallSpec:
    return CallSpec(HookOpName[op.hook_name], op.torch_inputs, op.torch_outputs, "root" if op.rooted else "")


class TorchCalls:
    """The methods of torch's groups that hooks see."""

    methods: Mapping[str, CallSpec] = {
        **{name: _spec_of(op) for op in OPS for name in (op.torch, op.older, op.alias) if name},
        "send": CallSpec(HookOpName.SEND, "tensors", root="dstRank", is_async=True),
        "recv": CallSpec(HookOpName.RECV, "", "tensors", "srcRank", True),
        "recv_anysource": CallSpec(HookOpName.RECV, "", "tensors", is_async=True),
        "monitored_barrier": CallSpec(HookOpName.BARRIER, is_async=False),
        **dict.fromkeys(("split_group", "splitGroup", "split_into"), CallSpec(HookOpName.SPLIT, is_async=False)),
        "new_window": CallSpec(HookOpName.NEW_WINDOW, "tensor", is_async=False),
    }

    def is_async(self, arguments: Mapping[str, Any]) -> bool:
        return is_async(arguments.get("opts"))

    def root(self, arguments: Mapping[str, Any], spec: CallSpec) -> int:
        given = arguments.get(spec.root)
        if not isinstance(given, int):  # in the options, unless an overload passes it in their place
            given = root_of(arguments.get("opts"))
        return given

    def changed(self, owner: Any, is_intercepted: bool) -> None:
        owner.set_intercepted(is_intercepted)


TORCH_CALLS = TorchCalls()


def named_by_torch(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``hook``, but called with torch's name of an operation."""
    if _TORCHS_NAMES is None or not callable(hook):
        return hook

    def told(args: PreHookArgs | PostHookArgs) -> Any:
        return hook(replace(args, name=getattr(_TORCHS_NAMES, args.name.name, args.name)))

    return told
