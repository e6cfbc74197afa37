"""``symcomm run``: options in, exit code out. What they mean is in job.py, what happens is in launch.py."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

import typer

from symcomm.cli import run_options as options
from symcomm.cli.command import Command
from symcomm.launcher import job as jobs
from symcomm.launcher.elastic_nodes import launch_nodes
from symcomm.launcher.launch import launch
from symcomm.launcher.mps import multi_process_service
from symcomm.launcher.output import STDERR, STDOUT, Output, want_color
from symcomm.preflight import check_output_folder

app = typer.Typer(rich_markup_mode=None, add_completion=False)


# Everything from the script's name on belongs to the script, hence no interspersed options.
@app.command(name="run", cls=Command, context_settings={"allow_interspersed_args": False})
def run(
    program: options.Program,
    args: options.Args = None,
    count: options.Count = "1",
    module: options.Module = False,
    no_python: options.NoPython = False,
    nnodes: options.Nnodes = "1",
    node_rank: options.NodeRank = None,
    endpoint: options.Endpoint = "",
    max_restarts: options.MaxRestarts = 0,
    restart: options.Restart = "all",
    grace: options.Grace = 5.0,
    log_dir: options.LogDir = None,
    trace: options.Trace = None,
    tag: options.Tag = "",
    env: options.Env = None,
    server: options.Server = False,
    insecure: options.Insecure = False,
    bind_numa: options.BindNuma = False,
    shared_heap: options.SharedHeap = False,
    mps: options.Mps = False,
    prefix: options.Prefix = True,
    color: options.Color = None,
    quiet: options.Quiet = False,
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
    least, most = jobs.parse_range(nnodes) if ":" in nnodes else (None, 0)
    place = (
        jobs.find_placement(nnodes, node_rank, meet)
        if least is None
        else jobs.NodePlacement(most, node_rank or 0, meet)
    )
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
        min_nodes=least,
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
        start = launch if least is None else launch_nodes
        code = start(replace(job, env={**variables, **found}), output)
    raise typer.Exit(code)
