"""``torch.ops.symm_mem.*`` on CPU tensors: the tables of operators, and their registration with torch.

Every operator that torch registers is in exactly one of three tables: IMPLEMENTED, NEEDS_MULTICAST and BOXED (in
symm_boxed.py). They take tensors in symmetric memory, as torch's do, or any CPU tensor if the result is the same.
Groups are given by name: ours, or torch.distributed's on our backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from symcomm import errors
from symcomm.symm_mem import words
from symcomm.torch_backend import symm_boxed, symm_functional, symm_one_sided, symm_reduce, symm_shuffle
from symcomm.torch_backend.torch_patches.when_imported import close_comm_buffers, open_comm_buffers
from symcomm.undo import Undo, all_of

IMPLEMENTED: dict[str, Callable[..., Any]] = {
    "_async_input_mm": symm_one_sided.async_input_mm,
    "_low_contention_all_gather": symm_reduce.low_contention_all_gather,
    "_low_contention_all_gather_ce_multicast": symm_reduce.low_contention_all_gather_multicast,
    "_low_contention_all_gather_ce_multicast_out": symm_reduce.low_contention_all_gather_out,
    "_low_contention_reduce_scatter": symm_reduce.low_contention_reduce_scatter,
    "all_to_all_vdev": symm_shuffle.all_to_all_vdev,
    "all_to_all_vdev_2d": symm_shuffle.all_to_all_vdev_2d,
    "all_to_all_vdev_2d_offset": symm_shuffle.all_to_all_vdev_2d_offset,
    "fused_all_gather_matmul": symm_reduce.fused_all_gather_matmul,
    "fused_all_gather_scaled_matmul": symm_reduce.fused_all_gather_scaled_matmul,
    "fused_matmul_reduce_scatter": symm_reduce.fused_matmul_reduce_scatter,
    "fused_scaled_matmul_reduce_scatter": symm_reduce.fused_scaled_matmul_reduce_scatter,
    "get_remote_tensors": symm_one_sided.get_remote_tensors,
    "memcpy_to_multicast_": symm_one_sided.memcpy_to_multicast,
    "memset32_": words.memset32,
    "multi_root_tile_reduce": symm_reduce.multi_root_tile_reduce,
    "nccl_all_to_all_nd": symm_shuffle.nccl_all_to_all_nd,
    "nccl_get": symm_one_sided.get,
    "nccl_put": symm_one_sided.put,
    "nccl_put_with_signal": symm_one_sided.nccl_put_with_signal,
    "nccl_reduce_scatter_offset": symm_reduce.nccl_reduce_scatter_offset,
    "nccl_wait_for_signal": symm_one_sided.nccl_wait_for_signal,
    "nvshmem_all_to_all": symm_shuffle.nvshmem_all_to_all,
    "nvshmem_broadcast": symm_shuffle.nvshmem_broadcast,
    "nvshmem_get": symm_one_sided.get,
    "nvshmem_put": symm_one_sided.put,
    "nvshmem_put_with_signal": symm_one_sided.nvshmem_put_with_signal,
    "nvshmem_wait_for_signal": symm_one_sided.nvshmem_wait_for_signal,
    "one_shot_all_reduce": symm_reduce.one_shot_all_reduce,
    "one_shot_all_reduce_copy": symm_reduce.one_shot_all_reduce_copy,
    "one_shot_all_reduce_copy_out": symm_reduce.one_shot_all_reduce_copy_out,
    "one_shot_all_reduce_out": symm_reduce.one_shot_all_reduce_out,
    "reduce_scatter_out": symm_reduce.reduce_scatter_out,
    "stream_write_value32_": words.stream_write_value32,
    "tile_reduce": symm_reduce.tile_reduce,
    "two_shot_all_reduce_": symm_reduce.two_shot_all_reduce_,
    "two_shot_all_reduce_out": symm_reduce.two_shot_all_reduce_out,
}
NEEDS_MULTICAST = {  # -> the operator that does the same without it
    "multimem_all_gather_out": "_low_contention_all_gather",
    "multimem_all_reduce_": "two_shot_all_reduce_",
    "multimem_one_shot_all_reduce": "one_shot_all_reduce",
    "multimem_one_shot_all_reduce_out": "one_shot_all_reduce_out",
    "multimem_one_shot_reduce_out": "tile_reduce",
}


def _refusing(name: str, why: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise errors.CallerError(f"torch.ops.symm_mem.{name} on CPU tensors: {why}.")

    return refuse


def _without_data(schema: Any) -> Callable[..., Any] | None:
    """A kernel for tracing an operator that returns what it writes, or nothing; None for others."""
    if not schema.returns:
        return lambda *_, **__: None
    written = schema.returns[0].alias_info
    if len(schema.returns) != 1 or written is None:
        return None
    sets = [argument.alias_info and argument.alias_info.before_set for argument in schema.arguments]
    place = sets.index(written.before_set)
    name = schema.arguments[place].name
    return lambda *args, **kwargs: args[place] if place < len(args) else kwargs[name]


def _register_for_tracing(names: set[str]) -> Any:
    """Register kernels for tracing: Dynamo asks operators for results without data, and torch has few such kernels."""
    library = torch.library.Library("symm_mem", "IMPL", "Meta")
    for name in sorted(names):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", "Meta"):
            kernel = _without_data(getattr(torch.ops.symm_mem, name).default._schema)
            if kernel is not None:
                library.impl(name, kernel)
    return library


def register() -> Undo:
    """Give torch the operators for CPU tensors that this version of torch has."""
    multicast = "needs multicast hardware (NVLink SHARP), which a CPU has not; use torch.ops.symm_mem.{}"
    refused = {name: multicast.format(other) for name, other in NEEDS_MULTICAST.items()}
    kernels = IMPLEMENTED | {name: _refusing(name, why) for name, why in refused.items()}
    known = {name.removeprefix("symm_mem::") for name in torch._C._dispatch_get_all_op_names()}
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    for name in sorted(kernels.keys() & known):
        library.impl(name, kernels[name])
    traced = _register_for_tracing(IMPLEMENTED.keys() & known)
    undos = (library._destroy, traced._destroy, symm_functional.register(known), symm_boxed.put_first(known))
    open_comm_buffers()
    return all_of(close_comm_buffers, *undos)
