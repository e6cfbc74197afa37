"""DeepSpeed's ``inference_all_reduce`` where its group is ours: eager by our own call, compiled by our operator.

Why: DeepSpeed leaves the group that it is given for its own shared memory, if that could be built.
Versions: 0.19.8.
Undo: DeepSpeed's method is back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from symcomm.integrations import operators
from symcomm.symm_mem.groups import look_up
from symcomm.undo import Undo, replace


def apply(module: Any) -> Undo:
    """``module``: deepspeed.comm.torch."""
    theirs = module.TorchBackend.inference_all_reduce

    def inference_all_reduce(self: Any, tensor: torch.Tensor, op: Any, group: Any = None) -> Any:
        if tensor.device.type != "cpu" or self._reduce_op(op) != dist.ReduceOp.SUM:
            return theirs(self, tensor, op, group)
        if torch.compiler.is_compiling():
            if not (name := _announced(group)):
                return theirs(self, tensor, op, group)
            torch.ops.symcomm.all_reduce_(tensor, name)
        elif (ours := look_up(group)) is None:
            return theirs(self, tensor, op, group)
        else:
            ours.all_reduce(tensor)
        return tensor

    return replace(module.TorchBackend, "inference_all_reduce", inference_all_reduce)


def _announced(group: Any) -> str:
    """A name by which operators know the group, if it is ours."""
    if (ours := look_up(group)) is None:
        return ""
    operators.announce(name := f"deepspeed {ours.name}", ours)
    return name


_announced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does
