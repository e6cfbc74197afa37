"""Whole programs that `symcomm bench` measures: the store, training, groups, graphs, calls of torch; and pictures."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from symcomm import errors
from symcomm.bench import compile as bench_compile
from symcomm.bench import ddp as bench_ddp
from symcomm.bench import ddp_worker as bench_ddp_worker
from symcomm.bench import groups as bench_groups
from symcomm.bench import hosts as bench_hosts
from symcomm.bench import run as bench_run
from symcomm.bench import shards as bench_shards
from symcomm.bench import sites as bench_sites
from symcomm.bench import steps as bench_steps
from symcomm.bench import store as bench_store
from symcomm.bench import table as bench_table
from symcomm.bench import torch_calls as bench_torch
from symcomm.bench.run import Case, CaseResult
from symcomm.cli import bench
from symcomm.cli.progress import Bar
from tests.support.bench_cli import cli, refused
from tests.support.loaded import stand_in

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def loaded_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that load torch by themselves are those of benchmarks in processes of their own, below."""
    monkeypatch.setattr(bench_run, "subprocess", stand_in())


# --- the store --------------------------------------------------------------------------------------------------


def test_the_store_on_real_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Ours alone (PyTorch's asks a resolver, which may take seconds); progress is told as often as was promised."""
    told: list[str] = []

    class Told(Bar):
        def __init__(self) -> None:
            super().__init__(0)

        def __call__(self, what: str) -> None:
            told.append(what)

    @contextlib.contextmanager
    def progress(turns: int) -> Iterator[Bar]:
        yield Told()
        assert len(told) == turns

    monkeypatch.setattr(bench, "progress", progress)
    few = {"clients": (1, 2), "calls": 20, "connect": (4,), "sides": ("ours",)}
    monkeypatch.setattr(bench_store, "QUICK", few)
    path = tmp_path / "store.json"
    code, output = cli("store", "--quick", "--markdown", "--json", str(path))
    assert code == 0, output
    assert "| call | clients | ours (us) | ours (calls/s) |" in output
    rows = json.loads(path.read_text())["rows"]
    assert [row["what"] for row in rows[-3:]] == ["set until a waiter goes on", "connect", "connect 4 at once"]
    assert all(row["ours_us"] > 0 for row in rows)
    assert {"set, ours, 1 client", "set, ours, 2 clients", "waking, ours", "connecting 4 at once, ours"} <= set(told)


STORE_ROWS = [
    {"what": "set", "clients": 8, "ours_us": 12.0, "torch_us": 30.0, "ours_per_s": 4e5, "torch_per_s": 1e5},
    {"what": "connect", "clients": 1, "ours_us": 200.0, "torch_us": 500.0},
]


def test_the_store_beside_pytorchs():
    title, head, rows = bench_store.as_table(STORE_ROWS, bench_store.StoreWorkload())
    lines: list[str] = []
    table = bench_table.GrowingTable(title, head, lines.append, markdown=False, like=rows)
    for row in rows:
        table.add(row)
    assert len(set(map(len, lines[1:]))) == 1, "columns are below each other"
    assert [re.split(r" {2,}", line.lstrip("# ")) for line in lines[1:]] == [
        ["call", "clients", "ours (us)", "PyTorch (us)", "ratio", "ours (calls/s)", "PyTorch (calls/s)", "ratio"],
        ["set", "8", "12.00", "30.00", "2.50x", "400,000", "100,000", "4.00x"],
        ["connect", "1", "200.0", "500.0", "2.50x", "-", "-", "-"],
    ]


# --- pictures ----------------------------------------------------------------------------------------------------


def test_every_benchmark_has_a_picture():
    case = Case("all_gather", 1024, 2, "float32", "sum", 0, False)
    results = [CaseResult(case, name, 2e-6, 1e-6) for name in ("gloo", "ordinary")]
    results.append(CaseResult(Case("barrier", 0, 0, "float32", "sum", 0, True), "gloo", 5e-6, 5e-6))
    [curves, bars] = bench_table.picture(results, ["ordinary", "gloo"], best=False)
    assert curves.lines == {"symcomm, ordinary tensors": [(1024, 2.0)], "gloo": [(1024, 2.0)]}
    assert bars.groups == {"": {"gloo": 5.0}}  # a barrier has no size
    [calls, others] = bench_store.picture(STORE_ROWS, bench_store.StoreWorkload())
    assert (calls.title, calls.groups) == ("8 clients", {"set": {"ours": 12.0, "PyTorch": 30.0}})
    assert list(others.groups) == ["connect"]
    workload = bench_hosts.HostsWorkload(ranks=2, hosts=2, mbits=1000, collectives=("all_reduce",))
    found = [bench_hosts.HostsMeasurement("all_reduce", 1 << 20, side, 1.0, [0.01, 0.03]) for side in ("ours", "gloo")]
    [curves] = bench_hosts.picture(found, workload, best=True)
    assert curves.lines["symcomm"] == curves.lines["flat gloo"] == [(1 << 20, 10.0)]
    assert curves.lines[bench_hosts.LINK] == [(1 << 20, pytest.approx((1 << 20) * 8 / 1e6))]
    [curves] = bench_sites.picture(
        [bench_sites.SitesMeasurement("plain", [(10, 2.0, 3.5)], 0)], bench_sites.SitesWorkload()
    )
    assert curves.lines["plain DDP"] == [(2.0, 3.5)] and curves.lines["target"] == [
        (0.0, 2.4),
        (2.0, 2.4),
    ]
    [steps, above] = bench_ddp.picture(fake_measurements(bench_ddp.DdpWorkload()), bench_ddp.DdpWorkload(), best=True)
    assert steps.groups["linear"]["no DDP"] == 50.0 and above.groups["linear"]["symcomm DDP"] == pytest.approx(4.0)
    workload = bench_compile.CompileWorkload()
    found = [
        bench_compile.CompileMeasurement("mlp", side, 0.0, [s], 8, 4) for side, s in (("alone", 1e-3), ("gloo", 3e-3))
    ]
    [steps, above] = bench_compile.picture(found, workload)
    assert steps.groups["mlp"]["gloo"] == pytest.approx(3000) and above.groups["mlp"] == {"gloo": pytest.approx(2000)}


# --- data parallel training --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ddp_on_every_side():
    """A tiny model with buffers on real ranks; three, where the order of additions matters."""
    ticks: list[str] = []
    workload = bench_ddp.DdpWorkload(ranks=3, rounds=2, steps=1, models=("conv",), scale=16)
    found = bench_ddp.run_ddp_bench(workload, ticks.append)
    assert [(f.program, f.side) for f in found] == [("conv", side) for side in bench_ddp.SIDES]
    assert len(ticks) == workload.turns == sum(len(f.turns) for f in found)
    assert all(min(f.turns) > 0 and 0 <= f.error < bench_ddp.TOLERANCE and f.peak >= 0 for f in found)
    convolutions, norms, heads = 9 * (3 * 2 + 2 * 4 + 4 * 8), 2 * (2 + 4 + 8), (128 + 1) * 16 + (16 + 1) * 10
    assert {f.parameters for f in found} == {convolutions + norms + heads}


@pytest.mark.slow
def test_shards_on_both_sides():
    """Real ranks: the same bits with one shard a rank, or nothing is timed."""
    ticks: list[str] = []
    workload = bench_shards.ShardsWorkload(ranks=2, rounds=2, steps=1, models=("conv",), per_rank=(1, 2), scale=16)
    found = bench_shards.run_shards_bench(workload, ticks.append)
    assert [(f.model, f.per_rank) for f in found] == [("conv", 1), ("conv", 2)]
    assert len(ticks) == workload.turns == sum(len(f.plain) + len(f.shards) for f in found)
    assert found[0].error == 0 <= found[1].error < bench_ddp.TOLERANCE
    assert all(min(f.plain + f.shards) > 0 for f in found)


class Other:
    """A side whose weights are ``parameters``."""

    def __init__(self, parameters: int):
        self.parameters = parameters

    def ask(self, what: str, order: dict) -> list[dict]:
        return [{"losses": [1.0], "gradients": [{"some": [1.0], "size": 1.0}], "parameters": self.parameters}] * 2


def test_shards_with_other_bits_are_not_timed():
    sides: Any = {"plain": Other(1), "shards": Other(2)}
    with pytest.raises(errors.SymcommError, match="1 shards a rank, ends with other bits than plain DDP"):
        bench_shards._measure(sides, "conv", 1, bench_shards.ShardsWorkload(), print)


def test_shards_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked = []

    def stand_in(workload: bench_shards.ShardsWorkload, *_: object) -> list[bench_shards.ShardsMeasurement]:
        asked.append(workload)
        return [bench_shards.ShardsMeasurement("linear", 2, 1e-7, [0.1, 0.2, 0.2], [0.12, 0.22, 0.2])]

    monkeypatch.setattr(bench_shards, "run_shards_bench", stand_in)
    path = tmp_path / "shards.json"
    picture = ["--plot", str(tmp_path / "shards.svg")] if importlib.util.find_spec("matplotlib") else []
    code, output = cli("shards", "--ranks", "4", "--quick", "--markdown", "--json", str(path), *picture)
    assert code == 0, output
    assert asked == [bench_shards.ShardsWorkload(4, **bench_shards.QUICK)]
    assert "| linear | 2 | 200.0 | 200.0 | 1.10x |" in output and "bit for bit" in output
    assert json.loads(path.read_text())["rows"][0]["shards"] == [0.12, 0.22, 0.2]
    _, fastest = cli("shards", "--best", "--markdown")
    assert "| linear | 2 | 100.0 | 120.0 | 1.20x |" in fastest


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(bench_steps.PROGRAMS))
def test_steps_on_every_side(program: str):
    ticks: list[str] = []
    workload = bench_steps.StepsWorkload(ranks=2, rounds=2, steps=1, programs=(program,), heap=True, scale=8)
    found = bench_steps.run_steps_bench(workload, ticks.append)
    assert [(f.program, f.side) for f in found] == [(program, side) for side in bench_steps.SIDES]
    assert len(ticks) == workload.turns == sum(len(f.turns) for f in found)
    assert all(min(f.turns) > 0 and 0 <= f.error < bench_steps.TOLERANCE and f.parameters > 1000 for f in found)
    *others, ours, heap = found
    assert not any(f.nbytes for f in others)
    if program == "pipeline":  # which has messages, and no collectives to speak of
        return
    assert heap.nbytes == ours.nbytes > 0 and heap.direct >= ours.direct
    assert heap.direct > 0.9 * heap.nbytes or program == "tensor parallel", "tensors of the latter are tiny here"


def test_steps_with_other_losses_are_refused():
    right = [[1.0, 0.5], [2.0, 0.0]]
    assert bench_steps.disagreement(right, right) == 0
    assert bench_steps.disagreement(right, [[1.0, 0.5], [2.0, 1e-9]]) == float("inf")
    assert bench_steps.disagreement(right, [[1.0, 0.5], [2.2, 0.0]]) == pytest.approx(0.1)
    assert bench_steps.disagreement(right, [[1.0, float("nan")], [2.0, 0.0]]) == float("inf")
    with pytest.raises(errors.SymcommError, match="has other losses"):
        bench_steps.frame.need_right(0.1, bench_steps.TOLERANCE, "fsdp2 on symcomm has other losses than on Gloo ({}")


def test_steps_figures():
    workload = bench_steps.StepsWorkload(programs=("fsdp2",))
    turns = {"alone": [0.1, 0.1], "gloo": [0.5, 0.5], "symcomm": [0.2, 0.2]}
    found = [
        bench_steps.StepsMeasurement("fsdp2", side, 1e-7, turns[side], 33_600_000, 100 * ours, 75 * ours)
        for side in workload.sides
        for ours in [int(side == "symcomm")]
    ]
    _, head, rows = bench_steps.as_table(found, workload)
    told = [dict(zip(head, row, strict=True)) for row in rows]
    assert [row["direct"] for row in told] == ["-", "-", "75%"]
    assert told[2]["gloo / this"].startswith("4") and told[2]["communication (ms)"] == "100.0"
    assert bench_steps.to_json(found, workload)["rows"][2]["direct_bytes"] == 75
    assert "heap" not in workload.sides and "heap" in bench_steps.StepsWorkload(heap=True).sides


def fake_measurements(workload: bench_ddp.DdpWorkload) -> list[bench_ddp.DdpMeasurement]:
    """Three rounds; in the second everything is slow."""
    turns = {
        "alone": [0.050, 0.160, 0.055],
        "gloo": [0.120, 0.22, 0.12],
        "symcomm": [0.068] * 3,
        "ours": [0.054, 0.167, 0.062],
    }
    return [
        bench_ddp.DdpMeasurement("linear", name, 1e-7, turns[name], 12_600_000, 100 << 20, 50 << 20) for name in turns
    ]


def test_ddp_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked = []

    def stand_in(workload: bench_ddp.DdpWorkload, *_: object) -> list[bench_ddp.DdpMeasurement]:
        asked.append(workload)
        return fake_measurements(workload)

    monkeypatch.setattr(bench_ddp, "run_ddp_bench", stand_in)
    path = tmp_path / "ddp.json"
    picture = ["--plot", str(tmp_path / "ddp.svg")] if importlib.util.find_spec("matplotlib") else []
    code, output = cli("ddp", "--ranks", "4", "--quick", "--markdown", "--json", str(path), *picture)
    assert code == 0, output
    assert asked == [bench_ddp.DdpWorkload(4, **bench_ddp.QUICK)]
    assert "| linear | 12.60 M | no DDP | 55.0 | - | - | - | 100 | 50 |" in output
    assert "| linear | 12.60 M | torch DDP, gloo | 120.0 | 65.0 | 54% | 1.00x | 100 | 50 |" in output
    assert "| linear | 12.60 M | symcomm DDP | 62.0 | 7.0 | 11% | 9.29x | 100 | 50 |" in output
    rows = {row["side"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["ours"]["communication_ms"] == pytest.approx(7) and "communication_ms" not in rows["alone"]
    assert rows["ours"]["fastest_communication_ms"] == pytest.approx(4)
    _, fastest = cli("ddp", "--best", "--rounds", "7", "-n", "5")
    assert asked[1] == bench_ddp.DdpWorkload(2, 7, 5)
    assert re.search(r"54\.0 +4\.0 +7%", fastest), fastest
    assert "--rounds must be 1 or more" in refused("ddp", "--rounds", "0")
    assert "2 or more for ddp" in refused("ddp", "--ranks", "1")
    if picture:
        assert (tmp_path / "ddp.svg").read_text().count("<!-- symcomm DDP -->") == 1  # one legend for both panels


def test_groups_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[bench_groups.GroupsWorkload] = []
    made = {"gloo": [2e-3, 4e-3, 9e-3], "symcomm": [1e-3, 2e-3, 3e-3], "ours": [5e-4] * 3}

    def stand_in(workload: bench_groups.GroupsWorkload, *_: object) -> list[bench_groups.GroupsMeasurement]:
        asked.append(workload)
        return [bench_groups.GroupsMeasurement(side, 14 << 10, 512, s, [1e-4] * 3) for side, s in made.items()]

    monkeypatch.setattr(bench_groups, "run_groups_bench", stand_in)
    path = tmp_path / "groups.json"
    code, output = cli("groups", "--ranks", "4", "--quick", "--markdown", "--json", str(path))
    assert code == 0 and asked == [bench_groups.GroupsWorkload(4, **bench_groups.QUICK)], output
    assert "| torch, gloo | 4.00 | 1.00x | 0.10 | 14.0 | 0.50 |" in output
    assert "| torch, symcomm | 2.00 | 2.00x | 0.10 | 14.0 | 0.50 |" in output
    rows = json.loads(path.read_text())["rows"]
    assert (rows[1]["make_ms"], rows[1]["fastest_make_ms"]) == (pytest.approx(2), pytest.approx(1))
    [bars] = bench_groups.picture(stand_in(asked[0]), asked[0], best=True)
    assert bars.groups["new_group"]["symcomm"] == pytest.approx(0.5)
    assert "2 or more for groups" in refused("groups", "--ranks", "1")


@pytest.mark.slow
def test_groups_on_every_side():
    ticks: list[str] = []
    workload = bench_groups.GroupsWorkload(ranks=2, rounds=1, steps=2, held=4)
    found = {f.side: f for f in bench_groups.run_groups_bench(workload, ticks.append)}
    assert list(found) == list(bench_groups.SIDES) and len(ticks) == workload.turns
    assert all(min(f.made) > 0 and min(f.dropped) > 0 for f in found.values())
    assert 0 < found["ours"].idle < 1 << 20


def test_compile_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[bench_compile.CompileWorkload] = []
    turns = {"alone": 1e-3, "gloo": 3e-3, "eager": 1.5e-3, "symcomm": 1.25e-3}

    def stand_in(workload: bench_compile.CompileWorkload, *_: object) -> list[bench_compile.CompileMeasurement]:
        asked.append(workload)
        return [bench_compile.CompileMeasurement("mlp", side, 1e-7, [s] * 3, 1 << 20, 4) for side, s in turns.items()]

    monkeypatch.setattr(bench_compile, "run_compile_bench", stand_in)
    path = tmp_path / "compile.json"
    code, output = cli("compile", "--quick", "--markdown", "--json", str(path))
    assert code == 0 and asked == [bench_compile.CompileWorkload(2, **bench_compile.QUICK)]
    assert "| mlp | 4 | 1024 | symcomm, ours | 1250 | 250 | 8.00x | 2.00x |" in output
    rows = json.loads(path.read_text())["rows"]
    assert rows[3]["communication_us"] == pytest.approx(250) and "communication_us" not in rows[0]
    assert "2, 4 or 8 for compile" in refused("compile", "--ranks", "3")


def test_torch_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[bench_torch.TorchWorkload] = []

    def stand_in(workload: bench_torch.TorchWorkload, *_: object) -> list[bench_torch.TorchMeasurement]:
        asked.append(workload)
        calls = {call: [1e-6, 3e-6, 2e-6] for call in bench_torch.CALLS}
        return [bench_torch.TorchMeasurement(version, "direct", calls) for version in ("2.13.0", "2.15.0")]

    monkeypatch.setattr(bench_torch, "run_torch_bench", stand_in)
    path = tmp_path / "torch.json"
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    code, output = cli("torch", "--quick", "--markdown", "--python", str(other), "--json", str(path))
    assert code == 0, output
    assert asked == [bench_torch.TorchWorkload(2, **bench_torch.QUICK, pythons=(sys.executable, str(other)))]
    assert "| 2.15.0 | symcomm | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 |" in output
    assert all(row["us"] == pytest.approx(2) for row in json.loads(path.read_text())["rows"])
    assert "--python must be Python interpreters" in refused("torch", "--python", "/no/such/python")
    assert "2 or more for torch" in refused("torch", "--ranks", "1")


@pytest.mark.slow
def test_every_way_through_torch_is_timed(tmp_path: Path):
    """The same interpreter under another name is another environment, which finds our package and measures as well."""
    pytest.importorskip("torch")
    from symcomm.torch_backend import versions

    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    ticks: list[str] = []
    found = bench_torch.run_torch_bench(bench_torch.TorchWorkload(2, 2, 3, (sys.executable, str(other))), ticks.append)
    ways = [way for way in bench_torch.WAYS if way != "watched" or versions.HAS_PYTHON_BACKENDS]
    assert [figures.way for figures in found] == ways * 2 and len(ticks) == 2 * len(found)
    assert all(len(turns) == 2 and min(turns) > 0 for figures in found for turns in figures.turns.values())


def test_compile_graphs_divide():
    """Every rank's part, added up, is what one process gives: layers are linear in what is divided."""
    torch = pytest.importorskip("torch")
    from symcomm.bench.compile_worker import GRAPHS

    for name, make in GRAPHS.items():
        seen: list[list[object]] = []
        for rank in range(2):
            arguments, function = make(rank, 2, 16)
            seen.append([])
            function(lambda tensor, op, here=seen[-1]: here.append(tensor) or tensor, *arguments)
        arguments, function = make(0, 1, 16)
        whole: list[object] = []
        function(lambda tensor, op, here=whole: here.append(tensor) or tensor, *arguments)
        share = 2 if name == "ddp" else 1
        torch.testing.assert_close((seen[0][0] + seen[1][0]) / share, whole[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", sorted(bench_ddp_worker.MODELS))
def test_ranks_that_do_not_communicate_are_noticed(model: str):
    """The check can fail: each rank on its own batches does not learn what one process with all of them does."""

    def check(rank: int, communicates: bool) -> dict:
        side = bench_ddp_worker.DdpSide(rank, 2, communicates, lambda module: module, lambda: None)
        return bench_ddp_worker.DdpTraining(side, model, 16).check(2)

    reference = [check(rank, communicates=False) for rank in range(2)]
    deaf = [check(rank, communicates=True) for rank in range(2)]
    assert bench_ddp.disagreement(reference, reference) == 0
    assert bench_ddp.disagreement(reference, deaf) == float("inf")
    for answer in deaf:  # even if the parameters were the same on all ranks
        answer["parameters"] = 0
    assert bench_ddp.disagreement(reference, deaf) > 10 * bench_ddp.TOLERANCE
