"""Writes 32-bit words that other ranks may be watching."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from symcomm import errors
from symcomm._core import native
from symcomm.symm_mem.allocate import place_of

if TYPE_CHECKING:
    import torch


def _write(call: str, tensor: Any, offset: int, val: int, count: int | None = None) -> torch.Tensor:
    """``count``: None for one word, see Place.write_words. Errors have torch's own words, which scripts may look
    for."""
    _check(call, tensor, offset, val, 1 if count is None else count)
    place = place_of(tensor.device)
    assert place is not None, "checked"
    place.write_words(tensor, offset, val, count)
    native.change_tensors(tensor)
    return tensor


def _check(call: str, tensor: Any, offset: int, val: int, count: int) -> None:
    import torch

    good = isinstance(tensor, torch.Tensor) and (tensor.is_cpu or tensor.is_cuda) and tensor.dtype is torch.uint32
    if not (good and tensor.dim() == 1 and tensor.is_contiguous()):
        got = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else tensor
        raise errors.bad_argument(call, "input", got, "a flat, contiguous uint32 tensor on the CPU or a CUDA GPU")
    for name, number in (("offset", offset), ("val", val), ("count", count)):
        if not hasattr(number, "__index__"):
            raise errors.bad_argument(call, name, number, "an int")
    if offset < 0:
        raise errors.bad_argument(call, "offset", offset, "greater than or equal to 0")
    if count <= 0:
        raise errors.bad_argument(call, "count", count, "a positive integer")
    if not 0 <= val <= 0xFFFFFFFF:
        raise errors.bad_argument(call, "val", val, "in the range of 0 to 4294967295 (uint32_t)")
    if offset + count > tensor.numel():
        raise errors.BadArgumentError(
            f"{call}: offset + count ({offset} + {count}) exceeded the numel of the input ({tensor.numel()}); "
            "write fewer words, or write them further in front."
        )


def memset32(input: torch.Tensor, offset: int, val: int, count: int = 1) -> torch.Tensor:
    """Set ``count`` words from word ``offset`` on to ``val``.

    Raises: BadArgumentError."""
    return _write("memset32", input, offset, val, count)


def stream_write_value32(input: torch.Tensor, offset: int, val: int) -> torch.Tensor:
    """Set one word. A rank that sees it sees everything that this thread wrote before.

    Raises: BadArgumentError."""
    return _write("stream_write_value32", input, offset, val)
