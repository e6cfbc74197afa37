"""Copies with non-temporal stores (`_core/memory/nontemporal.c`): the same bytes, whatever their size and address."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from symcomm._core import native

pytest.importorskip("torch", reason="values are compared with torch's")


def run(*command: str) -> str:
    env = {**os.environ, "SYMCOMM_STREAM_BYTES": "0"}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("wrong", ["many", "-1", "12 MiB", "9" * 30])
def test_a_threshold_that_is_no_number_is_refused(wrong: str):
    environment = {**os.environ, "SYMCOMM_STREAM_BYTES": wrong}
    command = [sys.executable, "-c", "import symcomm._core._native"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    words = f"ValueError: SYMCOMM_STREAM_BYTES must be a number of bytes such as 33554432, got '{wrong}'."
    assert done.stderr.splitlines()[-1] == words


NARROWER = "avx2" if "avx2" in native.reduce_sets()[0] else ""  # than the widest stores that this CPU has


@pytest.mark.parametrize(("ranks", "kernels"), [("2", ""), ("3", NARROWER)])
def test_every_collective_and_messages(ranks: str, kernels: str, monkeypatch: pytest.MonkeyPatch):
    """Before it measures, a benchmark compares every element."""
    monkeypatch.setenv("SYMCOMM_KERNELS", kernels)
    sizes = ("-b", "12", "-e", "3M", "-f", "64")
    said = run("-m", "symcomm", "bench", "all", *sizes, "--ranks", ranks, "--rounds", "1", "-n", "1", "-w", "1")
    assert "# wrong elements: 0" in said
    assert said.count("all_to_all") >= 1 and said.count("p2p") >= 1, said
