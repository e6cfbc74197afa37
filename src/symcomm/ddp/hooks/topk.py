"""Only the largest values of a gradient travel; error feedback sends the others later."""

# No postponed annotations in modules with hooks: DDP compares a hook's annotations with the types themselves.
import math
from typing import Any

import torch
import torch.distributed as dist

from symcomm import errors
from symcomm.ddp.hooks._exchange import all_gather, when_done
from symcomm.ddp.hooks._state import HookState, callbacks_only_compute

INDEX_BYTES = 4  # an int32: buckets are shorter than 2**31


class TopKState(HookState):
    """State of :func:`topk_hook`. ``ratio``: the share of a bucket's values that each rank sends, above 0, at most 1.

    All ranks get all ranks' values, so the bytes grow with the ranks: about ``ratio * ranks`` of plain ones. Buckets
    that would not gain go by plain all-reduce. Without ``error_feedback`` small gradients never arrive.

    Raises: BadArgumentError.
    """

    def __init__(
        self, ratio: float = 0.01, process_group: Any = None, *, error_feedback: bool = True, model: Any = None
    ):
        super().__init__(process_group, error_feedback=error_feedback, model=model)
        if not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
            raise errors.bad_argument("TopKState", "ratio", ratio, "a number above 0, at most 1")
        self.ratio = float(ratio)

    def _kept(self, bucket: Any) -> int:
        return max(1, math.ceil(self.ratio * bucket.buffer().numel()))

    def wire_bytes(self, bucket: Any, world: int) -> int:
        return (world - 1) * self._kept(bucket) * (INDEX_BYTES + bucket.buffer().element_size())

    def exchange(self, bucket: Any, flat: torch.Tensor) -> Any:
        buffer, group = bucket.buffer(), self.process_group
        chosen = flat.abs().topk(self._kept(bucket), sorted=False).indices  # NaNs count as largest
        values = flat[chosen].to(buffer.dtype)
        if self.error_feedback:
            flat[chosen] -= values  # what rounding to the buffer's dtype left, if anything
            self._residuals.keep(bucket, flat)
        work, rows = all_gather(torch.cat([chosen.int().view(torch.uint8), values.view(torch.uint8)]), group)
        split = len(chosen) * INDEX_BYTES

        def mean() -> torch.Tensor:
            indices = rows[:, :split].clone(memory_format=torch.contiguous_format).view(torch.int32)
            values = rows[:, split:].clone(memory_format=torch.contiguous_format).view(buffer.dtype).to(flat.dtype)
            total = torch.zeros_like(flat)
            for rank in range(len(rows)):  # in rank order everywhere: the same bits
                total.index_add_(0, indices[rank], values[rank])
            return buffer.copy_(total.div_(len(rows)))

        return when_done(work, mean)


@callbacks_only_compute
def topk_hook(state: TopKState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the largest values of a bucket; the rest waits in the residual.

    Raises: what a group's collectives raise."""
    return state.average(bucket)
