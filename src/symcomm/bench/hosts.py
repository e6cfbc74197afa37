"""``symcomm bench hosts``: collectives between hosts, ours beside flat Gloo, on a network of a known speed.

Two hosts that are network namespaces of this machine, each with a link of 1 Gbit/s. Both sides run in the same
processes and take turns. What either side must move over the busiest link follows from its algorithm, and so does the
ratio to be expected where the network is what limits; what it did move is read from the network card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from symcomm import errors
from symcomm.bench import table as bench_table
from symcomm.bench.frame import Measurement, TurnsWorkload
from symcomm.bench.namespaces import Network, why_no_namespaces
from symcomm.bench.pictures import Panel
from symcomm.bench.run import Seen, Tick, quiet
from symcomm.hierarchical.topology import fits_eager

SIDES = {"ours": "symcomm", "gloo": "flat gloo"}
LINK = "the link alone"
WORKER = "symcomm.bench.hosts_worker"
DEADLINE = 900.0  # seconds of silence, in which one size of a collective is measured


@dataclass(frozen=True)
class HostsWorkload(TurnsWorkload):
    """At every size. ``ranks``: of each host; a step is a call."""

    rounds: int = 5
    steps: int = 3
    hosts: int = 2
    mbits: int = 1000
    sizes: Sequence[int] = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20, 32 << 20)
    collectives: Sequence[str] = ("all_reduce",)

    @property
    def turns(self) -> int:
        cases = sum(1 if name == "barrier" else len(self.sizes) for name in self.collectives)
        return cases * len(SIDES) * self.rounds


@dataclass
class HostsMeasurement(Measurement):
    """One collective of one size on one side. Its values were right: otherwise nothing is measured."""

    collective: str
    nbytes: int
    side: str
    sent: float  # bytes of one call, of the host that sent or received most
    turns: list[float] = field(default_factory=list)  # seconds of a call: the slowest rank's, once for every turn


def expected_bytes(side: str, collective: str, nbytes: int, hosts: int, ranks: int) -> float | None:
    """What must leave the host that sends most, or reach the one that receives most; None for a barrier.

    The root is rank 0. Gloo's ways are known from what the network card counts: they know nothing of hosts.
    """
    if collective == "barrier":
        return None
    away = (hosts - 1) / hosts  # the part of all pieces that other hosts' ranks have or get
    factors = {"gather": away, "scatter": away, "all_to_all": ranks * away}  # from one rank to the other
    factors |= _gloos_way(hosts, ranks) if side == "gloo" else _our_way(hosts)
    whole = ("all_reduce", "reduce", "broadcast")
    said = nbytes if collective in whole else nbytes * (ranks if collective == "all_to_all" else 1) // hosts
    if side != "gloo" and fits_eager(said, hosts, collective in whole):
        factors |= dict.fromkeys(whole, hosts - 1)  # all of it to each other host; of the rest, what it needs
    return nbytes * factors[collective]


def _gloos_way(hosts: int, ranks: int) -> dict[str, float]:
    """A ring crosses a host's edge with all that one rank sends; reduce_scatter is an all_reduce of which most is
    thrown away; reduce ends with everybody's part on its way to the root."""
    world, away = hosts * ranks, (hosts - 1) / hosts
    ring = (world - 1) / world
    tree = [(low, low + bit) for bit in (1 << k for k in range(world.bit_length())) for low in range(bit)]
    crossing = [a // ranks for a, b in tree if b < world and a // ranks != b // ranks]
    return {
        "all_reduce": 2 * ring, "reduce_scatter": 2 * ring, "all_gather": ring, "reduce": ring + away,
        "broadcast": max((crossing.count(host) for host in crossing), default=0),
    }  # fmt: skip


def _our_way(hosts: int) -> dict[str, float]:
    """Hosts send what they have reduced or gathered."""
    away = (hosts - 1) / hosts
    return {
        "all_reduce": 2 * away, "reduce": 2 * away, "broadcast": 1.0 if hosts > 1 else 0.0, "all_gather": away,
        "reduce_scatter": away,
    }  # fmt: skip


def run_hosts_bench(workload: HostsWorkload, tick: Tick = quiet, seen: Seen = quiet) -> list[HostsMeasurement]:
    """Measure both sides at every size."""
    if reason := why_no_namespaces():
        raise errors.ResourceError(f"symcomm bench: hosts needs network namespaces: {reason}.")
    with Network(workload.hosts, workload.mbits) as network:
        return network.run_ranks(workload.ranks, WORKER, workload, DEADLINE, tick, HostsMeasurement, seen)


def as_table(found: Sequence[HostsMeasurement], workload: HostsWorkload, best: bool = False) -> bench_table.Table:
    head = [
        "collective", "size", "ours (ms)", "gloo (ms)", "gloo / ours", "by bytes", "ours sent", "gloo sent",
        "ours of the link",
    ]  # fmt: skip
    cases: dict[tuple[str, int], dict[str, HostsMeasurement]] = {}
    for figures in found:
        cases.setdefault((figures.collective, figures.nbytes), {})[figures.side] = figures
    rows = [[*_name(*case), *_cells(sides["ours"], sides["gloo"], workload, best)] for case, sides in cases.items()]
    return f"{workload.hosts} hosts x {workload.ranks} ranks, {workload.mbits} Mbit/s each", head, rows


def _name(collective: str, nbytes: int) -> list[str]:
    return [collective, bench_table.short_size(nbytes) if nbytes else ""]


def _cells(ours: HostsMeasurement, gloo: HostsMeasurement, workload: HostsWorkload, best: bool) -> list[str]:
    times = [figures.seconds(best) for figures in (ours, gloo)]
    wanted, theirs = (
        expected_bytes(f.side, f.collective, f.nbytes, workload.hosts, workload.ranks) for f in (ours, gloo)
    )  # fmt: skip
    return [
        *(f"{seconds * 1e3:.2f}" for seconds in times),
        bench_table.times(bench_table.ratio(times[1], times[0])),
        bench_table.times(bench_table.ratio(theirs, wanted)),
        *(f"{f.sent / f.nbytes:.2f} x size" if f.nbytes else f"{f.sent:.0f} B" for f in (ours, gloo)),
        f"{wanted * 8 / (workload.mbits * 1e6) / times[0]:.0%}" if wanted else "-",
    ]


def picture(found: Sequence[HostsMeasurement], workload: HostsWorkload, best: bool = False) -> list[Panel]:
    """Time over size, and the least time in which the link could carry what we send."""
    panels = []
    for collective in workload.collectives:
        mine = [figures for figures in found if figures.collective == collective]
        lines = {
            name: [(f.nbytes, f.seconds(best) * 1e3) for f in mine if f.side == side] for side, name in SIDES.items()
        }
        wanted = {f.nbytes: expected_bytes("ours", collective, f.nbytes, workload.hosts, workload.ranks) for f in mine}
        at_best = [(n, sent * 8 / (workload.mbits * 1e3)) for n, sent in wanted.items() if sent]
        panels.append(bench_table.over_size(collective, "milliseconds", lines | ({LINK: at_best} if at_best else {})))
    return panels


def note(found: Sequence[HostsMeasurement]) -> str:
    return "all values were right, on all ranks, before anything was timed"


def to_json(found: Sequence[HostsMeasurement], workload: HostsWorkload) -> dict[str, Any]:
    """Everything measured; times in milliseconds. ``expected``: bytes, null where an algorithm does not say."""
    rows = [
        {
            "collective": f.collective, "nbytes": f.nbytes, "side": f.side, "sent": f.sent,
            "expected": expected_bytes(f.side, f.collective, f.nbytes, workload.hosts, workload.ranks),
            "ms": f.seconds() * 1e3, "fastest_ms": f.seconds(best=True) * 1e3, "turns_ms": [s * 1e3 for s in f.turns],
        }
        for f in found
    ]  # fmt: skip
    return workload.to_json(rows)
