"""The orders that the core and its models take for granted, tried on the cores of this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.compiler import compile_c

SOURCE = Path(__file__).parent / "litmus.c"
SECONDS = 0.4  # each shape; half of it once more without fences
CORES = len(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[int, int]]:
    """(shape, "with" or "without" fences) -> (how often the forbidden outcome was seen, runs)"""
    if CORES < 2:
        pytest.skip("needs two cores: on one nothing overtakes anything")
    program = compile_c(SOURCE, tmp_path_factory.mktemp("litmus") / "litmus", "-std=c11", "-pthread")
    done = subprocess.run([str(program), str(SECONDS)], capture_output=True, text=True, check=True, timeout=100)
    print(done.stdout)  # without fences some forbidden outcomes are to be expected on arm64: they are reported, no more
    rows = [line.split() for line in done.stdout.splitlines() if "skipped" not in line]
    return {(shape, fences): (int(seen), int(runs)) for shape, fences, seen, runs in rows}


@pytest.mark.parametrize("shape", ["store-buffering", "message-passing", "voiding", "handed-on"])
def test_the_forbidden_outcome_is_never_seen(shape: str, outcomes: dict[tuple[str, str], tuple[int, int]]):
    if (shape, "with") not in outcomes:
        pytest.skip(f"needs three cores, this machine lends {CORES}")
    seen, runs = outcomes[shape, "with"]
    assert runs >= 10_000, "too few to say anything"
    assert seen == 0, f"{seen} of {runs}"
