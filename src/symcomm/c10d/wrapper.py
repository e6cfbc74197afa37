"""_ProcessGroupWrapper: checks, before each collective of a backend, that all ranks call the same one.

Our own engine always does that itself, with the data and at no extra cost, so the wrapper only passes its calls on. For
other backends, the ranks first compare their calls through a second backend.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from typing import Any

import torch

from symcomm import errors
from symcomm.c10d.backend import Backend
from symcomm.c10d.enums import ErrorType, named
from symcomm.c10d.options import for_torch
from symcomm.errors import wrong_type
from symcomm.group.interception import flat

_WORDS_BYTES = 512  # of a call's description; longer ones end in a digest of the whole

# The arguments that must agree among ranks, by place and by name: not what only the root has, nor what may differ.
_COMPARED: dict[str, tuple[set[int], set[str]]] = {
    "allreduce": ({0}, {"tensors", "tensor"}),
    "allreduce_coalesced": ({0}, {"tensors"}),
    "reduce": ({0}, {"tensors", "tensor"}),
    "reduce_scatter": ({0}, {"output_tensors"}),
    "_reduce_scatter_base": ({0, 1}, {"outputTensor", "inputTensor"}),
    "broadcast": ({0}, {"tensors", "tensor"}),
    "allgather": ({1}, {"input_tensors", "input_tensor"}),
    "_allgather_base": ({0, 1}, {"output", "input"}),
    "allgather_coalesced": ({1}, {"input_list"}),
    "gather": ({1}, {"input_tensors", "input_tensor"}),
    "gather_single": ({1}, {"input"}),
    "scatter": ({0}, {"output_tensors", "output_tensor"}),
    "alltoall": (set(), set()),
    "alltoall_base": (set(), set()),
    "barrier": (set(), set()),
}


def describe(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A collective in one line, the same on all ranks that make the same call."""
    places, names = _COMPARED[name]
    compared = [item for place, item in enumerate(args) if place in places]
    compared += [kwargs[key] for key in sorted(names & kwargs.keys())]
    shapes = [
        f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in flat(compared) if isinstance(t, torch.Tensor)
    ]
    return f"{name} of {', '.join(shapes)}" if shapes else name


def _fixed_length(words: str) -> bytes:
    text = words.encode()
    if len(text) > _WORDS_BYTES:
        digest = f"... ({hashlib.blake2b(text, digest_size=8).hexdigest()})".encode()
        text = text[: _WORDS_BYTES - len(digest)] + digest
    return text.ljust(_WORDS_BYTES, b"\0")


class _ProcessGroupWrapper(Backend):
    """``backend`` with checks; ``gloo_backend`` (any backend of the same ranks that has allgather) carries them.

    Raises: WrongTypeError, CollectiveMismatchError that says what each rank called."""

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

    def _check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(self.wrapped_pg, "is_symcomm", False):
            return
        self._checks += 1
        self._helper.monitored_barrier(wait_all_ranks=True)  # names those that do not come
        mine = _fixed_length(f"#{self._checks} {describe(name, args, kwargs)}")
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
        self._check(name, args, kwargs)
        if isinstance(self.wrapped_pg, torch._C._distributed_c10d.Backend):
            args, kwargs = tuple(map(for_torch, args)), {key: for_torch(value) for key, value in kwargs.items()}
        return getattr(self.wrapped_pg, name)(*args, **kwargs)

    return named(call, name, f"The backend's {name}, once all ranks are known to call it.")


def _passed_on(name: str) -> Any:
    @functools.wraps(getattr(Backend, name))
    def call(self: _ProcessGroupWrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.wrapped_pg, name)(*args, **kwargs)

    return call


for _name in _COMPARED:
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
