"""What ``symcomm bench`` can be asked for: the options, their names and helps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from symcomm.cli.command import choices

COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all", "barrier",
    "p2p",
)  # fmt: skip
ONE_SIDED = ("put", "put_signal")  # into windows: what ``window`` measures
# Each in a file of its own.
OTHERS = ("store", "kernels", "groups", "ddp", "compile", "gpu", "hosts", "noise", "sites", "torch", "llm")
DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64")
OPS = ("sum", "prod", "min", "max", "avg")

Collective = Annotated[
    str,
    typer.Argument(
        metavar="WHAT",
        help=f"One of {', '.join(COLLECTIVES)}, all, window, {', '.join(OTHERS)}.",
        autocompletion=choices(*COLLECTIVES, "all", "window", *OTHERS),
    ),
]
Minbytes = Annotated[str, typer.Option("-b", "--minbytes", metavar="SIZE", help="Smallest size.")]
Maxbytes = Annotated[str, typer.Option("-e", "--maxbytes", metavar="SIZE", help="Largest size.")]
Factor = Annotated[int, typer.Option("-f", "--stepfactor", metavar="N", help="Each size is N times the last.")]
Step = Annotated[str, typer.Option("-i", "--stepbytes", metavar="SIZE", help="Add this instead.")]
Dtype = Annotated[
    str,
    typer.Option(
        "-d",
        "--datatype",
        metavar="TYPE",
        help="Element type, torch's name or NCCL's.",
        autocompletion=choices(*DTYPES),
    ),
]
Op = Annotated[
    str, typer.Option("-o", "--op", metavar="OP", help="sum, prod, min, max or avg.", autocompletion=choices(*OPS))
]
Root = Annotated[int, typer.Option("-r", "--root", metavar="RANK", help="Root of broadcast, reduce, gather, scatter.")]
Iters = Annotated[
    int,
    typer.Option(
        "-n", "--iters", metavar="N", help="Calls per repetition. [default: what fills 25 ms]", show_default=False
    ),
]
Warmup = Annotated[int, typer.Option("-w", "--warmup", metavar="N", help="Calls before timing.")]
Check = Annotated[int, typer.Option("-c", "--check", metavar="0|1", help="Check values before timing.")]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        metavar="N",
        help="Ranks on each side; hosts, sites: of each; kernels: sources. [default: 2; sites: 1; llm: 2, then 4]",
        show_default=False,
    ),
]
Rounds = Annotated[
    int | None,
    typer.Option(
        "--rounds",
        metavar="N",
        help="Turns that the sides take. [default: 3; kernels, llm: 7; ddp, compile, groups: 10; hosts: 5; torch: 15]",
        show_default=False,
    ),
]
Symmetric = Annotated[bool, typer.Option("--symmetric", help="Only tensors in symmetric memory.")]
Ordinary = Annotated[bool, typer.Option("--ordinary", help="Only ordinary tensors.")]
Against = Annotated[
    str,
    typer.Option(
        "--against",
        metavar="NAMES",
        help="Also measure gloo, mpich, openmpi (with commas); noise: the MPIs there.",
        autocompletion=choices("gloo", "mpich", "openmpi"),
    ),
]
Collectives = Annotated[
    str,
    typer.Option(
        "--collectives",
        metavar="NAMES",
        help="hosts: which, with commas, or all but p2p: all.",
        autocompletion=choices(*(name for name in COLLECTIVES if name != "p2p"), "all"),
    ),
]
Neighbours = Annotated[
    str,
    typer.Option(
        "--neighbours",
        metavar="KINDS",
        help="noise: none or PERCENT:MS, with commas: awake so much, in bursts so long.",
    ),
]
Python = Annotated[
    str, typer.Option("--python", metavar="PATHS", help="torch: interpreters with another torch, with commas.")
]
Layers = Annotated[
    int, typer.Option("--layers", metavar="N", help="llm: of the model. [default: 8]", show_default=False)
]
Width = Annotated[
    int,
    typer.Option(
        "--width", metavar="N", help="llm: of the model, a multiple of 256. [default: 1024]", show_default=False
    ),
]
Batch = Annotated[
    int, typer.Option("--batch", metavar="N", help="llm: texts at once. [default: 1]", show_default=False)
]
Quick = Annotated[bool, typer.Option("--quick", help="Seven sizes, short repetitions, one summary.")]
Best = Annotated[bool, typer.Option("--best", help="Show fastest repetitions: for noisy machines.")]
Pin = Annotated[
    bool, typer.Option("--pin/--no-pin", help="Keep each rank, of every side, on a core of its own if it can.")
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.", show_default=False)
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw them: .png or .svg.", show_default=False)
]
Setup = Annotated[bool, typer.Option("--setup-peers", help="Install the MPIs to measure against.")]
