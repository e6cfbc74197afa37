"""What ``symcomm run`` can be asked for: the options, their names and helps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from symcomm.cli.command import choices

Program = Annotated[str, typer.Argument(metavar="SCRIPT", help="What every rank runs.", show_default=False)]
Args = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="Passed on to it as they are.", show_default=False),
]
Count = Annotated[
    str,
    typer.Option(
        "-n",
        "--nproc-per-node",
        metavar="N",
        help="Ranks on this node: a number, auto, cpu or gpu.",
        autocompletion=choices("auto", "cpu", "gpu"),
    ),
]
Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in `python -m`.")]
NoPython = Annotated[bool, typer.Option("--no-python", help="SCRIPT is a program that is not Python.")]
Nnodes = Annotated[
    str,
    typer.Option(
        "--nnodes",
        metavar="N|auto|MIN:MAX",
        help="Nodes, each runs this command once. auto: what Slurm, Kubernetes or MPI say; MIN:MAX come and go.",
    ),
]
NodeRank = Annotated[
    int | None,
    typer.Option("--node-rank", metavar="R", help="Which of the nodes this is, from 0.", show_default=False),
]
Endpoint = Annotated[
    str,
    typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Where ranks meet: a free port of node 0."),
]
MaxRestarts = Annotated[
    int, typer.Option("--max-restarts", metavar="K", help="Start again, up to K times, when a rank fails.")
]
Restart = Annotated[
    str,
    typer.Option(
        "--restart",
        metavar="all|failed",
        help="What starts again: all ranks, or the failed one, to join the others.",
        autocompletion=choices("all", "failed"),
    ),
]
Grace = Annotated[
    float, typer.Option("--grace", metavar="SECONDS", help="Between SIGTERM and SIGKILL, when a rank has failed.")
]
LogDir = Annotated[
    Path | None,
    typer.Option("--log-dir", metavar="DIR", help="Also write DIR/[TAG/]attempt-0/rank-0.out and .err."),
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="DIR", help="When one fails, ranks write there what they did, for symcomm trace."),
]
Tag = Annotated[str, typer.Option("--tag", metavar="TAG", help="The job's name, in prefixes and log files.")]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="KEY=VALUE", help="Set a variable in every rank; may be repeated."),
]
Server = Annotated[
    bool,
    typer.Option("--server", help="Every rank serves what it does to this user; see docs/reference/control-plane.md."),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Several nodes without a job token (SYMCOMM_TOKEN): anybody can join the store."),
]
BindNuma = Annotated[
    bool,
    typer.Option("--bind-numa", help="Keep each rank on the cores of one NUMA node, and its memory there."),
]
Mps = Annotated[
    bool,
    typer.Option("--mps", help="Start NVIDIA's MPS for the job: ranks on one GPU then use it at the same time."),
]
Prefix = Annotated[bool, typer.Option("--prefix/--no-prefix", help="Say which rank wrote a line.")]
Color = Annotated[
    bool | None,
    typer.Option("--color/--no-color", help="Colour the prefixes. [default: on a terminal]", show_default=False),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Show nothing of the ranks but the verdict.")]
