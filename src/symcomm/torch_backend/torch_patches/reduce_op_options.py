"""What: torch's options objects (AllreduceOptions and the like) take our reduce operations as ``reduceOp``.
Why: torch.distributed's functions put their argument there, as in ``dist.all_reduce(x, op=symcomm.ReduceOp.SUM)``.
Versions: all.
Undo: the properties are C++'s again.
"""

from __future__ import annotations

import sys
from typing import Any

import torch._C._distributed_c10d as _C
import torch.distributed as dist

from symcomm.undo import Undo, all_of, replace


def apply() -> Undo:
    """Most callers pass a kind such as SUM, which C++ would convert into an operation each time. Keeping the operations
    saves about half of the time that setting one takes."""
    theirs: Any = dist.ReduceOp
    kinds = [kind for name, kind in theirs.RedOpType.__members__.items() if name != "PREMUL_SUM"]
    made = {id(kind): theirs(kind) for kind in kinds}  # each kind is one object, an attribute of its class
    names = ("AllreduceOptions", "AllreduceCoalescedOptions", "ReduceOptions", "ReduceScatterOptions")
    classes = [getattr(_C, name) for name in names]
    return all_of(*(replace(each, "reduceOp", _taking_ours(each.reduceOp, made)) for each in classes))


def _taking_ours(known: property, made: dict[int, Any]) -> property:
    set_known: Any = known.fset

    def set_op(options: Any, op: Any) -> None:
        try:
            set_known(options, made.get(id(op), op))
        except TypeError:
            types = sys.modules.get("symcomm.types")  # loaded, if there is an operation of ours
            if types is None or not isinstance(op, types.ReduceOp):
                raise
            from symcomm.torch_backend.reduce_ops import redop_for_torch

            set_known(options, redop_for_torch(op))

    return property(known.fget, set_op, doc=known.__doc__)
