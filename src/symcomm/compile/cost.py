"""How long a collective and a kernel take, roughly: enough to tell 5 microseconds from 500.

The numbers are from two Neoverse N1 cores with one rank each; ``python -m symcomm.compile.calibrate`` measures them on
any machine. Near the border both choices take about the same time, and results never depend on it. If ranks' calls have
to match (which collectives are joined), ranks decide by sizes alone. Whether to block or to wait later, each rank
decides for itself.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import torch

# A blocking collective of a few bytes, as graphs call it. calibrate: 5.7, the fastest on a busy machine.
CALL_US = 6.0
# How much more a launch and a wait cost than a blocking call: two changes of thread, a Work, its registration.
# BENCHMARKS.md, "Through torch.distributed", on a quiet machine: 57 - 9.6. (calibrate on a busy one: 160 to 450.)
HANDOFF_US = 47.0
# BENCHMARKS.md, all_reduce of 1 MiB of symmetric memory, quiet: 49.9 us, 1.0 of which it takes for 8 bytes, too.
COLLECTIVE_BYTES_PER_US = 2.1e4
BYTES_PER_US = 3.4e4  # read and written by one core. calibrate, 4 MiB copied: 33,658 and 34,313 in two runs
FLOPS_PER_US = 3.6e4  # one core's float32 matmul. calibrate, 256 x 256: 35,998 and 36,046 in two runs
# Joining saves a call and costs a copy, so it pays below CALL_US * BYTES_PER_US / 2 = 102,000 bytes; the power of two
# below that. calibrate, four of 4 to 32 KiB on a busy machine: joined and apart within 4% of each other.
BUCKET_BYTES = 64 << 10


def tensor_bytes(value: Any) -> int:
    """Bytes of a (fake) tensor; symbolic sizes count as their example."""
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(map(_example, value.shape)) * value.dtype.itemsize


def _example(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) and size.node.hint is not None else int(size)


def collective_us(nbytes: int, world: int) -> float:
    """An all_reduce, all_gather or reduce_scatter that moves ``nbytes`` per rank."""
    return CALL_US * max(1, world - 1) + nbytes / COLLECTIVE_BYTES_PER_US


_MATMULS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}


def kernel_us(node: Any) -> float:
    """A node of an FX graph, run alone."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return 0.0
    out = node.meta.get("val")
    inputs = [n.meta.get("val") for n in node.all_input_nodes]
    if node.target.overloadpacket in _MATMULS and isinstance(out, torch.Tensor):
        left = next((v for v in inputs[::-1][1:2] if isinstance(v, torch.Tensor)), None)  # the last two are factors
        inner = _example(left.shape[-1]) if left is not None else 1
        return 2 * tensor_bytes(out) / out.dtype.itemsize * inner / FLOPS_PER_US
    if torch.Tag.core in node.target.tags and node.target.is_view:
        return 0.0
    return (tensor_bytes(out) + sum(map(tensor_bytes, inputs))) / BYTES_PER_US


def has_idle_cores(ranks: int) -> bool:
    """Whether a collective can run beside kernels without taking their core."""
    return len(os.sched_getaffinity(0)) > ranks * torch.get_num_threads()


_limits = [BUCKET_BYTES]  # the last one holds


def bucket_bytes() -> int:
    """The most bytes of collectives that are joined into one."""
    return _limits[-1]


@contextlib.contextmanager
def bucketing_up_to(nbytes: int) -> Iterator[None]:
    """Within it, another limit, for measurements. All ranks use it alike."""
    _limits.append(nbytes)
    try:
        yield
    finally:
        _limits.pop()
