"""One rank of ``symcomm bench hosts``: runs the whole plan on both sides; the first rank prints what was found."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from symcomm.bench.frame import in_turns
from symcomm.bench.namespaces import carried
from symcomm.bench.run import Case, make_cases
from symcomm.bench.torch_worker import read_plan, say
from symcomm.bench.worker import Bench, GlooSide, SymcommSide

TIMEOUT = 300.0
SMALL, MORE_STEPS = 256 << 10, 5  # up to so many bytes, a turn has so many times the steps


class Ranks:
    """All ranks: what each has found, and what crosses the busiest host's link meanwhile."""

    def __init__(self, group: Any):
        self.group, self.idle = group, 0
        self.idle = min(self.timed(lambda: None, 1)[1] for _ in range(3))  # the bytes that this class itself sends

    def timed(self, call: Callable[[], Any], calls: int) -> tuple[float, int]:
        """(seconds of a call, of the slowest rank; bytes of all calls, of the host that sent or received most)."""
        self.group.barrier()
        before, begun = carried(), time.perf_counter()
        for _ in range(calls):
            call()
        seconds = max(self.group.all_gather_object((time.perf_counter() - begun) / calls))
        after = carried()  # everybody is done, so nothing is in flight
        own = max(b - a for a, b in zip(before, after, strict=True))
        return seconds, max(0, max(self.group.all_gather_object(own)) - self.idle)


def measure(case: Case, workload: dict[str, Any], sides: dict[str, Any], ranks: Ranks) -> list[dict[str, Any]]:
    """Check values, warm up, then let the sides take turns."""
    ready = {name: Bench(side, SimpleNamespace(**asdict(case), kind="ordinary")) for name, side in sides.items()}
    rows: dict[str, dict[str, Any]] = {
        name: {"collective": case.collective, "nbytes": case.nbytes, "side": name, "sent": math.inf, "turns": []}
        for name in sides
    }  # fmt: skip
    for name, bench in ready.items():
        if case.collective == "barrier":
            _check_barrier(name, bench.call, ranks)
        elif wrong := sum(ranks.group.all_gather_object(bench.check())):
            raise SystemExit(f"{case.collective} of {case.nbytes} bytes on {name}: {wrong} elements are wrong")
        bench.clear()
        bench.call()
    steps = workload["steps"] * (MORE_STEPS if case.nbytes <= SMALL else 1)
    for name in in_turns(list(sides), workload["rounds"]):
        seconds, moved = ranks.timed(ready[name].call, steps)
        rows[name]["turns"].append(seconds)
        rows[name]["sent"] = min(rows[name]["sent"], moved / steps)  # without what TCP sent twice
        say(f"{case.collective}, {case.nbytes} bytes, {name}")
    return list(rows.values())


def _check_barrier(name: str, barrier: Callable[[], Any], ranks: Ranks) -> None:
    """Nobody leaves before the last has come. The hosts are one machine with one clock."""
    if ranks.group.rank == ranks.group.size - 1:
        time.sleep(0.05)
    came = time.monotonic()
    barrier()
    left = time.monotonic()
    if min(ranks.group.all_gather_object(left)) < max(ranks.group.all_gather_object(came)):
        raise SystemExit(f"barrier on {name}: a rank left before the last one came")


def main() -> None:
    workload = read_plan()
    import torch.distributed as dist

    import symcomm

    group = symcomm.init(timeout=TIMEOUT)
    meeting = f"tcp://{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 1}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=group.rank, world_size=group.size, timeout=timedelta(seconds=TIMEOUT)
    )
    sides, ranks = {"ours": SymcommSide(group), "gloo": GlooSide()}, Ranks(group)
    for collective in workload["collectives"]:
        for case in make_cases(collective, workload["sizes"], group.size, "float32", "sum", 0, one_place=True):
            say(measure(case, workload, sides, ranks))
    group.barrier()
    dist.destroy_process_group()
    symcomm.destroy()


if __name__ == "__main__":
    main()
