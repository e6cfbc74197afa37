"""Which operator of ``torch.ops.c10d`` a group of torch's calls in each of its methods."""

from __future__ import annotations

__all__ = ["OPERATORS"]

OPERATORS = {
    "allreduce": "allreduce_",
    "allreduce_coalesced": "allreduce_coalesced_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "allgather": "allgather_",
    "allgather_coalesced": "allgather_coalesced_",
    "all_gather_single": "_allgather_base_",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "reduce_scatter": "reduce_scatter_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced_",
    "gather": "gather_",
    "scatter": "scatter_",
    "alltoall": "alltoall_",
    "all_to_all_single": "alltoall_base_",
}
