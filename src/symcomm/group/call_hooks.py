"""Hooks around the calls of a group, with the meaning that PyTorch 2.15 gives them.

A pre-hook runs before a call has any effect: what it raises is raised by the call, and told to the other ranks. A
post-hook runs once the call is issued: an asynchronous operation may still be under way. Hooks run in the caller's
thread, in the order of their ids; registering an id again replaces its hook, and unregistering an unknown one does
nothing. Abort hooks run once on each rank that aborts the group or learns that it has failed.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from symcomm import errors
from symcomm.group.call_names import HookOpName
from symcomm.group.interception import Call, CallSpec, Interception
from symcomm.group.p2p import Message
from symcomm.group.refusal import Refusals
from symcomm.ops import OPS

__all__ = ["GROUP_CALLS", "CallHooks", "HookMethods", "HookOpName", "PostHookArgs", "PreHookArgs"]


@dataclass
class PreHookArgs:
    """What a pre-hook receives. In-place collectives have inputs only; ``root`` is the peer of a message, or -1."""

    name: HookOpName = HookOpName.UNKNOWN
    op_id: int = 0
    async_op: bool = False
    root: int = -1
    input_tensors: Sequence[Any] = ()
    output_tensors: Sequence[Any] = ()


@dataclass
class PostHookArgs:
    """What a post-hook receives; ``op_id`` is the pre-hook's. ``work`` is None if the call has already ended."""

    name: HookOpName = HookOpName.UNKNOWN
    op_id: int = 0
    async_op: bool = False
    work: Any = None


PreHook = Callable[[PreHookArgs], Any]
PostHook = Callable[[PostHookArgs], Any]
AbortHook = Callable[[], Any]


class CallHooks:
    """The hooks of one group, whichever object its calls are made through."""

    def __init__(self, interception: Interception):
        self._interception = interception
        self._lock = threading.RLock()
        self._hooks: dict[str, dict[int, Callable[..., Any]]] = {"pre": {}, "post": {}, "abort": {}}
        self._ids = itertools.count()
        self._own_ids = itertools.count(-1, -1)
        self._aborted = False

    def register(self, kind: str, hook_id: Any, hook: Any) -> None:
        """``kind``: "pre", "post" or "abort"."""
        call = f"register_{kind}_hook"
        _check_id(call, hook_id)
        if not callable(hook):
            raise errors.bad_argument(
                call, "hook", hook, f"a function of {'no' if kind == 'abort' else 'one'} argument"
            )
        with self._lock:  # copied, so that a call under way goes on with the hooks it began with
            self._hooks[kind] = dict(sorted({**self._hooks[kind], hook_id: hook}.items()))
            self._install()

    def unregister(self, kind: str, hook_id: Any) -> None:
        _check_id(f"unregister_{kind}_hook", hook_id)
        with self._lock:
            self._hooks[kind] = {known: hook for known, hook in self._hooks[kind].items() if known != hook_id}
            self._install()

    def move_to(self, other: CallHooks) -> None:
        """Move all hooks to ``other``."""
        with self._lock:
            moved, self._hooks = self._hooks, {kind: {} for kind in self._hooks}
            self._install()
        for kind, hooks in moved.items():
            for hook_id, hook in hooks.items():
                other.register(kind, hook_id, hook)

    def own_id(self) -> int:
        """An id that no caller uses: callers choose theirs freely, ours are negative."""
        with self._lock:
            taken = set().union(*self._hooks.values())
            return next(hook_id for hook_id in self._own_ids if hook_id not in taken)

    def _install(self) -> None:
        if self._hooks["pre"] or self._hooks["post"]:
            self._interception.add(self._around)
        else:
            self._interception.remove(self._around)

    def _around(self, call: Call, make: Callable[[], Any]) -> Any:
        each = _messages(call) if call.method == "batch" else [(call.name, call.root, call.inputs, call.outputs)]
        is_async = call.is_async
        ids = [(next(self._ids), *one) for one in each]
        with contextlib.nullcontext() if _concerns_one_rank(call) else Refusals(call.owner):
            for op_id, name, root, inputs, outputs in ids:
                for hook in self._hooks["pre"].values():
                    hook(PreHookArgs(name, op_id, is_async, root, inputs, outputs))
        result = make()
        works = result if call.method == "batch" else [result]
        for (op_id, name, *_), work in zip(ids, works, strict=True):
            for hook in self._hooks["post"].values():
                hook(PostHookArgs(name, op_id, is_async, work if hasattr(work, "wait") else None))
        return result

    def run_abort_hooks(self) -> None:
        """Runs once in a group's life. A hook that raises does not keep the others from running."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            hooks = list(self._hooks["abort"].values())
        for hook in hooks:
            try:
                hook()
            except Exception as error:
                said = f"an abort hook raised {type(error).__name__}: {error}"
                warnings.warn(said, RuntimeWarning, stacklevel=2)


def _concerns_one_rank(call: Call) -> bool:
    """Whether the call is none of the operations that all ranks number: a message, or made of messages."""
    return call.name in (HookOpName.SEND, HookOpName.RECV) or call.method in ("batch", "monitored_barrier")


def _check_id(call: str, hook_id: Any) -> None:
    if not isinstance(hook_id, int) or isinstance(hook_id, bool):
        raise errors.bad_argument(call, "hook_id", hook_id, "a whole number")


def _messages(call: Call) -> list[tuple[HookOpName, int, list[Any], list[Any]]]:
    """The messages of a batch: hooks see each of them."""
    return [
        (HookOpName.SEND, m.peer, [m.tensor], []) if m.is_send else (HookOpName.RECV, m.peer, [], [m.tensor])
        for m in call.arguments.get("messages", ())
        if isinstance(m, Message)  # else the call refuses it
    ]


class _GroupCalls:
    """The methods of a process group that hooks see."""

    methods: Mapping[str, CallSpec] = {
        **{
            op.name: CallSpec(HookOpName[op.hook_name], op.inputs, op.outputs, "root" if op.rooted else "")
            for op in OPS if op.torch not in ("send", "recv", "recv_anysource")
        },
        "scatter_single": CallSpec(HookOpName.SCATTER, "input", "output", "root"),
        "all_gather_bytes": CallSpec(HookOpName.ALLGATHER, is_async=False),
        "monitored_barrier": CallSpec(HookOpName.BARRIER, is_async=False),
        "send": CallSpec(HookOpName.SEND, "tensor", root="peer", is_async=False),
        "isend": CallSpec(HookOpName.SEND, "tensor", root="peer", is_async=True),
        "recv": CallSpec(HookOpName.RECV, "", "tensor", "peer", False),
        "irecv": CallSpec(HookOpName.RECV, "", "tensor", "peer", True),
        "batch": CallSpec(HookOpName.UNKNOWN, is_async=True),
        "new_group": CallSpec(HookOpName.SPLIT, is_async=False),
        "split": CallSpec(HookOpName.SPLIT, is_async=False),
        "new_window": CallSpec(HookOpName.NEW_WINDOW, "tensor", is_async=False),
    }  # fmt: skip

    def is_async(self, arguments: Mapping[str, Any]) -> bool:
        return bool(arguments.get("async_op"))

    def root(self, arguments: Mapping[str, Any], spec: CallSpec) -> int:
        return arguments.get(spec.root, -1)

    def changed(self, owner: Any, is_intercepted: bool) -> None:
        """Nothing to do: all calls of these objects go through their methods."""


GROUP_CALLS = _GroupCalls()


class HookMethods:
    """The methods of every kind of group that register hooks with its ``call_hooks``."""

    supports_abort_hooks: Any = True  # or a property
    supports_completion_hooks: Any = True

    @property
    @abstractmethod
    def call_hooks(self) -> CallHooks: ...

    def register_pre_hook(self, hook_id: int, hook: PreHook) -> None:
        """``hook(PreHookArgs)`` runs before every call. What it raises, the call raises, and nothing is sent."""
        self.call_hooks.register("pre", hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
        self.call_hooks.unregister("pre", hook_id)

    def register_post_hook(self, hook_id: int, hook: PostHook) -> None:
        """``hook(PostHookArgs)`` runs after every call, before it returns."""
        self.call_hooks.register("post", hook_id, hook)

    def unregister_post_hook(self, hook_id: int) -> None:
        self.call_hooks.unregister("post", hook_id)

    def register_abort_hook(self, hook_id: int, hook: AbortHook) -> None:
        """``hook()`` runs once, when this rank aborts the group or learns that it has failed."""
        self.call_hooks.register("abort", hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        self.call_hooks.unregister("abort", hook_id)
