"""The same values in tensors of every kind that a program may hand to a call."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["OF_THEIR_MEMORY", "OTHERS", "at_low_address", "low_buffer"]

_MAP_FIXED_NOREPLACE = 0x100000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_free_addresses = itertools.count(0x0200_0000, 0x0010_0000)  # 32 MiB and up: far below 4 GiB, far above nothing


def low_buffer(nbytes: int) -> Any:
    """Memory where a Python that is not position-independent has its heap. It stays mapped."""
    for address in itertools.takewhile(lambda a: a < 1 << 32, _free_addresses):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
        found = _libc.mmap(address, max(nbytes, 1), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if found == address:
            return (ctypes.c_char * max(nbytes, 1)).from_address(address)
    raise MemoryError("no room below 4 GiB")


def _in_buffer(values: torch.Tensor, buffer: Any) -> torch.Tensor:
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)[: values.nbytes].view(values.dtype).view(values.shape)
    return tensor.copy_(values)


def at_low_address(values: torch.Tensor) -> torch.Tensor:
    tensor = _in_buffer(values, low_buffer(values.nbytes))
    assert tensor.data_ptr() < 1 << 32 or not tensor.numel()
    return tensor


def _low_from_numpy(values: torch.Tensor) -> torch.Tensor:
    array = np.frombuffer(low_buffer(values.nbytes), np.uint8)[: values.nbytes].view(values.numpy().dtype)
    return torch.from_numpy(array.reshape(values.shape)).copy_(values)


def _in_inference_mode(values: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return values + 0


def _slice(values: torch.Tensor) -> torch.Tensor:
    whole = torch.full((values.numel() + 5,), 9, dtype=values.dtype)
    return whole[3 : 3 + values.numel()].copy_(values)


# Dense tensors whose values are what their memory holds: all of them take the fast path.
OF_THEIR_MEMORY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heap": torch.clone,
    "low address": at_low_address,
    "low address, NumPy": _low_from_numpy,
    "mmap": lambda values: _in_buffer(values, mmap.mmap(-1, max(values.nbytes, 1))),
    "NumPy": lambda values: torch.from_numpy(values.numpy().copy()),
    "shared memory": lambda values: values.clone().share_memory_(),
    "slice": _slice,
    "two dimensions": lambda values: values.clone().view(1, -1),
    "parameter": lambda values: torch.nn.Parameter(values.clone()),
    "requires grad": lambda values: values.clone().requires_grad_(),
    "inference mode": _in_inference_mode,
    "real part": lambda values: torch.complex(values, values).real if values.numel() == 1 else values.clone(),
    "complex": lambda values: torch.complex(values, torch.zeros_like(values)),
    "float64": lambda values: values.double(),
    "bfloat16": lambda values: values.bfloat16(),
    "int16": lambda values: values.short(),
    "uint8": lambda values: values.to(torch.uint8),
    "float8": lambda values: values.to(torch.float8_e5m2),
}


class Subclass(torch.Tensor):
    pass


def _imaginary(values: torch.Tensor) -> torch.Tensor:
    return torch.complex(torch.zeros_like(values), -values).conj().imag


# The same values, but Python has to look at them.
OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negative": lambda values: torch._neg_view(-values),
    "negative at a low address": lambda values: torch._neg_view(at_low_address(-values)),
    "imaginary part": _imaginary,
    "conjugate": lambda values: torch.complex(values, torch.zeros_like(values)).conj(),
    "subclass": lambda values: values.clone().as_subclass(Subclass),
    "every second": lambda values: torch.zeros(2 * values.numel()).copy_(values.repeat_interleave(2))[::2],
}
