"""How far a benchmark is: rows as they come, a bar and the time left."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import sys
from collections.abc import Callable

import pytest

from symcomm.bench import ddp as bench_ddp
from symcomm.cli import bench
from symcomm.cli.progress import progress


def test_rows_come_as_they_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A program's first rows are printed before its next part is begun, and none twice."""
    shown: list[str] = []

    def stand_in(workload: bench_ddp.DdpWorkload, tick: object, seen: Callable[[list], None]) -> list:
        found = [
            bench_ddp.DdpMeasurement(model, side, 0.0, parameters=1000, turns=[0.1 * n for n in (1, 2, 3)])
            for model in workload.models
            for side in bench_ddp.SIDES
        ]
        for model in workload.models:
            seen([f for f in found if workload.models.index(f.program) <= workload.models.index(model)])
            shown.append(capsys.readouterr().out)
        return found

    monkeypatch.setattr(bench_ddp, "run_ddp_bench", stand_in)
    workload = bench_ddp.DdpWorkload(2, 3, 1)
    bench.bench_program("ddp", workload, bench.Wanted(False, False, None, None))
    assert [sum(line.startswith("  ") for line in text.splitlines()) for text in shown] == [
        len(bench_ddp.SIDES) for _ in workload.models
    ]
    assert "# load " in capsys.readouterr().out


def test_time_left_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A line every ten seconds or so, on stderr, plain."""
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr("symcomm.cli.progress.time.monotonic", lambda: float(next(clock)))
    monkeypatch.setattr("symcomm.cli.progress.os.isatty", lambda fd: False)
    with progress(5) as bar:
        bar.begin("compiling")
        for turn in range(5):
            bar(f"turn {turn}")
    said = capsys.readouterr()
    turns = r"# compiling\n(# \d of 5 turns \(turn \d\), about \d+ s left\n)+"
    assert said.out == "" and re.fullmatch(turns, said.err), said.err


def test_time_left_on_a_terminal():
    """In a real one: a bar, rows above it, and nothing of the bar stays."""
    code = (
        "import time\nfrom symcomm.cli.progress import progress\n"
        "with progress(4) as bar:\n    bar.begin('compiling')\n"
        "    for turn in range(4):\n        time.sleep(0.3); bar(f'turn {turn}'); bar.say(f'row {turn}')\n"
    )
    shown, code = run_in_terminal([sys.executable, "-c", code])
    assert code == 0 and "compiling" in shown and "2/4" in shown
    assert re.search(r"0:00:0\d\S* left", re.sub(r"\x1b\[[0-9;?]*\w", "", shown))
    assert [f"row {turn}" in shown for turn in range(4)] == [True] * 4


def run_in_terminal(command: list[str]) -> tuple[str, int]:
    """All that a program writes to a terminal, and its exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, {**os.environ, "TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"})
    shown = b""
    with contextlib.suppress(OSError):  # the end of the other side
        while piece := os.read(terminal, 65536):
            shown += piece
    os.close(terminal)
    return shown.decode(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
