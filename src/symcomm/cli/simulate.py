"""``symcomm simulate``: what a collective or a training step would take on a cluster that is only described."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from symcomm import errors
from symcomm.bench.pictures import Curves, check_picture, draw
from symcomm.cli.command import Command, argument, flag, option
from symcomm.memory.limits import format_bytes
from symcomm.preflight import check_cache_directory
from symcomm.simulate import machine as machines
from symcomm.simulate.check import Checked, check, read
from symcomm.simulate.engines import ENGINES
from symcomm.simulate.predict import COLLECTIVES, Cluster, Estimate, compare, why_left_out
from symcomm.simulate.topology import Link, Topology, parse_topology, resized
from symcomm.simulate.training import Step, ddp_step, fsdp_step
from symcomm.simulate.units import format_time, parse_bandwidth, parse_bytes

app = typer.Typer(rich_markup_mode=None, add_completion=False)

# --- options -----------------------------------------------------------------------------------------------------

STEPS = {"ddp": ddp_step, "fsdp": fsdp_step}
WHAT = (*COLLECTIVES, *STEPS)

What = Annotated[str, argument("WHAT", f"One of {', '.join(WHAT)}.", *WHAT)]
Hosts = Annotated[int, option("--hosts", "N", "Hosts of the cluster.")]
RanksPerHost = Annotated[int, option("--ranks-per-host", "N", "Ranks on each.")]
Sizes = Annotated[str, option("--bytes", "SIZES", "The tensor: 64K, 1G, or 1M,64M,1G.")]
TopologySpec = Annotated[
    str, option("--topology", "SPEC", "star, ring, torus:8x8, fat-tree:32: docs/how-to/simulate.md.")
]
EngineName = Annotated[str, option("--engine", "NAME", f"Who costs the network: {' or '.join(ENGINES)}.", *ENGINES)]
Symmetric = Annotated[bool, flag("--symmetric", "Tensors live in symmetric memory.")]
MachineFile = Annotated[
    Path | None, option("--machine", "FILE", "A host's numbers. [default: this machine's calibration]")
]
Cores = Annotated[int, option("--cores", "N", "Cores of a host. [default: one a rank]")]
MemoryBandwidth = Annotated[str, option("--memory-bandwidth", "RATE", "Of a whole host: 200GB/s.")]
NumaNodes = Annotated[int, option("--numa-nodes", "N", "Parts of a host's memory. [default: 1]")]
ModelBytes = Annotated[str, option("--model-bytes", "SIZE", "ddp, fsdp: the model.")]
ComputeMs = Annotated[float, option("--compute-ms", "MS", "ddp, fsdp: a step's computing.")]
BucketBytes = Annotated[str, option("--bucket-bytes", "SIZE", "ddp: a bucket; fsdp: a unit.")]
AsJson = Annotated[bool, flag("--json", "Print JSON.")]
PlotFile = Annotated[Path | None, option("--plot", "FILE", "Draw it over 8 to 16,384 ranks: .png or .svg.")]
CheckedFiles = Annotated[
    list[Path] | None, option("--check", "FILE", "Predict what `bench hosts --json` measured; several times.")
]
Calibrate = Annotated[bool, flag("--calibrate", "Measure this machine first, and keep its numbers for later.")]
CALL = "symcomm simulate"
NOTHING: Mapping[str, str] = MappingProxyType({})
SWEEP = [8 << k for k in range(12)]  # ranks of a plot: 8 to 16,384


@app.command(name="simulate", cls=Command)
def simulate(
    what: What = "all_reduce",
    hosts: Hosts = 16,
    ranks: RanksPerHost = 8,
    sizes: Sizes = "64M",
    topology: TopologySpec = "star",
    engine: EngineName = "model",
    symmetric: Symmetric = False,
    machine_file: MachineFile = None,
    cores: Cores = 0,
    memory: MemoryBandwidth = "",
    nodes: NumaNodes = 0,
    model_bytes: ModelBytes = "1G",
    compute: ComputeMs = 100.0,
    bucket: BucketBytes = "25M",
    as_json: AsJson = False,
    plot_file: PlotFile = None,
    checked: CheckedFiles = None,
    calibrate: Calibrate = False,
) -> None:
    """What a collective or a training step would take on a cluster that is only described.

    \b
    Examples:
      symcomm simulate all_reduce --hosts 1024 --bytes 1G --topology fat-tree:32,oversubscription=2
      symcomm simulate ddp --model-bytes 14G --compute-ms 400 --hosts 64 --topology star,bandwidth=400Gb/s
      symcomm simulate all_reduce --bytes 64M --plot all_reduce.svg
      symcomm simulate --calibrate
      symcomm simulate --check two.json --check four.json
    """
    if what not in WHAT:
        raise errors.bad_choice(CALL, "WHAT", what, WHAT)
    if plot_file:
        check_picture(CALL, "--plot", plot_file)
    if calibrate:
        measure_this_machine()
    machine = _machine(machine_file, cores, memory, nodes)
    if checked:
        show_check(checked, machine, as_json)
        return
    cluster = Cluster(ranks, parse_topology(topology, hosts), machine, engine, symmetric)
    if what in STEPS:
        _simulate_step(what, cluster, model_bytes, compute / 1e3, bucket, as_json, plot_file)
    else:
        _simulate_collective(what, cluster, sizes, as_json, plot_file)


def _simulate_step(
    what: str, cluster: Cluster, model_bytes: str, compute: float, bucket: str, as_json: bool, plot_file: Path | None
) -> None:
    model, piece = parse_bytes(CALL, "--model-bytes", model_bytes), parse_bytes(CALL, "--bucket-bytes", bucket)
    steps = [STEPS[what](model, compute, piece, cluster)]
    show(step_rows(steps), cluster, as_json, [as_dict(step) for step in steps])
    if plot_file:
        plot_steps(plot_file, [STEPS[what](model, compute, piece, c) for c in sweep(cluster)])


def _simulate_collective(what: str, cluster: Cluster, sizes: str, as_json: bool, plot_file: Path | None) -> None:
    asked = [parse_bytes(CALL, "--bytes", text) for text in sizes.split(",")]
    found = [e for nbytes in asked for e in compare(what, nbytes, cluster)]
    show(rows(found), cluster, as_json, [as_dict(e) for e in found], why_left_out(what, cluster))
    if plot_file:
        clusters = sweep(cluster)
        plot_collective(plot_file, [compare(what, asked[-1], c) for c in clusters], why_left_out(what, clusters[-1]))


def _machine(file: Path | None, cores: int, memory: str, nodes: int) -> machines.Machine:
    machine = machines.load(file)
    for name, given in (("--cores", cores), ("--numa-nodes", nodes)):
        if given < 0:
            raise errors.bad_argument(CALL, name, given, "1 or more")
    machine = replace(machine, cores=cores or machine.cores, nodes=nodes or machine.nodes)
    return replace(machine, host_memory=parse_bandwidth(CALL, "--memory-bandwidth", memory)) if memory else machine


def measure_this_machine() -> None:
    from symcomm.simulate.calibrate import calibrate

    check_cache_directory(CALL)
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    machine = calibrate()
    path = machines.save(machine)
    times = ", ".join(f"{name} {getattr(machine, name) * 1e6:.2f} us" for name in ("call", "meet"))
    rates = ", ".join(f"{name} {getattr(machine, name) / 1e9:.1f} GB/s" for name in machines.RATES)
    typer.echo(f"{machine.name}: {times}, {rates}; kept in {path}", err=True)
    if load > cores / 2:
        words = f"the load was {load:.1f} on {cores} cores, so these are the times of a busy machine"
        typer.echo(f"{CALL}: {words}; run it again when nothing else works here.", err=True)


def sweep(cluster: Cluster) -> list[Cluster]:
    """The same kind of cluster with 8 to 16,384 ranks."""
    sizes = [ranks // cluster.ranks_per_host for ranks in SWEEP if ranks % cluster.ranks_per_host == 0]
    return [replace(cluster, topology=resized(cluster.topology, hosts)) for hosts in sizes if hosts]


# --- words ---------------------------------------------------------------------------------------------------------

Table = tuple[list[str], list[list[str]]]


def rows(found: Sequence[Estimate]) -> Table:
    """One row an algorithm; the fastest of each size is marked. GB/s is nccl-tests' busbw."""
    head = ["bytes", "algorithm", "time", "hosts", "network", "rounds", "GB/s", ""]
    best = {e.nbytes: min(x.seconds for x in found if x.nbytes == e.nbytes) for e in found}
    return head, [
        [
            format_bytes(e.nbytes), e.algorithm, format_time(e.seconds), _or_dash(e.inside), _or_dash(e.between),
            f"{e.chunks} x {e.messages}" if e.chunks > 1 else str(e.messages), f"{e.busbw / 1e9:.2f}",
            "fastest" if e.seconds == best[e.nbytes] else _times(e, best),
        ]
        for e in found
    ]  # fmt: skip


def _or_dash(seconds: float) -> str:
    return format_time(seconds) if seconds else "-"


def _times(found: Estimate, best: dict[int, float]) -> str:
    return f"{found.seconds / best[found.nbytes]:.1f}x" if best[found.nbytes] else "-"


def step_rows(steps: Sequence[Step]) -> Table:
    head = ["step", "computing", "comm", "not hidden", "efficiency", "calls", "algorithm"]
    return head, [
        [
            format_time(s.seconds), format_time(s.compute), format_time(s.communication),
            _or_dash(s.exposed), f"{s.efficiency:.1%}", str(s.collectives), s.algorithm,
        ]
        for s in steps
    ]  # fmt: skip


def as_dict(found: Estimate | Step) -> dict[str, Any]:
    more = ("algbw", "busbw") if isinstance(found, Estimate) else ("seconds", "efficiency")
    return {**asdict(found), **{name: getattr(found, name) for name in more}}


def describe(topology: Topology) -> str:
    shape = ":" + "x".join(map(str, topology.shape)) if topology.shape else ""
    thinner = f", oversubscription {topology.oversubscription:g}" if topology.oversubscription > 1 else ""
    link = topology.link
    speed = f"{link.bandwidth * 8 / 1e9:g} Gb/s, {format_time(link.latency)} a link"
    software = f"{format_time(link.message)} a message, {format_time(link.arrival)} to meet"
    return f"{topology.kind}{shape}{thinner}, {speed}, {software}"


def show(
    table: Table, cluster: Cluster, as_json: bool, found: list[dict[str, Any]], left_out: Mapping[str, str] = NOTHING
) -> None:
    if as_json:
        about = {
            "hosts": cluster.hosts, "ranks_per_host": cluster.ranks_per_host, "topology": describe(cluster.topology),
            "engine": cluster.engine, "machine": asdict(cluster.machine), "found": found,
            "left_out": dict(left_out),
        }  # fmt: skip
        typer.echo(json.dumps(about, indent=1))
        return
    from rich.console import Console

    console = Console(highlight=False)
    ranks = f"{cluster.ranks} ranks: {cluster.hosts} hosts of {cluster.ranks_per_host}"
    console.print(f"{ranks}; {describe(cluster.topology)}; engine {cluster.engine}", style="dim", soft_wrap=True)
    console.print(f"hosts as {cluster.machine.name}\n", style="dim")
    draw_table(*table)
    for algorithm, reason in left_out.items():
        console.print(f"\n{algorithm} is left out: {reason}", style="dim", soft_wrap=True)


# --- predictions beside what was measured --------------------------------------------------------------------------


def show_check(files: Sequence[Path], machine: machines.Machine, as_json: bool) -> None:
    link, found = check([read(file) for file in files], machine)
    if as_json:
        written = [{**asdict(row), "ratio": row.ratio} for row in found]
        typer.echo(json.dumps({"link": link._asdict(), "machine": asdict(machine), "rows": written}, indent=1))
        return
    typer.echo(f"link: {format_link(link)}; hosts as {machine.name}")
    for name, rows in itertools.groupby(found, lambda row: row.run):
        of_file = list(rows)
        typer.echo(f"\n{name}: {of_file[0].hosts} hosts x {of_file[0].ranks_per_host} ranks")
        draw_table(*check_rows(of_file))
    typer.echo(f"\nworst: {worst(found)}")


def draw_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    drawn = RichTable(box=None, header_style="dim", pad_edge=False)
    for name in head:
        left = name in ("algorithm", "collective", "")
        drawn.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    Console(highlight=False).print(drawn)


def format_link(link: Link) -> str:
    parts = [f"{name} {format_time(getattr(link, name))}" for name in ("arrival", "message", "latency")]
    return f"{link.bandwidth * 8 / 1e9:.3g} Gb/s, " + ", ".join(part for part in parts if not part.endswith(" 0.00 us"))


def check_rows(found: Sequence[Checked]) -> Table:
    head = ["collective", "bytes", "measured", "predicted", "ratio", ""]
    return head, [
        [
            row.collective, format_bytes(row.nbytes), format_time(row.measured), format_time(row.predicted),
            f"{row.ratio:.2f}x", "fitted" if row.fitted else "",
        ]
        for row in found
    ]  # fmt: skip


def worst(found: Sequence[Checked]) -> str:
    """The prediction that is farthest off, fitted ones left out."""
    rows = [row for row in found if not row.fitted]
    if not rows:
        return "nothing but what was fitted"
    row = max(rows, key=lambda r: r.off)
    within = sum(r.off <= 1.2 for r in rows)
    where = f"{row.collective} of {format_bytes(row.nbytes)}, {row.hosts} x {row.ranks_per_host} ranks"
    return f"{row.ratio:.2f}x ({where}); {within} of {len(rows)} that were not fitted are within 20 %"


# --- pictures ------------------------------------------------------------------------------------------------------


def plot_collective(path: Path, found: list[list[Estimate]], left_out: Mapping[str, str]) -> None:
    """Time over numbers of ranks. ``left_out``: algorithms without an estimate for the largest, and why."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for e in (e for each in found for e in each if e.seconds):
        curves.setdefault(e.algorithm, []).append((e.ranks, e.seconds * 1e3))
    title = f"{found[0][0].collective} of {format_bytes(found[0][0].nbytes)}"
    ends = {name: reason for name, reason in left_out.items() if name in curves}
    draw(path, title, [Curves("", "ranks", "milliseconds", curves, tick="{:,}".format, ends=ends)])
    for name, reason in ends.items():
        typer.echo(f"{path}: the line of {name} ends at {curves[name][-1][0]:,} ranks: {reason}.", err=True)


def plot_steps(path: Path, steps: list[Step]) -> None:
    curves = {
        "computing": [(s.ranks, s.compute * 1e3) for s in steps],
        "step": [(s.ranks, s.seconds * 1e3) for s in steps],
    }
    panel = Curves("", "ranks", "milliseconds", curves, tick="{:,}".format, logarithmic=False)
    draw(path, f"a {steps[0].kind} step", [panel])
