"""Runs a module of checks on forked ranks, all in one process tree, and collects what every rank has to say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_checks(module: str, checks: list[str], environment: dict[str, str], seconds: float) -> dict[str, list[str]]:
    """Check -> each rank's words, "" when all was well. What the process wrote to stderr is under "stderr"."""
    with subprocess.Popen(
        [sys.executable, "-m", module], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment, cwd=ROOT, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            out, err = process.communicate()
    told: dict[str, list[str]] = {name: [] for name in checks}
    for line in out.splitlines():
        start = line.find('{"check"')  # Gloo prints there too ("[Gloo] Rank 0 is connected to ...")
        if start >= 0:
            said = json.loads(line[start:])
            told[said["check"]].append(said["text"])
    told["stderr"] = [err]
    return told
