"""One rank of ``symcomm bench gpu``: runs the whole plan on all sides; the first rank writes a line for each turn."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from symcomm.bench.torch_worker import read_plan, say

BUDGET_S = 0.05  # of a turn in a row
MOST_CALLS = 100
SINGLE_CALLS = 20


def make_sides(count: int, gpu: Any, dist: Any, without: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """Side -> one all_reduce of ``count`` floats."""
    import torch

    from symcomm import symm_mem

    plain, ours = torch.zeros(count, device="cuda"), symm_mem.zeros(count, device="cuda")
    sides: dict[str, Callable[[], Any]] = {
        "ordinary": lambda: gpu.all_reduce(plain),
        "symmetric": lambda: gpu.all_reduce(ours),
        "gloo": lambda: dist.all_reduce(plain),
    }
    if "torch" in without:
        return sides
    say({"doing": "torch", "nbytes": 4 * count})  # its kernels wait for ever where the GPU cannot hold all at once
    with contextlib.suppress(Exception):  # where torch refuses several ranks on one GPU, the column stays empty
        from torch.distributed import _symmetric_memory

        theirs = _symmetric_memory.empty(count, device="cuda").zero_()
        _symmetric_memory.rendezvous(theirs, dist.group.WORLD)
        reduce = torch.ops.symm_mem.two_shot_all_reduce_
        sides["torch"] = lambda: reduce(theirs, "sum", dist.group.WORLD.group_name)
        sides["torch"]()
        torch.cuda.synchronize()
    return {name: run for name, run in sides.items() if name not in without}


def check_values(gpu: Any, count: int) -> None:
    import torch

    values = torch.full((count,), float(gpu.rank + 1), device="cuda")
    gpu.all_reduce(values)
    if not bool((values == gpu.size * (gpu.size + 1) / 2).all()):
        raise SystemExit(f"all_reduce of {count} floats: wrong values")


def time_turn(run: Callable[[], Any], core: Any) -> tuple[float, float]:
    """(seconds each in a row, seconds each one by one)"""
    import torch

    def once(count: int, wait: bool) -> float:
        core.barrier()
        begun = time.perf_counter()
        for _ in range(count):
            run()
            if wait:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / count

    first = max(core.all_gather_object(once(1, True)))  # all ranks make the same number of calls
    return once(max(3, min(MOST_CALLS, int(BUDGET_S / first))), False), once(SINGLE_CALLS, True)


def main() -> None:
    folder, workload = sys.argv[1], read_plan()
    import torch
    import torch.distributed as dist

    from symcomm.cuda.group import device_group
    from symcomm.group.default import init

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(0)
    core = init(f"file://{folder}/ours", rank, world, timeout=60)
    dist.init_process_group("cpu:gloo,cuda:gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=world)
    gpu = device_group(core, 0)
    for nbytes in workload["sizes"]:
        say({"doing": "ordinary", "nbytes": nbytes})
        check_values(gpu, nbytes // 4)
        sides = make_sides(nbytes // 4, gpu, dist, workload["without"])
        everyone = core.all_gather_object(list(sides))
        shared = [name for name in sides if all(name in names for names in everyone)]
        for _ in range(workload["rounds"]):
            for name in shared:
                say({"doing": name, "nbytes": nbytes})
                row, single = time_turn(sides[name], core)
                say({"nbytes": nbytes, "side": name, "row": row, "single": single})
    core.barrier()
    os._exit(0)  # nothing is left to do, and torch's own groups may take their time


if __name__ == "__main__":
    main()
