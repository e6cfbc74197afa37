"""``symcomm bench sites``: training across two sites with a slow link between them, as time to a loss.

The sites are network namespaces of this machine, joined by a link of 100 Mbit/s and a round trip of 50 ms. A small
language model is trained by plain data parallel steps, with hooks that compress gradients, and with DiLoCo's outer
steps. All start with the same parameters, read the same texts, and stop when the loss reaches the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from symcomm import errors
from symcomm.bench import table as bench_table
from symcomm.bench.frame import Asked, Workload
from symcomm.bench.namespaces import SlowNetwork, why_no_slow_network
from symcomm.bench.pictures import Curves, Panel
from symcomm.bench.run import Seen, Tick, quiet
from symcomm.bench.sites_worker import METHODS

WORKER = "symcomm.bench.sites_worker"
DEADLINE = 300.0  # seconds of silence while one method is trained


@dataclass(frozen=True)
class SitesWorkload(Workload):
    """The link, the model, and when to stop: at ``target``, or after ``limit`` steps."""

    ranks: int = 1  # of each site
    sites: int = 2
    mbits: int = 100
    round_trip_ms: float = 50.0
    width: int = 192
    layers: int = 2
    context: int = 64
    batch: int = 4  # texts per rank and step
    rate: float = 3e-3
    period: int = 20  # steps between DiLoCo's meetings
    every: int = 10  # steps between checks of the loss
    target: float = 2.4
    limit: int = 160
    methods: Sequence[str] = tuple(METHODS)

    @property
    def turns(self) -> int:
        """Checks of the loss, at most."""
        return sum(self.limit // (self.period if "diloco" in method else self.every) for method in self.methods)


QUICK: dict[str, Any] = {"target": 2.7, "limit": 60, "methods": ("plain", "int8", "diloco")}


def ask(asked: Asked) -> SitesWorkload:
    return asked.workload(SitesWorkload, QUICK, 1)


@dataclass
class SitesMeasurement:
    """One method: its loss over time, and the bytes that left the first site."""

    method: str
    curve: list[tuple[int, float, float]]  # (steps, seconds, loss) at every check
    sent: int  # bytes

    @property
    def steps(self) -> int:
        return self.curve[-1][0]

    @property
    def seconds(self) -> float:
        return self.curve[-1][1]

    @property
    def loss(self) -> float:
        return self.curve[-1][2]


def run_sites_bench(workload: SitesWorkload, tick: Tick = quiet, seen: Seen = quiet) -> list[SitesMeasurement]:
    if reason := why_no_slow_network():
        raise errors.ResourceError(f"symcomm bench: sites needs network namespaces and TUN devices: {reason}.")
    with SlowNetwork(workload.sites, workload.mbits, workload.round_trip_ms) as network:
        return network.run_ranks(workload.ranks, WORKER, workload, DEADLINE, tick, SitesMeasurement, seen)


def as_table(found: Sequence[SitesMeasurement], workload: SitesWorkload, best: bool = False) -> bench_table.Table:
    head = ["method", "seconds", "faster", "steps", "ms a step", "MB sent", "loss"]
    plain = next((f for f in found if f.method == "plain" and f.loss <= workload.target), None)
    rows = []
    for f in found:
        there = f.loss <= workload.target
        faster = plain.seconds / f.seconds if plain and there else None
        rows.append([
            METHODS[f.method], f"{f.seconds:.1f}" if there else f"not in {f.seconds:.1f}", bench_table.times(faster),
            str(f.steps), f"{f.seconds / f.steps * 1e3:.0f}", f"{f.sent / 1e6:.1f}", f"{f.loss:.2f}",
        ])  # fmt: skip
    title = (
        f"to a loss of {workload.target:g}: {workload.sites} sites x {workload.ranks} ranks, {workload.mbits} Mbit/s, "
        f"round trip {workload.round_trip_ms:g} ms, DiLoCo meets every {workload.period} steps"
    )
    return title, head, rows


def picture(found: Sequence[SitesMeasurement], workload: SitesWorkload, best: bool = False) -> list[Panel]:
    lines = {METHODS[f.method]: [(seconds, loss) for _, seconds, loss in f.curve] for f in found}
    last = max(f.seconds for f in found)
    lines["target"] = [(0.0, workload.target), (last, workload.target)]
    return [Curves("the loss on its way down", "seconds of training", "loss", lines, logarithmic=False)]
