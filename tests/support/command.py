"""The command, in a process of its own that has torch already (tests/support/loaded.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import loaded

SRC = Path(__file__).parents[2] / "src"


def symcomm(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess:
    return loaded.run([sys.executable, "-m", "symcomm", *arguments], cwd=cwd, env={**os.environ, **env}, timeout=60)
