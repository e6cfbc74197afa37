"""``python -m symcomm.compile.calibrate`` measures the numbers in cost.py on this machine.

Two ranks, one thread each, make the calls that compiled graphs make. Each figure is the fastest of many, so a busy
machine makes this slower rather than wrong. Variants that are compared (with and without buckets, waits, pieces) take
turns.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import symcomm
from symcomm.compile import configure, cost, runtime
from symcomm.symm_mem.allocate import empty_strided_p2p
from symcomm.torch_backend import symm_reduce

RANKS = 2
SIZES = tuple(1 << k for k in range(10, 21))  # bytes of one collective
DEADLINE = 600.0


def fastest(steps: Sequence[Callable[[], Any]], seconds: float, least: int = 300) -> list[float]:
    """Microseconds of each step. Steps take turns, as often as the slowest rank has time for."""
    for step in steps:
        step()
    began = time.perf_counter()
    for step in steps:
        step()
    taken = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    best = [float("inf")] * len(steps)
    for _ in range(max(least, int(seconds / float(taken)))):
        for k, step in enumerate(steps):
            begin = time.perf_counter()
            step()
            best[k] = min(best[k], time.perf_counter() - begin)
    return [one * 1e6 for one in best]


def _symmetric(nbytes: int) -> torch.Tensor:
    count = max(1, nbytes // 4)
    return empty_strided_p2p((count,), (1,), torch.float32, "cpu", dist.group.WORLD.core).zero_()


def call_and_launch_us(nbytes: int, seconds: float) -> tuple[float, float]:
    """A collective as a blocking call, and as a launch and a wait."""
    tensor, ops = _symmetric(nbytes), torch.ops._c10d_functional

    def launch() -> None:
        ops.wait_tensor(ops.all_reduce_(tensor, "sum", "0"))

    (blocking,) = fastest([lambda: runtime.all_reduce_(tensor, "sum", "0")], seconds)
    (launched,) = fastest([launch], seconds)  # not in turns, since threads that were just used still spin
    return blocking, launched


def copy_bytes_per_us(seconds: float) -> float:
    source, target = torch.zeros(1 << 20), torch.zeros(1 << 20)
    return 8 * (1 << 20) / fastest([lambda: target.copy_(source)], seconds)[0]


def matmul_flops_per_us(seconds: float) -> float:
    a, b, out = torch.randn(256, 256), torch.randn(256, 256), torch.empty(256, 256)
    return 2 * 256**3 / fastest([lambda: torch.mm(a, b, out=out)], seconds)[0]


def joined_and_apart_us(nbytes: int, seconds: float) -> tuple[float, float]:
    """Four all_reduces of ``nbytes`` that a compiled graph makes at once, or one by one."""

    @torch._dynamo.dont_skip_tracing  # code in this folder would be skipped
    def function(a: torch.Tensor) -> list[torch.Tensor]:
        return [functional.all_reduce(a * k, "sum", "0") for k in range(4)]

    a, steps = torch.ones(nbytes // 4), []
    for joined in (True, False):
        torch._dynamo.reset()
        step: Any = torch.compile(function, fullgraph=True, dynamic=False)
        with configure(bucket=joined, block=True), cost.bucketing_up_to(1 << 30):
            step(a)
        steps.append(lambda step=step: step(a))
    with torch.compiler.set_stance("fail_on_recompile"):
        once, one_by_one = fastest(steps, seconds)
    return once, one_by_one


def pieces_and_whole_us(nbytes: int, seconds: float) -> tuple[float, float]:
    """all_gather of ``nbytes`` and a matmul of 512 columns: beside each other, or one after the other."""
    shard, factor = torch.randn(nbytes // 4 // 512 // RANKS, 512), torch.randn(512, 512)
    known = symm_reduce.pays_in_pieces

    def run(answer: bool) -> None:
        symm_reduce.pays_in_pieces = lambda *_: answer
        symm_reduce.fused_all_gather_matmul(shard, [factor], 0, "0")

    try:
        pieces, whole = fastest([lambda: run(True), lambda: run(False)], seconds, least=20)
    finally:
        symm_reduce.pays_in_pieces = known
    return pieces, whole


def _first(pays: dict[int, bool], rising: bool) -> int | None:
    """The largest size at which a choice pays; with ``rising``, the smallest, since it pays from some size on."""
    sizes = [size for size, better in pays.items() if better]
    return (min(sizes) if rising else max(sizes)) if sizes else None


def measure(seconds: float = 0.2) -> dict[str, Any]:
    """Everything, on one rank of a group that exists. Every rank calls this."""
    calls = {n: call_and_launch_us(n, seconds) for n in (8, *SIZES)}
    joined = {n: joined_and_apart_us(n, seconds) for n in SIZES[2:8]}
    pieces = {n: pieces_and_whole_us(n, seconds) for n in (256 << 10, 1 << 20, 4 << 20)}
    return {
        "CALL_US": calls[8][0],
        "HANDOFF_US": statistics.median(launched - blocking for blocking, launched in calls.values()),
        "COLLECTIVE_BYTES_PER_US": (1 << 20) / (calls[1 << 20][0] - calls[8][0]),
        "BYTES_PER_US": copy_bytes_per_us(seconds),
        "FLOPS_PER_US": matmul_flops_per_us(seconds),
        "BUCKET_BYTES": 4 * (_first({n: a < b for n, (a, b) in joined.items()}, rising=False) or 0),
        "PIECES_FROM": _first({n: a < b for n, (a, b) in pieces.items()}, rising=True),
        "tables": {"one call, launch and wait": calls, "joined, apart": joined, "pieces, whole": pieces},
    }


def _rank(group: Any, path: str, seconds: float) -> dict[str, Any]:
    from symcomm.torch_backend.register import register

    torch.set_num_threads(1)
    register()
    dist.init_process_group(
        "symcomm", init_method=f"file://{path}", rank=group.rank, world_size=group.size, timeout=timedelta(seconds=120)
    )
    symcomm.compile.install()
    try:
        return measure(seconds)
    finally:
        dist.destroy_process_group()


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.2
    with tempfile.TemporaryDirectory() as folder:
        found = symcomm.spawn(_rank, RANKS, (f"{folder}/meet", seconds), deadline=DEADLINE)[0]
    print(f"{RANKS} ranks on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}\n")
    print(f"{'':26}{'in the code':>14}{'here':>14}")
    for name, value in found.items():
        if name != "tables":
            known = getattr(symm_reduce if name == "PIECES_FROM" else cost, name)
            print(f"{name:26}{known:>14,.1f}" + (f"{value:>14,.1f}" if value is not None else f"{'never':>14}"))
    for title, table in found["tables"].items():
        print(f"\n{title} (us)")
        for size, figure in table.items():
            print(f"{size:>10,} B" + "".join(f"{one:>12,.1f}" for one in figure))


if __name__ == "__main__":
    from symcomm.compile import calibrate  # ranks look functions up by their module's name

    calibrate.main()
