"""What ``symcomm simulate`` can be asked for: the options, their names and helps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from symcomm.cli.command import argument, flag, option
from symcomm.simulate.engines import ENGINES
from symcomm.simulate.predict import COLLECTIVES
from symcomm.simulate.training import ddp_step, fsdp_step

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
Checked = Annotated[
    list[Path] | None, option("--check", "FILE", "Predict what `bench hosts --json` measured; several times.")
]
Calibrate = Annotated[bool, flag("--calibrate", "Measure this machine first, and keep its numbers for later.")]
