"""What ``symcomm simulate`` can be asked for: the options, their names and helps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from symcomm.cli.command import choices
from symcomm.simulate.engines import ENGINES
from symcomm.simulate.predict import COLLECTIVES
from symcomm.simulate.training import ddp_step, fsdp_step

STEPS = {"ddp": ddp_step, "fsdp": fsdp_step}
WHAT = (*COLLECTIVES, *STEPS)

What = Annotated[
    str,
    typer.Argument(
        metavar="WHAT",
        help=f"One of {', '.join(WHAT)}.",
        autocompletion=choices(*WHAT),
    ),
]
Hosts = Annotated[int, typer.Option("--hosts", metavar="N", help="Hosts of the cluster.")]
RanksPerHost = Annotated[int, typer.Option("--ranks-per-host", metavar="N", help="Ranks on each.")]
Sizes = Annotated[str, typer.Option("--bytes", metavar="SIZES", help="The tensor: 64K, 1G, or 1M,64M,1G.")]
TopologySpec = Annotated[
    str,
    typer.Option("--topology", metavar="SPEC", help="star, ring, torus:8x8, fat-tree:32: docs/how-to/simulate.md."),
]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="NAME",
        help=f"Who costs the network: {' or '.join(ENGINES)}.",
        autocompletion=choices(*ENGINES),
    ),
]
Symmetric = Annotated[bool, typer.Option("--symmetric", help="Tensors live in symmetric memory.")]
MachineFile = Annotated[
    Path | None,
    typer.Option("--machine", metavar="FILE", help="A host's numbers. [default: this machine's calibration]"),
]
Cores = Annotated[
    int, typer.Option("--cores", metavar="N", help="Cores of a host. [default: one a rank]", show_default=False)
]
MemoryBandwidth = Annotated[
    str, typer.Option("--memory-bandwidth", metavar="RATE", help="Of a whole host: 200GB/s.", show_default=False)
]
NumaNodes = Annotated[
    int,
    typer.Option("--numa-nodes", metavar="N", help="Parts of a host's memory. [default: 1]", show_default=False),
]
ModelBytes = Annotated[str, typer.Option("--model-bytes", metavar="SIZE", help="ddp, fsdp: the model.")]
ComputeMs = Annotated[float, typer.Option("--compute-ms", metavar="MS", help="ddp, fsdp: a step's computing.")]
BucketBytes = Annotated[str, typer.Option("--bucket-bytes", metavar="SIZE", help="ddp: a bucket; fsdp: a unit.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw it over 8 to 16,384 ranks: .png or .svg.", show_default=False),
]
Checked = Annotated[
    list[Path] | None,
    typer.Option(
        "--check",
        metavar="FILE",
        help="Predict what `bench hosts --json` measured; several times.",
        show_default=False,
    ),
]
Calibrate = Annotated[
    bool, typer.Option("--calibrate", help="Measure this machine first, and keep its numbers for later.")
]
