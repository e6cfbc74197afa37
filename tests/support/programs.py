"""Programs that tests run in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.support import loaded

ROOT = Path(__file__).parents[2]


def environment(**extra: str) -> dict[str, str]:
    """Ours, without what a launcher around the tests may have set."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    kept |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return {**kept, **extra}


def kernels_of(name: str) -> str:
    """A cache for Inductor that one test uses, run after run. Known kernels are not compiled again, which takes a
    second each. Graphs are, since they contain our own code."""
    folder = ROOT / "build" / "inductor" / name
    for graphs in ("fxgraph", "aotautograd"):
        shutil.rmtree(folder / graphs, ignore_errors=True)
    return str(folder)


def run(*command: str, deadline: float = 60, **extra: str) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=deadline, env=environment(**extra), cwd=ROOT, check=False
    )
    return _output(done)


def run_loaded(*words: str, deadline: float = 60, **extra: str) -> str:
    """The same for Python, in processes that have torch already."""
    return _output(loaded.run([sys.executable, *words], timeout=deadline, env=environment(**extra), cwd=ROOT))


def _output(done: subprocess.CompletedProcess) -> str:
    words = f"{done.args} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, words
    return done.stdout


def find_mpirun() -> str | None:
    """Beside our interpreter (the ``dev`` extra brings MPICH), on the PATH, or below SYMCOMM_PEERS_DIR."""
    places = [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    found = shutil.which("mpirun", path=os.pathsep.join(places))
    peers = os.environ.get("SYMCOMM_PEERS_DIR")
    if found is None and peers:
        found = next(iter(sorted(map(str, Path(peers).glob("*/bin/mpirun")))), None)
    return found
