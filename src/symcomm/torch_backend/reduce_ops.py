"""Our reduce operations as PyTorch's."""

from __future__ import annotations

from typing import Any

import torch._C._distributed_c10d as torch_c10d

from symcomm.types import RedOpType, ReduceOp


def redop_for_torch(op: Any) -> Any:
    """One of our operations, with its factor, as PyTorch's."""
    theirs: Any = torch_c10d.ReduceOp
    kind = op if isinstance(op, RedOpType) else op.op
    if kind is RedOpType.PREMUL_SUM and type(op) is ReduceOp:
        factor = op.factor
        return torch_c10d._make_nccl_premul_sum(float(factor) if isinstance(factor, int) else factor)
    return theirs(getattr(theirs, kind.name))
