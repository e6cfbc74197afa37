"""``symcomm trace``: what went wrong with a job, from its ranks' dumps or from its running processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from symcomm.cli.command import Command, argument, flag, option
from symcomm.errors import BadArgumentError, ResourceError

if TYPE_CHECKING:
    from symcomm.observe.recorder.trace import Trace
    from symcomm.observe.top.jobs import JobFacts

app = typer.Typer(rich_markup_mode=None, add_completion=False)
NOTHING_WRONG, SOMETHING_WRONG = 0, 1


@app.command(name="trace", cls=Command)
def trace(
    place: Annotated[str, argument("DIR", "Folder with the ranks' dumps, or what their names begin with.")] = "",
    live: Annotated[bool, flag("--live", "Look at this user's running jobs instead.")] = False,
    job: Annotated[
        str | None, option("--job --pid", "JOB", "With --live: a pid (rank or launcher) or its --tag.")
    ] = None,
    paths: Annotated[bool, flag("--paths", "Also count which way the recorded calls took.")] = False,
    as_json: Annotated[bool, flag("--json", "Everything, for programs.")] = False,
    chrome: Annotated[
        Path | None, option("--chrome", "FILE", "Also write a trace for ui.perfetto.dev or chrome://tracing.")
    ] = None,
) -> None:
    """Say what went wrong with a job, in one sentence; then who is where, and who makes the others wait.

    Ranks write dumps when an operation fails and SYMCOMM_TRACE_DIR, or `symcomm run --trace`, names a folder.
    Exits with 0 when nothing is wrong, 1 when something is.

    \b
    Examples:
      symcomm run -n 4 --trace dumps train.py ; symcomm trace dumps
      symcomm trace dumps --chrome trace.json
      symcomm trace --live
    """
    from symcomm.observe.analysis.report import as_data, as_text
    from symcomm.observe.analysis.verdict import judge

    traces = _find(place, live, job)
    if chrome is not None:
        _write_chrome(traces, chrome)
    verdicts = [judge(one) for one in traces]
    if as_json:
        data = [as_data(one) for one in traces]
        typer.echo(json.dumps(data if live else data[0], indent=1))
    else:
        for number, (one, verdict) in enumerate(zip(traces, verdicts, strict=True)):
            if len(traces) > 1:
                pids = ", ".join(str(rank.pid) for rank in one.ranks.values())
                typer.echo(f"{chr(10) if number else ''}=== job of processes {pids}")
            typer.echo(as_text(one, verdict, paths=paths), nl=False)
    raise typer.Exit(NOTHING_WRONG if all(v.kind == "fine" for v in verdicts) else SOMETHING_WRONG)


def _find(place: str, live: bool, job: str | None) -> list[Trace]:
    if live and place:
        raise BadArgumentError(f"symcomm trace: give a folder ({place}) or --live, not both.")
    if live:
        from symcomm.observe.top.jobs import choose_jobs, find_jobs

        return _look_at(choose_jobs("symcomm trace", job, find_jobs()))
    if not place:
        raise BadArgumentError("symcomm trace: give the folder with the ranks' dumps, or --live for what runs now.")
    from symcomm.observe.recorder.trace import load

    return [load(place)]


def _look_at(jobs: list[JobFacts]) -> list[Trace]:
    """Traces of the jobs that still run; raises if all have ended."""
    from symcomm.observe.top.live import look

    traces, ended = [], None
    for job in jobs:
        try:
            traces.append(look(job, call="symcomm trace"))
        except ResourceError as error:
            ended = error
    if ended and not traces:
        raise ended
    return traces


def _write_chrome(traces: list[Trace], path: Path) -> None:
    from symcomm.observe.analysis.perfetto import chrome_trace

    if len(traces) > 1:
        raise BadArgumentError("symcomm trace: there are several jobs; choose one for --chrome with --job.")
    try:
        path.write_text(json.dumps(chrome_trace(traces[0])))
    except OSError as error:
        raise BadArgumentError(f"symcomm trace: --chrome {path} cannot be written: {error.strerror}.") from error
