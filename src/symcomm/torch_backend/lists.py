"""Calls with several tensors of each rank, as if each tensor were a rank of its own.

torch's own backends take several tensors in direct calls of a group; ``torch.distributed``'s functions never pass more
than one. The calls run synchronously: the work that they return has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from symcomm import errors
from symcomm.group.buffers import in_turn
from symcomm.group.refusal import Refusals
from symcomm.group.request import to_redop
from symcomm.torch_backend import checks
from symcomm.torch_backend.sparse import all_reduce_sparse
from symcomm.torch_backend.work import DoneWork
from symcomm.types import RedOpType

_COMBINE = {
    RedOpType.SUM: torch.add,
    RedOpType.AVG: torch.add,
    RedOpType.PRODUCT: torch.mul,
    RedOpType.MIN: torch.minimum,
    RedOpType.MAX: torch.maximum,
    RedOpType.BAND: torch.bitwise_and,
    RedOpType.BOR: torch.bitwise_or,
    RedOpType.BXOR: torch.bitwise_xor,
}


def _spread(tensors: Sequence[Any], value: Any) -> None:
    with torch.no_grad():
        for tensor in tensors:
            if tensor is not value:
                tensor.copy_(value)


def all_reduce(core: Any, tensors: Sequence[Any], op: Any, timeout: float | None) -> DoneWork:
    """All tensors of all ranks become their combination."""
    with Refusals(core):
        checks.non_empty("all_reduce", tensors)
        checks.alike("all_reduce", tensors)
        redop = to_redop("all_reduce", op)[0]
        if redop not in _COMBINE:
            raise errors.bad_argument("all_reduce", "op", redop.name, "another one for several tensors at once")
        total = tensors[0].detach().clone()
        for tensor in tensors[1:]:
            total = _COMBINE[redop](total, tensor.detach())
    if total.is_sparse:
        total = all_reduce_sparse(core, total, redop, timeout)
    else:
        core.all_reduce(total, redop, timeout=timeout)
    if redop is RedOpType.AVG:
        total = (total / len(tensors)).to(total.dtype)
    _spread(tensors, total)
    return DoneWork(list(tensors))


def broadcast(core: Any, tensors: Sequence[Any], root: int, opts: Any, timeout: float | None) -> DoneWork:
    """All tensors of all ranks become ``root``'s tensor number ``opts.rootTensor``."""
    with Refusals(core):
        number = checks.root_tensor("broadcast", opts, len(tensors))
        checks.alike("broadcast", tensors)
    core.broadcast(tensors[number], root, timeout=timeout)
    _spread(tensors, tensors[number])
    return DoneWork(list(tensors))


def all_gather(core: Any, outputs: Sequence[Any], inputs: Sequence[Any], timeout: float | None) -> DoneWork:
    """Every list of ``outputs`` becomes all ranks' inputs: rank 0's in their order, then rank 1's, and so on."""
    n = len(inputs)
    with Refusals(core):
        checks.alike("all_gather", inputs)
        for places in outputs:
            checks.alike("all_gather", places, inputs[0])
        rows = [[outputs[0][r * n + k] for r in range(core.size)] for k in range(n)]
    in_turn([partial(core.all_gather, *pair, timeout=timeout) for pair in zip(rows, inputs, strict=True)])
    for places in outputs[1:]:
        for place, value in zip(places, outputs[0], strict=True):
            _spread([place], value)
    return DoneWork([list(places) for places in outputs])
