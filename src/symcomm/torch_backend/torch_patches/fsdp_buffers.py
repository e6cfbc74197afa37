"""What: FSDP2's buffers for all_gather and reduce_scatter are symmetric, if its group is ours and on the CPU.
Why: peers then read and write them in place. With torch alone, a program has to call
``set_allocate_memory_from_process_group_for_comm`` on every module for that.
How: we replace the default object that a group of parameters communicates with. torch still takes ours for the default,
so a program that chooses another replaces it. Buffers stay torch's own if they are too small to gain, if the compiler
traces them, or if there is no room.
Versions: those where it has ``_all_gather_comm`` and ``_reduce_scatter_comm`` (torch 2.10 to 2.15); on any other, this
does nothing.
Undo: groups of parameters that are made from then on have torch's buffers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from symcomm.undo import Undo, all_of, replace

# Making one takes 14 us (`python -m timeit`). Two ranks that share their cores with others gain from 256 KiB to 1 MiB
# on; below, the second meeting of a direct call costs more than it saves.
LEAST_BYTES = 512 << 10
_COMMS = {"_all_gather_comm": "DefaultAllGather", "_reduce_scatter_comm": "DefaultReduceScatter"}


def _allocate(self: Any, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    from symcomm.errors import ResourceError

    count = math.prod(size)
    if count * dtype.itemsize >= LEAST_BYTES and not torch._C._len_torch_dispatch_stack():
        try:
            return self.symmetric_from.allocate_tensor(count, dtype=dtype, device=device).view(*size)
        except ResourceError:
            pass
    return torch.empty(*size, dtype=dtype, device=device)


@functools.cache
def _with_symmetric_buffers(kind: type) -> type:
    return type(kind.__name__, (kind,), {"allocate": _allocate, "__module__": kind.__module__})


def _group_of(mesh_info: Any) -> Any:
    """A group of ours whose ranks exchange these parameters, or None. Any will do: the memory is the process's."""
    for name in ("shard_process_group", "replicate_process_group"):
        group = getattr(mesh_info, name, None)
        if getattr(group, "is_symcomm", False):
            return group
    return None


def apply(param_group: Any) -> Undo:
    """``param_group``: torch's module of FSDP2's groups of parameters."""
    owner = getattr(param_group, "FSDPParamGroup", None)
    kinds = {name: getattr(param_group, kind, None) for name, kind in _COMMS.items()}
    if owner is None or None in kinds.values():
        return all_of()
    known = owner.__init__

    @functools.wraps(known)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        known(self, *args, **kwargs)
        group = _group_of(getattr(self, "mesh_info", None))
        if group is None or self.device.type != "cpu":
            return
        for name, kind in kinds.items():
            if type(getattr(self, name, None)) is kind:
                comm = _with_symmetric_buffers(kind)()
                comm.symmetric_from = group
                setattr(self, name, comm)

    return replace(owner, "__init__", init)
