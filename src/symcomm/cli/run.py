"""``symcomm run``: options in, exit code out. What they mean is in job.py, what happens is in launch.py."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from symcomm.cli.job import Job, Place, build_command, find_place, parse_count, parse_endpoint, parse_env, parse_range
from symcomm.cli.launch import launch
from symcomm.cli.mps import multi_process_service
from symcomm.cli.nodes import launch_nodes
from symcomm.cli.output import STDERR, STDOUT, Output, want_color
from symcomm.errors import SymcommError

app = typer.Typer(rich_markup_mode=None, add_completion=False)
BAD_USAGE = 2


# Everything from the script's name on belongs to the script, hence no interspersed options.
@app.command(name="run", context_settings={"allow_interspersed_args": False})
def run(
    program: Annotated[str, typer.Argument(metavar="SCRIPT", help="What every rank runs.", show_default=False)],
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="Passed on to it as they are.", show_default=False),
    ] = None,
    count: Annotated[
        str, typer.Option("-n", "--nproc-per-node", metavar="N", help="Ranks on this node: a number, auto, cpu or gpu.")
    ] = "1",
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in `python -m`.")] = False,
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is a program that is not Python.")] = False,
    nnodes: Annotated[
        str,
        typer.Option(
            "--nnodes",
            metavar="N|auto|MIN:MAX",
            help="Nodes, each runs this command once. auto: what Slurm, Kubernetes or MPI say; MIN:MAX come and go.",
        ),
    ] = "1",
    node_rank: Annotated[
        int | None,
        typer.Option("--node-rank", metavar="R", help="Which of the nodes this is, from 0.", show_default=False),
    ] = None,
    endpoint: Annotated[
        str,
        typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Where ranks meet: a free port of node 0."),
    ] = "",
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", metavar="K", help="Start again, up to K times, when a rank fails.")
    ] = 0,
    restart: Annotated[
        str,
        typer.Option(
            "--restart",
            metavar="all|failed",
            help="What starts again: all ranks, or the failed one, to join the others.",
        ),
    ] = "all",
    grace: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", help="Between SIGTERM and SIGKILL, when a rank has failed.")
    ] = 5.0,
    log_dir: Annotated[
        Path | None,
        typer.Option("--log-dir", metavar="DIR", help="Also write DIR/[TAG/]attempt-0/rank-0.out and .err."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="DIR", help="When one fails, ranks write there what they did, for symcomm trace."
        ),
    ] = None,
    tag: Annotated[str, typer.Option("--tag", metavar="TAG", help="The job's name, in prefixes and log files.")] = "",
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="KEY=VALUE", help="Set a variable in every rank; may be repeated."),
    ] = None,
    server: Annotated[
        bool,
        typer.Option("--server", help="Every rank serves what it does, to this user only; see docs/control-plane.md."),
    ] = False,
    mps: Annotated[
        bool,
        typer.Option("--mps", help="Start NVIDIA's MPS for the job: ranks on one GPU then use it at the same time."),
    ] = False,
    prefix: Annotated[bool, typer.Option("--prefix/--no-prefix", help="Say which rank wrote a line.")] = True,
    color: Annotated[
        bool | None,
        typer.Option("--color/--no-color", help="Colour the prefixes. [default: on a terminal]", show_default=False),
    ] = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Show nothing of the ranks but the verdict.")] = False,
) -> None:
    """Start a script as N ranks, with torchrun's environment variables.

    Lines that ranks write are shown with the rank's number. When a rank fails, all others are ended, and a verdict
    says which failed first and why; its exit code becomes this command's.

    \b
    Examples:
      symcomm run -n 4 train.py --lr 0.1
      symcomm run -n gpu --log-dir logs --tag first -m my_package.train
      symcomm run -n 8 --nnodes 2 --node-rank 0 --rdzv-endpoint node0:29500 train.py
      srun --ntasks-per-node=1 symcomm run -n 8 --nnodes auto train.py
      symcomm run -n 2 --no-python ./prog
    """
    try:
        meet = parse_endpoint(endpoint) if endpoint else None
        least, most = parse_range(nnodes) if ":" in nnodes else (None, 0)
        place = find_place(nnodes, node_rank, meet) if least is None else Place(most, node_rank or 0, meet)
        variables = parse_env(env or [])
        if trace is not None:
            variables = {**variables, "SYMCOMM_TRACE_DIR": str(trace.absolute())}
        job = Job(
            command=build_command(program, args or [], module=module, no_python=no_python, env=variables),
            ranks_here=parse_count(count),
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
        )
        on_terminal = os.isatty(STDOUT) and os.isatty(STDERR)
        output = Output(color=want_color(color, os.environ, on_terminal), prefix=prefix, quiet=quiet)
        with multi_process_service() if mps else contextlib.nullcontext({}) as found:
            start = launch if least is None else launch_nodes
            code = start(replace(job, env={**variables, **found}), output)
    except SymcommError as error:
        typer.echo(str(error), err=True)
        code = BAD_USAGE
    raise typer.Exit(code)
