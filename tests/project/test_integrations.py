"""What docs/how-to/integrations.md says of launchers, schedulers, containers and training frameworks."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from symcomm.store.launchers import identify_node

torch = pytest.importorskip("torch", reason="the examples train torch models")
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs/how-to/integrations.md").read_text()
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
}
SUMS = "sums: [1.0, 3.0, 5.0] ranks: [0.0, 1.0]"  # what examples/first_steps.py says with two ranks


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def run(*command: str, seconds: float = 100, **environ: str) -> str:
    done = subprocess.run(command, env=ENVIRONMENT | environ, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def losses(said: str) -> list[float]:
    return [float(text) for text in re.findall(r"^loss ([\d.e-]+)$", said, re.M)]


# --- training frameworks: what `make test` has not installed is skipped there -----------------------------


@needs("transformers", "accelerate")
@pytest.mark.slow
def test_trainer():
    script, torchrun = str(EXAMPLES / "transformers_train.py"), (sys.executable, "-m", "torch.distributed.run")
    said = [run(*torchrun, "--standalone", "--nproc-per-node", "2", script, name) for name in ("symcomm", "gloo")]
    assert len(losses(said[0])) == 20 and losses(said[0]) == losses(said[1])


ACCELERATE = """
import torch, torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
try:
    Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="symcomm")])
except ValueError as error:
    print("refused:", error)
AcceleratorState._reset_state(reset_partial_state=True)
accelerator = Accelerator(cpu=True)
print("made by", type(dist.group.WORLD).__module__.split(".")[0], accelerator.gather(torch.ones(1)).sum().item())
"""


@needs("accelerate")
def test_accelerate_knows_only_its_own_list_and_replace_gets_past_it(tmp_path: Path):
    """`ddp_backend="symcomm"` of Trainer goes the same way."""
    (tmp_path / "train.py").write_text(ACCELERATE)
    start = (sys.executable, "-m", "symcomm", "run", "-n", "2", "--no-prefix")
    said = run(*start, str(tmp_path / "train.py"), SYMCOMM_REPLACE="gloo")
    refusal = "Your assigned backend symcomm is not available, please use gloo"
    assert said.count(f"refused: {refusal}") == said.count("made by symcomm 2.0") == 2
    assert refusal in PAGE


@needs("deepspeed")
@pytest.mark.slow
def test_deepspeed():
    script = str(EXAMPLES / "deepspeed_train.py")
    said = run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    assert len(losses(said)) == 20 and losses(said)[-1] < losses(said)[0]


@needs("ray", "pyarrow")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ray_train():
    said = run(sys.executable, str(EXAMPLES / "ray_train.py"), seconds=250)
    assert len(losses(said)) == 20 and losses(said)[-1] < losses(said)[0]


# --- launchers and schedulers ------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("mpirun", path=ENVIRONMENT["PATH"]) is None, reason="there is no mpirun")
def test_mpirun():
    assert SUMS in run("mpirun", "-n", "2", sys.executable, str(EXAMPLES / "first_steps.py"))


SRUN = """#!/bin/bash
# stands for Slurm's: as many tasks as nodes, all of them here
shift
for task in 0 1; do
    SLURM_PROCID=$task SLURM_NODEID=$task SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_TASKS_PER_NODE="1(x2)" \\
        SLURM_JOB_NODELIST=127.0.0.1 SLURM_JOB_ID=$$ "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || exit; done
"""


def test_slurm_script(tmp_path: Path):
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(stat.S_IRWXU)
    (tmp_path / "symcomm").write_text(f'#!/bin/sh\nexec {sys.executable} -m symcomm "$@"\n')
    (tmp_path / "symcomm").chmod(stat.S_IRWXU)
    path = f"{tmp_path}{os.pathsep}{ENVIRONMENT['PATH']}"
    script = tmp_path / "train.py"
    script.write_text(
        "import symcomm\ngroup = symcomm.init()\nprint(group.all_gather_object(group.rank))\nsymcomm.destroy()\n"
    )
    said = run("bash", str(EXAMPLES / "slurm.sh"), PATH=path, RANKS="2", SCRIPT=str(script))
    assert said.count("[0, 1, 2, 3]") == 4


def manifests() -> list[dict]:
    yaml = pytest.importorskip("yaml")
    pages = [ROOT / "docs/how-to/launcher.md", ROOT / "docs/how-to/integrations.md"]
    texts = [text for page in pages for text in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.M | re.S)]
    texts += [path.read_text() for path in sorted((EXAMPLES / "kubernetes").glob("*.yaml"))]
    return [document for text in texts for document in yaml.safe_load_all(text)]


@needs("kubernetes_validate")
def test_manifests_are_what_kubernetes_takes():
    validator = importlib.import_module("kubernetes_validate")
    found = manifests()
    assert {document["kind"] for document in found} == {"Service", "Job"}
    for document in found:
        validator.validate(document, "1.31", strict=True)


def test_pods_find_each_other():
    """A pod's name, its subdomain and the service's name are what ranks look for."""
    service, job = manifests()[-2:]
    spec = job["spec"]["template"]["spec"]
    assert spec["subdomain"] == service["metadata"]["name"] and service["spec"]["selector"] == {"job-name": "train"}
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["completions"] == job["spec"]["parallelism"] == 4
    environ = {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2", "SYMCOMM_POD_DOMAIN": "train.default.svc"}
    command = spec["containers"][0]["command"]
    node = identify_node(environ, int(command[command.index("--nnodes") + 1]))
    assert node[:4] == (4, 2, "train-0.train.default.svc", 29500)


# --- containers: the namespaces that Docker makes -------------------------------------------------------------

IN_NAMESPACES = ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc"]
can_unshare = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*IN_NAMESPACES, "true"], capture_output=True).returncode != 0,
    reason="this user may not make namespaces",
)
LARGE = """
import symcomm
from symcomm import symm_mem

def work(group):
    x = symm_mem.empty(20 << 20).fill_(1.0)  # 80 MiB
    group.all_reduce(x)
    return x[-1].item()

if __name__ == "__main__":
    try:
        print(symcomm.spawn(work, 2, deadline=60))
    except symcomm.errors.ResourceError as error:
        print("ResourceError:", error)
"""


@can_unshare
@pytest.mark.parametrize(("share", "expected"), [("fd", "[2.0, 2.0]"), ("named", "ResourceError: ")])
def test_dockers_64_mib_of_shared_memory_are_enough(share: str, expected: str, tmp_path: Path):
    """They count only where arenas are files."""
    (tmp_path / "large.py").write_text(LARGE)
    shell = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {sys.executable} {tmp_path / 'large.py'}"
    assert expected in run("unshare", "--mount", "sh", "-c", shell, SYMCOMM_SHARE=share)


CONTAINER = """
import sys, numpy, symcomm
group = symcomm.init(f"file://{sys.argv[1]}/meet", rank=int(sys.argv[2]), world_size=2, timeout=30)
x = numpy.ones(4)
group.all_reduce(x)
print("one host" if not group.spans_hosts else "two hosts", x[0].item())
symcomm.destroy()
"""


@can_unshare
@pytest.mark.parametrize(
    ("namespaces", "share"),
    [(["--pid", "--fork", "--mount-proc"], "fd"), (["--net", "--pid", "--fork", "--mount-proc"], "named")],
    ids=["--network=host", "--ipc=host and SYMCOMM_SHARE=named"],
)
def test_containers_of_one_host_share_memory(namespaces: list[str], share: str, tmp_path: Path):
    (tmp_path / "rank.py").write_text(CONTAINER)
    started = [
        subprocess.Popen(
            ["unshare", *namespaces, sys.executable, str(tmp_path / "rank.py"), str(tmp_path), str(rank)],
            env=ENVIRONMENT | {"SYMCOMM_SHARE": share},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [process.communicate(timeout=60)[0] for process in started] == ["one host 2.0\n"] * 2


@can_unshare
def test_containers_with_networks_of_their_own_are_told_how_to_share(tmp_path: Path):
    """Without --ipc=host and SYMCOMM_SHARE=named they are several hosts, here without a way between them."""
    (tmp_path / "rank.py").write_text(CONTAINER)
    started = [
        subprocess.Popen(
            [*IN_NAMESPACES, sys.executable, str(tmp_path / "rank.py"), str(tmp_path), str(rank)],
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in started:
        last = process.communicate(timeout=60)[1].splitlines()[-1]
        assert last.startswith("symcomm.errors.ResourceError: rank 0 is at 127.0.0.1, where the others cannot reach it")
        assert last.endswith("with --ipc=host and SYMCOMM_SHARE=named on all ranks.")
