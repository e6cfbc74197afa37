"""How gradients get into buckets, and back out of them.

PyTorch divides by the number of ranks before it sums; so do we, in the same pass that copies a gradient into its
bucket, so that values are the same bit for bit and no pass is spent on the division.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from symcomm import errors
from symcomm.ddp.bucket import Bucket, is_alias
from symcomm.ddp.comm_hook import CommHook
from symcomm.ddp.timeline import now


def _divide(tensor: Any, divisor: int) -> None:
    """In place. By a power of two, multiplying gives the same bits in less than half the time."""
    if divisor & (divisor - 1):
        tensor.div_(divisor)
    else:
        tensor.mul_(1.0 / divisor)


class Filler:
    """Mixed into Reducer."""

    process_group: Any
    gradient_as_bucket_view: bool
    _batches: bool
    _divide_by: int
    _join: tuple[Any, bool] | None
    _hook: CommHook | None
    _mixed_dtype: torch.dtype | None
    _names: dict[int, str]
    _optimizer_in_backward: bool
    _sparse_metadata: Mapping[str, Any] | None
    _fault: Callable[[Exception | str], Exception]
    _name: Callable[[int], str]
    _is_unused_everywhere: Callable[[int], bool]

    # --- in ---------------------------------------------------------------------------------------------------

    def _divisor(self) -> int:
        """What gradients are divided by: the number of ranks; in join mode, perhaps of those that still have input."""
        if not self._divide_by:
            self._divide_by = self.process_group.size()
            if self._join is not None and not self._join[1]:
                self._divide_by = int(self._join[0].get_future().wait()[0].item())
        return self._divide_by

    def _fill(self, bucket: Bucket, slot: int, index: int) -> None:
        """Put one parameter's gradient into its bucket."""
        divisor = 1 if self._hook is not None else self._divide_by or self._divisor()
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
            if divisor != 1 and not self._batches:
                _divide(view, divisor)
            return
        if self._batches:
            bucket.deferred.append((view, grad))
        elif grad.requires_grad:
            self._fill_with_graph(view, grad, divisor)
        elif divisor == 1:
            view.copy_(grad)
        else:
            torch.mul(grad, 1.0 / divisor, out=view)
        if self.gradient_as_bucket_view:
            self._set_grad(param, view)

    def _fill_with_graph(self, view: Any, grad: Any, divisor: int) -> None:
        warnings.warn(
            "Using DistributedDataParallel with create_graph=True is not well-supported: higher-order gradients are "
            "not reduced over ranks.",
            stacklevel=2,
        )
        with torch.no_grad():
            view.copy_(grad * (1.0 / divisor))

    def _fill_deferred(self, bucket: Bucket) -> None:
        """The whole bucket at once: one batch of copies, one division."""
        pairs, bucket.deferred = bucket.deferred, []
        with torch.no_grad():
            if pairs:
                torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
            if self._batches and not bucket.sparse and self._hook is None and self._divisor() != 1:
                _divide(bucket.buffer, self._divisor())

    def _fill_sparse(self, bucket: Bucket, index: int, divisor: int) -> None:
        """The bucket is the gradient; where it is known which rows any rank has, only those are sent."""
        param = bucket.params[0]
        grad = param.grad
        if grad is None or grad.layout is not torch.sparse_coo:
            got = "none" if grad is None else f"a {grad.layout} one"
            raise self._fault(
                f"Expected sparse gradient to be defined for {self._name(index)}, got {got}; make the module that "
                "holds it with sparse=False, or use it in every iteration."
            )
        with torch.no_grad():
            if self._sparse_metadata is not None:
                grad = self._on_known_rows(bucket, index, grad.coalesce())
            if divisor != 1:
                grad.div_(divisor)
        bucket.buffer = grad

    def _on_known_rows(self, bucket: Bucket, index: int, grad: Any) -> Any:
        metadata = self._sparse_metadata or {}
        if self._names.get(index) not in metadata:
            raise self._fault(
                errors.bad_argument(
                    "_set_sparse_metadata", "its keys", sorted(metadata), f"the parameters, {self._name(index)!r} too"
                )
            )
        rows = metadata[self._names[index]].to(torch.int64).to(grad.device)
        bucket.sparse_indices = rows.unsqueeze(0)
        places = torch.searchsorted(rows, grad.indices()[0]).unsqueeze(0)
        return torch.sparse_coo_tensor(places, grad.values(), (rows.numel(), *grad.shape[1:]))

    def _wrong_gradient(self, index: int, grad: Any, view: Any) -> Exception:
        return self._fault(
            f"The gradient of {self._name(index)} is {list(grad.shape)} of {grad.dtype}, its bucket expects "
            f"{list(view.shape)} of {view.dtype}; convert the model before wrapping it, not after."
        )

    # --- out --------------------------------------------------------------------------------------------------

    def _hand_back(self, bucket: Bucket) -> None:
        """Wait for the bucket's reduction, and make its result the parameters' gradients."""
        bucket.wait_began = now()
        if bucket.work is not None:
            bucket.work.wait()
            result = bucket.buffer
        else:
            value = bucket.future.wait()
            result = (self._hook or CommHook()).parse_hook_result(value)
        bucket.ended = now()
        bucket.work = bucket.future = None
        if bucket.sparse:
            self._hand_back_sparse(bucket, result)
            return
        if result.numel() != bucket.buffer.numel():
            raise self._fault(
                f"The communication hook returned {result.numel()} elements for a bucket of "
                f"{bucket.buffer.numel()}; it must return a tensor of the bucket's size."
            )
        if self.gradient_as_bucket_view:
            self._point_at(bucket, result)
        else:
            self._copy_out(bucket, result)

    def _point_at(self, bucket: Bucket, result: Any) -> None:
        """Gradients are views of the bucket, which holds the result."""
        if not is_alias(result, bucket.buffer):
            bucket.buffer.copy_(result.view(-1))
        for param, view, index in zip(bucket.params, bucket.views, bucket.indices, strict=True):
            grad = param.grad
            if grad is view or self._is_unused_everywhere(index):
                continue
            if grad is None:
                if not self._optimizer_in_backward:
                    self._set_grad(param, view)
            elif not is_alias(grad, view):
                grad.copy_(view)  # somebody put another gradient there: another reducer, or mixed precision

    def _copy_out(self, bucket: Bucket, result: Any) -> None:
        views = bucket.views if is_alias(result, bucket.buffer) else bucket.views_of(result.view(-1))
        for param, view, index in zip(bucket.params, views, bucket.indices, strict=True):
            if self._is_unused_everywhere(index):
                continue
            if param.grad is not None:
                param.grad.copy_(view)
            elif not self._optimizer_in_backward:
                param.grad = torch.empty_like(param).copy_(view)

    def _hand_back_sparse(self, bucket: Bucket, result: Any) -> None:
        if self._sparse_metadata is None:
            bucket.buffer.copy_(result)
            return
        rows, param = bucket.sparse_indices, bucket.params[0]
        values = result.to_dense() if result.is_sparse else result
        param.grad = torch.sparse_coo_tensor(rows, values, param.shape)

    def _set_grad(self, param: Any, view: Any) -> None:
        """With mixed precision, PyTorch's hook puts other memory under the gradient: that must not be our view."""
        if self._mixed_dtype is not None:
            view = view.detach() if param.dtype == view.dtype else view.to(param.dtype)
        param.grad = view
