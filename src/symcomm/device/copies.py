"""broadcast, scatter and gather: plain copies between any devices.

They use torch's own copies, so they are differentiable (backward and forward mode), keep memory formats and release the
interpreter lock while data moves. Copies to an accelerator are asynchronous, in the order of the device's current
stream; copies to the CPU are complete when the call returns.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from symcomm import errors
from symcomm.device import nccl
from symcomm.device.devices import (
    as_destination,
    as_devices,
    as_integer,
    as_tensors,
    check_has_data,
    check_tensor,
    wrap_dim,
)


def waits(device: torch.device) -> bool:
    """Whether copies to ``device`` may finish later. The CPU could read them too early."""
    return device.type != "cpu"


def current_stream(device: torch.device) -> Any:
    if device.type == "cuda":
        return torch.cuda.current_stream(device)
    return torch.accelerator.current_stream(device)


# --- broadcast -----------------------------------------------------------------------------------------------


def broadcast(tensor: torch.Tensor, devices: Any = None, *, out: Any = None) -> tuple[torch.Tensor, ...]:
    """A copy of ``tensor`` on each of ``devices``, or in each tensor of ``out``.

    On the tensor's own device, the result is the tensor itself.

    Raises: BadArgumentError.
    """
    check_tensor("broadcast", "tensor", tensor)
    if (devices is None) == (out is None):
        what = "neither" if out is None else "both"
        raise errors.bad_argument("broadcast", "exactly one of devices and out", what, "given")
    if out is not None:
        return _broadcast_into(tensor, as_tensors("broadcast", "out", out))
    targets = as_devices("broadcast", "devices", devices, allow_none=True)
    for target in targets:
        check_has_data("broadcast", "tensor", tensor, target)
    if nccl.can_broadcast(tensor, targets):
        return nccl.broadcast(tensor, targets)
    return tuple(tensor if t == tensor.device else copy_to(tensor, t) for t in targets)


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new tensor on ``device``, with the strides of the old one."""
    return tensor.to(device, non_blocking=waits(device), copy=True)


def _broadcast_into(tensor: torch.Tensor, out: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    for i, target in enumerate(out):
        if target.shape != tensor.shape:
            allowed = f"of the tensor's shape {tuple(tensor.shape)}"
            raise errors.bad_argument("broadcast", f"out[{i}]", tuple(target.shape), allowed)
        check_has_data("broadcast", "tensor", tensor, target.device)
    for target in out:
        if target is not tensor:
            target.copy_(tensor, non_blocking=waits(target.device))
    return tuple(out)


# --- scatter -------------------------------------------------------------------------------------------------


def scatter(
    tensor: torch.Tensor,
    devices: Any = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Any = None,
    *,
    out: Any = None,
) -> tuple[torch.Tensor, ...]:
    """Consecutive pieces of ``tensor`` along ``dim``, one on each of ``devices`` or in each tensor of ``out``.

    By default (without ``chunk_sizes``), pieces are those of ``torch.chunk``: equal except the last, and fewer than
    devices if there is too little to share; an empty tensor gives an empty piece for each. A piece on the tensor's own
    device is a view of it. ``streams`` has one stream or None per device; the copy runs on that stream, after the work
    that the tensor's current stream has so far.

    Raises: BadArgumentError.
    """
    check_tensor("scatter", "tensor", tensor)
    if tensor.layout is not torch.strided:
        raise errors.bad_argument("scatter", "tensor", tensor.layout, "dense, to be split", "use .to_dense() first")
    dim = wrap_dim("scatter", dim, tensor.dim())
    if out is not None:
        for name, value in (("devices", devices), ("chunk_sizes", chunk_sizes)):
            if value is not None:
                raise errors.bad_argument("scatter", name, value, "left out when out is given")
        return _scatter_into(tensor, as_tensors("scatter", "out", out), dim, streams)
    targets = as_devices("scatter", "devices", devices)
    if chunk_sizes is None:
        sizes = equal_sizes(tensor.size(dim), len(targets))
    else:
        sizes = _check_sizes(chunk_sizes, tensor, dim, len(targets))
    streams = _check_streams(streams, targets)
    for target in targets:
        check_has_data("scatter", "tensor", tensor, target)
    pieces = []
    for piece, target, stream in zip(_pieces(tensor, sizes, dim), targets, streams, strict=False):
        with _on_stream(stream, tensor):
            pieces.append(piece.to(target, non_blocking=waits(target)))
    return tuple(pieces)


def equal_sizes(total: int, parts: int) -> list[int]:
    size = max(1, -(-total // parts))
    return [min(size, total - start) for start in range(0, total, size)] or [0] * parts


def _pieces(tensor: torch.Tensor, sizes: Sequence[int], dim: int) -> Iterator[torch.Tensor]:
    start = 0
    for size in sizes:
        yield tensor.narrow(dim, start, size)
        start += size


def _check_sizes(given: Any, tensor: torch.Tensor, dim: int, count: int) -> list[int]:
    each = f"one size for each of {count} devices"
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise errors.bad_argument("scatter", "chunk_sizes", given, f"a list, {each}")
    sizes = []
    for i, value in enumerate(given):
        size = as_integer(value)
        if size is None or size < 0:
            raise errors.bad_argument("scatter", f"chunk_sizes[{i}]", value, "a size of 0 or more")
        sizes.append(size)
    if len(sizes) != count:
        raise errors.bad_argument("scatter", "chunk_sizes", sizes, each)
    if sum(sizes) != tensor.size(dim):
        allowed = f"sizes that add up to {tensor.size(dim)}, the tensor's size in dimension {dim}"
        raise errors.bad_argument("scatter", "chunk_sizes", sizes, allowed, f"they add up to {sum(sizes)}")
    return sizes


def _check_streams(streams: Any, devices: Sequence[torch.device]) -> list[Any]:
    if streams is None:
        return [None] * len(devices)
    each = f"one stream or None for each of {len(devices)} devices"
    if not isinstance(streams, Iterable):
        raise errors.bad_argument("scatter", "streams", streams, f"a list, {each}")
    streams = list(streams)
    if len(streams) != len(devices):
        raise errors.bad_argument("scatter", "streams", streams, each)
    for i, (stream, device) in enumerate(zip(streams, devices, strict=True)):
        if stream is not None and getattr(stream, "device", None) != device:
            raise errors.bad_argument("scatter", f"streams[{i}]", stream, f"a stream of {device}, or None")
    return streams


@contextlib.contextmanager
def _on_stream(stream: Any, source: torch.Tensor) -> Iterator[None]:
    """Run copies on ``stream`` after the work that made ``source``, and keep its memory until they are done."""
    if stream is None:
        yield
        return
    if source.device.type != "cpu":
        stream.wait_stream(current_stream(source.device))
        source.record_stream(stream)
    with torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else stream:
        yield


def _scatter_into(tensor: torch.Tensor, out: list[torch.Tensor], dim: int, streams: Any) -> tuple[torch.Tensor, ...]:
    if not out:
        raise errors.bad_argument("scatter", "out", out, "at least one tensor")
    for i, target in enumerate(out):
        expected = list(tensor.shape)
        if target.dim() == tensor.dim():
            expected[dim] = target.size(dim)
        if list(target.shape) != expected:
            allowed = f"of the tensor's shape {tuple(tensor.shape)} but for dimension {dim}"
            raise errors.bad_argument("scatter", f"out[{i}]", tuple(target.shape), allowed)
        check_has_data("scatter", "tensor", tensor, target.device)
    sizes = [target.size(dim) for target in out]
    if sum(sizes) != tensor.size(dim):
        allowed = f"tensors whose sizes in dimension {dim} add up to the tensor's {tensor.size(dim)}"
        raise errors.bad_argument("scatter", "out", sizes, allowed, f"they add up to {sum(sizes)}")
    streams = _check_streams(streams, [target.device for target in out])
    for piece, target, stream in zip(_pieces(tensor, sizes, dim), out, streams, strict=True):
        with _on_stream(stream, tensor):
            target.copy_(piece, non_blocking=waits(target.device))
    return tuple(out)


# --- gather --------------------------------------------------------------------------------------------------


def gather(tensors: Any, dim: int = 0, destination: Any = None, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The tensors one after the other along ``dim``, on ``destination`` (-1: the CPU) or in ``out``.

    The result has the first tensor's dtype, and a memory format that all of them have. Tensors without dimensions
    become a vector, with a warning.

    Raises: BadArgumentError.
    """
    tensors = as_tensors("gather", "tensors", tensors)
    if not tensors:
        raise errors.bad_argument("gather", "tensors", tensors, "at least one tensor")
    if out is not None and destination is not None:
        raise errors.bad_argument("gather", "destination", destination, "left out when out is given")
    if all(t.dim() == 0 for t in tensors) and dim in (0, -1):
        text = f"gather: {len(tensors)} tensors without dimensions become a vector of {len(tensors)} elements."
        warnings.warn(text, stacklevel=2)
        tensors = [t.reshape(1) for t in tensors]
    dim = wrap_dim("gather", dim, tensors[0].dim())
    shape = _gathered_shape(tensors, dim)
    if out is None:
        if destination == -1:
            text = 'gather: -1 for the CPU is deprecated; say destination="cpu".'
            warnings.warn(text, FutureWarning, stacklevel=2)
        device = as_destination("gather", destination, tensors)
        if all(t.device == device and t.dtype == tensors[0].dtype for t in tensors):
            return torch.cat(tensors, dim)
        memory_format = common_memory_format(tensors)
        out = torch.empty(shape, dtype=tensors[0].dtype, device=device, memory_format=memory_format)
    else:
        check_tensor("gather", "out", out)
        if list(out.shape) != shape:
            raise errors.bad_argument("gather", "out", tuple(out.shape), f"of shape {tuple(shape)}")
    for i, tensor in enumerate(tensors):
        check_has_data("gather", f"tensors[{i}]", tensor, out.device)
    for piece, tensor in zip(_pieces(out, [t.size(dim) for t in tensors], dim), tensors, strict=True):
        piece.copy_(tensor, non_blocking=waits(out.device))
    return out


def _gathered_shape(tensors: list[torch.Tensor], dim: int) -> list[int]:
    shape = list(tensors[0].shape)
    for i, tensor in enumerate(tensors):
        if tensor.dim() != len(shape):
            allowed = f"of {len(shape)} dimensions as tensors[0] is"
            raise errors.bad_argument("gather", f"tensors[{i}]", tuple(tensor.shape), allowed)
        shape[dim] = tensor.size(dim)
        if list(tensor.shape) != shape:
            allowed = f"of the shape {tuple(tensors[0].shape)} of tensors[0] but for dimension {dim}"
            raise errors.bad_argument("gather", f"tensors[{i}]", tuple(tensor.shape), allowed)
    shape[dim] = sum(t.size(dim) for t in tensors)
    return shape


def common_memory_format(tensors: Sequence[torch.Tensor]) -> torch.memory_format:
    """The memory format that all tensors have; contiguous if they differ."""
    formats = {suggested_memory_format(t) for t in tensors}
    return formats.pop() if len(formats) == 1 else torch.contiguous_format


def suggested_memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """The memory format that PyTorch infers from strides, dense or not; contiguous if several fit."""
    order = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}.get(tensor.dim())
    if order is None or tensor.numel() == 0 or tensor.stride(1) == 0:
        return torch.contiguous_format
    least = 0
    for d in order:
        if tensor.stride(d) < least or (d == 0 and least == tensor.stride(1)):
            return torch.contiguous_format
        least = tensor.stride(d) * tensor.size(d)
    return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
