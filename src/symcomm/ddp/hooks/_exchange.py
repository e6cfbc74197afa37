"""The collectives that hooks use, and what each costs.

A cost is how many bytes one rank sends if every piece goes straight to the rank that needs it. A plain all-reduce is a
reduce-scatter and an all-gather, so it sends each of its ``nbytes`` 2 (n - 1) / n times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from symcomm.torch_backend import versions


def nbytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a dense or sparse tensor."""
    if tensor.is_sparse:
        return tensor._values().nbytes + tensor._indices().nbytes
    return tensor.nbytes


def all_reduce_bytes(nbytes: int, world: int) -> int:
    """What a rank sends in an all-reduce of ``nbytes``."""
    return 2 * (world - 1) * nbytes // world


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums, scales and residuals of a ``dtype`` are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def done(tensor: torch.Tensor) -> Any:
    """A future that holds ``tensor`` already."""
    future: Any = torch.futures.Future()
    future.set_result(tensor)
    return future


def when_done(work: Any, result: Callable[[], torch.Tensor]) -> Any:
    """A future of ``result()``, which is called once ``work`` has ended. It raises what the work raised."""

    def finish(ended: Any) -> torch.Tensor:
        ended.wait()  # raises what the work raised
        return result()

    return work.get_future().then(finish)


def mean_in_place(tensor: torch.Tensor, group: Any) -> Any:
    """Start averaging ``tensor`` over the ranks. Divided first, as DDP does: 16-bit sums then cannot overflow."""
    tensor.div_(group.size())
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return when_done(work, lambda: tensor)


def all_to_all(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """Send row k to rank k; returns the rows that all ranks sent here, in rank order."""
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group)
    return received


def all_gather(row: torch.Tensor, group: Any) -> tuple[Any, torch.Tensor]:
    """Start to send ``row`` to all ranks; returns the work, and where all ranks' rows will be."""
    rows = row.new_empty(group.size(), row.numel())
    work = versions.all_gather_single(rows, row.reshape(1, -1), group=group, async_op=True)
    return work, rows
