"""``symcomm bench hosts``: all_reduce between hosts, ours beside flat Gloo, on a network of a known speed.

Two hosts that are network namespaces of this machine, each with a link of 1 Gbit/s. Both sides run in the same
processes and take turns. What either side must move over the link follows from its algorithm, and so does the ratio to
be expected where the network is what limits; what it did move is read from the network card.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from symcomm import errors
from symcomm.cli import bench_table
from symcomm.cli.namespaces import Network, why_no_namespaces

__all__ = ["Figures", "Plan", "as_table", "expected_bytes", "run_hosts_bench", "to_json"]

SIDES = {"ours": "symcomm", "gloo": "flat gloo"}
WORKER = "symcomm.cli.bench_hosts_worker"
DEADLINE = 900.0


@dataclass(frozen=True)
class Plan:
    """What to measure: ``rounds`` turns of both sides at every size, each of ``steps`` calls."""

    ranks: int = 2  # of each host
    rounds: int = 5
    steps: int = 3
    hosts: int = 2
    mbits: int = 1000
    sizes: Sequence[int] = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 32 << 20)

    @property
    def turns(self) -> int:
        return len(self.sizes) * len(SIDES) * self.rounds


@dataclass
class Figures:
    """One size on one side."""

    nbytes: int
    side: str
    error: float  # how far the values are from the sum, in units of its size
    sent: float  # bytes that left the first host in one call
    turns: list[float] = field(default_factory=list)  # seconds of a call: the slowest rank's, once for every turn

    def seconds(self, best: bool = False) -> float:
        return min(self.turns) if best else statistics.median(self.turns)


def expected_bytes(side: str, nbytes: int, hosts: int, ranks: int) -> float:
    """What must leave a host: Gloo's ring crosses its edge with all that a rank sends; ours with the host's sum."""
    world = hosts * ranks
    return 2 * nbytes * ((hosts - 1) / hosts if side == "ours" else (world - 1) / world)


def run_hosts_bench(plan: Plan, tick: Callable[[str], None] = lambda what: None) -> list[Figures]:
    """Measure both sides at every size; ``tick`` is told after every turn."""
    if reason := why_no_namespaces():
        raise errors.ResourceError(f"symcomm bench: hosts needs network namespaces: {reason}.")
    with Network(plan.hosts, plan.mbits) as network:
        rows = network.run_ranks(plan.ranks, WORKER, plan, DEADLINE, tick)
    return [Figures(**row) for row in rows]


def as_table(found: Sequence[Figures], plan: Plan, best: bool = False) -> bench_table.Table:
    head = ["size", "ours (ms)", "gloo (ms)", "gloo / ours", "by bytes", "ours sent", "gloo sent", "ours of the link"]
    by_size: dict[int, dict[str, Figures]] = {}
    for figures in found:
        by_size.setdefault(figures.nbytes, {})[figures.side] = figures
    rows = []
    for nbytes, sides in by_size.items():
        ours, gloo = sides["ours"].seconds(best), sides["gloo"].seconds(best)
        wanted = {side: expected_bytes(side, nbytes, plan.hosts, plan.ranks) for side in SIDES}
        rows.append([
            bench_table.short_size(nbytes), f"{ours * 1e3:.2f}", f"{gloo * 1e3:.2f}",
            bench_table.times(gloo / ours), bench_table.times(wanted["gloo"] / wanted["ours"]),
            *(f"{sides[side].sent / nbytes:.2f} x size" for side in SIDES),
            f"{wanted['ours'] * 8 / (plan.mbits * 1e6) / ours:.0%}",
        ])  # fmt: skip
    title = f"all_reduce, {plan.hosts} hosts x {plan.ranks} ranks, {plan.mbits} Mbit/s each"
    return title, head, rows


def to_json(found: Sequence[Figures], plan: Plan) -> dict[str, Any]:
    """Everything measured; times in milliseconds."""
    rows = [
        {
            "nbytes": f.nbytes, "side": f.side, "error": f.error, "sent": f.sent,
            "expected": expected_bytes(f.side, f.nbytes, plan.hosts, plan.ranks), "ms": f.seconds() * 1e3,
            "fastest_ms": f.seconds(best=True) * 1e3, "turns_ms": [s * 1e3 for s in f.turns],
        }
        for f in found
    ]  # fmt: skip
    return {"machine": bench_table.machine(), "plan": asdict(plan), "rows": rows}
