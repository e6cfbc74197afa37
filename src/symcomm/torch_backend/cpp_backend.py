"""The Backend that torch's C++ finds inside a TorchGroup, if Python classes can be one (torch 2.14 and newer).

A call of a TorchGroup goes straight from Python to our core, in a fraction of the time of the way through C++
(BENCHMARKS.md has both). But C++ itself needs a Backend: for a group's name, for abort hooks, for operators that ask
the group for one. So each TorchGroup has one, which only forwards calls::

    dist.all_reduce -> TorchGroup.allreduce -> core                                     the rule
    dist.all_reduce -> WatchedGroup -> C++: hooks, dispatcher -> CppBackend -> core   while torch's hooks watch

FlightRecorderHook and NanCheckHook are C++ objects that see only what passes through C++. When one is attached, the
group becomes a WatchedGroup (watched_group.py) until the last of them is removed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._C._distributed_c10d as torch_c10d
import torch.distributed as dist

from symcomm.ops import BY_TORCH_NAME

_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM


class CppBackend(torch_c10d.Backend):
    """Forwards every call to the group that contains it, without keeping that group alive."""

    def __init__(self, group: Any, kind: type):
        super().__init__(group.getRank(), group.getSize())
        self._kind = kind  # the class whose methods to call: a WatchedGroup's own would come back here
        self._group = weakref.ref(group)
        self._options = group.options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_group(), name)

    def _of_group(self) -> Any:
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


# Works made by a call of this thread. C++ returns objects that can only wait, without a message's source.
_made = threading.local()


@contextlib.contextmanager
def works_made() -> Iterator[list[Any]]:
    """Within it, collects the works that this thread's backends return to C++. They hold tensors: do not keep them."""
    works = _made.works = []
    try:
        yield works
    finally:
        _made.works = None


def _handed_on(name: str) -> Callable[..., Any]:
    def call(self: CppBackend, *args: Any) -> Any:
        work = getattr(self._kind, name)(self._of_group(), *args)
        if (waiting := getattr(_made, "works", None)) is not None:
            waiting.append(work)
        return work

    call.__name__ = name
    return call


# What Backend defines itself, so that Python does not ask __getattr__ for it.
FACTS = ("supports_splitting", "supports_coalescing", "supports_shrinking", "supports_window", "supports_reconfigure")
CALLS = (
    "abort", "shutdown", "set_timeout", "_set_default_timeout", "get_error", "allocate_tensor", "supports_tensor_alloc",
    "eager_connect_single_device", "new_window", "get_reconfigure_handle", "reconfigure", "shrink", "split", "merge",
    "monitored_barrier", "memory_stats", "register_abort_hook", "unregister_abort_hook", "_add_ephemeral_timeout",
    "_start_time_estimate", "_end_time_estimate", "_get_sequence_number_for_group", "_set_sequence_number_for_group",
)  # fmt: skip


def _fact(name: str, inner: CppBackend) -> Any:
    return getattr(inner._of_group(), name)


for _name in (*BY_TORCH_NAME, *CALLS):
    setattr(CppBackend, _name, _handed_on(_name))
for _name in (*FACTS, "supports_abort_hooks", "supports_completion_hooks", "_supports_time_estimate"):
    setattr(CppBackend, _name, property(functools.partial(_fact, _name)))


def install_cpp_backend(group: Any, kind: type, device_types: list[str]) -> None:
    """Let C++ find a Backend in ``group`` for tensors on these devices, which calls the methods of ``kind``."""
    inner = CppBackend(group, kind)
    group._set_default_backend(_CUSTOM)
    for device_type in device_types:
        group._register_backend(torch.device(device_type), _CUSTOM, inner)
