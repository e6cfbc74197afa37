"""One process, many devices: ``torch.cuda.comm``'s functions and what ``DataParallel`` is made of, for any devices."""

from __future__ import annotations

from symcomm.device.apply import parallel_apply
from symcomm.device.bindings import (
    _broadcast,
    _broadcast_coalesced,
    _broadcast_out,
    _gather,
    _gather_out,
    _scatter,
    _scatter_out,
)
from symcomm.device.coalesce import broadcast_coalesced, reduce_add_coalesced
from symcomm.device.copies import broadcast, gather, scatter
from symcomm.device.data_parallel import DataParallel, data_parallel
from symcomm.device.functions import Broadcast, Gather, ReduceAddCoalesced, Scatter
from symcomm.device.nested import gather_nested, scatter_kwargs, scatter_nested
from symcomm.device.replicate import replicate
from symcomm.device.sums import reduce_add

__all__ = [
    "Broadcast", "DataParallel", "Gather", "ReduceAddCoalesced", "Scatter",
    "broadcast", "broadcast_coalesced", "data_parallel", "gather", "gather_nested", "parallel_apply", "reduce_add",
    "reduce_add_coalesced", "replicate", "scatter", "scatter_kwargs", "scatter_nested",
    "_broadcast", "_broadcast_coalesced", "_broadcast_out", "_gather", "_gather_out", "_scatter", "_scatter_out",
]  # fmt: skip
