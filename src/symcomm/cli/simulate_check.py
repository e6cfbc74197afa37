"""``symcomm simulate --check``: predictions beside measured figures, as a table or as JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from symcomm.memory.limits import format_bytes
from symcomm.simulate.check import Checked, check, read
from symcomm.simulate.machine import Machine
from symcomm.simulate.topology import Link
from symcomm.simulate.units import format_time


def show_check(files: Sequence[Path], machine: Machine, as_json: bool) -> None:
    link, found = check([read(file) for file in files], machine)
    if as_json:
        written = [{**asdict(row), "ratio": row.ratio} for row in found]
        typer.echo(json.dumps({"link": link._asdict(), "machine": asdict(machine), "rows": written}, indent=1))
        return
    typer.echo(f"link: {format_link(link)}; hosts as {machine.name}")
    for name, rows in itertools.groupby(found, lambda row: row.run):
        of_file = list(rows)
        typer.echo(f"\n{name}: {of_file[0].hosts} hosts x {of_file[0].ranks_per_host} ranks")
        draw_table(*table(of_file))
    typer.echo(f"\nworst: {worst(found)}")


def draw_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=None, header_style="dim", pad_edge=False)
    for name in head:
        left = name in ("algorithm", "collective", "")
        drawn.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    Console(highlight=False).print(drawn)


def format_link(link: Link) -> str:
    parts = [f"{name} {format_time(getattr(link, name))}" for name in ("arrival", "message", "latency")]
    return f"{link.bandwidth * 8 / 1e9:.3g} Gb/s, " + ", ".join(part for part in parts if not part.endswith(" 0.00 us"))


def table(found: Sequence[Checked]) -> tuple[list[str], list[list[str]]]:
    head = ["collective", "bytes", "measured", "predicted", "ratio", ""]
    return head, [
        [
            row.collective, format_bytes(row.nbytes), format_time(row.measured), format_time(row.predicted),
            f"{row.ratio:.2f}x", "fitted" if row.fitted else "",
        ]
        for row in found
    ]  # fmt: skip


def worst(found: Sequence[Checked]) -> str:
    """The prediction that is furthest off, of those that were not fitted."""
    rows = [row for row in found if not row.fitted]
    if not rows:
        return "nothing but what was fitted"
    row = max(rows, key=lambda r: r.off)
    within = sum(r.off <= 1.2 for r in rows)
    where = f"{row.collective} of {format_bytes(row.nbytes)}, {row.hosts} x {row.ranks_per_host} ranks"
    return f"{row.ratio:.2f}x ({where}); {within} of {len(rows)} that were not fitted are within 20 %"
