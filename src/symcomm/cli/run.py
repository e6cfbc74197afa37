"""``symcomm run``: options in, exit code out. What they mean is in job.py, what happens is in launch.py."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from symcomm.cli.command import Command, argument, flag, option
from symcomm.launcher import job as jobs
from symcomm.launcher.elastic_nodes import launch_nodes
from symcomm.launcher.launch import launch
from symcomm.launcher.mps import multi_process_service
from symcomm.launcher.output import STDERR, STDOUT, Output, want_color
from symcomm.preflight import check_output_folder

app = typer.Typer(rich_markup_mode=None, add_completion=False)

# --- options -----------------------------------------------------------------------------------------------------

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


# Everything from the script's name on belongs to the script, hence no interspersed options.
@app.command(name="run", cls=Command, context_settings={"allow_interspersed_args": False})
def run(
    program: Program,
    args: Args = None,
    count: Count = "1",
    module: Module = False,
    no_python: NoPython = False,
    nnodes: Nnodes = "1",
    node_rank: NodeRank = None,
    endpoint: Endpoint = "",
    max_restarts: MaxRestarts = 0,
    restart: Restart = "all",
    grace: Grace = 5.0,
    log_dir: LogDir = None,
    trace: Trace = None,
    tag: Tag = "",
    env: Env = None,
    server: Server = False,
    insecure: Insecure = False,
    bind_numa: BindNuma = False,
    shared_heap: SharedHeap = False,
    mps: Mps = False,
    prefix: Prefix = True,
    color: Color = None,
    quiet: Quiet = False,
) -> None:
    """Start a script as N ranks, with torchrun's environment variables.

    Lines that ranks write are shown with the rank's number. When a rank fails, all others are ended, and a verdict
    says which failed first and why; its exit code becomes this command's.

    \b
    Examples:
      symcomm run -n 4 train.py --lr 0.1
      symcomm run -n gpu --log-dir logs --tag first -m my_package.train
      SYMCOMM_TOKEN=... symcomm run -n 8 --nnodes 2 --node-rank 0 --rdzv-endpoint node0:29500 train.py
      srun --ntasks-per-node=1 symcomm run -n 8 --nnodes auto train.py
      symcomm run -n 2 --no-python ./prog
    """
    meet = jobs.parse_endpoint(endpoint) if endpoint else None
    place = jobs.find_placement(nnodes, node_rank, meet)
    variables = jobs.parse_env(env or [])
    if trace is not None:
        check_output_folder("symcomm run", "--trace", trace)
        variables = {**variables, "SYMCOMM_TRACE_DIR": str(trace.absolute())}
    if shared_heap:
        variables = {"SYMCOMM_HEAP": "1", **variables}
    job = jobs.Job(
        command=jobs.build_command(program, args or [], module=module, no_python=no_python, env=variables),
        ranks_here=jobs.parse_count(count),
        nodes=place.nodes,
        min_nodes=place.least,
        node_rank=place.node_rank,
        endpoint=place.endpoint,
        max_restarts=max_restarts,
        restart=restart,
        grace=grace,
        tag=tag,
        log_dir=log_dir,
        env=variables,
        server=server,
        insecure=insecure,
        bind_numa=bind_numa,
    )
    on_terminal = os.isatty(STDOUT) and os.isatty(STDERR)
    output = Output(color=want_color(color, os.environ, on_terminal), prefix=prefix, quiet=quiet)
    with multi_process_service() if mps else contextlib.nullcontext({}) as found:
        start = launch if place.least is None else launch_nodes
        code = start(replace(job, env={**variables, **found}), output)
    raise typer.Exit(code)
