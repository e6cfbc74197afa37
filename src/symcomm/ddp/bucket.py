"""Buckets: gradients of several parameters in one flat buffer, which is reduced as one.

On a group of ours the buffer is symmetric memory, so that reducing it copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from symcomm.torch_backend import values


def allocate(process_group: Any, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat buffer, from the group's own memory where it offers some."""
    if getattr(process_group, "is_symcomm", False) and device.type == "cpu":
        return process_group.allocate_tensor(count, dtype=dtype, device=device)
    return torch.empty(count, dtype=dtype, device=device)


def is_alias(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same memory. (A gradient is either all of its view or none of it.)"""
    return one is other or one.data_ptr() == other.data_ptr()


class Bucket:
    """The reducer's side of a bucket."""

    __slots__ = (
        "buffer", "deferred", "ended", "future", "grads", "indices", "launched", "lengths", "limit", "offsets",
        "params", "pending", "shapes", "sparse", "sparse_indices", "views", "wait_began", "work",
    )  # fmt: skip

    def __init__(self, indices: Sequence[int], params: Sequence[Any], sparse: bool, limit: int):
        self.indices = list(indices)
        self.params = list(params)
        self.sparse = sparse
        self.limit = limit
        self.lengths = [] if sparse else [p.numel() for p in params]
        self.offsets = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        self.shapes = [] if sparse else [p.shape for p in params]
        self.buffer: Any = None  # flat and dense; or the sparse gradient itself
        self.views: list[Any] = []
        self.sparse_indices: Any = None
        self.restart()

    def restart(self) -> None:
        """Forget the last backward pass."""
        self.pending = len(self.params)
        self.work: Any = None
        self.future: Any = None
        self.deferred: list[tuple[Any, Any]] = []  # (view, gradient) pairs still to be copied
        self.launched = self.wait_began = self.ended = 0

    def allocate(self, process_group: Any, dtype: torch.dtype | None) -> None:
        """Allocate a dense bucket's memory. ``dtype``: the gradients', where it is not the parameters' (mixed
        precision)."""
        first = self.params[0]
        self.buffer = allocate(process_group, sum(self.lengths), dtype or first.dtype, first.device)
        self.views = self.views_of(self.buffer)

    def views_of(self, flat: Any) -> list[Any]:
        """Every parameter's part of ``flat``, in the parameter's own layout."""
        views = []
        for param, offset, length in zip(self.params, self.offsets, self.lengths, strict=True):
            if torch.ops.aten.is_non_overlapping_and_dense(param):
                views.append(flat.as_strided(param.shape, param.stride(), flat.storage_offset() + offset))
            else:
                views.append(flat.narrow(0, offset, length).view(param.shape))
        return views

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.params)


class GradBucket:
    """What a communication hook receives: one bucket's flat buffer, and which parameter's gradient lies where in it.

    Raises: nothing."""

    __slots__ = ("__weakref__", "_bucket", "_buffer", "_count", "_index")

    def __init__(self, index: int, count: int, buffer: Any, bucket: Bucket):
        self._index = index
        self._count = count
        self._buffer = buffer
        self._bucket = bucket

    def index(self) -> int:
        """The bucket's place in the order of reduction."""
        return self._index

    def buffer(self) -> Any:
        """The flat 1-dimensional tensor of all gradients of the bucket (a sparse bucket: the gradient itself)."""
        return self._buffer

    def set_buffer(self, buffer: Any) -> None:
        """Replace the tensor, for hooks that go on with another one, of another dtype for instance."""
        self._buffer = values.tensor("GradBucket.set_buffer: buffer", buffer)

    def gradients(self) -> list[Any]:
        """Every parameter's gradient, a view of the buffer."""
        bucket = self._bucket
        parts = zip(bucket.offsets, bucket.lengths, bucket.shapes, strict=True)
        return [self._buffer.narrow(0, offset, length).view(shape) for offset, length, shape in parts]

    def parameters(self) -> list[Any]:
        """The parameters, in the order of ``gradients()``."""
        return list(self._bucket.params)

    def is_last(self) -> bool:
        """Whether this is the last bucket to be reduced in this iteration."""
        return self._index == self._count - 1
