"""The options of ``symcomm bench``, their names and helps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from symcomm.cli.command import argument, flag, option

COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all", "barrier",
    "p2p",
)  # fmt: skip
ONE_SIDED = ("put", "put_signal")  # into windows: what ``window`` measures
# Each in a file of its own.
OTHERS = ("store", "kernels", "attach", "groups", "ddp", "compile", "gpu", "hosts", "noise", "sites", "torch", "llm")
DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64")
OPS = ("sum", "prod", "min", "max", "avg")

Collective = Annotated[
    str,
    argument(
        "WHAT",
        f"One of {', '.join(COLLECTIVES)}, all, window, {', '.join(OTHERS)}.",
        *COLLECTIVES,
        "all",
        "window",
        *OTHERS,
    ),
]
Minbytes = Annotated[str, option("-b --minbytes", "SIZE", "Smallest size.")]
Maxbytes = Annotated[str, option("-e --maxbytes", "SIZE", "Largest size.")]
Factor = Annotated[int, option("-f --stepfactor", "N", "Each size is N times the last.")]
Step = Annotated[str, option("-i --stepbytes", "SIZE", "Add this instead.")]
Dtype = Annotated[str, option("-d --datatype", "TYPE", "Element type, torch's name or NCCL's.", *DTYPES)]
Op = Annotated[str, option("-o --op", "OP", "sum, prod, min, max or avg.", *OPS)]
Root = Annotated[int, option("-r --root", "RANK", "Root of broadcast, reduce, gather, scatter.")]
Iters = Annotated[int, option("-n --iters", "N", "Calls per repetition. [default: what fills 25 ms]")]
Warmup = Annotated[int, option("-w --warmup", "N", "Calls before timing.")]
Check = Annotated[int, option("-c --check", "0|1", "Check values before timing.")]
Ranks = Annotated[
    int | None,
    option(
        "--ranks",
        "N",
        "Ranks on each side; hosts, sites: of each; kernels: sources. "
        "[default: 2; sites: 1; attach: cores, 16 at most; llm: 2, then 4]",
    ),
]
Rounds = Annotated[
    int | None,
    option(
        "--rounds",
        "N",
        "Turns that the sides take. "
        "[default: 3; kernels, llm: 7; attach: 9; ddp, compile, groups: 10; hosts: 5; torch: 15]",
    ),
]
Symmetric = Annotated[bool, flag("--symmetric", "Only tensors in symmetric memory.")]
Ordinary = Annotated[bool, flag("--ordinary", "Only ordinary tensors.")]
Heap = Annotated[bool, flag("--heap", "Also ordinary tensors that lie in the shared heap (SYMCOMM_HEAP=1).")]
Against = Annotated[
    str,
    option(
        "--against",
        "NAMES",
        "Also measure gloo, mpich, openmpi (with commas); noise: the MPIs there.",
        "gloo",
        "mpich",
        "openmpi",
    ),
]
Collectives = Annotated[
    str,
    option(
        "--collectives",
        "NAMES",
        "hosts: which, with commas, or all but p2p: all.",
        *(name for name in COLLECTIVES if name != "p2p"),
        "all",
    ),
]
Neighbours = Annotated[
    str, option("--neighbours", "KINDS", "noise: none or PERCENT:MS, with commas: awake so much, in bursts so long.")
]
Python = Annotated[str, option("--python", "PATHS", "torch: interpreters with another torch, with commas.")]
Layers = Annotated[int, option("--layers", "N", "llm: of the model. [default: 8]")]
Width = Annotated[int, option("--width", "N", "llm: of the model, a multiple of 256. [default: 1024]")]
Batch = Annotated[int, option("--batch", "N", "llm: texts at once. [default: 1]")]
Quick = Annotated[bool, flag("--quick", "Seven sizes, short repetitions, one summary.")]
Best = Annotated[bool, flag("--best", "Show fastest repetitions: for noisy machines.")]
Pin = Annotated[bool, flag("--pin/--no-pin", "Keep each rank, of every side, on a core of its own if it can.")]
Markdown = Annotated[bool, flag("--markdown", "Print tables as Markdown.")]
JsonFile = Annotated[Path | None, option("--json", "FILE", "Write all figures there.")]
PlotFile = Annotated[Path | None, option("--plot", "FILE", "Draw them: .png or .svg.")]
Setup = Annotated[bool, flag("--setup-peers", "Install the MPIs to measure against.")]
