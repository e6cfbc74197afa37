"""The progress of a long command: a bar with the time left on a terminal, otherwise a line now and then."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from symcomm.bench.estimate import in_words

SECONDS_BETWEEN_LINES = 10.0


class Bar:
    """Progress over ``turns``, on stderr. Call it after each turn, with the turn's name. Without a terminal (``bar`` is
    None) it prints the time left now and then, as ``seconds_left`` or the turns so far tell."""

    def __init__(
        self, turns: int, bar: Any = None, task: Any = None, seconds_left: Callable[[], float] | None = None
    ) -> None:
        self._turns, self._done = turns, 0
        self._bar, self._task = bar, task
        self._begun = self._told = time.monotonic()
        self._seconds_left = seconds_left or self._as_before

    def __call__(self, what: str) -> None:
        self._done += 1
        now = time.monotonic()
        if self._done == 1:  # ranks start only once, before the first turn
            self._begun = now
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=what, refresh=True)
        elif now - self._told > SECONDS_BETWEEN_LINES and 1 < self._done < self._turns:
            self._told = now
            left = in_words(self._seconds_left())
            print(f"# {self._done} of {self._turns} turns ({what}), about {left} left", file=sys.stderr, flush=True)

    def begin(self, what: str) -> None:
        """Announce long work that is not a turn."""
        if self._bar is not None:
            self._bar.update(self._task, description=what, refresh=True)
        else:
            print(f"# {what}", file=sys.stderr, flush=True)

    def _as_before(self) -> float:
        return (time.monotonic() - self._begun) / (self._done - 1) * (self._turns - self._done)

    def say(self, line: str) -> None:
        """A line on stdout, at once, above the bar."""
        if self._bar is not None:
            self._bar.stop()
        print(line, flush=True)
        if self._bar is not None:
            self._bar.start()


@contextlib.contextmanager
def progress(turns: int, seconds_left: Callable[[], float] | None = None) -> Iterator[Bar]:
    if not os.isatty(2):
        yield Bar(turns, seconds_left=seconds_left)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("left"),
    )  # fmt: skip
    # Drawn at every turn, not by a thread, which would run during measurements and forks. Nor may it use stdout, which
    # may be a file.
    with Progress(
        *columns, console=Console(stderr=True), transient=True, auto_refresh=False, redirect_stdout=False
    ) as bar:
        task = bar.add_task("starting", total=turns)
        bar.refresh()
        yield Bar(turns, bar, task)
