"""What launchers and schedulers leave in the environment: which rank this process is, and where all ranks meet.

``identify`` finds the rank of a process; ``identify_node`` finds which of its nodes `symcomm run` has to serve.

If a launcher names no meeting place, this module derives one. The host is the scheduler's first node, the first pod of
a Kubernetes job, or 127.0.0.1 if all ranks are on one machine. The port is ``20000 + crc32(job id) % 10000``, which
every rank computes the same way; without a job id, and in Kubernetes, where a pod has all its ports to itself, it
is 29500. MASTER_ADDR and MASTER_PORT win over both.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple

from symcomm.errors import RendezvousError

DEFAULT_PORT = 29500
PORTS_FROM, PORTS_COUNT = 20000, 10000  # below 32768, from where Linux assigns free ports
PLAIN = "environment variables"
POD_DOMAIN = "SYMCOMM_POD_DOMAIN"  # what comes after a pod's name, when other pods ask for it


def _comm_world(prefix: str) -> tuple[tuple[str, ...], ...]:
    return tuple((f"{prefix}_COMM_WORLD_{what}",) for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))


# launcher -> variables for rank, world size, rank and number of ranks on this machine (the first one set counts)
LAUNCHERS: dict[str, tuple[tuple[str, ...], ...]] = {
    PLAIN: (("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    "Open MPI": _comm_world("OMPI"),
    "MVAPICH": _comm_world("MV2"),
    "MPICH": (
        ("PMI_RANK", "PMIX_RANK"),
        ("PMI_SIZE", "WORLD_SIZE"),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
    ),
    "Slurm": (("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), ()),
}
JOB_IDS = {
    "Open MPI": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    "MVAPICH": ("MV2_COMM_WORLD_JOBID",),
    "MPICH": ("PMI_JOBID", "PMI_NAMESPACE", "PMIX_NAMESPACE"),
    "Slurm": ("SLURM_JOB_ID", "SLURM_JOBID"),
}
SCHEDULERS_IDS = (*JOB_IDS["Slurm"], "PBS_JOBID", "LSB_JOBID")
# Every variable that an error may want to show: the plain ones first, each once.
_RANKS = (name for groups in list(LAUNCHERS.values())[1:] for names in groups[:2] for name in names)
_SHOWN = (*chain(*LAUNCHERS[PLAIN]), "MASTER_ADDR", "MASTER_PORT", *_RANKS, "JOB_COMPLETION_INDEX")
KNOWN = tuple(dict.fromkeys(_SHOWN))


class Identity(NamedTuple):
    """What the environment says about this process; None where it does not say."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    source: str = "nothing"


# --- a process -------------------------------------------------------------------------------------


def identify(environ: Mapping[str, str]) -> Identity:
    """Read the variables of the first launcher that has both rank and world size. Plain variables win over MPI, Slurm,
    Kubernetes.

    (Open MPI wins over Slurm because of mpirun in a batch job, where Slurm's variables speak of the job's one script.)
    """
    found = Identity(master_addr=environ.get("MASTER_ADDR") or None, master_port=read_number(environ, "MASTER_PORT"))
    for launcher, (rank, size, local_rank, local_size) in LAUNCHERS.items():
        if (me := read_number(environ, *rank)) is None or (everyone := read_number(environ, *size)) is None:
            continue
        found = found._replace(
            rank=me,
            world_size=everyone,
            local_rank=read_number(environ, *local_rank),
            local_world_size=_slurm_local_size(environ) if launcher == "Slurm" else read_number(environ, *local_size),
            source="torchrun" if launcher == PLAIN and "TORCHELASTIC_RUN_ID" in environ else launcher,
        )
        return _with_meeting_place(found, launcher, environ)
    if (pod := _pod(environ)) and (everyone := read_number(environ, "WORLD_SIZE")) is not None:
        return _in_pod(found, pod, everyone, environ)
    # Half of it: the caller may give the other half.
    one, all_of_us = read_number(environ, "RANK"), read_number(environ, "WORLD_SIZE")
    half = one is not None or all_of_us is not None
    return found._replace(rank=one, world_size=all_of_us, source=PLAIN if half else found.source)


def _with_meeting_place(found: Identity, launcher: str, environ: Mapping[str, str]) -> Identity:
    """Fill in address and port if a launcher names the job but no meeting place."""
    if launcher == PLAIN:
        return found
    addr, port = found.master_addr, found.master_port
    if addr is None and found.local_world_size == found.world_size:
        addr = "127.0.0.1"
    if addr is None:
        addr = _first_node(environ)
    if addr is not None and port is None:
        job = _first(environ, *JOB_IDS[launcher], *SCHEDULERS_IDS)
        port = port_for_job(job) if job else DEFAULT_PORT
    return found._replace(master_addr=addr, master_port=port)


def _first_node(environ: Mapping[str, str]) -> str | None:
    """Where rank 0 runs, as the scheduler lists its nodes: Slurm, LSF, PBS."""
    if nodes := _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        return first_host(nodes)
    if hosts := environ.get("LSB_HOSTS", "").split():
        return hosts[0]
    try:
        with open(environ.get("PBS_NODEFILE", ""), encoding="utf-8") as file:
            return file.readline().strip() or None
    except OSError:
        return None


def first_host(nodelist: str) -> str:
    """The first name in a Slurm node list: ``gpu[03-07,9],cpu1`` -> ``gpu03``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group() if first else "")


def port_for_job(job: str) -> int:
    """A port that all ranks of a job compute without communication."""
    return PORTS_FROM + zlib.crc32(job.encode()) % PORTS_COUNT


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    """Tasks on this node, from ``SLURM_*TASKS_PER_NODE`` (``4(x2),3``: two nodes with 4, one with 3) and our node."""
    counts: list[int] = []
    for tasks, repeat in re.findall(
        r"(\d+)(?:\(x(\d+)\))?", _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or ""
    ):
        counts += [int(tasks)] * int(repeat or 1)
    node = read_number(environ, "SLURM_NODEID")
    if node is not None and node < len(counts):
        return counts[node]
    if len(set(counts)) == 1:
        return counts[0]
    return read_number(environ, "SLURM_NTASKS_PER_NODE")


# --- a pod -----------------------------------------------------------------------------------------


class _Pod(NamedTuple):
    number: int
    first: str  # the name of the pod with index 0, or "" when ours does not follow the pattern
    kind: str


def _pod(environ: Mapping[str, str]) -> _Pod | None:
    """Which of a set of pods this is. Pods of indexed Jobs and of StatefulSets are called ``name-0``, ``name-1``, ...

    A name like that means nothing outside Kubernetes, where machines are called gpu-17.
    """
    numbered = re.fullmatch(r"(.+)-(\d+)", environ.get("HOSTNAME", "").split(".")[0])
    index = read_number(environ, "JOB_COMPLETION_INDEX")
    if index is not None:
        mine = numbered is not None and int(numbered[2]) == index
        return _Pod(index, f"{numbered[1]}-0" if numbered and mine else "", "Kubernetes Job")
    if numbered and environ.get("KUBERNETES_SERVICE_HOST"):
        return _Pod(int(numbered[2]), f"{numbered[1]}-0", "Kubernetes StatefulSet")
    return None


def _in_pod(found: Identity, pod: _Pod, world_size: int, environ: Mapping[str, str]) -> Identity:
    """One rank per pod. Pods find each other by name if a headless service gives them a domain."""
    addr, domain = found.master_addr, environ.get(POD_DOMAIN, "")
    if addr is None and world_size == 1:
        addr = "127.0.0.1"
    if addr is None and pod.first and domain:
        addr = f"{pod.first}.{domain}"
    port = found.master_port if found.master_port is not None or addr is None else DEFAULT_PORT
    return Identity(pod.number, world_size, 0, 1, addr, port, pod.kind)


def pod_domain(hostname: str, hosts_file: str = "/etc/hosts") -> str | None:
    """The domain in which other pods find this one: the kubelet writes a pod's full name into its hosts file."""
    try:
        with open(hosts_file, encoding="utf-8") as file:
            names = [name for line in file for name in line.partition("#")[0].split()[1:]]
    except OSError:
        return None
    return next((name[len(hostname) + 1 :] for name in names if name.startswith(f"{hostname}.")), None)


# --- a node ----------------------------------------------------------------------------------------


class Node(NamedTuple):
    """Which of a job's nodes this is, and where all ranks meet; None where nobody says."""

    nodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    source: str = "nothing"


def identify_node(environ: Mapping[str, str], nodes: int | None = None) -> Node:
    """The node of this process, if its launcher started only one process on the node.

    ``nodes``: how many there are, if the caller knows. Kubeflow has its own variables (``PET_``).
    """
    addr, port = environ.get("MASTER_ADDR") or None, read_number(environ, "MASTER_PORT")
    count, mine = environ.get("PET_NNODES", ""), read_number(environ, "PET_NODE_RANK")
    if count.isdigit() and mine is not None:
        return Node(int(count), mine, addr, port, "Kubeflow")
    if nodes is not None and _pod(environ) and not environ.get("RANK"):
        environ = {**environ, "WORLD_SIZE": str(nodes)}
    me = identify(environ)
    in_pod = bool(environ.get("KUBERNETES_SERVICE_HOST")) and me.local_world_size is None
    if me.rank is None or me.world_size is None or (me.source in (PLAIN, "torchrun") and not in_pod):
        return Node(source=me.source)
    if me.local_world_size not in (1, None):
        raise RendezvousError(
            f"symcomm run: {me.source} has started {me.local_world_size} processes on this node, and each would start "
            "all of its ranks; start one a node (`srun --ntasks-per-node=1`, `mpirun --map-by ppr:1:node`)."
        )
    return Node(me.world_size, me.rank, me.master_addr, me.master_port, me.source)


# --- what is not in the environment ----------------------------------------------------------------


def surroundings() -> dict[str, str]:
    """The environment, and what launchers tell a process in other ways."""
    environ = dict(os.environ)
    if "PMI_RANK" in environ and "PMI_JOBID" not in environ and (job := hydra_job()):
        environ["PMI_JOBID"] = job
    if "KUBERNETES_SERVICE_HOST" in environ or "JOB_COMPLETION_INDEX" in environ:
        name = environ.setdefault("HOSTNAME", os.uname().nodename)
        if POD_DOMAIN not in environ and (domain := pod_domain(name.split(".")[0])):
            environ[POD_DOMAIN] = domain
    return environ


def hydra_job() -> str | None:
    """A job id for MPICH's launcher, which names none: the process above all ranks of this machine, if there is one.

    Without it, two jobs on one machine would meet at one port, and the ranks of one could join the other.
    """
    pid = os.getpid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                name, rest = file.read().rsplit(b")", 1)
        except OSError:
            return None
        if name.endswith(b"(hydra_pmi_proxy"):
            return f"hydra {pid}"
        pid = int(rest.split()[1])
    return None


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def read_number(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is set."""
    for name in names:
        if text := environ.get(name):
            if not re.fullmatch(r"\s*\d+\s*", text):
                raise RendezvousError(f"rendezvous: {name} must be a number, got {text!r}.")
            return int(text)
    return None
