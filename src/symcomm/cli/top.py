"""``symcomm top``: a live page of a running job, or the same in the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from symcomm import errors
from symcomm.cli.command import Command, argument, flag, option
from symcomm.observe.top.feed import Feed, attach
from symcomm.observe.top.jobs import choose_job, find_jobs
from symcomm.observe.top.metrics import Meter, Spans
from symcomm.observe.top.model import Live
from symcomm.observe.top.page import LOOPBACK, PageServer
from symcomm.observe.top.servers_feed import attach_servers
from symcomm.observe.top.simulate import SimulatedFeed

app = typer.Typer(rich_markup_mode=None, add_completion=False)
TEXTFILE_S = 5.0  # how often a metrics file is written


def make_feed(
    job: str | None, server: str | None, simulate: int | None, straggler: int | None, stuck: int | None
) -> Feed:
    """A job on this host, a job on any hosts that has servers, or a made-up one."""
    if server is not None:
        if job is not None or simulate is not None:
            given = "JOB" if job is not None else "--simulate"
            raise errors.bad_argument("symcomm top", given, job or simulate, "left out with --server")
        return attach_servers(server, os.environ.get("SYMCOMM_TOKEN", ""))
    if simulate is not None:
        if job is not None:
            raise errors.bad_argument("symcomm top", "JOB", job, "left out with --simulate")
        return SimulatedFeed(simulate, straggler=straggler, stuck=stuck)
    for name, value in (("--straggler", straggler), ("--stuck", stuck)):
        if value is not None:
            raise errors.bad_argument("symcomm top", name, value, "left out without --simulate")
    found = choose_job("symcomm top", job, find_jobs())
    return attach(found.pids, found.title, call="symcomm top")


@app.command(name="top", cls=Command)
def top(
    job: Annotated[str | None, argument("JOB", "A pid of the job (rank or launcher) or its --tag.")] = None,
    server: Annotated[
        str | None,
        option("--server", "ADDRESS", "Any rank's server, for a job on any hosts; needs the job's SYMCOMM_TOKEN."),
    ] = None,
    port: Annotated[int, option("--port", "N", "Port of the page; 0: any free one.")] = 0,
    host: Annotated[str, option("--host", "ADDRESS", "Where to listen.")] = "127.0.0.1",
    terminal: Annotated[bool, flag("--terminal -t", "Draw in the terminal, serve no page.")] = False,
    once: Annotated[bool, flag("--once", "With --terminal: print once and exit.")] = False,
    textfile: Annotated[Path | None, option("--metrics-file", "FILE", "Also write Prometheus metrics there.")] = None,
    spans: Annotated[
        bool, flag("--spans", "Also send OpenTelemetry spans, to where OTEL_EXPORTER_OTLP_ENDPOINT says.")
    ] = False,
    simulate: Annotated[int | None, option("--simulate", "N", "Show a made-up job of N ranks.")] = None,
    straggler: Annotated[int | None, option("--straggler", "RANK", "Make this rank of the made-up job slow.")] = None,
    stuck: Annotated[int | None, option("--stuck", "RANK", "Make this rank of the made-up job stop for good.")] = None,
) -> None:
    """Watch a running job: ranks, timeline, stragglers, speed, and what is stuck.

    \b
    Examples:
      symcomm top                          the only job on this host
      symcomm top 4711 --terminal          the job of process 4711, here
      SYMCOMM_TOKEN=... symcomm top --server http://10.0.0.7:7000
      symcomm top --simulate 1000 --straggler 7 --stuck 613
    """
    if terminal and not once and not sys.stdout.isatty():
        raise errors.BadArgumentError(
            "symcomm top: --terminal needs a terminal to draw on; add --once to print the page once."
        )
    live = Live(make_feed(job, server, simulate, straggler, stuck))
    if terminal:
        from symcomm.cli.top_terminal import show

        if spans:
            raise errors.bad_argument("symcomm top", "--spans", "--terminal", "the page", "leave out --terminal")
        raise typer.Exit(show(live, once=once))
    serve(live, host, port, textfile, spans)


def serve(live: Live, host: str, port: int, textfile: Path | None, spans: bool) -> None:
    """Serve the page, and metrics where the library is installed, until interrupted."""
    if not 0 <= port < 65536:
        raise errors.bad_argument("symcomm top", "--port", port, "0 to 65535")
    meter = make_meter(required=textfile is not None)
    with contextlib.ExitStack() as stack:
        observers = []
        if spans:
            made, finish = Spans.from_environment()
            stack.callback(finish)
            observers.append(made.add)
        server = stack.enter_context(PageServer(live, host, port))
        server.observers += observers
        if meter is not None:
            server.attach_meter(meter)
        typer.echo(f"{live.feed.title}\n{server.url}")
        if host not in LOOPBACK:
            typer.echo(
                f"anybody who can reach {host} can read this connection, token and all; "
                f"prefer `ssh -L {server.port}:127.0.0.1:{server.port}` and the loopback address.",
                err=True,
            )
        if meter is not None:
            typer.echo(f"metrics: {server.address}metrics (Authorization: Bearer TOKEN)")
        while True:
            if textfile is not None and meter is not None:
                with server.lock:
                    meter.write(textfile)
            time.sleep(TEXTFILE_S)


def make_meter(required: bool) -> Meter | None:
    """None if the metrics library is missing and nobody asked for metrics."""
    try:
        return Meter()
    except errors.ResourceError:
        if required:
            raise
        return None
