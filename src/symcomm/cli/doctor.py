"""``symcomm doctor``: is this machine set up well, and what to change."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from symcomm import errors
from symcomm.cli.command import Command, flag, option
from symcomm.observe.health import FAIL, OK, WARN, Finding, run_checks

app = typer.Typer(rich_markup_mode=None, add_completion=False)
UNFIT = 1
STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}


def examine(ranks: int | None = None) -> list[Finding]:
    """All checks, for a machine that will run ``ranks`` ranks."""
    from symcomm.observe.health import machine, memory, network, software

    return run_checks([*software.CHECKS, *memory.CHECKS, *machine.checks(ranks), *network.CHECKS])


def exit_code(findings: list[Finding], strict: bool) -> int:
    states = {finding.state for finding in findings}
    return UNFIT if FAIL in states or (strict and WARN in states) else 0


@app.command(name="doctor", cls=Command)
def doctor(
    ranks: Annotated[int | None, option("-n --ranks", "N", "Ranks to run here. [default: one a core]")] = None,
    as_json: Annotated[bool, flag("--json", "Print JSON.")] = False,
    strict: Annotated[bool, flag("--strict", "Exit with 1 on warnings too.")] = False,
    bits: Annotated[bool, flag("--bits", "Print what must be equal for equal bits, and stop.")] = False,
) -> None:
    """Check this machine, and say what to change. Exits with 1 when something fails.

    \b
    Examples:
      symcomm doctor
      symcomm doctor -n 64 --json
      symcomm doctor --bits
    """
    if ranks is not None and ranks < 1:
        raise errors.bad_argument("symcomm doctor", "--ranks", ranks, "1 or more")
    if bits:
        show_bits(as_json)
        return
    findings = examine(ranks)
    code = exit_code(findings, strict)
    if as_json:
        typer.echo(json.dumps({"fit": code == 0, "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        show(findings)
    raise typer.Exit(code)


def show_bits(as_json: bool) -> None:
    from symcomm.observe.health.bits import what_must_be_equal

    found = what_must_be_equal()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        typer.echo(f"{name:22}{value}")


def show(findings: list[Finding]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal:
        console.print(_as_table(findings))
    else:
        typer.echo("\n".join(_as_lines(findings)))
    counts = {state: sum(f.state == state for f in findings) for state in (FAIL, WARN)}
    said = [f"{n} {words}" for n, words in ((counts[FAIL], "to repair"), (counts[WARN], "to look at")) if n]
    console.print(f"\n{', '.join(said) or 'All is well'}.")


def _as_lines(findings: list[Finding]) -> list[str]:
    """For a file or another program: a line each, and what to change below it. Nothing is broken."""
    widest = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:4}  {finding.check:{widest}}  {finding.found}")
        if finding.fix:
            lines.append(f"{'':{widest + 6}}  what to change: {finding.fix}")
    return lines


def _as_table(findings: list[Finding]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("", "check", "found", "what to change"):
        table.add_column(name, overflow="fold")
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for finding in findings:
        table.add_row(Text(finding.state, STYLES[finding.state]), finding.check, Text(finding.found), Text(finding.fix))
    return table
