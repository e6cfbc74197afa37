"""Runs a module of checks on forked ranks, all in one process tree, and collects what every rank says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support import loaded

ROOT = Path(__file__).parents[2]


def run_checks(module: str, checks: list[str], environment: dict[str, str], seconds: float) -> dict[str, list[str]]:
    """Check -> each rank's words, "" if all was well. "stderr" has what the process wrote there."""
    done = loaded.run([sys.executable, "-m", module], env=environment, cwd=ROOT, timeout=seconds)
    told: dict[str, list[str]] = {name: [] for name in checks}
    for line in done.stdout.splitlines():
        start = line.find('{"check"')  # Gloo prints there too ("[Gloo] Rank 0 is connected to ...")
        if start >= 0:
            said = json.loads(line[start:])
            told[said["check"]].append(said["text"])
    told["stderr"] = [done.stderr]
    return told
