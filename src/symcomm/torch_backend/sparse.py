"""Sums of sparse tensors: every rank gathers all entries and adds those of the same index."""

from __future__ import annotations

from typing import Any

import torch

from symcomm import errors
from symcomm.group.refusal import Refusals
from symcomm.group.request import to_redop
from symcomm.types import RedOpType


def all_reduce_sparse(core: Any, tensor: Any, op: Any, timeout: float | None) -> Any:
    """``tensor`` becomes the sum over all ranks, and is returned."""
    with Refusals(core):
        redop = to_redop("all_reduce", op)[0]
        if redop is not RedOpType.SUM:
            raise errors.bad_argument(
                "all_reduce: unsupported reduction operation", "op", redop.name, "SUM for sparse tensors",
                "use .to_dense()",
            )  # fmt: skip
        mine = tensor.coalesce()
        facts = torch.tensor([mine._nnz(), mine.sparse_dim(), *mine.shape], dtype=torch.int64)
    everyone = [torch.empty_like(facts) for _ in range(core.size)]
    core.all_gather(everyone, facts, timeout=timeout)
    if any(not torch.equal(e[1:], facts[1:]) for e in everyone):
        shape = f"shape {list(mine.shape)}"
        raise errors.bad_argument("all_reduce", "tensor", shape, "of the same shape on all ranks")
    counts = [int(e[0]) for e in everyone]
    with Refusals(core):  # there may be no memory for all ranks' entries
        indices = [torch.empty((mine.sparse_dim(), n), dtype=torch.int64) for n in counts]
        values = [torch.empty((n, *mine.values().shape[1:]), dtype=mine.dtype) for n in counts]
    core.all_gather(indices, mine.indices().contiguous(), timeout=timeout)
    core.all_gather(values, mine.values().contiguous(), timeout=timeout)
    entries = torch.cat(indices, 1), torch.cat(values)
    total = torch.sparse_coo_tensor(*entries, mine.shape, check_invariants=False).coalesce()  # or torch warns
    with torch.no_grad():
        return tensor.copy_(total)
