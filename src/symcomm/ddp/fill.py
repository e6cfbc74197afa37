"""Copies gradients into buckets, and results back out of them.

PyTorch divides by the number of ranks before it sums. So do we, to get the same bits, but in the pass that copies a
gradient into its bucket: the division costs no pass of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from symcomm import errors
from symcomm.ddp.bucket import Bucket, is_alias
from symcomm.ddp.faults import Faults


def _divide(tensor: Any, divisor: int) -> None:
    """In place. For a power of two, multiplying gives the same bits in less than half the time."""
    if divisor & (divisor - 1):
        tensor.div_(divisor)
    else:
        tensor.mul_(1.0 / divisor)


class Filler:
    """Copies gradients into buckets, and results out of them. A divisor of 1 leaves gradients as they are."""

    def __init__(self, faults: Faults, as_views: bool, in_batches: bool):
        self.as_views = as_views  # gradients are views of their bucket
        self.in_batches = in_batches  # all gradients of a bucket are copied together
        self.mixed_dtype: torch.dtype | None = None
        self.optimizer_in_backward = False
        self.sparse_metadata: Mapping[str, Any] | None = None  # for one backward pass
        self._faults = faults

    # --- in ---------------------------------------------------------------------------------------------------

    def fill(self, bucket: Bucket, slot: int, index: int, divisor: int) -> None:
        """Put one parameter's gradient into its bucket."""
        if bucket.sparse:
            self._fill_sparse(bucket, index, divisor)
            return
        param, view = bucket.params[slot], bucket.views[slot]
        grad = param.grad
        if grad is None:
            view.zero_()
            return
        if grad.dtype != view.dtype:
            raise self._wrong_gradient(index, grad, view)
        if grad is view or is_alias(grad, view):
            if divisor != 1 and not self.in_batches:
                _divide(view, divisor)
            return
        if self.in_batches:
            bucket.deferred.append((view, grad))
        elif grad.requires_grad:
            self._fill_with_graph(view, grad, divisor)
        elif divisor == 1:
            view.copy_(grad)
        else:
            torch.mul(grad, 1.0 / divisor, out=view)
        if self.as_views:
            self.set_grad(param, view)

    def _fill_with_graph(self, view: Any, grad: Any, divisor: int) -> None:
        warnings.warn(
            "Using DistributedDataParallel with create_graph=True is not well-supported: higher-order gradients are "
            "not reduced over ranks.",
            stacklevel=2,
        )
        with torch.no_grad():
            view.copy_(grad * (1.0 / divisor))

    def fill_deferred(self, bucket: Bucket, divisor: int) -> None:
        """The whole bucket at once: one batch of copies, one division."""
        pairs, bucket.deferred = bucket.deferred, []
        with torch.no_grad():
            if pairs:
                torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
            if self.in_batches and not bucket.sparse and divisor != 1:
                _divide(bucket.buffer, divisor)

    def _fill_sparse(self, bucket: Bucket, index: int, divisor: int) -> None:
        """The bucket's buffer is the gradient itself. If it is known which rows any rank has, only those are sent."""
        param = bucket.params[0]
        grad = param.grad
        if grad is None or grad.layout is not torch.sparse_coo:
            got = "none" if grad is None else f"a {grad.layout} one"
            raise self._faults.fault(
                f"Expected sparse gradient to be defined for {self._faults.name(index)}, got {got}; make the module "
                "that holds it with sparse=False, or use it in every iteration."
            )
        with torch.no_grad():
            if self.sparse_metadata is not None:
                grad = self._on_known_rows(bucket, index, grad.coalesce())
            if divisor != 1:
                grad.div_(divisor)
        bucket.buffer = grad

    def _on_known_rows(self, bucket: Bucket, index: int, grad: Any) -> Any:
        metadata = self.sparse_metadata or {}
        if self._faults.names.get(index) not in metadata:
            allowed = f"the parameters, {self._faults.name(index)!r} too"
            error = errors.bad_argument("_set_sparse_metadata", "its keys", sorted(metadata), allowed)
            raise self._faults.fault(error)
        rows = metadata[self._faults.names[index]].to(torch.int64).to(grad.device)
        bucket.sparse_indices = rows.unsqueeze(0)
        places = torch.searchsorted(rows, grad.indices()[0]).unsqueeze(0)
        return torch.sparse_coo_tensor(places, grad.values(), (rows.numel(), *grad.shape[1:]))

    def _wrong_gradient(self, index: int, grad: Any, view: Any) -> Exception:
        return self._faults.fault(
            f"The gradient of {self._faults.name(index)} is {list(grad.shape)} of {grad.dtype}, its bucket expects "
            f"{list(view.shape)} of {view.dtype}; convert the model before wrapping it, not after."
        )

    # --- out --------------------------------------------------------------------------------------------------

    def hand_back(self, bucket: Bucket, result: Any, is_unused: Callable[[int], bool]) -> None:
        """Make ``result`` the gradients of the bucket's parameters, except those that no rank has used."""
        if bucket.sparse:
            self._hand_back_sparse(bucket, result)
            return
        if result.numel() != bucket.buffer.numel():
            raise self._faults.fault(
                f"The communication hook returned {result.numel()} elements for a bucket of "
                f"{bucket.buffer.numel()}; it must return a tensor of the bucket's size."
            )
        if self.as_views:
            self._point_at(bucket, result, is_unused)
        else:
            self._copy_out(bucket, result, is_unused)

    def _point_at(self, bucket: Bucket, result: Any, is_unused: Callable[[int], bool]) -> None:
        """Gradients are views of the bucket, which holds the result."""
        if not is_alias(result, bucket.buffer):
            bucket.buffer.copy_(result.view(-1))
        for param, view, index in zip(bucket.params, bucket.views, bucket.indices, strict=True):
            grad = param.grad
            if grad is view or is_unused(index):
                continue
            if grad is None:
                if not self.optimizer_in_backward:
                    self.set_grad(param, view)
            elif not is_alias(grad, view):
                grad.copy_(view)  # another reducer, or mixed precision, has replaced the gradient

    def _copy_out(self, bucket: Bucket, result: Any, is_unused: Callable[[int], bool]) -> None:
        views = bucket.views if is_alias(result, bucket.buffer) else bucket.views_of(result.view(-1))
        for param, view, index in zip(bucket.params, views, bucket.indices, strict=True):
            if is_unused(index):
                continue
            if param.grad is not None:
                param.grad.copy_(view)
            elif not self.optimizer_in_backward:
                param.grad = torch.empty_like(param).copy_(view)

    def _hand_back_sparse(self, bucket: Bucket, result: Any) -> None:
        if self.sparse_metadata is None:
            bucket.buffer.copy_(result)
            return
        rows, param = bucket.sparse_indices, bucket.params[0]
        values = result.to_dense() if result.is_sparse else result
        param.grad = torch.sparse_coo_tensor(rows, values, param.shape)

    def set_grad(self, param: Any, view: Any) -> None:
        """With mixed precision, PyTorch's hook replaces the gradient's memory, so the gradient must not be our view."""
        if self.mixed_dtype is not None:
            view = view.detach() if param.dtype == view.dtype else view.to(param.dtype)
        param.grad = view
