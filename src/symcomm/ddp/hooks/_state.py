"""HookState: what the states of all hooks share."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from symcomm import errors
from symcomm.ddp.hooks._exchange import all_reduce_bytes, done, mean_in_place, nbytes_of, work_dtype
from symcomm.ddp.hooks._residuals import Names, Residuals
from symcomm.group import default
from symcomm.group.process_group import ProcessGroup
from symcomm.torch_backend.group import TorchGroup


def callbacks_only_compute(hook: Any) -> Any:
    """Tell our reducer that no callback of ``hook`` starts a collective: its buckets need not take turns."""
    hook.callbacks_only_compute = True
    return hook


def at_least(call: str, argument: str, value: Any, lowest: int) -> int:
    """``value``, which must be a whole number of ``lowest`` or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise errors.bad_argument(call, argument, value, f"a whole number, {lowest} or more")
    return value


def one_of(call: str, argument: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise errors.bad_argument(call, argument, value, " or ".join(map(str, allowed)))
    return value


class HookState:
    """A group, counters, and what compression left out so far. Subclasses say what is sent instead of a bucket.

    ``process_group``: one of torch's or of ours; None is torch's default group, or else ours.
    ``error_feedback``: add what compression leaves out of a gradient to the next one.
    ``model``: names the parameters, which only ``state_dict`` needs. Each rank saves its own: residuals differ.

    ``bytes_sent`` and ``bytes_plain`` count what this rank sent, and what plain all-reduces would have sent.
    """

    def __init__(self, process_group: Any = None, *, error_feedback: bool = False, model: Any = None):
        call = type(self).__name__
        if process_group is not None and not isinstance(process_group, (dist.ProcessGroup, ProcessGroup)):
            kind = type(process_group).__name__
            raise errors.bad_argument(call, "process_group", kind, "a process group or None")
        self._group = process_group
        self.error_feedback = bool(one_of(call, "error_feedback", error_feedback, (True, False)))
        self._names = Names(call, model)
        self._residuals = Residuals(self._names)
        self.bytes_sent = 0
        self.bytes_plain = 0
        self.iteration = 0

    @property
    def process_group(self) -> Any:
        group = self._group
        if group is None and dist.is_initialized():
            return dist.group.WORLD
        if group is None:
            group = default.default_group()
        if isinstance(group, ProcessGroup):  # dress it for torch, once
            group = self._group = TorchGroup(
                None,
                group.rank,
                group.size,
                timedelta(seconds=group.timeout),
                group.name,
                group.global_ranks,
                None,
                group,
            )
        return group

    @property
    def saved(self) -> float:
        """The share of a plain all-reduce's bytes that was saved: 0.75 if a quarter was sent, 0 at first."""
        return 1.0 - self.bytes_sent / self.bytes_plain if self.bytes_plain else 0.0

    # --- what a subclass says ---------------------------------------------------------------------------------

    def wire_bytes(self, bucket: Any, world: int) -> int:
        """What a rank would send for this bucket. A bucket that gains nothing goes by plain all-reduce."""
        return all_reduce_bytes(bucket.buffer().nbytes, world)

    def exchange(self, bucket: Any, flat: torch.Tensor) -> Any:
        """Start to average a bucket in place; returns a future of its buffer. Called only for buckets that gain.

        ``flat`` is the buffer's content plus the residual, in float32 (float64 for float64), and may be overwritten.
        With error feedback it is a copy, which may be kept; without, it may be the buffer itself.
        """
        return mean_in_place(bucket.buffer().copy_(flat), self.process_group)

    # --- what the hooks call ----------------------------------------------------------------------------------

    def average(self, bucket: Any) -> Any:
        """A future of the bucket's buffer, averaged over the ranks. All ranks call it for the same buckets in order."""
        buffer, group = bucket.buffer(), self.process_group
        plain = all_reduce_bytes(nbytes_of(buffer), group.size())
        if buffer.is_sparse or group.size() == 1:  # sparse gradients (of embeddings) are small already
            wire = plain
        else:
            wire = self.wire_bytes(bucket, group.size())
        self._count(bucket, plain, min(wire, plain))
        residual = None if buffer.is_sparse else self._residuals.take(bucket)
        if wire < plain:
            flat = buffer.to(work_dtype(buffer.dtype), copy=self.error_feedback)
            return self.exchange(bucket, flat if residual is None else flat.add_(residual))
        if residual is not None:
            buffer.add_(residual)
        return done(buffer) if group.size() == 1 else mean_in_place(buffer, group)

    def _count(self, bucket: Any, plain: int, sent: int) -> None:
        self.bytes_plain += plain
        self.bytes_sent += sent
        self.iteration += bucket.is_last()

    # --- checkpoints ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state; tensors by the names of their parameters."""
        return {
            "iteration": self.iteration,
            "bytes_sent": self.bytes_sent,
            "bytes_plain": self.bytes_plain,
            "residuals": self._residuals.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave, on the same rank of a group of the same size."""
        missing = sorted(set(self.state_dict()) - set(saved))
        if missing:
            call = f"{type(self).__name__}.load_state_dict"
            raise errors.bad_argument(call, "saved", sorted(saved), f"complete ({', '.join(missing)} is missing)")
        self._residuals.load_state_dict(saved["residuals"])
        self.iteration, self.bytes_sent, self.bytes_plain = (
            saved["iteration"], saved["bytes_sent"], saved["bytes_plain"],
        )  # fmt: skip
