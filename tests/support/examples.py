"""Programs of examples/, run by a launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import loaded

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
}


def run_example(
    name: str, *args: str, ranks: int = 2, options: tuple[str, ...] = (), torchrun: bool = False, seconds: float = 100,
    fresh: bool = False,
) -> list[str]:  # fmt: skip
    """The lines that it prints. Processes have torch already, unless ``fresh``."""
    launcher = ["symcomm", "run", "-n", str(ranks), "--no-prefix", *options]
    if torchrun:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *options]
    command = [sys.executable, "-m", *launcher, str(ROOT / "examples" / name), *args]
    if fresh:
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds)
    else:
        done = loaded.run(command, env=ENVIRONMENT, timeout=seconds)
    assert done.returncode == 0, f"{name} {args} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()


def losses(lines: list[str]) -> list[float]:
    """Python prints as many digits as it takes to get the same bits back."""
    return [float(line.split()[1]) for line in lines if line.startswith("loss ")]
