"""Our reduce operations in PyTorch's hands. Loaded while torch is being imported, so it imports next to nothing."""

from __future__ import annotations

from typing import Any

import torch._C._distributed_c10d as torch_c10d

from symcomm.types import RedOpType, ReduceOp

__all__ = ["redop_for_torch", "take_ours"]

_PLAIN = [op for op in RedOpType if op is not RedOpType.PREMUL_SUM]
_theirs: Any = torch_c10d.ReduceOp


def redop_for_torch(op: Any) -> Any:
    """One of our operations, with its factor, as PyTorch's."""
    kind = op if isinstance(op, RedOpType) else op.op
    if kind is RedOpType.PREMUL_SUM and type(op) is ReduceOp:
        factor = op.factor
        return torch_c10d._make_nccl_premul_sum(float(factor) if isinstance(factor, int) else factor)
    return _theirs(getattr(_theirs, kind.name))


def take_ours() -> None:
    """Options objects of PyTorch take our operations: torch.distributed's functions put there what they are given.

    C++ makes an operation of the kind that most callers give, a kind being what SUM is. One that is made already saves
    more than looking for it costs: 1.3 us of 2.6."""
    kinds = [getattr(_theirs, op.name) for op in _PLAIN]  # each is one object for ever, the class's attribute
    made = {id(kind): _theirs(kind) for kind in kinds}
    made |= {id(op): made[id(kind)] for op, kind in zip(_PLAIN, kinds, strict=True)}
    for name in ("AllreduceOptions", "AllreduceCoalescedOptions", "ReduceOptions", "ReduceScatterOptions"):
        options = getattr(torch_c10d, name)
        options.reduceOp = _taking_ours(options.reduceOp, made)


def _taking_ours(known: property, made: dict[int, Any]) -> property:
    set_known: Any = known.fset

    def set_op(options: Any, op: Any) -> None:
        try:
            set_known(options, made.get(id(op), op))
        except TypeError:
            if not isinstance(op, ReduceOp):
                raise
            set_known(options, redop_for_torch(op))

    return property(known.fget, set_op, doc=known.__doc__)
