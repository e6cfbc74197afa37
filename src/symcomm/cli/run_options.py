"""The options of ``symcomm run``, their names and helps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from symcomm.cli.command import argument, flag, option

Program = Annotated[str, argument("SCRIPT", "What every rank runs.")]
Args = Annotated[list[str] | None, argument("ARGS", "Arguments for SCRIPT, passed on unchanged.")]
Count = Annotated[
    str, option("-n --nproc-per-node", "N", "Ranks on this node: a number, auto, cpu or gpu.", "auto", "cpu", "gpu")
]
Module = Annotated[bool, flag("-m --module", "SCRIPT is a module, as in `python -m`.")]
NoPython = Annotated[bool, flag("--no-python", "SCRIPT is a program that is not Python.")]
Nnodes = Annotated[
    str,
    option(
        "--nnodes",
        "N|auto|MIN:MAX",
        "Nodes, each runs this command once. auto: what Slurm, Kubernetes or MPI say; MIN:MAX come and go.",
    ),
]
NodeRank = Annotated[int | None, option("--node-rank", "R", "This node's number, from 0.")]
Endpoint = Annotated[str, option("--rdzv-endpoint", "HOST:PORT", "Where ranks meet: a free port of node 0.")]
MaxRestarts = Annotated[int, option("--max-restarts", "K", "Start again, up to K times, when a rank fails.")]
Restart = Annotated[
    str,
    option(
        "--restart",
        "all|failed",
        "Which ranks start again: all, or only the failed one, which joins the others.",
        "all",
        "failed",
    ),
]
Grace = Annotated[float, option("--grace", "SECONDS", "Time between SIGTERM and SIGKILL after a rank failed.")]
LogDir = Annotated[Path | None, option("--log-dir", "DIR", "Also write DIR/[TAG/]attempt-0/rank-0.out and .err.")]
Trace = Annotated[Path | None, option("--trace", "DIR", "When an operation fails, ranks write their records there.")]
Tag = Annotated[str, option("--tag", "TAG", "The job's name, in prefixes and log files.")]
Env = Annotated[list[str] | None, option("--env", "KEY=VALUE", "Set a variable in every rank; may be repeated.")]
Server = Annotated[
    bool, flag("--server", "Every rank serves its state to this user; see docs/reference/control-plane.md.")
]
Insecure = Annotated[
    bool, flag("--insecure", "Allow several nodes without a job token (SYMCOMM_TOKEN): anyone can join the store.")
]
BindNuma = Annotated[bool, flag("--bind-numa", "Keep each rank on the cores of one NUMA node, and its memory there.")]
SharedHeap = Annotated[
    bool, flag("--shared-heap", "Put CPU tensors into shared memory: calls on them need no copies (SYMCOMM_HEAP=1).")
]
Mps = Annotated[bool, flag("--mps", "Start NVIDIA's MPS for the job: ranks on one GPU then use it at the same time.")]
Prefix = Annotated[bool, flag("--prefix/--no-prefix", "Say which rank wrote a line.")]
Color = Annotated[bool | None, flag("--color/--no-color", "Colour the prefixes. [default: on a terminal]")]
Quiet = Annotated[bool, flag("-q --quiet", "Show only the verdict, no output of ranks.")]
