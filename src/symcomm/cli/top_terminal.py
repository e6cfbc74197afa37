"""The live page's data in a terminal, for where there is no browser."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live as Screen
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from symcomm.errors import format_ranks
from symcomm.memory.limits import format_bytes
from symcomm.observe.top.model import COMPUTING, DEAD, FAILED, IDLE, LATE, STATES, WAITING, Live
from symcomm.simulate.units import format_time

REFRESH_S = 0.5
ROWS = 16  # ranks listed; those that need attention first
# (letter, style) of each state, so that it can be told without colours
MARKS = {
    "idle": ("_", "dim"), "computing": (".", "blue"), "communicating": ("+", "bright_blue"), "waiting": ("w", "yellow"),
    "late": ("!", "bold white on red"), "failed": ("F", "bold red"), "dead": ("x", "bold red reverse"),
}  # fmt: skip


def show(live: Live, once: bool = False, console: Console | None = None) -> int:
    """Draw until interrupted, or once. The exit code says whether anything is stuck."""
    console = console or Console()
    live.refresh()
    if once:
        console.print(render(live, console.width))
        return 1 if live.verdict() else 0
    with Screen(render(live, console.width), console=console, screen=True, auto_refresh=False) as screen:
        while True:
            time.sleep(REFRESH_S)
            live.refresh()
            screen.update(render(live, console.width), refresh=True)


def render(live: Live, width: int) -> RenderableType:
    parts: list[RenderableType] = [_heading(live)]
    if verdict := live.verdict():
        parts.append(Panel(Text(verdict.sentence), style="bold white on red"))
    parts += [_grid(live, width), _ranks(live, width), _numbers(live, width), _stragglers(live)]
    return Group(*parts)


def _heading(live: Live) -> Text:
    memory = format_bytes(sum(fact.arena_bytes for fact in live.ranks))
    text = Text(live.feed.title, style="bold")
    groups = f"{len(live.groups)} group{'s' if len(live.groups) != 1 else ''}"
    return text.append(f"   {len(live.ranks)} ranks, {groups}, {memory} in arenas", style="default not bold")


def _grid(live: Live, width: int) -> Text:
    """One letter a rank."""
    text = Text()
    for place, state in enumerate(live.states()):
        if place and place % max(10, (width - 2) // 10 * 10) == 0:
            text.append("\n")
        mark, style = MARKS[STATES[state]]
        text.append(mark, style)
    text.append("\n")
    for name in STATES[1:]:
        mark, style = MARKS[name]
        text.append(f"{mark} ", style).append(f"{name}  ", "dim")
    return text


def _ranks(live: Live, width: int) -> Table:
    """All ranks of a small job; in a large one, those that need attention."""
    urgent = {LATE: 0, FAILED: 1, DEAD: 2, WAITING: 3, IDLE: 5, COMPUTING: 5}
    ranks = list(zip(live.ranks, live.states(), live.lags(), strict=True))
    ranks.sort(key=lambda row: (urgent.get(row[1], 4) if len(ranks) > ROWS else 0, row[0].rank))
    rows: list[list[str | Text]] = []
    for fact, state, lag, *_ in ranks[:ROWS]:
        now = live.current.get(fact.rank)
        doing = f"{now.call} #{now.seq} on {now.group}" if now else "-"
        since = format_time((live.sample.now_ns - (now.finished_ns or now.created_ns)) / 1e9) if now else "-"
        style = MARKS[STATES[state]][1] if state in (LATE, FAILED, DEAD) else ""
        where = os.path.basename(now.site) if now else ""
        rows.append([str(fact.rank), Text(STATES[state], style), str(lag), doing, since, where, str(fact.pid)])
    if len(ranks) > ROWS:
        rows.append(["...", f"{len(ranks) - ROWS} more", *[""] * 5])
    return _fitting(RANK_COLUMNS, rows, width)


def _numbers(live: Live, width: int) -> Table:
    rows = []
    for (call, _), numbers in sorted(live.numbers.items()):
        row = numbers.row()
        times = [format_time(row[name]) for name in ("p50", "p90", "p99", "waited")]
        rate = f"{row['rate'] / 1e9:.2f}"
        direct = f"{row['direct']:.0%}" if numbers.nbytes else "-"
        rows.append([call, format_bytes(numbers.nbytes), str(numbers.count), *times, direct, rate])
    return _fitting(NUMBER_COLUMNS, rows, width)


@dataclass(frozen=True)
class Column:
    """``matters``: 0 goes last if the terminal is narrow. ``cut``: a width that is enough for longer text; 0: all."""

    name: str
    matters: int
    least: int = 0  # so that columns do not move when a value gets longer
    cut: int = 0
    right: bool = False


RANK_COLUMNS = (
    Column("rank", 0, 4), Column("state", 1, 13), Column("lag", 4, 3), Column("last did", 2, cut=12),
    Column("since", 3, 8), Column("at", 5), Column("pid", 6, 7),
)  # fmt: skip
NUMBER_COLUMNS = (
    Column("collective", 0), Column("up to", 1, right=True), Column("times", 6, right=True),
    Column("p50", 2, right=True), Column("p90", 7, right=True), Column("p99", 4, right=True),
    Column("waited", 3, right=True), Column("direct", 8, right=True), Column("GB/s", 5, right=True),
)  # fmt: skip
PADDING = 2  # of a column, left and right together


def _fitting(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], width: int) -> Table:
    """A table of the columns that fit, whole ones, the most important first."""
    wide = [
        max([column.least, *(cell_len(str(cell)) for cell in (column.name, *(row[i] for row in rows)))])
        for i, column in enumerate(columns)
    ]
    kept: dict[int, int] = {}  # column -> its width
    for i in sorted(range(len(columns)), key=lambda i: columns[i].matters):
        need = min(wide[i], columns[i].cut or wide[i])
        if not kept or sum(kept.values()) + PADDING * (len(kept) + 1) + need <= width:
            kept[i] = need
    spare = width - sum(kept.values()) - PADDING * len(kept)
    table = Table(box=None, header_style="dim")
    for i in sorted(kept):
        more = min(max(spare, 0), wide[i] - kept[i])  # only a column that was cut wants more
        justify: Literal["left", "right"] = "right" if columns[i].right else "left"
        table.add_column(columns[i].name, no_wrap=True, width=kept[i] + more, justify=justify)
    for row in rows:
        table.add_row(*(row[i] for i in sorted(kept)))
    return table


def _stragglers(live: Live) -> Text:
    worst = [late for late in live.stragglers(3) if late.seconds > 0]
    if not worst:
        return Text()
    told = [f"rank {late.rank} ({format_time(late.seconds)}, last {late.times} of {late.of} times)" for late in worst]
    said = ", ".join(told) + ("" if live.straggler() else "; nobody stands out")
    dead = format_ranks(fact.rank for fact in live.ranks if not fact.alive)
    return Text(f"waited for most: {said}" + (f"; ended: {dead}" if dead != "none" else ""), style="dim")
