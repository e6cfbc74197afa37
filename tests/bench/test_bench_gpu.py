"""``symcomm bench gpu`` where there is no GPU: its table, and sides that stand still."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from symcomm import errors
from symcomm.bench import gpu as module

torch = pytest.importorskip("torch")


def test_the_table_of_ranks_on_one_gpu(tmp_path: Path):
    from symcomm.bench import pictures

    found = [
        module.GpuMeasurement("in turns", 4096, "ordinary", [70e-6, 72e-6, 68e-6], [120e-6]),
        module.GpuMeasurement("in turns", 4096, "gloo", [490e-6], [540e-6]),
        module.GpuMeasurement("MPS", 1 << 20, "symmetric", [10e-6], [20e-6]),
        module.GpuMeasurement("MPS", 1 << 20, "torch", [20e-6], [30e-6]),
    ]
    _, _, rows = module.as_table(found, module.GpuWorkload())
    assert rows == [
        ["in turns", "4 KiB", "70 / 120", "-", "490 / 540", "-", "7.00x / 4.50x", "-"],
        ["MPS", "1 MiB", "-", "10 / 20", "-", "20 / 30", "-", "2.00x / 1.50x"],
    ]
    assert module.note(found, module.GpuWorkload()) == ""
    assert "refused" in module.note(found[:2], module.GpuWorkload())
    assert module.to_json(found, module.GpuWorkload())["rows"][0]["row_us"] == [70, 72, 68]
    pytest.importorskip("matplotlib")
    pictures.draw(tmp_path / "gpu.svg", "heading", module.picture(found, module.GpuWorkload()))
    assert "GPU shared: MPS" in (tmp_path / "gpu.svg").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_bench_gpu_says_what_is_missing():
    from typer.testing import CliRunner

    from symcomm.cli import bench

    done = CliRunner().invoke(bench.app, ["gpu", "--quick"])
    assert done.exit_code == 2 and "symcomm bench gpu: " in done.output and "use CPU tensors" in done.output


# A rank that measures nothing; with 1 MiB the side that is named stands still.
RANK = """
import faulthandler, json, os, signal, sys, time
faulthandler.register(signal.SIGUSR1)
workload = json.loads(sys.argv[2])
def tell(**what):
    if os.environ["RANK"] == "0":
        print(json.dumps(what), flush=True)
def stand_still():
    time.sleep(600)
for nbytes in workload["sizes"]:
    for side in ("ordinary", "gloo", "torch"):
        if side in workload["without"]:
            continue
        tell(doing=side, nbytes=nbytes)
        if side == os.environ["STUCK"] and nbytes == 1 << 20:
            stand_still()
        tell(nbytes=nbytes, side=side, row=1e-6, single=2e-6)
"""


def measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: str, services: list[str]
) -> list[module.GpuMeasurement]:
    (tmp_path / "stand_in_rank.py").write_text(RANK)
    monkeypatch.setattr(module, "WORKER", "stand_in_rank")
    monkeypatch.setattr(module, "STEP_S", 1.0)
    workload = module.GpuWorkload(ranks=2, rounds=1, sizes=(4096, 1 << 20, 1 << 21))

    @contextlib.contextmanager
    def service():
        services.append("started")
        try:
            yield {"PYTHONPATH": str(tmp_path), "STUCK": stuck}
        finally:
            services.append("stopped")

    return module._measure(workload, module.MPS, service, lambda what: None)


@pytest.mark.parametrize("stuck", ["gloo", "torch"])
def test_a_side_that_stands_still_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stuck: str
):
    services: list[str] = []
    found = measure(tmp_path, monkeypatch, stuck, services)
    assert services == ["started", "stopped"] * 2  # one whose clients were killed at work may let nobody in
    rest = [side for side in ("ordinary", "gloo", "torch") if side != stuck]
    assert sorted((f.nbytes, f.side) for f in found) == sorted(
        [(4096, stuck), *((size, side) for size in (4096, 1 << 20, 1 << 21) for side in rest)]
    )
    assert all(len(f.row) == 1 for f in found)
    said = capsys.readouterr().err
    assert f"# {module.SIDES[stuck]} stood still for 1 s with 1 MiB (MPS)" in said


def test_ours_that_stands_still_says_where_its_ranks_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(errors.SymcommError, match="bench gpu, ordinary with 1 MiB timed out after 1 s") as raised:
        measure(tmp_path, monkeypatch, "ordinary", [])
    assert str(raised.value).count("in stand_still") == 2  # both ranks
