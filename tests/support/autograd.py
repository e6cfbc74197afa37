"""Tensors that autograd needs again after a call, and what it says if the call has changed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

LEAF = "a leaf Variable that requires grad is being used in an in-place operation"
CHANGED = "modified by an inplace operation"


class Case(NamedTuple):
    """One call: ``call(**options)``, the tensors that it writes here, and those that it only reads."""

    call: Callable[..., Any]
    written: list[torch.Tensor]
    read: list[torch.Tensor]


def saved(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """For each tensor a result that needs its values for backward."""
    weights = [torch.ones(t.shape, device=t.device, requires_grad=True) for t in tensors]
    return [(w * t).sum() for w, t in zip(weights, tensors, strict=True)]


def must_be_noticed(results: list[torch.Tensor], what: str) -> None:
    for result in results:
        try:
            result.backward()
        except RuntimeError as error:
            assert CHANGED in str(error), f"{what}: {error}"
        else:
            raise AssertionError(f"{what}: a gradient was computed from overwritten values")


def check(case: Case, act: Callable[[], Any], what: str) -> None:
    written, read = saved(case.written), saved(case.read)
    act()
    must_be_noticed(written, what)
    for result in read:
        result.backward()
