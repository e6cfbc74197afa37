"""What each of the two ranks that `symcomm doctor` starts runs: do torch.distributed and a device's memory work?"""

from __future__ import annotations

import os
import sys

HEAP = "heap"  # in place of a device: on the CPU, with tensors in the shared heap
SIZES = (1 << 10, 1 << 20)  # elements: through host memory, and in the GPU's own
ROUNDS = 2  # a group that is made again must not find what the last one left


def main(device: str) -> None:
    if device == HEAP:
        os.environ.setdefault("SYMCOMM_HEAP", "1")
    import torch.distributed as dist

    from symcomm.torch_backend.register import register

    register()  # torch does so by itself if the package is installed, not only found
    if device == HEAP:
        device = "cpu"
        check_heap()
    for _ in range(ROUNDS):
        dist.init_process_group("symcomm")
        for count in SIZES:
            check_sum(device, count)
        dist.destroy_process_group()


def check_heap() -> None:
    import torch

    from symcomm.memory.shared_heap import heap_stats

    tensor = torch.empty(max(SIZES))
    stats = heap_stats()
    if stats.in_use < tensor.nbytes:
        raise SystemExit(stats.why_not or "the heap served nothing")


def check_sum(device: str, count: int) -> None:
    import torch
    import torch.distributed as dist

    values = torch.full((count,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(values)
    expected = dist.get_world_size() * (dist.get_world_size() + 1) / 2
    if not bool((values == expected).all()):
        raise SystemExit(f"wrong values on {device}: {values[0].item()} instead of {expected}")


if __name__ == "__main__":
    main(sys.argv[1])
