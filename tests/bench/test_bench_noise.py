"""`symcomm bench noise`: neighbours that are there while it measures and gone afterwards, rows as they come, ratios."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from symcomm import errors
from symcomm.bench import noise as bench_noise
from symcomm.bench import worker as bench_worker
from symcomm.bench.noise import Neighbours, NoiseMeasurement, NoiseWorkload, live_beside, parse_neighbours
from symcomm.bench.run import Case
from symcomm.cli import bench
from tests.support.ranks import until

SMALL = Case("all_reduce", 8, 2, "float32", "sum", 0, True)


def test_neighbours_in_words():
    assert parse_neighbours("none,2:1, 25:4") == (Neighbours(), Neighbours(0.02, 0.001), Neighbours(0.25, 0.004))
    assert [str(kind) for kind in parse_neighbours("none,2:1,25:0.5")] == ["none", "2% of 1 ms", "25% of 0.5 ms"]
    for wrong in ("", "some", "25", "100:1", "0:1", "10:0", "5:2000", "none,-2:1"):
        with pytest.raises(errors.BadArgumentError, match="--neighbours"):
            parse_neighbours(wrong)
    with pytest.raises(errors.BadArgumentError, match="--against"):
        bench_noise.peers_at_hand("gloo")


def test_ratios_are_against_the_better_mpi_of_each_figure():
    workload = NoiseWorkload(2, (Neighbours(0.25, 0.004),), ("mpich", "openmpi"))
    figures = NoiseMeasurement(workload.neighbours[0], SMALL)
    for side, median, tail in (("symcomm", 2e-6, 8e-6), ("mpich", 3e-6, 4e-6), ("openmpi", 5e-6, 6e-6)):
        for factor in (1, 1, 9):  # one turn was disturbed
            figures.add(side, median * factor, tail * factor)
    cells = dict(zip(bench_noise.head(workload), bench_noise.row(figures, workload), strict=True))
    assert (cells["ours median (us)"], cells["mpich p99 (us)"]) == ("2.00", "4.00")
    assert (cells["median vs MPI"], cells["p99 vs MPI"]) == ("1.50x", "0.50x!")
    assert (cells["neighbours"], cells["collective"], cells["size"]) == ("25% of 4 ms", "all_reduce", "8 B")
    [panel] = bench_noise.picture([figures], workload)
    assert "25% of 4 ms" in panel.title


def test_a_neighbour_works_on_its_core_and_ends_with_its_bench():
    core, before = min(os.sched_getaffinity(0)), set(psutil.Process().children())
    with live_beside(Neighbours(0.5, 0.002), [core]):
        [neighbour] = set(psutil.Process().children()) - before
        assert until(lambda: sum(neighbour.cpu_times()[:2]) > 0.1), "it is awake"
        assert neighbour.cpu_affinity() == [core]
        switches = neighbour.num_ctx_switches().voluntary
        assert until(lambda: neighbour.num_ctx_switches().voluntary > switches + 5), "it sleeps"
    assert not neighbour.is_running()
    with live_beside(Neighbours(), [core]):
        assert set(psutil.Process().children()) <= before


def test_neighbours_of_a_bench_that_was_killed_end():
    source = (
        "from symcomm.bench.noise import Neighbours, live_beside\n"
        f"with live_beside(Neighbours(0.1, 0.001), [{min(os.sched_getaffinity(0))}]):\n"
        "    print('there', flush=True); input()"
    )
    killed = subprocess.Popen([sys.executable, "-c", source], stdin=-1, stdout=-1)
    assert killed.stdout is not None and killed.stdout.readline() == b"there\n"
    [neighbour] = psutil.Process(killed.pid).children()
    killed.kill()
    killed.communicate()
    assert until(lambda: not neighbour.is_running() or neighbour.status() == psutil.STATUS_ZOMBIE)


def test_every_call_counts():
    """Of 200 calls, 3 are slow: the median does not know, the 99th percentile does."""

    class Played(bench_worker.Bench):
        def __init__(self) -> None:
            self.case, self.side = SMALL, type("Side", (), {"barrier": staticmethod(lambda: None)})
            self.source = self.result = None
            self.zeroed, self.calls = True, 0

        def call(self) -> None:
            self.calls += 1
            if self.calls % 64 == 0:
                os.sched_yield()
                end = bench_worker.time.perf_counter() + 0.02
                while bench_worker.time.perf_counter() < end:
                    pass

    found = Played().sample(200)
    assert found["p99"] >= 20e6 > 10e6 > found["median"] > 0
    assert found["total"] >= 3 * 20e6


def test_rows_on_real_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = set(psutil.Process().children())
    monkeypatch.setenv("SYMCOMM_PEERS_DIR", str(tmp_path / "none"))  # nobody to be held against
    monkeypatch.setattr(bench_noise, "WORK", (("all_reduce", (8,)), ("p2p", (8,))))
    monkeypatch.setattr(bench_noise, "QUICK", {"rounds": 1, "seconds": 0.02})
    args = ["noise", "--quick", "--neighbours", "none,10:1", "--json", str(tmp_path / "found.json"), "--markdown"]
    result = CliRunner().invoke(bench.app, args)
    assert result.exit_code == 0, result.output
    rows = [line.split(" | ")[:3] for line in result.output.splitlines() if line.startswith("| ")]
    names = [f"{row[0].removeprefix('| ')}, {row[1]}" for row in rows[2:]]
    assert names == ["none, all_reduce", "none, p2p", "10% of 1 ms, all_reduce", "10% of 1 ms, p2p"]
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["duty"] for row in found["rows"]] == [0, 0, 0.1, 0.1]
    assert all(row["p99_us"] >= row["median_us"] > 0 for row in found["rows"])
    assert set(psutil.Process().children()) <= before
