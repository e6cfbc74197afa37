"""symcomm.ddp: data parallel training. PyTorch's DistributedDataParallel with a reducer on symmetric memory.

module.py     DistributedDataParallel
reducer.py    Reducer: when gradients come, when buckets leave
fill.py       copies gradients into buckets, and results back
faults.py     names of parameters in errors, which the logger sees first
bucket.py     Bucket, and GradBucket, which hooks receive
assign.py     which parameters share a bucket
comm_hook.py  communication hooks: the interface, and the built-in ones
hook_order.py calls hooks in turn, without holding up backward
unused.py     parameters without gradients
verify.py     do all ranks hold the same model?
broadcast.py  many tensors from one rank to all
shards.py     logical shards: a step is so many micro-batches, wherever they run
sampling.py   the samples and random numbers of a shard
logger.py     Logger: facts under PyTorch's keys
timeline.py   times of an iteration, bucket by bucket
hooks/        hooks that compress

Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "symcomm.ddp.module": ("DistributedDataParallel",),
    "symcomm.ddp.reducer": ("Reducer",),
    "symcomm.ddp.bucket": ("GradBucket",),
    "symcomm.ddp.comm_hook": ("BuiltinCommHookType", "CommHook", "register_builtin_comm_hook", "register_comm_hook"),
    "symcomm.ddp.assign": ("compute_bucket_assignment_by_size",),
    "symcomm.ddp.verify": ("verify_params_across_processes",),
    "symcomm.ddp.broadcast": ("broadcast_coalesced",),
    "symcomm.ddp.logger": ("DDPLoggingData", "Logger"),
    "symcomm.ddp.timeline": ("BucketTimes", "IterationTimes"),
}
_LAZY = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'symcomm.ddp' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
