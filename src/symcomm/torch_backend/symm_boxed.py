"""Operators of torch.ops.symm_mem that take or return a handle.

torch passes its own C++ object in a box; ours is a Python object, which no box can hold. So these operators do not go
through the dispatcher: we take calls from Python with one of our handles or a CPU tensor, and torch gets all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from symcomm.symm_mem.handle import SymmetricMemory
from symcomm.symm_mem.install import get_elements, meet, put_and_signal
from symcomm.undo import Undo, all_of, replace


def _get_out(dst: Any, hdl: SymmetricMemory, offset: int, size: int, peer: int) -> None:
    get_elements(dst.view(-1)[:size], hdl, peer, offset)


BOXED: dict[str, Callable[..., Any]] = {
    "_barrier": lambda symm: symm.barrier(),
    "_rendezvous": meet,
    "nccl_get_out": _get_out,
    "nccl_put_signal": put_and_signal,
    "nccl_wait_signal": lambda hdl, peer: hdl.wait_signal(peer),
    "nvshmem_get_out": _get_out,
}


class _Either:
    """Stands for one of torch's operators, or for an overload of it."""

    def __init__(self, theirs: Any, ours: Callable[..., Any]):
        self._theirs, self._ours = theirs, ours
        self.__doc__ = theirs.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        handles = [value for value in given if isinstance(value, SymmetricMemory)]
        is_ours = bool(handles) or (self._ours is meet and any(_is_on_cpu(value) for value in given))
        return (self._ours if is_ours else self._theirs)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._theirs, name)
        return _Either(found, self._ours) if isinstance(found, torch._ops.OpOverload) else found


def _is_on_cpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cpu


def put_first(known: set[str]) -> Undo:
    """Put ours before torch's operators, as far as this version has them."""
    namespace: Any = torch.ops.symm_mem
    return all_of(
        *(replace(namespace, name, _Either(getattr(namespace, name), BOXED[name])) for name in BOXED.keys() & known)
    )
