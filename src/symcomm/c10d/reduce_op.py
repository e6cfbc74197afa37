"""PREMUL_SUM as the binding makes it; ``ReduceOp`` itself lives in symcomm.types."""

from __future__ import annotations

from typing import Any

from symcomm.errors import wrong_type
from symcomm.types import ReduceOp, make_premul_sum

__all__ = ["ReduceOp", "_make_nccl_premul_sum"]


def _make_nccl_premul_sum(factor: Any) -> ReduceOp:
    """SUM of the inputs, each multiplied first by ``factor``: a number, or a tensor that broadcasts.

    Raises: WrongTypeError."""
    if not (isinstance(factor, (int, float)) or hasattr(factor, "numel")):
        raise wrong_type("_make_nccl_premul_sum", "factor", factor, "a number or a tensor")
    return make_premul_sum(factor)
