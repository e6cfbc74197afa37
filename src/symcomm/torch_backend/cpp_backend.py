"""The Backend that torch's C++ finds inside a TorchGroup, where Python classes can be one (torch 2.14 and newer).

A call of a TorchGroup goes straight from Python to our core, which takes a fraction of the time of the path through C++
(BENCHMARKS.md has both). C++ itself needs a Backend: for a group's name, for abort hooks, for operators that ask the
group for one. So each TorchGroup carries one, which only forwards calls::

    dist.all_reduce -> TorchGroup.allreduce -> core                                     the rule
    dist.all_reduce -> WatchedGroup -> C++: hooks, dispatcher -> CppBackend -> core   while torch's hooks watch

FlightRecorderHook and NanCheckHook are C++ objects that see only what passes through C++. When one is attached, the
group becomes a WatchedGroup until the last of them is removed.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch._C._distributed_c10d as torch_c10d
import torch.distributed as dist

from symcomm.ops import BY_TORCH_NAME
from symcomm.torch_backend import versions
from symcomm.torch_backend.group import TorchGroup

_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM


class CppBackend(torch_c10d.Backend):
    """Forwards every call to the group that contains it, without keeping that group alive."""

    def __init__(self, group: TorchGroup):
        super().__init__(group.getRank(), group.getSize())
        self._group = weakref.ref(group)
        self._options = group.options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_group(), name)

    def _of_group(self) -> TorchGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("symcomm: the group of this backend is gone.")
        return group

    @property
    def options(self) -> Any:
        return self._options

    def getBackendName(self) -> str:
        return "symcomm"

    def start_coalescing(self) -> None:
        self._of_group().start_coalescing()

    def end_coalescing(self) -> Any:
        return self._of_group().end_coalescing()


# Works made by a call of this thread: what C++ returns for them can only wait, and lacks a message's source.
_made = threading.local()


def _handed_on(name: str) -> Callable[..., Any]:
    own = getattr(TorchGroup, name)  # not the WatchedGroup's, which would come back here

    @functools.wraps(own)
    def call(self: CppBackend, *args: Any) -> Any:
        work = own(self._of_group(), *args)
        if (waiting := getattr(_made, "works", None)) is not None:
            waiting.append(work)
        return work

    return call


# Attributes and methods that Backend defines itself, so that __getattr__ is not called for them.
FACTS = ("supports_splitting", "supports_coalescing", "supports_shrinking", "supports_window", "supports_reconfigure")
CALLS = (
    "abort", "shutdown", "set_timeout", "_set_default_timeout", "get_error", "allocate_tensor", "supports_tensor_alloc",
    "eager_connect_single_device", "new_window", "get_reconfigure_handle", "reconfigure", "shrink", "split", "merge",
    "monitored_barrier", "memory_stats", "register_abort_hook", "unregister_abort_hook", "_add_ephemeral_timeout",
    "_start_time_estimate", "_end_time_estimate", "_get_sequence_number_for_group", "_set_sequence_number_for_group",
)  # fmt: skip


def _fact(name: str, inner: CppBackend) -> Any:
    return getattr(inner._of_group(), name)


def _fill() -> None:
    for name in (*BY_TORCH_NAME, *CALLS):
        if hasattr(TorchGroup, name):
            setattr(CppBackend, name, _handed_on(name))
    for name in (*FACTS, "supports_abort_hooks", "supports_completion_hooks", "_supports_time_estimate"):
        if hasattr(TorchGroup, name):
            setattr(CppBackend, name, property(functools.partial(_fact, name)))


_fill()


def install_cpp_backend(group: TorchGroup, device_types: list[str]) -> None:
    """Let C++ find a Backend in ``group`` for tensors on these devices."""
    inner = CppBackend(group)
    group._set_default_backend(_CUSTOM)
    for device_type in device_types:
        group._register_backend(torch.device(device_type), _CUSTOM, inner)


# --- groups that torch's hooks watch ----------------------------------------------------------------------------------


class WatchedGroup(TorchGroup):
    """A TorchGroup whose calls go through C++, where hooks see them."""


def _through_cpp(name: str) -> Callable[..., Any]:
    theirs = getattr(dist.ProcessGroup, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        works = _made.works = []  # not kept beyond the call: works hold tensors
        try:
            work = theirs(self, *args, **kwargs)
        finally:
            _made.works = None
        return works[-1] if works else work

    # C++ calls a Python method of this name, unless it is that method that calls C++.
    call.__code__ = call.__code__.replace(co_name=name)
    call.__name__ = name
    return call


for _name in versions.present(dist.ProcessGroup, BY_TORCH_NAME):
    setattr(WatchedGroup, _name, _through_cpp(_name))
