"""``python -m symcomm.cli.bench_gpu``: all_reduce of two ranks on one GPU, ours beside Gloo's and torch's.

All sides run in the same two processes, in turns, so that they meet the same machine. Times are medians, per operation:
"in a row" without waiting for the GPU in between, "one by one" with a wait for it after each.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from symcomm.cli.mps import multi_process_service
from symcomm.errors import SymcommError

SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
ROUNDS = 5
LIMIT_S = 90  # for all sizes of one mode
BUDGET_S = 0.05  # per side, size and round
LATENCY_RUNS = 5


# --- a rank ---------------------------------------------------------------------------------------------------------


def _sides(count: int, gpu: Any, dist: Any) -> dict[str, Callable[[], Any]]:
    """Name -> one all_reduce of ``count`` floats."""
    import torch

    from symcomm import symm_mem

    plain, ours = torch.zeros(count, device="cuda"), symm_mem.zeros(count, device="cuda")
    sides: dict[str, Callable[[], Any]] = {
        "symcomm, any tensor": lambda: gpu.all_reduce(plain),
        "symcomm, symmetric": lambda: gpu.all_reduce(ours),
        "Gloo": lambda: dist.all_reduce(plain),
    }
    with contextlib.suppress(Exception):  # where torch refuses two ranks on one GPU, the column stays empty
        from torch.distributed import _symmetric_memory

        theirs = _symmetric_memory.empty(count, device="cuda").zero_()
        _symmetric_memory.rendezvous(theirs, dist.group.WORLD)
        reduce = torch.ops.symm_mem.two_shot_all_reduce_
        sides["torch symmetric"] = lambda: reduce(theirs, "sum", dist.group.WORLD.group_name)
        sides["torch symmetric"]()
        torch.cuda.synchronize()
    return sides


def _time(run: Callable[[], Any], core: Any) -> tuple[float, float]:
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

    mine = json.dumps(once(1, True)).encode()
    first = max(map(json.loads, core.all_gather_object(mine)))  # all ranks make the same number of calls
    return once(max(3, min(100, int(BUDGET_S / first))), False), once(LATENCY_RUNS, True)


def rank_main(folder: str) -> None:
    """One of the two ranks; rank 0 prints a JSON line for each size."""
    import torch
    import torch.distributed as dist

    from symcomm.gpu.group import device_group
    from symcomm.group.default import init

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(0)
    core = init(f"file://{folder}/ours", rank, world, timeout=60)
    dist.init_process_group("cpu:gloo,cuda:gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=world)
    gpu = device_group(core, 0)
    for nbytes in SIZES:
        sides = _sides(nbytes // 4, gpu, dist)
        everyone = [json.loads(names) for names in core.all_gather_object(json.dumps(list(sides)).encode())]
        shared = [name for name in sides if all(name in names for names in everyone)]
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in shared}
        for _ in range(ROUNDS):
            for name in shared:
                times[name].append(_time(sides[name], core))
        if rank == 0:
            medians = {n: [statistics.median(t) * 1e6 for t in zip(*ts, strict=True)] for n, ts in times.items()}
            print(json.dumps({"nbytes": nbytes, "sliced": gpu.time_sliced, "us": medians}), flush=True)
    core.barrier()
    os._exit(0)  # nothing is left to do, and torch's own groups may take their time


# --- the command ----------------------------------------------------------------------------------------------------


def measure(environment: dict[str, str]) -> list[dict[str, Any]]:
    """Run two ranks; what rank 0 printed until the time was up."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "symcomm.cli.bench_gpu", "rank", folder]
        base = {**os.environ, **environment, "WORLD_SIZE": "2", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
        ranks = [
            subprocess.Popen(
                command, env={**base, "RANK": str(r)}, stdout=subprocess.PIPE if r == 0 else None, text=True
            )
            for r in range(2)
        ]
        try:
            out = ranks[0].communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            ranks[0].kill()
            out = ranks[0].communicate()[0]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def words_for_size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table: in a row / one by one, in microseconds."""
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    lines = ["| size | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for row in rows:
        cells = [f"{row['us'][n][0]:.0f} / {row['us'][n][1]:.0f}" if n in row["us"] else "" for n in names]
        lines.append(f"| {words_for_size(row['nbytes'])} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == ["rank"]:
        rank_main(sys.argv[2])
        return 0
    print("all_reduce, float32 sum, 2 ranks on one GPU; us in a row / one by one")
    print("\nwithout MPS: the processes take turns on the GPU\n")
    rows = measure({})
    print(table(rows), flush=True)
    try:
        with multi_process_service() as found:
            print("\nwith MPS\n")
            print(table(measure(found)))
    except SymcommError as error:
        print(f"\nwith MPS: not measured. {error}")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
