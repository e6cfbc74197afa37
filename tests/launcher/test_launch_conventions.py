"""Ranks that schedulers start: `symcomm.init()` and `symcomm run` with the variables of Slurm, Kubernetes and MPI."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from symcomm.errors import SymcommError
from symcomm.launcher.job import NodePlacement, find_placement
from symcomm.store.launchers import port_for_job
from tests.support.ports import free_port

pytestmark = pytest.mark.without_torch

SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "1(x4)",
    "SLURM_JOB_NODELIST": "gpu[07,09-11]",
    "SLURM_JOB_ID": "4711",
}
INDEXED_JOB = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1"}
DOMAIN = {"SYMCOMM_POD_DOMAIN": "train.default.svc.cluster.local"}
SLURM_PLACE = ("gpu07", port_for_job("4711"))
POD_PLACE = ("train-0.train.default.svc.cluster.local", 29500)


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        (("1", None, None), {}, NodePlacement(1, 0, None)),
        (("1", None, None), SLURM, NodePlacement(1, 0, None)),  # a script on one node of a job is nobody's node 1
        (("auto", None, None), SLURM, NodePlacement(4, 1, SLURM_PLACE)),
        (("4", None, None), SLURM, NodePlacement(4, 1, SLURM_PLACE)),
        (("4", 3, None), SLURM, NodePlacement(4, 3, SLURM_PLACE)),
        (("auto", None, ("h", 1)), SLURM, NodePlacement(4, 1, ("h", 1))),
        (("2", 1, ("h", 1)), SLURM, NodePlacement(2, 1, ("h", 1))),  # who says everything is not contradicted
        (("3", None, None), INDEXED_JOB | DOMAIN, NodePlacement(3, 1, POD_PLACE)),
        (("auto", None, None), INDEXED_JOB | DOMAIN | {"WORLD_SIZE": "3"}, NodePlacement(3, 1, POD_PLACE)),
        (
            ("auto", None, None),
            INDEXED_JOB | {"WORLD_SIZE": "2", "MASTER_ADDR": "m"},
            NodePlacement(2, 1, ("m", 29500)),
        ),
        (("2", 1, None), {}, NodePlacement(2, 1, None)),  # the job refuses this afterwards: nobody says where to meet
    ],
)
def test_find_place(given, environ, expected):
    assert find_placement(*given, environ) == expected


@pytest.mark.parametrize(
    ("given", "environ", "words"),
    [
        (("two", None, None), {}, "--nnodes must be a number of 1 or more, auto, or MIN:MAX, got 'two'"),
        (("auto", None, None), {}, "nobody says how many nodes there are"),
        (("auto", None, None), INDEXED_JOB, "Kubernetes with WORLD_SIZE"),
        (("2", None, None), {}, "--node-rank is missing; with --nnodes 2"),
        (("2", None, None), SLURM, "--nnodes must be 4, which Slurm says, or auto, got 2"),
        (("auto", None, None), SLURM | {"SLURM_TASKS_PER_NODE": "8(x4)"}, "Slurm has started 8 processes on this node"),
    ],
)
def test_mistakes_get_one_sentence(given, environ, words):
    with pytest.raises(SymcommError) as info:
        find_placement(*given, environ)
    assert str(info.value).startswith("symcomm run: ") and words in str(info.value) and "\n" not in str(info.value)


def clean_environment() -> dict[str, str]:
    foreign = ("SLURM_", "PMI", "OMPI_", "MPI_LOCAL", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
    return {k: v for k, v in os.environ.items() if not k.startswith(foreign)}


def start(command: list[str], environ: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *command], env=clean_environment() | environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def finish(processes: list[subprocess.Popen]) -> list[str]:
    try:
        outputs = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return outputs


MEET = """
import symcomm
group = symcomm.init(timeout=60)
everyone = group.all_gather_bytes(str(group.rank).encode())
print(group.rank, group.size, b"".join(everyone).decode())
symcomm.destroy()
"""


def slurm(rank: int) -> dict[str, str]:
    return {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
            "SLURM_TASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "127.0.0.1", "SLURM_JOB_ID": "1"}  # fmt: skip


def mvapich(rank: int) -> dict[str, str]:
    values = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"MV2_COMM_WORLD_{name}": str(value) for name, value in values.items()}


def indexed_job(rank: int) -> dict[str, str]:
    return {"JOB_COMPLETION_INDEX": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def pytorch_job(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize("convention", [slurm, mvapich, indexed_job, pytorch_job])
def test_init_finds_the_others(convention):
    port = {"MASTER_PORT": str(free_port())}
    outputs = finish([start(["-c", MEET], convention(rank) | port) for rank in range(2)])
    assert [output.split() for output in outputs] == [["0", "2", "01"], ["1", "2", "01"]]


def test_run_serves_its_node_of_a_slurm_job(tmp_path):
    """As `srun --ntasks-per-node=1 symcomm run -n 2 --nnodes auto script.py` on two nodes."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'GROUP_RANK', 'MASTER_ADDR')))\n"
    )
    port = free_port()
    nodes = [
        slurm(node) | {"SLURM_NODEID": str(node), "SLURM_TASKS_PER_NODE": "1(x2)", "MASTER_PORT": str(port)}
        for node in range(2)
    ]
    command = ["-m", "symcomm", "run", "-n", "2", "--nnodes", "auto", "--no-prefix", str(script)]
    outputs = finish([start(command, node) for node in nodes])
    assert sorted(line for output in outputs for line in output.splitlines()) == [
        "0 4 0 127.0.0.1", "1 4 0 127.0.0.1", "2 4 1 127.0.0.1", "3 4 1 127.0.0.1",
    ]  # fmt: skip


def test_ray_that_is_not_installed_is_said(monkeypatch):
    import symcomm.ray

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        SymcommError, match=r"symcomm\.ray\.run: Ray is not installed; run `pip install 'symcomm\[ray\]'`"
    ):
        symcomm.ray.run(print, 2)
