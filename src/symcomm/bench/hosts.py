"""``symcomm bench hosts``: collectives between hosts, ours beside flat Gloo, on a network of known speed.

Two hosts are network namespaces of this machine, each with a link of 1 Gbit/s. Both sides run in the same processes and
take turns. From each side's algorithm follows what it must move over the busiest link, and so the ratio to expect where
the network is the limit; the network card tells what it did move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from symcomm import errors
from symcomm.bench import table as bench_table
from symcomm.bench.frame import Asked, Measurement, TurnsWorkload
from symcomm.bench.namespaces import Network, why_no_namespaces
from symcomm.bench.pictures import Panel
from symcomm.bench.run import PLACES, Seen, Tick, quiet
from symcomm.bench.worker import ONE_SIDED
from symcomm.hierarchical.topology import fits_eager
from symcomm.memory.limits import format_bytes

SIDES = {"ours": "symcomm", "gloo": "flat gloo"}
LINK = "the link alone"
WORKER = "symcomm.bench.hosts_worker"
DEADLINE = 900.0  # seconds of silence while one size of a collective is measured


@dataclass(frozen=True)
class HostsWorkload(TurnsWorkload):
    """``ranks``: of each host; a step is a call."""

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


QUICK = {"rounds": 3, "steps": 1}
MEASURED = tuple(name for name in PLACES if name not in ("p2p", *ONE_SIDED))


def ask(asked: Asked) -> HostsWorkload:
    return asked.workload(HostsWorkload, QUICK, 1, collectives=pick_collectives(asked.collectives))


def pick_collectives(text: str) -> tuple[str, ...]:
    """Names of collectives that we can measure, with commas between them, or ``all``."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in (*MEASURED, "all"):
            raise errors.bad_choice("symcomm bench", "--collectives", name, [*MEASURED, "all"])
    return MEASURED if names == ("all",) else names


@dataclass
class HostsMeasurement(Measurement):
    """One collective of one size on one side."""

    collective: str
    nbytes: int
    side: str
    sent: float  # bytes of one call, of the host that sent or received most
    turns: list[float] = field(default_factory=list)  # seconds of a call, the slowest rank's in each turn


def expected_bytes(side: str, collective: str, nbytes: int, hosts: int, ranks: int) -> float | None:
    """Bytes that must leave the host that sends most, or reach the one that receives most; None for a barrier.

    The root is rank 0. Gloo's algorithms ignore hosts; we know them from the network card's counts."""
    if collective == "barrier":
        return None
    away = (hosts - 1) / hosts  # the share of pieces on other hosts
    factors = {"gather": away, "scatter": away, "all_to_all": ranks * away}  # from one rank to the other
    factors |= _gloos_way(hosts, ranks) if side == "gloo" else _our_way(hosts)
    whole = ("all_reduce", "reduce", "broadcast")
    said = nbytes if collective in whole else nbytes * (ranks if collective == "all_to_all" else 1) // hosts
    if side != "gloo" and fits_eager(said, hosts, collective in whole):
        factors |= dict.fromkeys(whole, hosts - 1)  # all of it to each other host; of the rest, what it needs
    return nbytes * factors[collective]


def _gloos_way(hosts: int, ranks: int) -> dict[str, float]:
    """In a ring, all that one rank sends crosses a host's edge; reduce_scatter is an all_reduce that throws most of the
    result away; at the end of a reduce everybody sends its part to the root."""
    world, away = hosts * ranks, (hosts - 1) / hosts
    ring = (world - 1) / world
    tree = [(low, low + bit) for bit in (1 << k for k in range(world.bit_length())) for low in range(bit)]
    crossing = [a // ranks for a, b in tree if b < world and a // ranks != b // ranks]
    return {
        "all_reduce": 2 * ring, "reduce_scatter": 2 * ring, "all_gather": ring, "reduce": ring + away,
        "broadcast": max((crossing.count(host) for host in crossing), default=0),
    }  # fmt: skip


def _our_way(hosts: int) -> dict[str, float]:
    """Hosts send what their ranks have reduced or gathered."""
    away = (hosts - 1) / hosts
    return {
        "all_reduce": 2 * away, "reduce": 2 * away, "broadcast": 1.0 if hosts > 1 else 0.0, "all_gather": away,
        "reduce_scatter": away,
    }  # fmt: skip


def run_hosts_bench(workload: HostsWorkload, tick: Tick = quiet, seen: Seen = quiet) -> list[HostsMeasurement]:
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
    rows = [
        [collective, format_bytes(nbytes) if nbytes else "", *_cells(sides["ours"], sides["gloo"], workload, best)]
        for (collective, nbytes), sides in cases.items()
    ]
    return f"{workload.hosts} hosts x {workload.ranks} ranks, {workload.mbits} Mbit/s each", head, rows


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
    """Time over size, and the link's own time for the bytes that we send."""
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


def note(found: Sequence[HostsMeasurement], workload: HostsWorkload) -> str:
    return "all values were right, on all ranks, before anything was timed"


def to_json(found: Sequence[HostsMeasurement], workload: HostsWorkload) -> dict[str, Any]:
    """``expected``: bytes; null for a barrier."""
    rows = [
        {
            "collective": f.collective, "nbytes": f.nbytes, "side": f.side, "sent": f.sent,
            "expected": expected_bytes(f.side, f.collective, f.nbytes, workload.hosts, workload.ranks),
            "ms": f.seconds() * 1e3, "fastest_ms": f.seconds(best=True) * 1e3, "turns_ms": [s * 1e3 for s in f.turns],
        }
        for f in found
    ]  # fmt: skip
    return workload.to_json(rows)
