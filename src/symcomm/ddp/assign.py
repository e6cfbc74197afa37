"""Which parameters share a bucket.

Parameters are taken in the order given. Those of one dtype and device are collected until they reach the size limit;
the first limit holds for the first bucket, the second for the second, the last for all that follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from symcomm import errors
from symcomm.ddp.arguments import logger_of
from symcomm.torch_backend import values

NO_LIMIT = 0  # what a bucket of a sparse gradient reports: it holds that one gradient, whatever its size


class _Open:
    """The bucket being filled for one dtype and device."""

    def __init__(self, limits: Sequence[int]):
        self._limits: Iterator[int] = iter(limits)
        self.limit = next(self._limits)
        self.indices: list[int] = []
        self.nbytes = 0

    def close(self) -> tuple[list[int], int]:
        full = self.indices, self.limit
        self.indices, self.nbytes, self.limit = [], 0, next(self._limits, self.limit)
        return full


def compute_bucket_assignment_by_size(
    tensors: Sequence[Any],
    bucket_size: Sequence[int],
    expect_sparse_gradient: Sequence[bool] = (),
    tensor_indices: Sequence[int] = (),
    logger: Any = None,
) -> tuple[list[list[int]], list[int]]:
    """(indices of the tensors in each bucket, size limit of each bucket).

    With ``tensor_indices`` the tensors come in the order in which their gradients arrive, and buckets keep that order;
    without, buckets are sorted by the smallest index in them.

    Raises: BadArgumentError.
    """
    call = "_compute_bucket_assignment_by_size"
    tensors = values.tensors(f"{call}: tensors", tensors)
    bucket_size = values.sizes(f"{call}: bucket_size", bucket_size)
    expect_sparse_gradient = values.flags(f"{call}: expect_sparse_gradient", expect_sparse_gradient)
    tensor_indices = values.ranks(f"{call}: tensor_indices", tensor_indices)
    logger = logger_of(call, logger)
    if (error := _mistake(call, tensors, bucket_size, expect_sparse_gradient, tensor_indices)) is not None:
        if logger is not None:
            logger.set_error_and_log(str(error))
        raise error
    done: list[tuple[list[int], int]] = []
    being_filled: dict[Any, _Open] = {}
    for place, tensor in enumerate(tensors):
        index = tensor_indices[place] if tensor_indices else place
        if expect_sparse_gradient and expect_sparse_gradient[index]:
            done.append(([index], NO_LIMIT))
            continue
        key = tensor.dtype, tensor.device
        bucket = being_filled.get(key) or being_filled.setdefault(key, _Open(bucket_size))
        bucket.indices.append(index)
        bucket.nbytes += tensor.numel() * tensor.element_size()
        if bucket.nbytes >= bucket.limit:
            done.append(bucket.close())
    # Buckets that are not full come in the order of PyTorch's hash table: the one opened last is first.
    done += [bucket.close() for bucket in reversed(being_filled.values()) if bucket.indices]
    if not tensor_indices:
        done.sort(key=lambda bucket: min(bucket[0]))
    return [indices for indices, _ in done], [limit for _, limit in done]


def _mistake(
    call: str, tensors: list[Any], limits: list[int], sparse: list[bool], order: list[int]
) -> errors.BadArgumentError | None:
    """What is wrong with arguments that are of the right types."""
    if not tensors:
        return errors.bad_argument(call, "tensors", tensors, "at least one tensor")
    if not limits:
        return errors.bad_argument(call, "bucket_size", limits, "at least one size in bytes")
    if sparse and len(sparse) != len(tensors):
        allowed = f"one bool for each of {len(tensors)} tensors"
        return errors.bad_argument(call, "expect_sparse_gradient", sparse, allowed)
    if order and len(order) != len(tensors):
        return errors.bad_argument(call, "tensor_indices", order, f"{len(tensors)} numbers, one for each tensor")
    if sparse and any(not 0 <= index < len(sparse) for index in order):
        return errors.bad_argument(call, "tensor_indices", order, f"numbers from 0 to {len(sparse) - 1}")
    if any(tensor.is_sparse for tensor in tensors):
        return errors.bad_argument(call, "tensors", "a sparse tensor", "dense: No support for sparse tensors")
    return None
