"""Who am I: every launcher's variables, every URL, and every mistake in one clear sentence."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import types
from datetime import timedelta
from typing import Any

import pytest

from symcomm.errors import BadArgumentError, RendezvousError
from symcomm.store import FileStore, HashStore, PrefixStore, rendezvous
from symcomm.store.launchers import (
    Identity,
    Node,
    first_host,
    hydra_job,
    identify,
    identify_node,
    pod_domain,
    port_for_job,
    surroundings,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.without_torch

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
PLAIN = {name: value for name, value in TORCHRUN.items() if not name.startswith("TORCHELASTIC")}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "991",
}
MVAPICH = {f"MV2_COMM_WORLD_{name}": value for name, value in
           (("RANK", "3"), ("SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))}  # fmt: skip
CRAY = {"PMI_RANK": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4"}
# One rank a pod. The domain is read from the pod's hosts file, see test_pods_learn_their_domain.
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "WORLD_SIZE": "4", "SYMCOMM_POD_DOMAIN": "svc.ns.svc.cluster.local"}
INDEXED_JOB = POD | {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2"}
STATEFUL_SET = POD | {"HOSTNAME": "worker-a-3"}
PYTORCH_JOB = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "job-worker-0", "RANK": "1", "WORLD_SIZE": "3",
               "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}  # fmt: skip
FIRST_POD = "train-0.svc.ns.svc.cluster.local"
MPIRUN_PORT = port_for_job("prterun-host-77@1")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Identity()),
        (PLAIN, Identity(3, 8, 1, 2, "node0", 1234, "environment variables")),
        (TORCHRUN, Identity(3, 8, 1, 2, "node0", 1234, "torchrun")),
        (OPEN_MPI, Identity(1, 4, 1, 4, "127.0.0.1", MPIRUN_PORT, "Open MPI")),
        (MPICH, Identity(2, 3, 2, 3, "127.0.0.1", 29500, "MPICH")),
        (SLURM, Identity(5, 7, 1, 3, "gpu03", port_for_job("991"), "Slurm")),
        # who wins
        (PLAIN | OPEN_MPI | SLURM, Identity(3, 8, 1, 2, "node0", 1234, "environment variables")),
        (OPEN_MPI | SLURM, Identity(1, 4, 1, 4, "127.0.0.1", MPIRUN_PORT, "Open MPI")),
        (MPICH | SLURM, Identity(2, 3, 2, 3, "127.0.0.1", port_for_job("991"), "MPICH")),
        # given places win over derived ones
        (OPEN_MPI | {"MASTER_ADDR": "h"}, Identity(1, 4, 1, 4, "h", MPIRUN_PORT, "Open MPI")),
        (SLURM | {"MASTER_PORT": "7"}, Identity(5, 7, 1, 3, "gpu03", 7, "Slurm")),
        # several hosts, and nothing says which is the first
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, Identity(1, 4, 1, 2, None, None, "Open MPI")),
        # mpirun over several nodes of a Slurm job
        (
            OPEN_MPI | SLURM | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            Identity(1, 4, 1, 2, "gpu03", MPIRUN_PORT, "Open MPI"),
        ),
        # a rank without a size is not enough
        ({"RANK": "1"} | MPICH, Identity(2, 3, 2, 3, "127.0.0.1", 29500, "MPICH")),
        ({"PMIX_RANK": "1"}, Identity()),
        ({"PMIX_RANK": "1", "WORLD_SIZE": "4"}, Identity(1, 4, None, None, None, None, "MPICH")),
        ({"RANK": "1"}, Identity(rank=1, source="environment variables")),
        # a step smaller than its job
        (SLURM | {"SLURM_STEP_NUM_TASKS": "6"}, Identity(5, 6, 1, 3, "gpu03", port_for_job("991"), "Slurm")),
        # more MPIs; hosts as LSF lists them
        (MVAPICH, Identity(3, 4, 1, 2, None, None, "MVAPICH")),
        (CRAY, Identity(5, 8, 1, 4, None, None, "MPICH")),
        (
            CRAY | {"LSB_HOSTS": "n4 n4 n5 n5", "LSB_JOBID": "77"},
            Identity(5, 8, 1, 4, "n4", port_for_job("77"), "MPICH"),
        ),
        # srun with PMIx: Slurm's own variables say the size
        (SLURM | {"PMIX_RANK": "5"}, Identity(5, 7, 1, 3, "gpu03", port_for_job("991"), "Slurm")),
        # Kubernetes
        (INDEXED_JOB, Identity(2, 4, 0, 1, FIRST_POD, 29500, "Kubernetes Job")),
        (
            STATEFUL_SET,
            Identity(3, 4, 0, 1, "worker-a-0.svc.ns.svc.cluster.local", 29500, "Kubernetes StatefulSet"),
        ),
        (PYTORCH_JOB, Identity(1, 3, None, None, "job-master-0", 23456, "environment variables")),
        (INDEXED_JOB | {"MASTER_ADDR": "m", "MASTER_PORT": "5"}, Identity(2, 4, 0, 1, "m", 5, "Kubernetes Job")),
        (INDEXED_JOB | {"RANK": "7", "WORLD_SIZE": "9"}, Identity(7, 9, source="environment variables")),
        (INDEXED_JOB | {"HOSTNAME": "renamed"}, Identity(2, 4, 0, 1, None, None, "Kubernetes Job")),
        (INDEXED_JOB | {"SYMCOMM_POD_DOMAIN": ""}, Identity(2, 4, 0, 1, None, None, "Kubernetes Job")),
        (
            INDEXED_JOB | {"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "j-0", "WORLD_SIZE": "1", "SYMCOMM_POD_DOMAIN": ""},
            Identity(0, 1, 0, 1, "127.0.0.1", 29500, "Kubernetes Job"),
        ),
        (INDEXED_JOB | OPEN_MPI, Identity(1, 4, 1, 4, "127.0.0.1", MPIRUN_PORT, "Open MPI")),  # an MPIJob
        # a machine called gpu-17, and a pod of a Deployment, are no rank 17
        ({"HOSTNAME": "gpu-17", "WORLD_SIZE": "4"}, Identity(world_size=4, source="environment variables")),
        (POD | {"HOSTNAME": "web-7d9c5b-x2x1z"}, Identity(world_size=4, source="environment variables")),
        # empty means not set
        ({"RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": ""}, Identity()),
    ],
)
def test_identify(environ, expected):
    assert identify(environ) == expected


SLURM_NODE = SLURM | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environ", "nodes", "expected"),
    [
        ({}, None, Node()),
        (SLURM_NODE, None, Node(2, 1, "gpu03", port_for_job("991"), "Slurm")),
        (SLURM_NODE | {"MASTER_PORT": "5"}, None, Node(2, 1, "gpu03", 5, "Slurm")),
        (INDEXED_JOB, None, Node(4, 2, FIRST_POD, 29500, "Kubernetes Job")),
        ({k: v for k, v in INDEXED_JOB.items() if k != "WORLD_SIZE"}, None, Node()),
        (
            {k: v for k, v in INDEXED_JOB.items() if k != "WORLD_SIZE"},
            8,
            Node(8, 2, FIRST_POD, 29500, "Kubernetes Job"),
        ),
        (PYTORCH_JOB, None, Node(3, 1, "job-master-0", 23456, "environment variables")),
        (
            PYTORCH_JOB | {"PET_NNODES": "3", "PET_NODE_RANK": "2", "WORLD_SIZE": "24", "RANK": "16"},
            None,
            Node(3, 2, "job-master-0", 23456, "Kubeflow"),
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, None, Node(4, 1, None, None, "Open MPI")),
        # variables of ranks, not of nodes
        (PLAIN, None, Node(source="environment variables")),
        (TORCHRUN, None, Node(source="torchrun")),
    ],
)
def test_identify_node(environ, nodes, expected):
    assert identify_node(environ, nodes) == expected


def test_several_launchers_on_a_node_are_refused():
    with pytest.raises(RendezvousError, match=r"Slurm has started 3 processes on this node.*--ntasks-per-node=1"):
        identify_node(SLURM)


def test_pods_learn_their_domain(tmp_path, monkeypatch):
    """As the kubelet writes it, with and without a headless service."""
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1\tlocalhost # train-2.wrong\n10.1.2.3\ttrain-2.svc.ns.svc.cluster.local\ttrain-2\n")
    assert pod_domain("train-2", str(file)) == "svc.ns.svc.cluster.local"
    assert pod_domain("train-1", str(file)) is None
    file.write_text("127.0.0.1\tlocalhost\n10.1.2.3\ttrain-2\n")
    assert pod_domain("train-2", str(file)) is None
    assert pod_domain("train-2", str(tmp_path / "missing")) is None
    monkeypatch.setattr("symcomm.store.launchers.pod_domain", lambda name: f"domain-of-{name}")
    for name, value in {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-2"}.items():
        monkeypatch.setenv(name, value)
    assert surroundings()["SYMCOMM_POD_DOMAIN"] == "domain-of-train-2"
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert "SYMCOMM_POD_DOMAIN" not in surroundings()


def test_pbs_lists_its_nodes_in_a_file(tmp_path):
    (tmp_path / "nodes").write_text("n7.cluster\nn7.cluster\nn8.cluster\n")
    environ = CRAY | {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "12.server"}
    assert identify(environ) == Identity(5, 8, 1, 4, "n7.cluster", port_for_job("12.server"), "MPICH")
    assert identify(environ | {"PBS_NODEFILE": "/nowhere"}).master_addr is None


@pytest.mark.parametrize(
    ("counts", "node", "local"),
    [("4(x2),3", 0, 4), ("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("2(x8)", 7, 2), ("2(x8)", None, 2), ("4,3", None, None)],
)
def test_slurm_tasks_per_node(counts, node, local):
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "99", "SLURM_TASKS_PER_NODE": counts}
    if node is not None:
        environ["SLURM_NODEID"] = str(node)
    assert identify(environ).local_world_size == local


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu[03-07,9],cpu1", "gpu03"),
        ("cpu1,gpu[03-07,9]", "cpu1"),
        ("n[9,1-3]", "n9"),
        ("rack[1-2]node[01-04]", "rack1node01"),
        ("a[1-2]-ib,b", "a1-ib"),
        ("single", "single"),
        ("dashed-name-3,other", "dashed-name-3"),
        ("", ""),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


def test_ports_for_jobs_are_stable_and_outside_the_ephemeral_range():
    assert port_for_job("991") == port_for_job("991")
    ports = {port_for_job(str(job)) for job in range(200)}
    assert len(ports) > 150
    assert all(20000 <= port < 30000 for port in ports)


def test_mpich_jobs_are_told_apart_by_their_launcher(tmp_path):
    """A process called hydra_pmi_proxy, a shell below it, and two ranks below that: both find the one at the top."""
    assert hydra_job() is None
    code = "from symcomm.store.launchers import hydra_job; print(hydra_job(), flush=True)"
    proxy = tmp_path / "hydra_pmi_proxy"
    proxy.symlink_to("/bin/sh")
    rank = f"{sys.executable} -c '{code}'"
    launcher = subprocess.Popen(
        [str(proxy), "-c", f'sh -c "{rank}; {rank}; true"; true'], stdout=subprocess.PIPE, text=True
    )
    out, _ = launcher.communicate(timeout=60)
    assert out.splitlines() == [f"hydra {launcher.pid}"] * 2
    assert identify(MPICH | {"PMI_JOBID": f"hydra {launcher.pid}"}).master_port == port_for_job(out.splitlines()[0])


# --- meeting ----------------------------------------------------------------------------------------------


class FakeTCPStore(HashStore):
    """Notes how it was made."""

    def __init__(
        self, host_name, port, world_size=None, is_master=False, timeout=None, wait_for_workers=True, token=None
    ):
        super().__init__()
        self.made = (host_name, port, world_size, is_master, wait_for_workers)
        self.token = token


@pytest.fixture
def fake_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("symcomm.store.tcp")
    module.TCPStore = FakeTCPStore
    monkeypatch.setitem(sys.modules, "symcomm.store.tcp", module)


def test_plain_variables(fake_tcp):
    for rank in (0, 3):
        met = rendezvous(environ=PLAIN | {"RANK": str(rank)}, timeout=12)
        assert met.store.made == ("node0", 1234, 8, rank == 0, True)
        assert met.store.timeout == timedelta(seconds=12)
        assert (met.rank, met.world_size, met.local_rank, met.local_world_size) == (rank, 8, 1, 2)
        assert met.how == "environment variables: TCP store at node0:1234"
        assert met.host


def test_torchrun_hosts_the_store_itself(fake_tcp):
    for rank in (0, 3):
        met = rendezvous(environ=TORCHRUN | {"RANK": str(rank)})
        assert isinstance(met.store, PrefixStore)
        assert met.store.underlying_store.made == ("node0", 1234, 8, False, False)
        assert met.store.underlying_store.token == ""  # the agent's store has none, whatever the job has
        met.store.set("key", "value")
        assert met.store.underlying_store.list_keys() == ["attempt_2/key"]
        assert met.how == "torchrun: the agent's store at node0:1234, attempt 2"


def test_torchruns_store_is_only_at_its_own_address(fake_tcp):
    met = rendezvous("tcp://elsewhere:99", environ=TORCHRUN | {"RANK": "0"})
    assert met.store.made == ("elsewhere", 99, 8, True, True)


@pytest.mark.parametrize(
    ("url", "arguments", "environ", "made"),
    [
        ("tcp://10.0.0.1:29500?rank=0&world_size=4", {}, {}, ("10.0.0.1", 29500, 4, True, True)),
        ("tcp://10.0.0.1:29500?rank=1&world_size=4", {}, {}, ("10.0.0.1", 29500, 4, False, True)),
        ("tcp://[::1]:29500", {"rank": 1, "world_size": 2}, {}, ("::1", 29500, 2, False, True)),
        ("tcp://h:1?world_size=2", {"rank": 1}, {}, ("h", 1, 2, False, True)),
        ("tcp://h:1", {}, OPEN_MPI, ("h", 1, 4, False, True)),
        ("tcp://h:1?rank=0&world_size=2", {}, OPEN_MPI, ("h", 1, 2, True, True)),
        ("env://", {"rank": 0, "world_size": 2}, PLAIN, ("node0", 1234, 2, True, True)),
        ("env://?rank=1", {}, PLAIN, ("node0", 1234, 8, False, True)),
        ("tcp://h:1", {"world_size": 2}, {"RANK": "1"}, ("h", 1, 2, False, True)),
        ("env://", {}, SLURM, ("gpu03", port_for_job("991"), 7, False, True)),
        ("env://", {}, INDEXED_JOB, (FIRST_POD, 29500, 4, False, True)),
        ("env://", {}, MPICH | {"PMI_RANK": "0"}, ("127.0.0.1", 29500, 3, True, True)),
    ],
)
def test_where_the_store_is(fake_tcp, url, arguments, environ, made):
    assert rendezvous(url, environ=environ, **arguments).store.made == made


def test_arguments_do_not_keep_the_launchers_local_rank(fake_tcp):
    met = rendezvous(rank=0, world_size=2, environ=PLAIN)
    assert met.local_rank is None and met.local_world_size is None
    met = rendezvous(rank=3, world_size=8, environ=PLAIN)
    assert (met.local_rank, met.local_world_size) == (1, 2)


@pytest.mark.parametrize("environ", [{}, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}])
def test_a_world_of_one_needs_no_address(environ):
    arguments = {} if environ else {"rank": 0, "world_size": 1}
    met = rendezvous(environ=environ, **arguments)
    assert type(met.store) is HashStore
    assert (met.rank, met.world_size) == (0, 1)


def test_file(tmp_path):
    path = tmp_path / "a store"
    met = rendezvous(f"file://{tmp_path}/a%20store?rank=0&world_size=1", environ={})
    assert isinstance(met.store, FileStore)
    assert met.store.path == str(path) and path.exists()
    del met
    assert not path.exists()


@pytest.mark.parametrize(
    ("url", "arguments", "environ", "words"),
    [
        ("env://", {}, {}, "nobody says the rank and world size (found none of the known variables); start with"),
        ("env://", {}, {"RANK": "1"}, "nobody says the world size|found RANK=1"),
        ("env://", {}, {"RANK": "1", "WORLD_SIZE": "2"}, "meeting place (MASTER_ADDR and MASTER_PORT)"),
        ("env://", {}, {**PLAIN, "MASTER_PORT": ""}, "meeting place (MASTER_PORT)"),
        ("env://", {"rank": 0, "world_size": 2}, {}, "meeting place"),
        ("env://", {"world_size": 2}, {}, "nobody says the rank (found"),
        ("env://", {}, {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "meeting place|OMPI_COMM_WORLD_RANK=1"),
        (
            "env://",
            {},
            INDEXED_JOB | {"SYMCOMM_POD_DOMAIN": ""},
            "meeting place|headless service|JOB_COMPLETION_INDEX=2",
        ),
        (
            "env://",
            {},
            {k: v for k, v in INDEXED_JOB.items() if k != "WORLD_SIZE"},
            "rank and world size|set WORLD_SIZE",
        ),
        ("env://", {}, {**PLAIN, "RANK": "8"}, "rank must be from 0 to 7 for world_size 8, got 8 (environment"),
        ("env://", {}, {**PLAIN, "RANK": "one"}, "RANK must be a number, got 'one'"),
        ("env://", {}, {**PLAIN, "MASTER_PORT": "70000"}, "port must be from 1 to 65535, got 70000"),
        ("env://", {"rank": 2, "world_size": 2}, PLAIN, "rank must be from 0 to 1 for world_size 2, got 2 (arguments)"),
        ("env://", {"rank": 0, "world_size": 0}, PLAIN, "world_size must be 1 or more, got 0"),
        ("env://", {"rank": -3, "world_size": 2}, PLAIN, "rank must be from 0 to 1"),
        ("env://", {"rank": "0"}, PLAIN, "rank must be an int, got '0'"),
        ("tcp://h?rank=0&world_size=2", {}, {}, "must name a host and a port"),
        ("tcp://:80?rank=0&world_size=2", {}, {}, "must name a host and a port"),
        ("tcp://h:99999?rank=0&world_size=2", {}, {}, "must be a number from 1 to 65535"),
        ("tcp://h:http?rank=0&world_size=2", {}, {}, "must be a number from 1 to 65535"),
        ("tcp://h:0?rank=0&world_size=2", {}, {}, "port must be from 1 to 65535, got 0"),
        ("tcp://h:1?rank=0&world_size=2", {"rank": 0}, {}, "rank is given twice"),
        ("tcp://h:1?rank=x&world_size=2", {}, {}, "rank must be a number, got 'x'"),
        ("tcp://h:1?rank=0", {}, {}, "nobody says the world size"),
        ("file://?rank=0&world_size=2", {}, {}, "names no file"),
        ("zookeeper://h", {}, {}, "unknown scheme in 'zookeeper://h'; use env://"),
        ("localhost:80", {}, {}, "url must be env://"),
        (None, {}, {}, "url must be env://"),
    ],
)
def test_mistakes_get_one_clear_sentence(url, arguments, environ, words):
    with pytest.raises(RendezvousError) as info:
        rendezvous(url, environ=environ, **arguments)
    for part in words.split("|"):
        assert part in str(info.value)
    assert str(info.value).startswith("rendezvous: ") and "\n" not in str(info.value)


def test_bad_timeout():
    with pytest.raises(BadArgumentError, match="rendezvous: timeout must be"):
        rendezvous(rank=0, world_size=1, timeout=-1)


def _meet_in_a_file(rank: int, world: int, path: str) -> list[bytes]:
    met = rendezvous(f"file://{path}?rank={rank}&world_size={world}", timeout=20, environ={})
    met.store.set(f"rank {met.rank}", "here")
    met.store.barrier("all", met.world_size)
    return met.store.multi_get([f"rank {r}" for r in range(world)])


def test_processes_meet_in_a_file(tmp_path):
    assert run_ranks(_meet_in_a_file, 3, str(tmp_path / "store")) == [[b"here"] * 3] * 3


# --- over TCP, for real ------------------------------------------------------------------------------------


def _meet_over_tcp(rank: int, world: int, port: int) -> tuple[str, list[bytes]]:
    environ = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    met = rendezvous(timeout=30, environ=environ)
    met.store.set(f"rank {met.rank}", "here")
    found = met.store.multi_get([f"rank {r}" for r in range(world)])
    met.store.barrier("done", world)
    return met.how, found


def test_processes_meet_over_tcp():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    how = f"environment variables: TCP store at 127.0.0.1:{port}"
    assert run_ranks(_meet_over_tcp, 3, port) == [(how, [b"here"] * 3)] * 3


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torchrun comes with torch")
def test_under_torchrun(tmp_path):
    """The agent's store is PyTorch's own; our ranks join it without ever importing torch."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from symcomm.store import rendezvous\n"
        "met = rendezvous(timeout=30)\n"
        "met.store.set(f'rank {met.rank}', f'{met.local_rank} of {met.local_world_size}')\n"
        "found = met.store.multi_get([f'rank {r}' for r in range(met.world_size)])\n"
        "how = met.how.split(' at ')[0]\n"
        "sys.stdout.write(f'{met.rank} {how} {found} {\"torch\" in sys.modules}\\n')\n"  # in one piece
        "met.store.barrier('done', met.world_size)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    expected = "torchrun: the agent's store [b'0 of 2', b'1 of 2'] False"
    assert sorted(ran.stdout.splitlines()) == [f"0 {expected}", f"1 {expected}"]
