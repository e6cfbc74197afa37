"""_ProcessGroupWrapper: checks, before each collective of a backend, that all ranks call the same one.

Our own engine always does that itself, with the data and at no extra cost, so for it the wrapper only passes calls on.
For other backends the ranks compare what they are about to do through a second one.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from symcomm import errors
from symcomm.c10d.backend import Backend
from symcomm.c10d.enums import ErrorType
from symcomm.c10d.options import for_torch
from symcomm.c10d.words import wrong_type

__all__ = ["_ProcessGroupWrapper"]

_WORDS_BYTES = 512  # of a call's description; longer ones are cut, which keeps the beginning: name, shapes, dtypes

_CHECKED = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base", "broadcast", "allgather",
    "_allgather_base", "allgather_coalesced", "gather", "gather_single", "scatter", "alltoall", "alltoall_base",
    "barrier",
)  # fmt: skip
# Tensors whose shapes must agree: not those that only the root has, nor those that may differ among ranks.
_COMPARED = {"allreduce", "allreduce_coalesced", "reduce", "broadcast", "_reduce_scatter_base", "_allgather_base"}


def describe(name: str, args: tuple) -> str:
    """A collective in one line, the same on all ranks that make the same call."""
    if name not in _COMPARED:
        return name
    shapes = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in _tensors(args)]
    return f"{name} of {', '.join(shapes)}"


def _tensors(args: Any) -> list[Any]:
    found: list[Any] = []
    for item in args:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found += _tensors(item)
    return found


class _ProcessGroupWrapper(Backend):
    """``backend`` with checks; ``gloo_backend`` (any backend of the same ranks that has allgather) carries them."""

    wrapped_pg: Any

    def __init__(self, backend: Any, gloo_backend: Any):
        for argument, value in (("backend", backend), ("gloo_backend", gloo_backend)):
            if not isinstance(value, Backend):
                raise wrong_type("_ProcessGroupWrapper", argument, value, "a Backend")
        super().__init__(backend.rank(), backend.size())
        self.wrapped_pg = backend
        self._helper = gloo_backend
        self._checks = 0

    @property
    def options(self) -> Any:
        return self.wrapped_pg.options

    def get_error(self) -> ErrorType:
        """What ended the backend's group; SUCCESS while it lives."""
        if not hasattr(self.wrapped_pg, "get_error"):  # PyTorch's have it since 2.15
            raise self._lacks("get_error")
        return ErrorType(self.wrapped_pg.get_error().value)

    def _check(self, name: str, args: tuple) -> None:
        if getattr(self.wrapped_pg, "is_symcomm", False):
            return
        self._checks += 1
        mine = f"#{self._checks} {describe(name, args)}".encode()[:_WORDS_BYTES].ljust(_WORDS_BYTES, b"\0")
        everyone = [torch.zeros(_WORDS_BYTES, dtype=torch.uint8) for _ in range(self._size)]
        self._helper.allgather([everyone], [torch.frombuffer(bytearray(mine), dtype=torch.uint8)]).wait()
        calls = [bytes(t.tolist()).rstrip(b"\0").decode(errors="replace") for t in everyone]
        if len(set(calls)) > 1:
            raise errors.CollectiveMismatchError(
                "Detected mismatch between collectives on ranks: "
                + "; ".join(f"rank {rank} called {call}" for rank, call in enumerate(calls))
            )


def _checked(name: str) -> Any:
    def call(self: _ProcessGroupWrapper, *args: Any, **kwargs: Any) -> Any:
        self._check(name, args)
        if not isinstance(self.wrapped_pg, torch._C._distributed_c10d.Backend):
            return getattr(self.wrapped_pg, name)(*args, **kwargs)
        given = {key: for_torch(value) for key, value in kwargs.items()}
        return getattr(self.wrapped_pg, name)(*map(for_torch, args), **given)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"The backend's {name}, once all ranks are known to call it."
    return call


def _passed_on(name: str) -> Any:
    @functools.wraps(getattr(Backend, name))
    def call(self: _ProcessGroupWrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.wrapped_pg, name)(*args, **kwargs)

    return call


for _name in _CHECKED:
    setattr(_ProcessGroupWrapper, _name, _checked(_name))
for _name in (
    "name", "_get_backend_name", "send", "recv", "recv_anysource", "monitored_barrier", "_start_coalescing",
    "_end_coalescing", "set_timeout", "_get_sequence_number_for_group", "_set_sequence_number_for_group",
    "allocate_tensor", "supports_tensor_alloc", "memory_stats", "suspend", "resume", "shrink", "abort",
    "shutdown", "eager_connect_single_device",
):  # fmt: skip
    setattr(_ProcessGroupWrapper, _name, _passed_on(_name))
for _name in ("supports_splitting", "supports_coalescing", "supports_shrinking", "supports_time_estimate"):
    setattr(_ProcessGroupWrapper, _name, property(operator.attrgetter(f"wrapped_pg.{_name}")))
