"""``symcomm simulate``: what a collective or a training step would take on a cluster that is only described."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import typer

from symcomm import errors
from symcomm.bench.pictures import Curves, check_picture, draw
from symcomm.cli import simulate_options as options
from symcomm.cli.command import Command
from symcomm.cli.simulate_check import draw_table, show_check
from symcomm.memory.limits import format_bytes
from symcomm.preflight import check_cache_directory
from symcomm.simulate import machine as machines
from symcomm.simulate.predict import Cluster, Estimate, compare, why_left_out
from symcomm.simulate.topology import Topology, parse_topology, resized
from symcomm.simulate.training import Step
from symcomm.simulate.units import format_time, parse_bandwidth, parse_bytes

app = typer.Typer(rich_markup_mode=None, add_completion=False)
CALL = "symcomm simulate"
NOTHING: Mapping[str, str] = MappingProxyType({})
SWEEP = [8 << k for k in range(12)]  # ranks of a plot: 8 to 16,384


@app.command(name="simulate", cls=Command)
def simulate(
    what: options.What = "all_reduce",
    hosts: options.Hosts = 16,
    ranks: options.RanksPerHost = 8,
    sizes: options.Sizes = "64M",
    topology: options.TopologySpec = "star",
    engine: options.EngineName = "model",
    symmetric: options.Symmetric = False,
    machine_file: options.MachineFile = None,
    cores: options.Cores = 0,
    memory: options.MemoryBandwidth = "",
    nodes: options.NumaNodes = 0,
    model_bytes: options.ModelBytes = "1G",
    compute: options.ComputeMs = 100.0,
    bucket: options.BucketBytes = "25M",
    as_json: options.AsJson = False,
    plot_file: options.PlotFile = None,
    checked: options.Checked = None,
    calibrate: options.Calibrate = False,
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
    if what not in options.WHAT:
        raise errors.bad_choice(CALL, "WHAT", what, options.WHAT)
    if plot_file:
        check_picture(CALL, "--plot", plot_file)
    if calibrate:
        measure_this_machine()
    machine = _machine(machine_file, cores, memory, nodes)
    if checked:
        show_check(checked, machine, as_json)
        return
    cluster = Cluster(ranks, parse_topology(topology, hosts), machine, engine, symmetric)
    if what in options.STEPS:
        _simulate_step(what, cluster, model_bytes, compute / 1e3, bucket, as_json, plot_file)
    else:
        _simulate_collective(what, cluster, sizes, as_json, plot_file)


def _simulate_step(
    what: str, cluster: Cluster, model_bytes: str, compute: float, bucket: str, as_json: bool, plot_file: Path | None
) -> None:
    model, piece = parse_bytes(CALL, "--model-bytes", model_bytes), parse_bytes(CALL, "--bucket-bytes", bucket)
    steps = [options.STEPS[what](model, compute, piece, cluster)]
    show(step_rows(steps), cluster, as_json, [as_dict(step) for step in steps])
    if plot_file:
        plot_steps(plot_file, [options.STEPS[what](model, compute, piece, c) for c in sweep(cluster)])


def _simulate_collective(what: str, cluster: Cluster, sizes: str, as_json: bool, plot_file: Path | None) -> None:
    asked = [parse_bytes(CALL, "--bytes", text) for text in sizes.split(",")]
    found = [e for nbytes in asked for e in compare(what, nbytes, cluster)]
    show(rows(found), cluster, as_json, [as_dict(e) for e in found], why_left_out(what, cluster))
    if plot_file:
        clusters = sweep(cluster)
        plot_collective(plot_file, [compare(what, asked[-1], c) for c in clusters], why_left_out(what, clusters[-1]))


def _machine(file: Path | None, cores: int, memory: str, nodes: int) -> machines.Machine:
    machine = machines.load(file)
    for option, given in (("--cores", cores), ("--numa-nodes", nodes)):
        if given < 0:
            raise errors.bad_argument(CALL, option, given, "1 or more")
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
    """Seconds and bytes a second."""
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


# --- pictures ------------------------------------------------------------------------------------------------------


def plot_collective(path: Path, found: list[list[Estimate]], left_out: Mapping[str, str]) -> None:
    """Over numbers of ranks; ``left_out`` names algorithms that are not estimated for the largest, and why."""
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
