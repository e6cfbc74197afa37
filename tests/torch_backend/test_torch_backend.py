"""``torch.distributed`` on our backend, as users use it. The checks themselves are in tests/torch_backend/checks/."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from symcomm.torch_backend.torch_patches import method_swap
from tests.support.check_runner import run_checks
from tests.support.ports import free_port
from tests.support.programs import environment, find_mpirun, run, run_loaded

pytestmark = [pytest.mark.torch_versions, pytest.mark.long]

# Decorated functions, read from the text: this file needs no torch of its own.
CHECKS = [
    name
    for file in sorted((Path(__file__).parent / "checks").glob("*.py"))
    for name in re.findall(r"^@check3?\ndef (\w+)", file.read_text(), re.MULTILINE)
]
RANKS = 3


# --- the checks, all on one pair of ranks -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    """What every rank has to say about every check."""
    return run_checks("tests.torch_backend.checks", CHECKS, environment(), 110)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str, told: dict[str, list[str]]):
    assert told[name] == [""] * RANKS, "\n".join([*told[name], *told["stderr"]])[-6000:]


# --- registration -------------------------------------------------------------------------------------------------


def test_autoload_loads_next_to_nothing():
    modules = run(
        sys.executable,
        "-c",
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "from symcomm.torch_backend.register import autoload\n"
        "autoload()\n"
        "import torch.distributed as dist\n"
        "assert 'symcomm' in dist.Backend.backend_list\n"
        "print(*[m for m in sys.modules if m.startswith('symcomm')])\n",
    ).split()
    assert not [
        m for m in modules if m.startswith(("symcomm._core", "symcomm.group", "symcomm.torch_backend.group"))
    ], modules
    assert len([m for m in modules if ".torch_patches." not in m]) <= 7, modules


NOT_FOR_A_FIRST_GROUP = (
    "gpu", "hosts", "simulate", "observe", "symm_mem", "compile", "ddp", "device", "elastic", "c10d", "cli", "comm",
    "backend.careful", "store.bootstrap", "store.collectives", "store.file", "store.hash", "store.launchers",
    "store.prefix", "store.tcp", "group.default", "group.grow", "group.shrink", "group.spawn",
)  # fmt: skip


def test_a_first_group_loads_only_what_it_runs():
    """What else there is comes with the first CUDA tensor, host, store of ours or failure that needs it."""
    modules = run(
        sys.executable,
        "-c",
        "import sys, torch, torch.distributed as dist\n"
        "from symcomm.torch_backend.register import register; register()\n"
        "dist.init_process_group('symcomm', store=dist.HashStore(), rank=0, world_size=1)\n"
        "x = torch.ones(2); dist.all_reduce(x); dist.new_group()\n"
        "print(*[m for m in sys.modules if m.startswith('symcomm.')])\n",
    ).split()
    assert "symcomm.group.process_group" in modules
    unwanted = tuple(f"symcomm.{name}" for name in NOT_FOR_A_FIRST_GROUP)
    assert not [m for m in modules if m.startswith(unwanted)]


ONE_RANK = (
    "from symcomm.torch_backend.register import register; register()\n"
    "import torch, torch.distributed as dist\n"
    "dist.init_process_group({backend!r}, store=dist.HashStore(), rank=0, world_size=1)\n"
    "x = torch.ones(2); dist.all_reduce(x); dist.monitored_barrier()\n"
    "print(dist.get_backend(), type(dist.group.WORLD).__name__, x.tolist())\n"
    "g = dist.new_group(backend='gloo'); print(type(g).__name__)\n"
    "dist.destroy_process_group()\n"
)


def test_gloo_can_be_replaced_from_outside():
    out = run(sys.executable, "-c", ONE_RANK.format(backend="gloo"), SYMCOMM_REPLACE="gloo").split("\n")
    assert out[0] == "gloo TorchGroup [1.0, 1.0]" and out[1] == "TorchGroup"
    out = run(sys.executable, "-c", ONE_RANK.format(backend="cpu:gloo,cuda:nccl"), SYMCOMM_REPLACE="gloo").split("\n")
    assert "TorchGroup [1.0, 1.0]" in out[0]


NAMES = (
    "import sys, torch, torch.distributed as dist\n"
    "from symcomm.torch_backend.register import register; register()\n"
    "for asked in ('gloo', 'GLOO', None):\n"
    "    dist.init_process_group(asked, store=dist.HashStore(), rank=0, world_size=1)\n"
    "    pg, sub = dist.group.WORLD, dist.new_group()\n"
    "    print(dist.get_backend(), pg.name(), pg._get_backend_name(), dist.get_backend_config())\n"
    "    print(dist.get_backend(sub), dist.get_default_backend_for_device('cpu'), dist.get_backend() == 'gloo')\n"
    "    print(dist.Backend('gloo'), dist.Backend.default_device_backend_map['cpu'])\n"
    "    dist.destroy_process_group()\n"
    "print(type(pg).__name__)\n"
)


def test_a_program_that_asks_for_gloo_is_told_gloo():
    """Also where Symcomm has made its groups: programs compare names."""
    ours = run(sys.executable, "-c", NAMES, SYMCOMM_REPLACE="gloo").splitlines()
    gloos = [line for line in run_loaded("-c", NAMES, SYMCOMM_REPLACE="").splitlines() if "[Gloo]" not in line]
    assert ours[:-1] == gloos[:-1] and len(ours) == 10 and ours[-1] == "TorchGroup" != gloos[-1]


APART = (
    "import torch, torch.distributed as dist\n"
    "from symcomm.torch_backend.register import register; register()\n"
    "import torch.distributed.nn.functional as differentiable\n"
    "from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook\n"
    "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
    "known, called = dist.scatter, []\n"
    "dist.scatter = lambda *args, **more: (called.append(1), known(*args, **more))\n"
    "x = torch.ones(2, requires_grad=True)\n"
    "differentiable.all_to_all([torch.empty(2)], [x])[0].sum().backward()\n"
    "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
    "from torch.distributed.optim import ZeroRedundancyOptimizer as Zero\n"
    "zero = Zero(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=1)\n"
    "try:\n"
    "    ddp_zero_hook.hook_with_zero_step(lambda state, bucket: None, model, zero)\n"
    "except RuntimeError as error:\n"
    "    print(error)\n"
    "print(x.grad.tolist(), len(called))\n"
)


def test_what_torch_does_worse_for_gloo_it_does_well_for_what_replaces_it():
    assert run(sys.executable, "-c", APART, SYMCOMM_REPLACE="gloo").splitlines() == ["[1.0, 1.0] 0"]
    gloos = run_loaded("-c", APART, SYMCOMM_REPLACE="").splitlines()[-2:]
    assert "may meet hangs" in gloos[0] and gloos[1] == "[1.0, 1.0] 2"


REPLACED = "symcomm: SYMCOMM_REPLACE=gloo is set: groups asked of gloo are made by symcomm."
TWO_GROUPS = (
    "import sys, torch, torch.distributed as dist\n"
    "from symcomm.torch_backend.register import register; register()\n"
    "for _ in range(int(sys.argv[1])):\n"
    "    dist.init_process_group('gloo'); dist.new_group(); dist.new_group([1]); dist.barrier()\n"
    "    dist.destroy_process_group()\n"
)


@pytest.mark.parametrize(("asked", "lives"), [("gloo", 2), ("", 1)])  # Gloo itself may not survive a second one
def test_a_replaced_gloo_is_told_once_by_rank_0(asked: str, lives: int, tmp_path: Path):
    """Two ranks make groups, twice, one without rank 0: one line of one rank, and none where nothing is replaced."""
    script = tmp_path / "program.py"
    script.write_text(TWO_GROUPS)
    command = [sys.executable, "-m", "symcomm", "run", "-n", "2", str(script), str(lives)]
    env = environment(SYMCOMM_REPLACE=asked)
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=True)
    told = [line for line in (done.stdout + done.stderr).splitlines() if "SYMCOMM_REPLACE" in line]
    assert len(told) == (asked == "gloo") and all(line.endswith(REPLACED) and "0" in line[:8] for line in told), told


def test_a_backend_that_cannot_be_replaced_is_told():
    said = run(
        sys.executable,
        "-c",
        "import warnings\n"
        "from symcomm.torch_backend.register import register\n"
        "with warnings.catch_warnings(record=True) as found: register()\n"
        "print(*[w.message for w in found])\n",
        SYMCOMM_REPLACE="glo",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert "SYMCOMM_REPLACE must be gloo, got 'glo': nothing is replaced." in said


def test_gloo_stays_gloo_when_nobody_asks():
    out = run_loaded("-c", ONE_RANK.format(backend="gloo"), SYMCOMM_REPLACE="").splitlines()
    out = [line for line in out if not line.startswith("[Gloo]")]  # older versions tell who is connected
    assert out[0] == "gloo ProcessGroup [1.0, 1.0]" and out[1] == "ProcessGroup"


# --- launchers ----------------------------------------------------------------------------------------------------

SCRIPT = """\
import os
from symcomm.torch_backend.register import register
register()
import torch
import torch.distributed as dist
if "RANK" not in os.environ:  # mpirun speaks of itself only
    os.environ["RANK"] = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
    os.environ["WORLD_SIZE"] = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["PMI_SIZE"]
dist.init_process_group("symcomm")
x = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(x)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} has {x.item()}", flush=True)
dist.destroy_process_group()
"""
EXPECTED = ["rank 0 of 2 has 3.0", "rank 1 of 2 has 3.0"]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "tiny.py"
    path.write_text(SCRIPT)
    return str(path)


def said(out: str) -> list[str]:
    return sorted(re.findall(r"rank \d of \d has [\d.]+", out))


def test_under_torchrun(script: str):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    assert said(run(*command, deadline=100)) == EXPECTED


def test_under_symcomm_run(script: str):
    assert said(run(sys.executable, "-m", "symcomm", "run", "-n", "2", script)) == EXPECTED


def test_started_by_hand(script: str):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with ThreadPoolExecutor(2) as pool:
        assert said("".join(pool.map(lambda rank: run_loaded(script, **place, RANK=rank), "01"))) == EXPECTED


def test_under_mpirun(script: str):
    mpirun = find_mpirun()
    if mpirun is None:
        pytest.skip("no mpirun: install the dev extra")
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place["PMIX_MCA_gds"] = "hash"
    assert said(run(mpirun, "-n", "2", sys.executable, script, **place)) == EXPECTED


def test_methods_are_wrapped_while_modes_are_entered_in_any_order():
    class Base:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    class Mode(Base):
        pass

    class Other(Base):
        pass

    class Group:
        def call(self):
            return "own"

        alias = call

    own = Group.call
    for mode, letter in ((Mode, "a"), (Other, "b")):
        method_swap.wrap_inside(
            mode, Group, lambda name, _, now, s=letter: (lambda self: s + now(self)) if name == "call" else None
        )
    first, second = Mode(), Other()
    said = [Group().call()]
    for step in (first.__enter__, second.__enter__, first.__exit__, first.__enter__, second.__exit__, first.__exit__):
        step()
        said.append(Group().call())
        assert Group().alias() == "own" and method_swap.own(Group, "call") is own
    assert said == ["own", "aown", "baown", "bown", "baown", "aown", "own"]
    assert vars(Group)["call"] is own
