"""What the files of programs share."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"
LIMIT = 900.0  # seconds of one program on one backend
LAST = 400  # characters of what a program wrote, when it failed


@dataclass(frozen=True)
class Outcome:
    """``values``: what must be the same on both backends, as text. ``seconds``: of the part that both ran."""

    ran: str
    works: bool
    seconds: float
    values: str = ""
    why: str = ""


def execute(python: str, *words: str, **env: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """A program of the environment, with our sources; and how long it took."""
    told = {**os.environ, "PYTHONPATH": str(SOURCES), **env}
    begun = time.monotonic()
    try:
        done = subprocess.run([python, *words], env=told, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired as late:
        done = subprocess.CompletedProcess(late.cmd, -9, str(late.stdout or ""), f"not over after {LIMIT:g} s")
    return done, time.monotonic() - begun


def ending(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr or done.stdout).strip()[-LAST:]
