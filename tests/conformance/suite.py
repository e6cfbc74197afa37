"""One test of PyTorch's suite: run it with a hard deadline, keep what it printed, say how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PASSES = Path(__file__).parent / "gloo_passes.txt"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass
class Result:
    name: str
    status: str
    seconds: float
    why: str = ""
    printed: str = ""


def make_cases(suite: Any, start: str) -> type[unittest.TestCase]:
    """The suite as a TestCase. Forked ranks save the seconds that each would need to import torch."""
    import torch.multiprocessing as mp

    class Cases(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(mp.get_context(start).Process)

    # What a spawned rank unpickles.
    Cases.__qualname__ = "Cases"
    Cases.__module__ = __name__
    globals()["Cases"] = Cases
    return Cases


@contextlib.contextmanager
def _output_to(file: Any) -> Iterator[None]:
    """Standard output and error of this process and of the ranks it starts."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in enumerate(kept, start=1):
            os.dup2(old, number)
            os.close(old)


def run_one(cases: type[unittest.TestCase], name: str, timeout: int) -> Result:
    def ring(*_: Any) -> None:
        raise TimeoutError(f"{name} did not end within {timeout} s")

    outcome = unittest.TestResult()
    case = cases(name)
    started = time.monotonic()
    previous = signal.signal(signal.SIGALRM, ring)
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        with _output_to(file):
            signal.alarm(timeout)
            try:
                case.run(outcome)
            except TimeoutError as error:
                outcome.errors.append((case, str(error)))
            finally:
                signal.alarm(0)
                signal.signal(signal.SIGALRM, previous)
        file.seek(0)
        printed = file.read()
    for process in getattr(case, "processes", ()):
        if process.is_alive():
            process.kill()
    seconds = time.monotonic() - started
    bad = [why for _, why in outcome.errors + outcome.failures]
    if bad or outcome.unexpectedSuccesses:
        return Result(name, FAILED, seconds, bad[0] if bad else "unexpected success", printed)
    if outcome.skipped:
        return Result(name, SKIPPED, seconds, outcome.skipped[0][1])
    return Result(name, PASSED, seconds)


def gloo_passes(tag: str) -> set[str]:
    """Names of the tests that stock Gloo passes with this many ranks ("4", "4+mpi"); empty where nobody measured."""
    passes: set[str] = set()
    tags: list[str] = []
    for line in PASSES.read_text().splitlines():
        if line.startswith("["):
            tags = line.strip("[]").split()
        elif line and not line.startswith("#") and tag in tags:
            passes.add(line)
    return passes
