"""Nothing piles up: memory, symmetric memory, works, threads and open files are the same after thousands of iterations.

A few hundred are made among the tests; ``SYMCOMM_COMPILE_STEPS=10000 python -m tests.compile.checks
training_steps_leave_nothing_behind the_same_memory_again`` makes ten thousand.
"""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from symcomm import symm_mem
from symcomm.bench.ddp_worker import memory
from symcomm.compile import runtime
from tests.compile.checks import Compiled, check, gradients

STEPS = int(os.environ.get("SYMCOMM_COMPILE_STEPS", "300"))
WARM = 50  # iterations after which nothing new should be needed
MOST_GROWTH = 2 << 20  # bytes of the process, in all iterations together: the allocator's own wandering


@dataclass
class Held:
    symmetric: int
    works: int
    threads: int
    files: int
    places: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        return cls(
            symm_mem.memory_stats()["used_bytes"],
            torch._C._distributed_c10d._get_work_registry_size(),
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
            sum(runtime.places(dist.group.WORLD.core).values()),
        )


def step(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Every kind of collective, large and small ones, with gradients through them."""
    whole = functional.all_gather_tensor_autograd(a @ w, 0, "0")
    part = functional.reduce_scatter_tensor_autograd(whole @ w, "sum", 0, "0")
    mixed = functional.all_to_all_single_autograd(part @ w, None, None, "0")
    small = [functional.all_reduce(mixed[:4] * k, "sum", "0") for k in range(3)]
    return functional.all_reduce(mixed @ w, "sum", "0") + sum(s.sum() for s in small)


@check
def training_steps_leave_nothing_behind(rank: int) -> None:
    a, w = torch.randn(64, 64), torch.randn(64, 64) / 8
    for block in (True, False):
        compiled = Compiled(step, a.clone().requires_grad_(), w.clone().requires_grad_(), block=block)
        compiled.result.sum().backward()  # compiles the backward, too
        compiled.result = None
        for _ in range(WARM):
            gradients(compiled.function, a, w)
        before, size = Held.now(), memory("VmRSS:")
        for _ in range(STEPS):
            gradients(compiled.function, a, w)
        grown = memory("VmRSS:") - size
        assert Held.now() == before, (block, before, Held.now())
        assert grown < MOST_GROWTH, f"{grown} bytes in {STEPS} iterations, block={block}"
        if STEPS > 1000 and rank == 0:
            os.write(2, f"{STEPS} iterations, block={block}: {grown} bytes more, {before}\n".encode())
