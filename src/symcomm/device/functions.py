"""Broadcast, Scatter, Gather and ReduceAddCoalesced as autograd functions, backward and forward mode.

They are each other's derivatives: the backward pass adds what a broadcast copied, and joins what a scatter split. A
whole list of tensors is one node of the graph, and crosses devices packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function, forward_ad

from symcomm import errors
from symcomm.device.coalesce import broadcast_coalesced, own_entry, reduce_add_coalesced
from symcomm.device.copies import gather, scatter
from symcomm.device.devices import as_devices, as_tensors, check_tensor


class Broadcast(Function):
    """``Broadcast.apply(devices, *tensors)``: all tensors on the first device, then all on the second, and so on.

    Raises: BadArgumentError."""

    @staticmethod
    def forward(ctx: Any, devices: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.devices = as_devices("Broadcast", "devices", devices)
        ctx.count = len(inputs)
        if not inputs:
            return ()
        ctx.source = as_tensors("Broadcast", "tensors", inputs)[0].device
        outputs = broadcast_coalesced(inputs, ctx.devices)
        forward_mode = getattr(forward_ad, "_current_level", -1) >= 0
        own = own_entry(ctx.source, ctx.devices)
        if own is not None:
            # torch makes a returned input a view of itself, which it cannot do for a sparse one. In forward mode, torch
            # (2.13) also drops the tangents of later outputs. A new tensor over the same memory avoids both.
            renamed = [t.data if forward_mode or t.layout is not torch.strided else t for t in outputs[own]]
            outputs[own] = renamed
        if forward_mode:  # a tangent is not a requires_grad
            wanted = [t.is_floating_point() or t.is_complex() for t in inputs]
        else:
            wanted = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(t for copies in outputs for t, w in zip(copies, wanted, strict=True) if not w))
        return tuple(t for copies in outputs for t in copies)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        wanted = [i for i in range(ctx.count) if ctx.needs_input_grad[1 + i]]
        result: list[Any] = [None] * ctx.count
        if wanted:
            chosen = [grads[start + i] for start in range(0, len(grads), ctx.count) for i in wanted]
            sums = ReduceAddCoalesced.apply(ctx.source, len(wanted), *chosen)
            for i, total in zip(wanted, sums, strict=True):
                result[i] = total
        return (None, *result)

    @staticmethod
    def jvp(ctx: Any, _devices: Any, *tangents: torch.Tensor) -> tuple[Any, ...]:
        known = [t for t in tangents if t is not None]  # integers have none
        copies = [iter(ts) for ts in broadcast_coalesced(known, ctx.devices)]
        return tuple(None if t is None else next(ts) for ts in copies for t in tangents)


class ReduceAddCoalesced(Function):
    """``ReduceAddCoalesced.apply(destination, count, *tensors)``: the sums of ``count`` tensors from each device.

    Raises: BadArgumentError."""

    @staticmethod
    def forward(ctx: Any, destination: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not isinstance(count, int) or count < 1 or len(tensors) % count:
            allowed = f"a number of tensors per device that divides {len(tensors)}"
            raise errors.bad_argument("ReduceAddCoalesced", "count", count, allowed)
        as_tensors("ReduceAddCoalesced", "tensors", tensors)
        ctx.destination, ctx.count = destination, count
        ctx.devices = [tensors[start].device for start in range(0, len(tensors), count)]
        return _sums(destination, count, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, *Broadcast.apply(ctx.devices, *grads))

    @staticmethod
    def jvp(ctx: Any, _destination: Any, _count: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _sums(ctx.destination, ctx.count, tangents)


def _sums(destination: Any, count: int, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    lists = [tensors[start : start + count] for start in range(0, len(tensors), count)]
    sums = reduce_add_coalesced(lists, destination)
    return sums if len(lists) > 1 else tuple(t.view_as(t) for t in sums)


class Scatter(Function):
    """``Scatter.apply(devices, chunk_sizes, dim, tensor)``: one piece per device; from the CPU on extra streams.

    Raises: BadArgumentError."""

    @staticmethod
    def forward(ctx: Any, devices: Any, chunk_sizes: Any, dim: int, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        targets = as_devices("Scatter", "devices", devices)
        check_tensor("Scatter", "tensor", tensor)
        ctx.dim, ctx.source, ctx.devices, ctx.chunk_sizes = dim, tensor.device, targets, chunk_sizes
        return _scatter_beside(tensor, targets, chunk_sizes, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, Gather.apply(ctx.source, ctx.dim, *grads)

    @staticmethod
    def jvp(ctx: Any, _devices: Any, _sizes: Any, _dim: Any, tangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _scatter_beside(tangent, ctx.devices, ctx.chunk_sizes, ctx.dim)


class Gather(Function):
    """``Gather.apply(destination, dim, *tensors)``: the tensors one after the other along ``dim``.

    Raises: BadArgumentError."""

    @staticmethod
    def forward(ctx: Any, destination: Any, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.destination, ctx.dim = destination, dim
        ctx.devices = [t.device for t in as_tensors("Gather", "tensors", tensors)]
        ctx.scalars = bool(tensors) and all(t.dim() == 0 for t in tensors)
        result = gather(tensors, dim, destination)
        ctx.sizes = [1 if ctx.scalars else t.size(dim) for t in tensors]
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        pieces = Scatter.apply(ctx.devices, ctx.sizes, ctx.dim, grad)
        return (None, None, *(piece[0] if ctx.scalars else piece for piece in pieces))

    @staticmethod
    def jvp(ctx: Any, _destination: Any, _dim: Any, *tangents: torch.Tensor) -> torch.Tensor:
        tangents = tuple(t.reshape(1) for t in tangents) if ctx.scalars else tangents
        return gather(tangents, ctx.dim, ctx.destination)


# --- copies from the CPU to GPUs, beside the GPUs' other work -----------------------------------------------

_copy_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    if device not in _copy_streams:
        _copy_streams.setdefault(device, torch.cuda.Stream(device))
    return _copy_streams[device]


def _scatter_beside(
    tensor: torch.Tensor, devices: Sequence[torch.device], chunk_sizes: Any, dim: int
) -> tuple[torch.Tensor, ...]:
    if tensor.device.type != "cpu":
        return scatter(tensor, devices, chunk_sizes, dim)
    streams = [_copy_stream(device) for device in devices]
    pieces = scatter(tensor, devices, chunk_sizes, dim, streams)
    for piece, stream in zip(pieces, streams, strict=False):
        if stream is not None:
            current = torch.cuda.current_stream(piece.device)
            current.wait_stream(stream)
            piece.record_stream(current)  # its memory belongs to the copy stream
    return pieces
