"""What to launch: the job, validated; its ranks' environment; the port of their rendezvous."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

from symcomm.errors import BadArgumentError, ResourceError, bad_argument
from symcomm.launcher.reaper import MARK
from symcomm.store.launchers import identify_node, surroundings

JOIN = "SYMCOMM_JOIN"  # as in group/default.py, which is not loaded here: a rank joins the ranks of that attempt

CALL = "symcomm run"
RESTARTS = ("all", "failed")
LOCAL_ADDRESS = "127.0.0.1"
AGENT_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # the launcher keeps the store, so it outlives any rank
# An outer torchrun would have set these for its own ranks; ours host their store themselves.
NOT_INHERITED = ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", *AGENT_STORE, JOIN)


@dataclass(frozen=True)
class Job:
    """What to launch. ``endpoint`` is None on a single node: a free port is found."""

    command: Sequence[str]
    ranks_here: int
    nodes: int = 1
    min_nodes: int | None = None  # nodes may come and go, between this many and ``nodes``
    node_rank: int = 0
    endpoint: tuple[str, int] | None = None
    max_restarts: int = 0
    restart: str = "all"  # or "failed": only the rank that failed starts again, and joins the others
    grace: float = 5.0
    tag: str = ""
    log_dir: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    server: bool = False
    insecure: bool = False  # other users or hosts may reach the store
    bind_numa: bool = False  # bind each rank to the cores of one NUMA node
    token: str = field(default_factory=secrets.token_urlsafe)  # the job's token, if none is given
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_here

    @property
    def first_rank(self) -> int:
        return self.node_rank * self.ranks_here

    def check(self) -> None:
        """Refuse contradictory options before anything starts."""
        if not self.command:
            raise BadArgumentError(f"{CALL}: nothing to run; name a script: `symcomm run -n 2 script.py`.")
        if self.ranks_here < 1:
            raise bad_argument(CALL, "-n", self.ranks_here, "1 or more")
        if self.nodes < 1:
            raise bad_argument(CALL, "--nnodes", self.nodes, "1 or more")
        if not 0 <= self.node_rank < self.nodes:
            allowed = f"0 to {self.nodes - 1}" if self.nodes > 1 else "0"
            raise bad_argument(CALL, "--node-rank", self.node_rank, allowed, f"the job has --nnodes {self.nodes}")
        if self.min_nodes is not None and not 1 <= self.min_nodes <= self.nodes:
            raise bad_argument(CALL, "--nnodes", f"{self.min_nodes}:{self.nodes}", "MIN:MAX with 1 <= MIN <= MAX")
        if (self.nodes > 1 or self.min_nodes is not None) and self.endpoint is None:
            example = f"`--rdzv-endpoint {socket.gethostname()}:29500`"
            count = self.nodes if self.min_nodes is None else f"{self.min_nodes}:{self.nodes}"
            raise BadArgumentError(
                f"{CALL}: --rdzv-endpoint is missing; with --nnodes {count}, give every node the same one, "
                f"a free port of node 0: {example}."
            )
        if self.nodes > 1 and self.min_nodes is None and (self.max_restarts or self.restart == "failed"):
            fix = f"write --nnodes {self.nodes}:{self.nodes}, and the launchers of the nodes talk to each other"
            name, got = ("--max-restarts", self.max_restarts) if self.max_restarts else ("--restart", self.restart)
            raise bad_argument(CALL, name, got, f"{0 if self.max_restarts else 'all'} with --nnodes {self.nodes}", fix)
        if self.max_restarts < 0:
            raise bad_argument(CALL, "--max-restarts", self.max_restarts, "0 or more")
        if self.restart not in RESTARTS:
            raise bad_argument(CALL, "--restart", self.restart, " or ".join(RESTARTS))
        if self.grace < 0:
            raise bad_argument(CALL, "--grace", self.grace, "0 or more seconds")
        if not (self.is_alone or self.given_token or self.insecure or _is_loopback(self.endpoint)):
            host, port = self.endpoint or ("", 0)
            raise BadArgumentError(
                f"{CALL}: nodes would meet at {host}:{port}, where anybody can connect, and the job has no token; give "
                f"every node the same one, for example `export SYMCOMM_TOKEN={self.token}` (a new one for each job), "
                "or say --insecure on a network where you trust everybody."
            )
        if taken := sorted(set(self.env) & {*self.assigned(0, 0, "", 0), *AGENT_STORE, JOIN}):
            raise bad_argument(CALL, "--env", taken[0], "a variable that the launcher does not set itself")
        if not re.fullmatch(r"[\w.+=-]*", self.tag) or self.tag in (".", ".."):
            raise bad_argument(CALL, "--tag", self.tag, "letters, digits and any of . _ + = -", "it names a directory")

    def log_directory(self, attempt: int) -> Path | None:
        return self.log_dir / self.tag / f"attempt-{attempt}" if self.log_dir else None

    def assigned(self, local_rank: int, attempt: int, address: str, port: int) -> dict[str, str]:
        """The variables that tell a rank who it is. The names are torchrun's."""
        rank = self.first_rank + local_rank
        values = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.ranks_here,
            "GROUP_RANK": self.node_rank,
            "GROUP_WORLD_SIZE": self.nodes,
            "ROLE_NAME": "default",
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": self.world_size,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": attempt,
            "TORCHELASTIC_MAX_RESTARTS": self.max_restarts,
            # must be the same on every node without communication between the launchers
            "TORCHELASTIC_RUN_ID": self.tag or (self.mark if self.is_alone else "none"),
            MARK: self.mark,
        }
        return {key: str(value) for key, value in values.items()}

    @property
    def keeps_store(self) -> bool:
        """Whether the launcher serves the ranks' store: elastic ranks need one that outlives them."""
        return self.restart == "failed" or self.min_nodes is not None

    @property
    def given_token(self) -> str:
        return self.env.get("SYMCOMM_TOKEN", os.environ.get("SYMCOMM_TOKEN", ""))

    @property
    def admits_unauthenticated(self) -> bool:
        """Whether a store that the launcher serves accepts clients without the token. PyTorch's clients cannot prove a
        token, and must work unless the user has set one."""
        return self.insecure or not self.given_token

    @property
    def is_alone(self) -> bool:
        return self.nodes == 1 and self.min_nodes is None

    def environment(
        self, local_rank: int, attempt: int, address: str, port: int, joins: int | None = None
    ) -> dict[str, str]:
        """The whole environment of one rank: ours, torchrun's variables, and what the user asked for. ``joins``: the
        attempt whose ranks it must join."""
        defaults = {
            "OMP_NUM_THREADS": str(max(1, cores() // self.ranks_here)),
            "PYTHONUNBUFFERED": "1",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }
        if self.is_alone:  # otherwise the user must set it: launchers do not communicate before their ranks do
            defaults["SYMCOMM_TOKEN"] = self.token
        inherited = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
        if self.server:
            defaults["SYMCOMM_SERVER"] = "1"
            if inherited.get("SYMCOMM_SERVER") in ("", "0"):
                del inherited["SYMCOMM_SERVER"]
        assigned = self.assigned(local_rank, attempt, address, port)
        if self.keeps_store:
            assigned |= AGENT_STORE
        if joins is not None:
            assigned[JOIN] = str(joins)
        return {**defaults, **inherited, **self.env, **assigned}


# --- the port ------------------------------------------------------------------------------------


def reserve_port(port: int = 0) -> socket.socket:
    """A socket that keeps a port for rank 0's store: a free one, or the given one. Hold it while the ranks run.

    It is bound with SO_REUSEADDR and never listens. Linux then lets rank 0 bind the same port, since stores set
    SO_REUSEADDR too, but never hands it to a program that asks for any free port."""
    with contextlib.suppress(OSError):  # no IPv6 here, or the port is taken
        return _bound(socket.AF_INET6, port)
    try:
        return _bound(socket.AF_INET, port)
    except OSError as error:
        raise ResourceError(
            f"{CALL}: port {port or 'any'} cannot be used on this host ({os.strerror(error.errno or 0)}); "
            "end the program that holds it, or name another in --rdzv-endpoint on every node."
        ) from None


def _bound(family: int, port: int) -> socket.socket:
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", port))
    except OSError:
        holder.close()
        raise
    return holder


def _is_loopback(endpoint: tuple[str, int] | None) -> bool:
    """Whether only this machine can connect there. Of names, only ``localhost`` counts."""
    host = endpoint[0] if endpoint else ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def parse_endpoint(text: str) -> tuple[str, int]:
    """``host:port``, ``1.2.3.4:port`` or ``[::1]:port``."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:/]+)):(\d{1,5})", text)
    if not match or not 0 < int(match[3]) < 65536:
        raise bad_argument(CALL, "--rdzv-endpoint", text, "host:port with a port of 1 to 65535", "e.g. node0:29500")
    return match[1] or match[2], int(match[3])


# --- which node -----------------------------------------------------------------------------------


class NodePlacement(NamedTuple):
    """Which of the job's nodes this is, and where they meet. ``least``: with fewer nodes the job ends."""

    nodes: int
    node_rank: int
    endpoint: tuple[str, int] | None
    least: int | None = None


def find_placement(
    nnodes: str, node_rank: int | None, endpoint: tuple[str, int] | None, environ: Mapping[str, str] | None = None
) -> NodePlacement:
    """``--nnodes`` (a number, auto or MIN:MAX), ``--node-rank`` and ``--rdzv-endpoint``, or a scheduler's variables in
    their place. These count only for several nodes or auto: a batch script on the first of many nodes may run something
    alone."""
    if span := re.fullmatch(r"(\d{1,6}):(\d{1,6})", nnodes):
        return NodePlacement(int(span[2]), node_rank or 0, endpoint, int(span[1]))
    if nnodes != "auto" and not re.fullmatch(r"-?\d{1,6}", nnodes):
        raise bad_argument(CALL, "--nnodes", nnodes, "a number of 1 or more, auto, or MIN:MAX")
    count = None if nnodes == "auto" else int(nnodes)
    if count is not None and (count <= 1 or (node_rank is not None and endpoint is not None)):
        return NodePlacement(count, node_rank or 0, endpoint)
    told = identify_node(surroundings() if environ is None else environ, count)
    nodes = told.nodes if count is None else count
    if nodes is None:
        raise BadArgumentError(
            f"{CALL}: --nnodes auto, but nobody says how many nodes there are (Slurm, MPI, Kubernetes with WORLD_SIZE, "
            "PET_NNODES); give the number."
        )
    if told.nodes not in (None, nodes):
        raise bad_argument(CALL, "--nnodes", nodes, f"{told.nodes}, which {told.source} says, or auto")
    mine = told.node_rank if node_rank is None else node_rank
    if mine is None:
        fix = f"give each node its own: --node-rank 0 to --node-rank {nodes - 1}"
        raise BadArgumentError(f"{CALL}: --node-rank is missing; with --nnodes {nodes}, {fix}.")
    if endpoint is None and nodes > 1 and told.master_addr and told.master_port:
        endpoint = told.master_addr, told.master_port
    return NodePlacement(nodes, mine, endpoint)


# --- how many ------------------------------------------------------------------------------------


def cores() -> int:
    return len(os.sched_getaffinity(0))


def parse_count(text: str) -> int:
    """``-n``: a number, ``auto`` or ``cpu`` (one rank a core), ``gpu`` (one rank a GPU)."""
    if text in ("auto", "cpu"):
        return cores()
    if text == "gpu":
        count = count_gpus(os.environ)
        if not count:
            hidden = "CUDA_VISIBLE_DEVICES" in os.environ
            found = "CUDA_VISIBLE_DEVICES hides all" if hidden else "nvidia-smi found none"
            raise BadArgumentError(f"{CALL}: -n gpu, but there is no GPU here ({found}); use -n cpu or a number.")
        return count
    if not re.fullmatch(r"\d{1,6}", text) or int(text) < 1:
        raise bad_argument(CALL, "-n", text, "a number of 1 or more, auto, cpu or gpu")
    return int(text)


def count_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that the ranks would see. As in CUDA, an entry of -1 hides itself and all after it."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        entries = [entry.strip() for entry in visible.split(",")]
        return next((i for i, entry in enumerate(entries) if entry in ("", "-1")), len(entries))
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


# --- what to run ---------------------------------------------------------------------------------


def build_command(
    program: str,
    args: Sequence[str],
    *,
    module: bool = False,
    no_python: bool = False,
    env: Mapping[str, str] | None = None,
) -> list[str]:
    """The command line of every rank; refuses one that could not start."""
    if module and no_python:
        raise BadArgumentError(f"{CALL}: -m and --no-python contradict each other; a module needs Python.")
    if module:
        check_module(program, (env or {}).get("PYTHONPATH", ""))
        return [sys.executable, "-m", program, *args]
    if no_python:
        return [find_executable(program), *args]
    path = Path(program)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise bad_argument(CALL, "script", program, "a file or a directory with a __main__.py")
    if not path.exists():
        fix = "for a module say `-m`, for a program that is not Python `--no-python`"
        raise bad_argument(CALL, "script", program, f"a file (looked in {os.getcwd()})", fix)
    if not os.access(path, os.R_OK):
        raise bad_argument(CALL, "script", program, "readable")
    return [sys.executable, program, *args]


def find_executable(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        if os.path.isfile(program):
            fix = f"`chmod +x {program}`, and write it with a directory: ./{os.path.basename(program)}"
            raise bad_argument(CALL, "program", program, "executable", fix)
        raise bad_argument(CALL, "program", program, "an executable file or a command on PATH")
    return found


def check_module(name: str, python_path: str = "") -> None:
    """Refuse a module that ``python -m`` would not find. Imports nothing."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise bad_argument(CALL, "-m", name, "a module's dotted name, as in an import statement")
    places = [os.getcwd(), *filter(None, python_path.split(os.pathsep))]  # where ranks look first
    spec = _find_spec(name, places)
    if spec is None:
        fix = "leave out -m to run a file" if name.endswith(".py") else "install it, or set PYTHONPATH"
        raise bad_argument(CALL, "-m", name, f"a module that this Python can find ({sys.executable})", fix)
    if spec.submodule_search_locations is not None and _find_spec(f"{name}.__main__", places) is None:
        raise bad_argument(CALL, "-m", name, "a module or a package with a __main__.py")


def _find_spec(name: str, places: list[str]) -> ModuleSpec | None:
    """Like importlib.util.find_spec, which would import the parent packages."""
    top, *rest = name.split(".")
    before = list(sys.path)
    sys.path[:0] = places
    try:
        spec = None if top == "__main__" else importlib.util.find_spec(top)
        for part in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None
            # the last part alone: with a dotted name, a namespace package would ask for its parent in sys.modules
            spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
        return spec
    except (ValueError, ImportError):
        return None
    finally:
        sys.path[:] = before


def parse_env(pairs: Sequence[str]) -> dict[str, str]:
    """``--env KEY=VALUE``, any number of times."""
    env = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key or "\0" in pair:
            raise bad_argument(CALL, "--env", pair, "KEY=VALUE")
        env[key] = value
    return env
