"""Real programs train on our backend to the same losses, bit for bit, as on Gloo."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the examples train torch models")
ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    "OMP_NUM_THREADS": "1",
}


def run_example(
    name: str, *args: str, ranks: int = 2, options: tuple[str, ...] = (), torchrun: bool = False
) -> list[str]:
    launcher = ["symcomm", "run", "-n", str(ranks), "--no-prefix", *options]
    if torchrun:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *options]
    command = [sys.executable, "-m", *launcher, str(ROOT / "examples" / name), *args]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{name} {args} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()


def losses(lines: list[str]) -> list[float]:
    """Python prints as many digits as it takes to get the same bits back."""
    return [float(line.split()[1]) for line in lines if line.startswith("loss ")]


@pytest.mark.slow
@pytest.mark.timeout(310)  # three trainings
@pytest.mark.parametrize(
    "name", ["ddp", "fsdp2", "tensor_parallel", "zero", "checkpoint", "accelerate_train", "lightning_train"]
)
def test_same_losses_as_gloo(name: str):
    needs = {"accelerate_train": "accelerate", "lightning_train": "lightning"}.get(name)
    if needs and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed (pip install {needs})")
    program = f"{name}.py"
    ours = losses(run_example(program, "symcomm"))
    gloo = losses(run_example(program, "gloo", torchrun=True))
    assert len(ours) >= 10 and ours == gloo == losses(run_example(program, "symcomm", torchrun=True))
    assert ours[-1] < ours[0], "the training does not learn"


def test_first_steps():
    assert run_example("first_steps.py", ranks=4) == ["sums: [6.0, 10.0, 14.0] ranks: [0.0, 1.0, 2.0, 3.0]"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_window(ranks: int):
    expected = {f"rank {rank}: the same as in one process: True" for rank in range(ranks)}
    assert set(run_example("window.py", ranks=ranks)) == expected
