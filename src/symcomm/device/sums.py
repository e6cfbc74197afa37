"""reduce_add: the sum of one tensor from each device, as the tree over them, whatever the destination.

Formats of 16 bits and less are added in float32 and rounded once, as everywhere in Symcomm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from symcomm import errors
from symcomm.collectives import tree
from symcomm.device import nccl
from symcomm.device.copies import waits
from symcomm.device.devices import as_destination, as_tensors, check_has_data
from symcomm.types import DType, RedOpType, kept_dtype

NARROW = {getattr(torch, d.label, None) for d in DType if kept_dtype(d, RedOpType.SUM) is not d}


def reduce_add(inputs: Any, destination: Any = None) -> torch.Tensor:
    """The elementwise sum of ``inputs``, on ``destination`` (-1: the CPU); a single input is returned as it is.

    Raises: BadArgumentError."""
    tensors = as_tensors("reduce_add", "inputs", inputs)
    if not tensors:
        raise errors.bad_argument("reduce_add", "inputs", tensors, "at least one tensor")
    check_same("reduce_add", "inputs[{}]", tensors)
    device = as_destination("reduce_add", destination, tensors)
    for i, tensor in enumerate(tensors):
        check_has_data("reduce_add", f"inputs[{i}]", tensor, device)
    return add_on(device, tensors)


def check_same(call: str, argument: str, tensors: Sequence[torch.Tensor], *, layouts: bool = True) -> None:
    """Refuse different shapes, dtypes and (if asked) layouts; ``argument`` has a place for the index."""
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        if tensor.shape != first.shape:
            got, expected = tuple(tensor.shape), f"shape {tuple(first.shape)}"
        elif tensor.dtype != first.dtype:
            got, expected = tensor.dtype, f"dtype {first.dtype}"
        elif layouts and tensor.layout != first.layout:
            got, expected = tensor.layout, f"layout {first.layout}"
        else:
            continue
        raise errors.bad_argument(call, argument.format(i), got, f"of the {expected} of {argument.format(0)}")


def add_on(device: torch.device, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum on ``device``: through NCCL where the tensors are on different GPUs, else copied there and added."""
    if tensors[0].dtype not in NARROW and nccl.can_add(tensors, device):
        return nccl.add(tensors, device)
    here = [t.to(device, non_blocking=waits(device)) for t in tensors]
    dtype = here[0].dtype
    if len(here) > 1 and dtype in NARROW:
        here = [t.float() for t in here]
    return tree.combine(torch.add, here).to(dtype)
