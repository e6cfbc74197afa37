"""Local SGD: ranks train on their own, and average their parameters every few steps.

state = LocalSGDState(model.parameters(), period=8)
model.register_comm_hook(state, local_sgd_hook)
...
loss.backward()
optimizer.step()
state.step()        # after every optimizer step, on every rank
"""

# No postponed annotations in modules with hooks: DDP compares a hook's annotations with the types themselves.
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from symcomm import errors
from symcomm.ddp.hooks._exchange import all_reduce_bytes, done, mean_in_place, nbytes_of
from symcomm.ddp.hooks._state import HookState, at_least, callbacks_only_compute


class LocalSGDState(HookState):
    """State of :func:`local_sgd_hook`; it also averages the parameters.

    ``parameters``: the model's; all ranks make the state, and begin with rank 0's. ``period``: steps between two
    averages. ``start``: steps with plain all-reduced gradients before the ranks part.

    Raises: BadArgumentError.
    """

    def __init__(self, parameters: Iterable[Any], period: int = 8, process_group: Any = None, *, start: int = 0):
        super().__init__(process_group)
        call = type(self).__name__
        listed = list(parameters) if isinstance(parameters, Iterable) else []
        if not listed or not all(isinstance(p, torch.Tensor) for p in listed):
            raise errors.bad_argument(
                call, "parameters", parameters, "tensors, at least one", "pass model.parameters()"
            )
        self.period = at_least(call, "period", period, 1)
        self.start = at_least(call, "start", start, 0)
        self.steps = 0
        self._of_dtype: dict[torch.dtype, list[Any]] = {}
        for parameter in listed:
            self._of_dtype.setdefault(parameter.dtype, []).append(parameter)
        self._begin_equal()

    @torch.no_grad()
    def _begin_equal(self) -> None:
        options: Any = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for parameters in self._of_dtype.values():
            flat = flattened(parameters)
            self.process_group.broadcast([flat], options).wait()
            write_back(parameters, flat)

    def average(self, bucket: Any) -> Any:
        """Average until the ranks part; from then on gradients stay as they are."""
        if self.steps < self.start:
            return super().average(bucket)
        self._count(bucket, all_reduce_bytes(nbytes_of(bucket.buffer()), self.process_group.size()), 0)
        return done(bucket.buffer())

    def step(self) -> bool:
        """Count one step of the optimizer, and average the parameters if it is time. Returns whether it was."""
        self.steps += 1
        due = self.steps > self.start and (self.steps - self.start) % self.period == 0
        if due:
            self.synchronize()
        return due

    @torch.no_grad()
    def synchronize(self) -> None:
        """Average the parameters now. All ranks call it."""
        group = self.process_group
        for parameters in self._of_dtype.values():
            flat = flattened(parameters)
            self.bytes_sent += all_reduce_bytes(flat.nbytes, group.size())
            write_back(parameters, mean_in_place(flat, group).wait())

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        self.steps = saved["steps"]


def flattened(parameters: list[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A flat copy of parameters of one dtype."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters]).to(dtype or parameters[0].dtype)


def write_back(parameters: list[Any], flat: torch.Tensor) -> None:
    """Copy a flat tensor back into the parameters."""
    pieces = flat.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.detach().copy_(piece.view(parameter.shape))


@callbacks_only_compute
def local_sgd_hook(state: LocalSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave a bucket as it is, except for the first ``state.start`` steps.

    Raises: what a group's collectives raise."""
    return state.average(bucket)
