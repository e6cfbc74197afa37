"""Every engine between hosts that can be used here keeps the same contract (tests/hierarchical/engine_contract.py)."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from symcomm import errors
from symcomm.hierarchical.discovery import network_advice
from symcomm.hierarchical.engines import base as engines
from symcomm.hierarchical.engines.base import Engine, available_engines, engine_class, wanted_engine
from tests.hierarchical.engine_contract import CHECKS, RANKS, run_contract

pytestmark = pytest.mark.torch_versions

ROOT = Path(__file__).parents[2]


@functools.cache
def outcomes(name: str) -> list[dict[str, str]]:
    """What each rank says of each check."""
    return _by_mpirun(name) if name == "mpi" else _by_threads(name)


def _by_threads(name: str) -> list[dict[str, str]]:
    meeting, items = threading.Barrier(RANKS, timeout=60), [b""] * RANKS
    said: list[dict[str, str]] = [{}] * RANKS

    def exchange(rank: int, item: bytes) -> list[bytes]:
        items[rank] = item
        meeting.wait()
        everyone = list(items)
        meeting.wait()
        return everyone

    def run(rank: int) -> None:
        said[rank] = run_contract(name, rank, RANKS, functools.partial(exchange, rank))

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return said


def _by_mpirun(name: str) -> list[dict[str, str]]:
    launcher = _mpirun()
    assert launcher
    done = subprocess.run(
        [launcher, "-n", str(RANKS), sys.executable, "-m", "tests.hierarchical.engine_contract", name],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("outcomes:")]
    assert lines, f"{done.stdout}\n{done.stderr}"
    return json.loads(lines[0].removeprefix("outcomes:"))


def _mpirun() -> str | None:
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def why_not(name: str) -> str:
    if name == "mpi":
        if importlib.util.find_spec("mpi4py") is None:
            return "mpi4py is not installed"
        return "" if _mpirun() else "there is no mpirun"
    if name == "nccl" and not engine_class(name).why_not():
        import torch

        return "" if torch.cuda.device_count() >= RANKS else f"needs {RANKS} GPUs"
    return engine_class(name).why_not()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", engines.BUILT_IN)
def test_contract(name: str, check: str):
    if reason := why_not(name):
        pytest.skip(f"engine {name}: {reason}")
    for rank, said in enumerate(outcomes(name)):
        assert said.get(check) == "", f"rank {rank}: {said.get(check, 'did not come so far')}"


@pytest.mark.skipif(bool(why_not("gloo")), reason="this torch has no Gloo")
def test_a_transfer_that_gets_no_thread_fails_and_the_next_one_does_not(monkeypatch):
    def start_none(thread):
        raise RuntimeError("can't start new thread")

    engine = engine_class("gloo")(engines.EngineContext(0, 1, "127.0.0.1"))
    engine.connect([engine.endpoint], 20)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_none)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                engine.start([]).wait(10)
        engine.start([]).wait(10)
    finally:
        engine.close()


MPI_PROGRAM = """
import os, sys
os.environ["SYMCOMM_HOST_ID"] = str(int(os.environ.get("PMI_RANK") or os.environ["PMIX_RANK"]) // 2)
import numpy as np
import symcomm

group = symcomm.init(timeout=60, engine="mpi")
x = np.full(3_000_000, 1.0 + group.rank, dtype=np.float32)
group.all_reduce(x)
y = np.empty(4 * 1000)
group.all_gather_single(y, np.full(1000, float(group.rank)))
z = np.empty(20_000)
works = [group.irecv(z, (group.rank - 1) % 4), group.isend(np.full(20_000, float(group.rank)), (group.rank + 1) % 4)]
for work in works:
    work.wait()
assert (x == 10).all() and (y.reshape(4, 1000) == np.arange(4)[:, None]).all() and (z == (group.rank - 1) % 4).all()
assert group.engine_name == "mpi" and "torch" not in sys.modules
group.barrier()
print("right", flush=True)
symcomm.destroy()
"""


def test_a_group_on_mpi_needs_no_torch(tmp_path):
    if reason := why_not("mpi"):
        pytest.skip(f"engine mpi: {reason}")
    script = tmp_path / "program.py"
    script.write_text(MPI_PROGRAM)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "RANK", "WORLD_"))}
    done = subprocess.run(
        [str(_mpirun()), "-n", "4", sys.executable, str(script)],
        env=env, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("right") == 4, done.stdout + done.stderr


def test_the_choice(monkeypatch):
    monkeypatch.delenv("SYMCOMM_ENGINE", raising=False)
    assert wanted_engine(None) == "" and available_engines()[0] == "gloo" and "nccl" not in available_engines()
    monkeypatch.setenv("SYMCOMM_ENGINE", "Gloo")
    assert wanted_engine(None) == "gloo" == wanted_engine("gloo")
    with pytest.raises(errors.BadArgumentError, match=f"one of {', '.join(engines.BUILT_IN)}, got 'doves'"):
        wanted_engine("doves")
    monkeypatch.setattr(engines.engine_class("nccl"), "why_not", staticmethod(lambda: "this machine has no GPU"))
    with pytest.raises(errors.ResourceError, match="engine nccl cannot be used: this machine has no GPU"):
        wanted_engine("nccl")


def test_third_parties_add_one(monkeypatch):
    class Doves(engine_class("gloo")):  # type: ignore[misc]
        name = "doves"

    entry = importlib.metadata.EntryPoint("doves", "doves:Doves", "symcomm.engines")
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: Doves)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == "symcomm.engines" else [])
    assert engine_class("doves") is Doves and issubclass(Doves, Engine)
    assert wanted_engine("doves") == "doves" and "doves" in available_engines()


def test_what_to_do_about_ranks_that_do_not_reach_each_other():
    here, container, elsewhere = (
        {"machine": machine} for machine in (["boot", "net:[1]"], ["boot", "net:[2]"], ["other", "net:[1]"])
    )
    assert "SYMCOMM_SHARE=named" in network_advice([here, container, elsewhere])
    assert "SYMCOMM_ADDRESS" in network_advice([here, elsewhere])
