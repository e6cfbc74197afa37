"""`symcomm bench`: right values, complete figures, clear refusals, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from symcomm import errors
from symcomm.bench import peers as bench_peers
from symcomm.bench import run as bench_run
from symcomm.bench import table as bench_table
from symcomm.bench import torch_calls as bench_torch
from symcomm.bench import worker as bench_worker
from symcomm.bench.estimate import TimeLeft, in_words
from symcomm.bench.run import Case, CaseResult, Effort, measure, open_sides
from symcomm.cli import bench
from tests.support.bench_cli import cli, refused
from tests.support.loaded import stand_in

pytestmark = pytest.mark.long

TINY = ["-n", "3", "-w", "1", "--rounds", "1"]
SMALL = Effort(rounds=1, repetitions=1, iterations=3, warmup=1)


@pytest.fixture(autouse=True)
def loaded_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that load torch by themselves are those of benchmarks in processes of their own, below."""
    monkeypatch.setattr(bench_run, "subprocess", stand_in())


# --- figures -----------------------------------------------------------------------------------------------------


def test_sizes():
    assert bench.pick_sizes("8", "8", 2, "", False) == [8]
    assert bench.pick_sizes("64k", "2M", 32, "", False) == [65536, 2 << 20]
    assert bench.sizes_between(8, 100, 2, 0) == [8, 16, 32, 64]
    assert bench.sizes_between(8, 32, 2, 10) == [8, 18, 28]


def test_the_example_in_the_help_ends_at_its_end():
    low, high, factor = re.search(r"-b (\S+) -e (\S+) -f (\d+)", bench.bench.__doc__).groups()
    assert bench.pick_sizes(low, high, int(factor), "", False)[-1] == 64 << 20 and high == "64M"


def test_sizes_count_as_in_nccl_tests():
    """Where every rank has a piece, the size is that of all pieces; a size too small still has one element."""
    [case] = bench_run.make_cases("all_gather", [1024], 4, "float32", "sum", 0, one_place=True)
    assert (case.nbytes, case.count) == (1024, 64)
    [case] = bench_run.make_cases("all_reduce", [1024], 4, "float64", "sum", 0, one_place=True)
    assert (case.nbytes, case.count) == (1024, 128)
    [case] = bench_run.make_cases("reduce_scatter", [8], 4, "float32", "sum", 0, one_place=True)
    assert (case.nbytes, case.count) == (16, 1)


def test_calls_that_took_the_slow_path_are_warned_of():
    case = Case("all_reduce", 1024, 256, "float32", "sum", 0, True)
    gloo, short = CaseResult(case, "gloo", 1e-6, 1e-6, 0), CaseResult(case, "ordinary", 1e-6, 1e-6, 0, calls=1200)
    assert bench_table.ways([gloo]) == ""
    assert bench_table.ways([gloo, short]) == "way: all 1,200 timed calls of ours took the fast path"
    slow = CaseResult(case, "symmetric", 1e-5, 1e-5, 0, calls=100, long=40)
    words = "WARNING: 40 of 1,300 timed calls took the slow path through Python: all_reduce of 1 KiB"
    assert bench_table.ways([gloo, short, slow]) == words
    figures = bench_torch.TorchMeasurement("2.15.0", "direct")
    assert "all blocking calls of ours took the fast path" in bench_torch.note([figures], bench_torch.TorchWorkload())
    figures.long["async 8 B"] = 7  # handed to the group's thread, which is what asynchronous calls are for
    assert "WARNING" not in bench_torch.note([figures], bench_torch.TorchWorkload())
    figures.long["barrier"] = 7
    assert "WARNING: calls took the slow path through Python: barrier (symcomm, torch 2.15" in bench_torch.note(
        [figures], bench_torch.TorchWorkload()
    )


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("gather", 0.75),
     ("scatter", 0.75), ("broadcast", 1), ("reduce", 1), ("p2p", 1)],
)  # fmt: skip
def test_bus_bandwidth(collective: str, factor: float):
    case = Case(collective, 4_000_000, 1_000_000, "float32", "sum", 0, True)
    algbw, busbw = bench_table.bandwidths(case, 0.001, 4)
    assert algbw == pytest.approx(4.0)
    assert busbw == pytest.approx(4.0 * factor)


def test_summary_marks_what_misses_its_goal():
    case = Case("all_reduce", 8, 2, "float32", "sum", 0, True)
    seconds = {"ordinary": 2e-6, "gloo": 5e-6, "mpich": 3e-6, "openmpi": 1e-6}
    results = [CaseResult(case, name, s, s, 0) for name, s in seconds.items()]
    peers = ["gloo", "mpich", "openmpi"]
    row = bench_table.summary_row(results, ["ordinary"], peers, best=False)
    cells = dict(zip(bench_table.summary_head(["ordinary"], peers), row, strict=True))
    assert cells["ordinary vs MPI"] == "0.50x!"
    assert cells["ordinary vs gloo"] == "2.50x!"
    assert cells["mpich (us)"] == "3.00"


def test_the_time_that_is_left_is_learnt():
    """A guess at first; then what cases of the same size took, and guesses as wrong as those before."""
    cases = [Case(name, size, size, "float32", "sum", 0, True) for name in ("reduce", "gather") for size in (8, 4096)]
    estimate = TimeLeft(cases, 2, Effort())
    assert 0.4 * 4 < estimate.seconds_left() < 60
    estimate.took(10.0)
    left = estimate.seconds_left()  # 10 s for the other small one, and about as much for each large one
    assert 29 < left < 40
    estimate.took(20.0)
    assert estimate.seconds_left() == 30.0
    estimate.took(10.0)
    estimate.took(20.0)
    assert estimate.seconds_left() == 0.0
    assert [in_words(seconds) for seconds in (0.2, 42, 200, 7200)] == ["1 s", "45 s", "3 min", "2.0 h"]


def test_lines_come_as_they_are_measured(tmp_path: Path):
    """The benchmark is stopped at its first line: the others are not in the pipe, and no file is written."""
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "symcomm", "bench", "all", "--quick", "-e", "8", "--json", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=False, bufsize=0) as process:
        assert process.stdout is not None and process.stderr is not None
        assert b"10 measurements of ordinary and symmetric, about " in process.stderr.readline()
        seen = b""
        while b"all_reduce       8 B" not in seen:
            seen += (chunk := os.read(process.stdout.fileno(), 4096))
            assert chunk
        os.kill(process.pid, signal.SIGSTOP)
        try:
            while select.select([process.stdout], [], [], 0)[0]:
                seen += os.read(process.stdout.fileno(), 4096)
            assert b"p2p" not in seen and not path.exists()
        finally:
            os.kill(process.pid, signal.SIGCONT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    rows = [line.split()[0].decode() for line in (seen + rest).splitlines() if line.startswith(b"  ")]
    assert rows == list(bench.COLLECTIVES)
    check_rows(path, 2, {"ordinary", "symmetric"})


@pytest.mark.parametrize("peers", [[], ["gloo"]])
def test_lines_have_as_many_cells_as_their_heads(peers: list[str]):
    """Whatever placements a collective has."""
    question = bench.make_question(
        bench.What("all", "float32", "sum", 0), [8, 1024], 2, ["ordinary", "symmetric"], ",".join(peers), SMALL,
        pin=False, summary=False,
    )  # fmt: skip
    lines: list[str] = []
    report = bench.Report(question, bench.Wanted(True, False, None, None), lines.append)
    for case in question.cases:
        report.add([CaseResult(case, name, 2e-6, 1e-6, 0) for name in question.series])
    tables = [block.splitlines() for block in "\n".join(lines).split("**") if block.startswith("\n")]
    assert len(tables) == len(bench.COLLECTIVES)
    for collective, (_, _, head, _, *rows) in zip(bench.COLLECTIVES, tables, strict=True):
        rows = [row for row in rows if row]
        assert len(rows) == 2 * (1 if collective == "barrier" else 2)
        assert {row.count("|") for row in rows} == {head.count("|")}
        assert ("in:time" in head, "out:time" in head) == (
            True in bench_run.PLACES[collective], False in bench_run.PLACES[collective]
        )  # fmt: skip


def test_a_call_that_does_nothing_is_wrong_everywhere():
    """The check can fail: without the call no rank that has a result has the right one."""

    class Idle(bench_worker.MPISide):
        def __init__(self, rank: int):
            self.np, self.rank, self.world, self.barrier = np, rank, 3, lambda: None

        def call(self, case, *tensors):
            return lambda: None

        one_sided = call

        def window(self, count, dtype):
            return None, self.empty(count, dtype, "ordinary")

    results = {"barrier": 0, "reduce": 1, "gather": 1, "p2p": 2, "broadcast": 2, "put": 1, "put_signal": 2}
    for collective, places in bench_run.PLACES.items():
        for in_place in places:
            case = {
                "collective": collective,
                "count": 7,
                "dtype": "float32",
                "op": "sum",
                "root": 1,
                "kind": "ordinary",
            }
            wrong = [bench_worker.Bench(Idle(r), SimpleNamespace(**case, in_place=in_place)).check() for r in range(3)]
            has_result = results.get(collective, 3)
            if collective == "scatter" and in_place:
                has_result = 2  # the root's piece is where it belongs already
            assert sum(w > 0 for w in wrong) == has_result, (collective, in_place, wrong)


# --- real runs ---------------------------------------------------------------------------------------------------


def check_rows(path: Path, ranks: int, series: set[str]) -> list[dict]:
    found = json.loads(path.read_text())
    assert found["ranks"] == ranks
    assert found["machine"]["cores"] >= 1
    assert not (found["pinned"] and ranks > found["machine"]["cores"])
    for row in found["rows"]:
        assert row["wrong"] == 0, row
        assert row["time_us"] > 0 and row["fastest_us"] <= row["time_us"], row
        assert row["algbw"] == pytest.approx(row["size"] / row["time_us"] / 1e3), row
    assert {row["series"] for row in found["rows"]} == series
    return found["rows"]


@pytest.mark.parametrize(
    ("ranks", "sizes", "more"),
    [
        (2, 2, ["-b", "8", "-e", "4K", "-f", "512"]),
        (3, 1, ["-b", "999", "-e", "1K", "-r", "2", "-d", "half", "-o", "max"]),
    ],
    ids=["two ranks", "three ranks"],
)
def test_every_collective(tmp_path: Path, ranks: int, sizes: int, more: list[str]):
    path = tmp_path / "out.json"
    code, output = cli("all", *more, *TINY, "--ranks", str(ranks), "--json", str(path))
    assert code == 0, output
    assert "# wrong elements: 0" in output
    assert "timed calls of ours took the fast path" in output and "WARNING" not in output
    rows = check_rows(path, ranks, {"ordinary", "symmetric"})
    assert not any(row["long_way"] for row in rows)
    for collective in bench.COLLECTIVES:
        places = bench_run.PLACES[collective]
        mine = [row for row in rows if row["collective"] == collective]
        assert {row["in_place"] for row in mine} == set(places)
        assert len(mine) == 2 * len(places) * (1 if collective == "barrier" else sizes)


def test_ordinary_tensors_in_the_shared_heap_are_a_side_of_their_own(tmp_path: Path):
    path = tmp_path / "out.json"
    code, output = cli("all_reduce", "-b", "64K", "-e", "64K", "--heap", *TINY, "--json", str(path))
    assert code == 0 and "# wrong elements: 0" in output, output
    check_rows(path, 2, {"ordinary", "symmetric", "heap"})


def test_asynchronous_calls_are_a_side_of_their_own(tmp_path: Path):
    path = tmp_path / "out.json"
    code, output = cli("all", "-b", "1K", "-e", "1K", "--ordinary", "--async", *TINY, "--json", str(path))
    assert code == 0 and "# wrong elements: 0" in output, output
    rows = check_rows(path, 2, {"ordinary", "async"})
    assert {row["collective"] for row in rows if row["series"] == "async"} == set(bench.COLLECTIVES)


@pytest.mark.parametrize("ranks", [2, 3])
def test_windows(tmp_path: Path, ranks: int):
    path = tmp_path / "out.json"
    code, output = cli("window", "-b", "8", "-e", "4K", "-f", "512", *TINY, "--ranks", str(ranks), "--json", str(path))
    assert code == 0, output
    rows = check_rows(path, ranks, {"ordinary"})
    assert "timed calls of ours took the fast path" in output
    assert [(row["collective"], row["size"]) for row in rows] == [
        ("put", 8), ("put", 4096), ("put_signal", 8), ("put_signal", 4096)
    ]  # fmt: skip


def test_against_gloo_with_plot_and_markdown(tmp_path: Path):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "out.json", tmp_path / "out.svg"
    code, output = cli(
        "all_gather", "--quick", "-e", "16K", *TINY, "--ordinary", "--against", "gloo", "--markdown", "--no-pin",
        "--json", str(path), "--plot", str(picture),
    )  # fmt: skip
    assert code == 0, output
    rows = check_rows(path, 2, {"ordinary", "gloo"})
    assert [row["size"] for row in rows if row["series"] == "gloo"] == [8, 1024, 16384]
    assert "| collective | size | ordinary (us) | gloo (us) | ordinary vs gloo |" in output
    drawn = picture.read_text()
    assert "<svg" in drawn and all(f"<!-- {words} -->" in drawn for words in ("8 B", "1 KiB", "16 KiB", "gloo"))


def test_what_an_mpi_starts_is_a_file_that_stands_alone():
    """Its Python does not have our package."""
    start = bench_peers.start_of("mpich", 2, "address", "store", False, "symcomm.bench.worker")
    [file] = [word for word in start.commands[0] if word.endswith(".py")]
    told = [sys.executable, "-I", "-S", "-c", f"import runpy; runpy.run_path({file!r})"]
    subprocess.run(told, check=True, timeout=60)


def test_an_mpis_arrays_are_in_pages_like_those_of_torchs_tensors():
    """NumPy would ask for huge pages, in which MPI's copies take a tenth less time."""
    code = """
import numpy, torch
def huge():
    return [int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")]
before = huge(); array = numpy.ones(1 << 24, numpy.float32)
between = huge(); tensor = torch.ones(1 << 24)
print(between == before, huge() == between)
"""
    env = bench_peers.start_of("openmpi", 2, "address", "store", False, "symcomm.bench.worker").env
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout in ("True True\n", "False False\n"), done.stdout + done.stderr


@pytest.mark.parametrize("mpi", sorted(bench_peers.MPIS))
def test_against_mpi(tmp_path: Path, mpi: str):
    if not (bench_peers.peers_dir() / mpi / "bin" / bench_peers.MPIS[mpi]).exists():
        pytest.skip(f"{mpi} is not set up; `{bench_peers.SETUP}` does it")
    path, before = tmp_path / "out.json", set(Path("/dev/shm").glob("mpich*"))
    for what, names in bench.FAMILIES.items():
        code, output = cli(what, "-b", "1K", "-e", "1K", *TINY, "--ordinary", "--against", mpi, "--json", str(path))
        assert code == 0, output
        rows = check_rows(path, 2, {"ordinary", mpi})
        assert {row["collective"] for row in rows if row["series"] == mpi} == set(names)
    assert set(Path("/dev/shm").glob("mpich*")) <= before


def test_what_a_peer_cannot_do_is_a_dash_with_its_reason(tmp_path: Path):
    """Gloo has no average of integers."""
    with open_sides(["gloo"], 2) as sides:
        case = Case("all_reduce", 8, 2, "int32", "avg", 0, True)
        [result] = measure(sides, case, ["gloo"], SMALL)
    assert result.seconds is None and result.reason
    assert bench_table.reasons([result]) == [f"gloo, all_reduce: {result.reason}"]


# --- trouble -----------------------------------------------------------------------------------------------------


def test_refusals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert "one of all_reduce, all_gather" in refused("all_the_things")
    assert refused("all_redcue").endswith(", got 'all_redcue'; did you mean all_reduce?\n")
    assert "'8Q'" in refused("-b", "8Q")
    assert "at most --maxbytes, 8" in refused("-b", "9", "-e", "8")
    assert "2 or more" in refused("-f", "1")
    assert "one of int8, uint8" in refused("-d", "float7")
    assert "one of sum, prod" in refused("-o", "median")
    assert "a rank, 0 to 1" in refused("-r", "2")
    assert "store, queue, kernels, attach, groups, ddp, shards, steps" in refused("all_the_things")
    assert "2 or more for p2p" in refused("p2p", "--ranks", "1")
    assert "some of gloo, mpich, openmpi" in refused("--against", "nccl")
    assert ".png or .svg" in refused("--plot", "figure.doc")
    monkeypatch.setattr(bench, "run", None)  # refused before anything is measured
    for mode in ("all_reduce", "store", "kernels", "ddp", "steps", "compile", "hosts", "sites"):
        for option in ("--json", "--plot"):
            words = refused(mode, option, str(tmp_path / "nodir" / "x.svg"))
            assert words.startswith(f"symcomm bench: {option} must be a file in a folder that exists, got '"), words
            assert f"; make {tmp_path / 'nodir'} first" in words
    monkeypatch.setenv("SYMCOMM_PEERS_DIR", str(tmp_path))
    assert "symcomm bench --setup-peers" in refused("--against", "mpich")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'symcomm[plot]'" in refused("--plot", "figure.svg")


def test_a_dead_rank_is_named_and_all_others_end():
    named = pytest.raises(
        errors.RankFailedError, match=r"symcomm: rank 1 \(pid \d+\) died with SIGKILL while all_reduce"
    )
    with named, open_sides(["symcomm"], 2) as sides:
        pids = [rank.pid for rank in sides["symcomm"].ranks]
        os.kill(pids[1], signal.SIGKILL)
        measure(sides, Case("all_reduce", 8, 2, "float32", "sum", 0, True), ["ordinary"], SMALL)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_side_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch):
    broken = bench_peers.Start([[sys.executable, "-c", "raise SystemExit('no such library')"]], dict(os.environ))
    monkeypatch.setattr(bench_run, "start_of", lambda *args: broken)
    reason = pytest.raises(errors.RankFailedError, match=r"exited with code 1 while starting.*no such library")
    with reason, open_sides(["gloo"], 1):
        pass


def test_interrupt_ends_every_process():
    command = [sys.executable, "-m", "symcomm", "bench", "all_reduce", "-n", "3", "--rounds", "100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        end = time.monotonic() + 30
        workers: list[psutil.Process] = []
        while len(workers) < 2 and time.monotonic() < end:
            workers = psutil.Process(process.pid).children(recursive=True)
            time.sleep(0.1)
        assert len(workers) == 2
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive
    finally:
        process.kill()
        process.communicate()
