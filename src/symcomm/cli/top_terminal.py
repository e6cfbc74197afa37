"""The live page's data in a terminal, for where there is no browser."""

from __future__ import annotations

import os
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live as Screen
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from symcomm.errors import words_for_ranks
from symcomm.memory.limits import words_for_bytes
from symcomm.observe.top.model import COMPUTING, DEAD, FAILED, IDLE, LATE, STATES, WAITING, Live

__all__ = ["render", "show"]

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
    parts += [_grid(live, width), _ranks(live), _numbers(live), _stragglers(live)]
    return Group(*parts)


def _heading(live: Live) -> Text:
    memory = words_for_bytes(sum(fact.arena_bytes for fact in live.ranks))
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


def _ranks(live: Live) -> Table:
    """All ranks of a small job; of a large one those that need attention."""
    urgent = {LATE: 0, FAILED: 1, DEAD: 2, WAITING: 3, IDLE: 5, COMPUTING: 5}
    rows = list(zip(live.ranks, live.states(), live.lags(), strict=True))
    rows.sort(key=lambda row: (urgent.get(row[1], 4) if len(rows) > ROWS else 0, row[0].rank))
    table = Table(box=None, header_style="dim")
    for name, width in (("rank", 4), ("state", 13), ("lag", 3), ("does", 0), ("since", 8), ("at", 0), ("pid", 7)):
        table.add_column(name, no_wrap=True, min_width=width or None)
    for fact, state, lag, *_ in rows[:ROWS]:
        now = live.current.get(fact.rank)
        doing = f"{now.call} #{now.seq} on {now.group}" if now else "-"
        since = seconds((live.sample.now_ns - (now.finished_ns or now.created_ns)) / 1e9) if now else "-"
        style = MARKS[STATES[state]][1] if state in (LATE, FAILED, DEAD) else None
        where = os.path.basename(now.site) if now else ""
        table.add_row(str(fact.rank), Text(STATES[state], style or ""), str(lag), doing, since, where, str(fact.pid))
    if len(rows) > ROWS:
        table.add_row("...", f"{len(rows) - ROWS} more", *[""] * 5)
    return table


def _numbers(live: Live) -> Table:
    table = Table("collective", "up to", "times", "p50", "p90", "p99", "waited", "GB/s", box=None, header_style="dim")
    for column in table.columns[1:]:
        column.justify = "right"
    for (call, _), numbers in sorted(live.numbers.items()):
        row = numbers.row()
        times = [seconds(row[name]) for name in ("p50", "p90", "p99", "waited")]
        table.add_row(call, words_for_bytes(numbers.nbytes), str(numbers.count), *times, f"{row['rate'] / 1e9:.2f}")
    return table


def _stragglers(live: Live) -> Text:
    worst = [item for item in live.stragglers(3) if item[2] > 0]
    if not worst:
        return Text()
    said = ", ".join(f"rank {rank} ({seconds(total)}, last {times} times)" for rank, times, total in worst)
    dead = words_for_ranks(fact.rank for fact in live.ranks if not fact.alive)
    return Text(f"waited for most: {said}" + (f"; ended: {dead}" if dead != "none" else ""), style="dim")


def seconds(value: float) -> str:
    """``1.23 ms``"""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if value * factor < 1000:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.3g} s"
