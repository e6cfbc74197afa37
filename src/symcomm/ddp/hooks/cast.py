"""Gradients travel as bf16 or fp16."""

# No postponed annotations in modules with hooks: DDP compares a hook's annotations with the types themselves.
from typing import Any

import torch
import torch.distributed as dist

from symcomm.ddp.hooks._exchange import all_reduce_bytes, when_done
from symcomm.ddp.hooks._state import HookState, callbacks_only_compute, one_of


class CastState(HookState):
    """State of :func:`cast_hook`. ``dtype``: torch.bfloat16 (the range of float32) or torch.float16 (finer, narrower).

    A float16 beyond 65504 becomes infinite, on all ranks; use it with a gradient scaler, as always with float16.
    ``error_feedback`` makes up for the rounding of each rank's gradient, not for that of their sum.

    Raises: BadArgumentError.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, process_group: Any = None, **options: Any):
        super().__init__(process_group, **options)
        self.dtype = one_of("CastState", "dtype", dtype, (torch.bfloat16, torch.float16))

    def wire_bytes(self, bucket: Any, world: int) -> int:
        return all_reduce_bytes(2 * bucket.buffer().numel(), world)

    def exchange(self, bucket: Any, flat: torch.Tensor) -> Any:
        buffer, group = bucket.buffer(), self.process_group
        sent = (flat / group.size()).to(self.dtype)  # divided before rounding: their sum then fits
        if self.error_feedback:
            self._residuals.keep(bucket, flat.sub_(sent, alpha=group.size()))
        work = dist.all_reduce(sent, group=group, async_op=True)
        return when_done(work, lambda: buffer.copy_(sent))


@callbacks_only_compute
def cast_hook(state: CastState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in 16 bits: half the bytes of float32.

    Raises: what a group's collectives raise."""
    return state.average(bucket)
