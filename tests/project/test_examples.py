"""Real programs train on our backend to the same losses, bit for bit, as on Gloo."""

from __future__ import annotations

import importlib
import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import loaded
from tests.support.examples import ENVIRONMENT, ROOT, losses, run_example
from tests.support.in_turn import parts

pytest.importorskip("torch", reason="the examples train torch models")

pytestmark = [pytest.mark.torch_versions, pytest.mark.long]


PROGRAMS = ["ddp", "ddp_hook", "fsdp2", "tensor_parallel", "zero", "checkpoint", "accelerate_train", "lightning_train"]
NEEDS = {"accelerate_train": "accelerate", "lightning_train": "lightning"}
THERE = [name for name in PROGRAMS if name not in NEEDS or importlib.util.find_spec(NEEDS[name])]


def train(backend: str, torchrun: bool) -> dict[str, list[float]]:
    """Every example's losses, of ranks that one launcher has started."""
    files = [str(ROOT / "examples" / f"{name}.py") for name in THERE]
    lines = run_example("../tests/support/in_turn.py", *files, "--", backend, torchrun=torchrun, seconds=280)
    return {name: losses(said) for name, (_, said) in zip(THERE, parts(lines, files), strict=True)}


def train_on_gloo() -> dict[str, list[float]]:
    """On a busy machine Gloo may deadlock (see ``torch_checks.leave``): once more then."""
    try:
        return train("gloo", torchrun=True)
    except AssertionError as error:
        if f": -{signal.SIGALRM.value}\n" not in str(error):
            raise
    return train("gloo", torchrun=True)


@pytest.fixture(scope="module")
def trained() -> list[dict[str, list[float]]]:
    return [train("symcomm", torchrun=False), train_on_gloo()]


@pytest.mark.slow
@pytest.mark.timeout(900)  # two trainings of each
@pytest.mark.parametrize("name", PROGRAMS)
def test_same_losses_as_gloo(name: str, trained: list[dict[str, list[float]]]):
    if name not in THERE:
        pytest.skip(f"{NEEDS[name]} is not installed (pip install {NEEDS[name]})")
    ours, gloo = [each[name] for each in trained]
    assert len(ours) >= 10 and ours == gloo
    assert ours[-1] < ours[0], "the training does not learn"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_that_the_examples_name(trained: list[dict[str, list[float]]]):
    """On ours under torchrun, and not in turn with others."""
    assert losses(run_example("ddp.py", torchrun=True, fresh=True)) == trained[0]["ddp"]


def test_first_steps():
    assert run_example("first_steps.py", ranks=4) == ["sums: [6.0, 10.0, 14.0] ranks: [0.0, 1.0, 2.0, 3.0]"]


def alone(name: str) -> list[str]:
    """What an example says that starts its processes itself."""
    said = subprocess.run([sys.executable, str(ROOT / "examples" / name)], capture_output=True, text=True, timeout=200)
    assert said.returncode == 0, said.stderr
    return said.stdout.splitlines()


def test_board():
    expected = [f"generator {number}: version 60, the sum of 0 to 7 is 28" for number in range(2)]
    assert alone("board.py") == expected


def test_board_server():
    expected = [(20, "24.7"), (40, "27.6"), (60, "28.0")]
    assert alone("board_server.py") == [f"version {v}: the sum of 0 to 7 is {total}" for v, total in expected]


def test_torchrl_weights():
    pytest.importorskip("torchrl", reason="its collectors take the weights (pip install torchrl)")
    assert alone("torchrl_weights.py") == [f"all actions are [{value}]" for value in (1.0, 5.0, 9.0)]


def test_custom_collective():
    done = loaded.run([sys.executable, str(ROOT / "examples/custom_collective.py")], env=ENVIRONMENT, timeout=100)
    assert done.stdout.splitlines()[1::2] == ["rank 1: [1.0, 3.0, 5.0]", "rank 3: [6.0, 10.0, 14.0]"], done.stderr


def test_notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    nbclient = pytest.importorskip("nbclient", reason="notebooks are run by nbclient (pip install nbclient ipykernel)")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    nbformat = importlib.import_module("nbformat")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", 4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "kept without outputs"
    client = nbclient.NotebookClient(notebook, timeout=90, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs), "a plot"
    (said,) = (output["text"] for output in outputs if "did not make the same call" in output.get("text", ""))
    explained = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for part in (
        "ranks 0, 1, 3 called all_reduce(float32 x 1000, SUM)",
        "rank 2 called all_reduce(float32 x 999, SUM)",
    ):
        assert part in said and part in explained


CELL = """\
import numpy, symcomm
def work(group):
    group.all_reduce(numpy.ones(3 + group.rank))
try:
    symcomm.spawn(work, 2, mode=MODE, deadline=60)
except symcomm.errors.CollectiveMismatchError as error:
    print(error)
"""


def test_errors_name_cells_of_a_notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Not the files under /tmp that they were compiled as; also where ranks are processes, which have no notebook."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    nbformat = importlib.import_module("nbformat")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    cells = ["1", *(f"MODE = {mode!r}\n{CELL}" for mode in ("threads", "processes"))]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=90, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for number, cell in enumerate(notebook.cells[1:], 2):
        (output,) = cell.outputs
        assert f"rank 0 called all_reduce(float64 x 3, SUM) at In [{number}]:4; rank 1" in output["text"], output


@pytest.mark.parametrize("ranks", [1, 2])
def test_window(ranks: int):
    expected = {f"rank {rank}: the same as in one process: True" for rank in range(ranks)}
    assert set(run_example("window.py", ranks=ranks)) == expected
