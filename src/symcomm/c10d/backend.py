"""Backend: an engine that a ProcessGroup sends the operations of one kind of device to.

PyTorch's class can be subclassed in Python since 2.15; this one with every version. A subclass defines what its engine
does, and every other call raises an error that says so. TorchGroup (our engine) and PyTorch's own backends count as
Backends too.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as torch_c10d

from symcomm import errors
from symcomm.c10d.enums import ErrorType, named
from symcomm.c10d.options import DEFAULT_TIMEOUT, Option, Options, flag, sizes, text, timeout_of, with_half
from symcomm.ops import OPS
from symcomm.torch_backend.group import TorchGroup


class AnyBackendOptions(Options):
    """Options that every backend has."""

    __slots__ = ()
    backend = Option("", None)
    _timeout = Option(DEFAULT_TIMEOUT, timeout_of)
    group_name = Option("", text)
    global_ranks_in_group = Option([], sizes)
    enable_reconfigure = Option(False, flag)


class _BackendOptions(AnyBackendOptions):
    """``Backend.Options``."""

    __slots__ = ()

    def __init__(self, backend: str, timeout: timedelta = DEFAULT_TIMEOUT):
        backend = text("Backend.Options: backend", backend)
        self._half.__init__(self, backend)
        self._values = {"backend": backend}  # type: ignore[misc]  # the subclass's slot
        self._timeout = timeout


BackendOptions = with_half(_BackendOptions, torch_c10d.Backend.Options)


class _AnyBackend(type):
    """``isinstance(b, Backend)`` holds for our engine and for PyTorch's backends too."""

    def __instancecheck__(cls, instance: object) -> bool:
        others = (TorchGroup, torch_c10d.Backend)
        return super().__instancecheck__(instance) or (cls is Backend and isinstance(instance, others))


class Backend(metaclass=_AnyBackend):
    """An engine that a ProcessGroup sends the operations of one kind of device to, to be subclassed in Python.

    A subclass calls ``super().__init__(rank, size)`` and defines the operations it has, by either of their names.

    Raises: CallerError for an operation that the subclass does not define."""

    Options: Any = BackendOptions
    is_symcomm = False
    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_time_estimate = False
    _supports_time_estimate = False
    supports_abort_hooks = False
    supports_completion_hooks = False
    supports_reconfigure = False
    supports_window = False
    bound_device_id: Any = None
    options: Any

    def __init__(self, rank: int, size: int):
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return type(self).__name__.lower()

    def _get_backend_name(self) -> str:
        return self.name()

    def _lacks(self, call: str) -> errors.CallerError:
        return errors.CallerError(f"Backend {self.name()} does not support {call}; use a backend that does.")

    @property
    def mem_allocator(self) -> Any:
        raise self._lacks("mem_allocator")

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Nothing to connect early, unless a subclass has something."""

    def setUsePgForSymmMemRendezvous(self, value: bool) -> None:
        self._used_for_symmetric_memory = bool(value)

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Ignored, unless a subclass knows deadlines."""

    def _set_group_uid(self, uid: str) -> None:
        self._group_uid = uid

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to set: numbers start with the group."""

    def get_error(self) -> ErrorType:
        """What ended the group; nothing, unless a subclass knows better."""
        return ErrorType.SUCCESS

    def abort(self) -> None:
        """Nothing to stop, unless a subclass has something."""

    def shutdown(self) -> None:
        """Nothing to close, unless a subclass has something."""


def _refused(name: str) -> Any:
    def call(self: Backend, *args: Any, **kwargs: Any) -> Any:
        raise self._lacks(name)

    return named(call, name, "Refused, unless a subclass defines it.")


_TO_DEFINE = (
    *(op.backend_name for op in OPS), "monitored_barrier", "_start_coalescing", "_end_coalescing", "set_timeout",
    "_get_sequence_number_for_group", "allocate_tensor", "memory_stats", "suspend", "resume", "shrink", "split_group",
    "split", "merge", "allreduce_sparse", "register_abort_hook", "unregister_abort_hook", "new_window",
    "get_reconfigure_handle", "reconfigure", "_start_time_estimate", "_end_time_estimate",
    "_register_on_completion_hook", "_wait_for_pending_works", "_enable_collectives_timing",
)  # fmt: skip
for _name in _TO_DEFINE:
    setattr(Backend, _name, _refused(_name))

# Newer names: a subclass may define either one, and has both.
NEWER_NAMES = {op.torch: op.older for op in OPS if op.older} | {op.alias: op.torch for op in OPS if op.alias}


def _by_either_name(name: str, other: str) -> Any:
    def call(self: Backend, *args: Any, **kwargs: Any) -> Any:
        if getattr(type(self), other) is getattr(Backend, other):
            raise self._lacks(name)
        return getattr(self, other)(*args, **kwargs)

    return named(call, name, f"Another name of {other}.")


for _name, _older in NEWER_NAMES.items():
    setattr(Backend, _name, _by_either_name(_name, _older))
    setattr(Backend, _older, _by_either_name(_older, _name))
