"""A benchmark never stands still silently: a side that does is named, with where its ranks are, and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from symcomm import errors
from symcomm.bench import peers as bench_peers
from symcomm.bench import plans, whereabouts
from symcomm.bench import run as bench_run
from symcomm.bench.run import Case, Effort, measure, open_sides
from tests.support.bench_cli import cli

ROOT = Path(__file__).parents[2]
# A rank that measures nothing, and stands still where it is told to: "side, rank, order, size".
RANK = """
import os, signal, sys, time
from symcomm.bench.worker import serve
side, rank, when, size = os.environ["STILL"].split(",")
def stand_still():
    while True:
        time.sleep(600)
class Orders:
    def __init__(self, args):
        self.rank, self.is_it, self.sizes = args.rank, (args.name, args.rank) == (side, int(rank)), {}
        self.reach("start", 0)
    def reach(self, order, nbytes):
        if self.is_it and order == when and nbytes >= int(size):
            os.kill(os.getpid(), signal.SIGSTOP) if os.environ.get("HOW") == "stopped" else stand_still()
    def prepare(self, case, spec):
        self.sizes[case] = spec["nbytes"]
        return self.reach("prepare", spec["nbytes"]) or {}
    def check(self, case):
        return {"wrong": 0}
    def time(self, case, iterations, repetitions, warmup):
        self.reach("time", self.sizes[case])
        return {"ns": [1000] * repetitions}
    def drop(self, case):
        return self.reach("drop", self.sizes[case]) or {}
if not (os.environ.get("HOW") == "mute" and sys.argv[2] == side and sys.argv[3] == rank):
    serve(Orders)
stand_still()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ranks that stand still, with short deadlines."""
    (tmp_path / "rank.py").write_text(RANK)

    def start_of(side: str, world: int, address: str, store: str, *_: object) -> bench_peers.Start:
        words = [sys.executable, str(tmp_path / "rank.py"), address, side]
        commands = [[*words, str(rank), str(world), store, "free"] for rank in range(world)]
        return bench_peers.Start(commands, {**os.environ, "PYTHONPATH": str(ROOT / "src")})

    def prepare(still: str, how: str = "", start: float = 60.0) -> None:
        monkeypatch.setenv("STILL", still)
        monkeypatch.setenv("HOW", how)
        monkeypatch.setattr(bench_run, "start_of", start_of)
        monkeypatch.setattr(bench_run, "ORDER_DEADLINE", 4.0)
        monkeypatch.setattr(bench_run, "START_DEADLINE", start)
        monkeypatch.setattr(bench_run, "SLOW", 0.3)

    return prepare


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "rank.py" in " ".join(p.cmdline())]


def rows_of(path: Path) -> dict[tuple[int, str], bool]:
    """Whether there is a time, by size and series."""
    return {(row["size"], row["series"]): "time_us" in row for row in json.loads(path.read_text())["rows"]}


@pytest.mark.parametrize("order", ["prepare", "time", "drop"])
def test_a_side_that_stands_still_is_named_and_the_other_rows_are_measured(tmp_path: Path, stand_in, order: str):
    stand_in(f"gloo,1,{order},16")
    path = tmp_path / "out.json"
    words = ["-b", "8", "-e", "32", "-n", "3", "--rounds", "1", "--ordinary", "--against", "gloo"]
    code, output = cli("broadcast", *words, "--json", str(path))
    assert code == 1, output
    ours = {(size, "ordinary"): True for size in (8, 16, 32)}
    assert rows_of(path) == ours | {(8, "gloo"): True, (16, "gloo"): False, (32, "gloo"): False}
    assert "# symcomm bench: gloo has not answered for 0.3 s: broadcast of 16 bytes, rank 1; it has 4" in output
    assert "gloo, broadcast of 16 bytes timed out after 4" in output and "rank 1 did not come" in output
    assert "rank 1 (pid " in output and "in stand_still" in output
    assert "gloo, broadcast: stood still in broadcast of 16 bytes" in output
    assert not children()


def test_a_stopped_rank_is_called_stopped(stand_in, capsys: pytest.CaptureFixture[str]):
    stand_in("symcomm,0,time,0", "stopped")
    case, effort = Case("all_reduce", 8, 2, "float32", "sum", 0, True), Effort(rounds=1, repetitions=1, iterations=3)
    with open_sides(["symcomm", "gloo"], 2) as sides:
        ours, theirs = measure(sides, case, ["ordinary", "gloo"], effort)
    assert ours.stood_still and ours.seconds is None
    assert not theirs.stood_still and theirs.seconds == pytest.approx(1e-6)
    assert "is stopped (SIGSTOP, or a debugger)" in capsys.readouterr().err
    assert not children()


@pytest.mark.parametrize("how", ["", "mute"], ids=["connected", "mute"])
def test_a_side_that_does_not_come_up_is_named(stand_in, how: str):
    """It has not said who it is, or not even connected."""
    stand_in("gloo,1,start,0", how, start=10.0)
    named = pytest.raises(errors.DeadlineError, match="symcomm bench: gloo, starting timed out after")
    with named as caught, open_sides(["gloo", "symcomm"], 2):
        pass
    assert "in stand_still" in str(caught.value) or how == "mute"
    assert "rank.py" in str(caught.value)
    assert not children()


def test_a_whole_program_that_stands_still_ends_with_exit_code_1(stand_in):
    stand_in("gloo,0,start,0", start=10.0)
    code, output = cli("ddp", "--quick")
    assert code == 1 and "gloo, starting timed out after" in output, output
    assert not children()


LINES = """
import faulthandler, signal, time
faulthandler.register(signal.SIGUSR1, 2, all_threads=False)
def stand_still():
    time.sleep(600)
print("first", flush=True)
stand_still()
"""


def test_ranks_that_write_lines_are_named_by_their_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(plans, "SLOW", 5.0)
    log = tmp_path / "log"
    with log.open("w") as said:
        words = [sys.executable, "-c", LINES]
        rank = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=said, text=True)
    found = []
    try:
        with pytest.raises(errors.DeadlineError, match="the ranks, after first timed out after 6 s") as caught:
            found.extend(plans.lines_of("the ranks", [rank], log, (6.0, 6.0), "after {}".format))
            pytest.fail("it has ended")
    finally:
        rank.kill()
        rank.wait()
    assert "in stand_still" in str(caught.value)
    assert "# the ranks, after first: nothing came for 5 s; it has 6 s" in capsys.readouterr().err


def test_whereabouts_of_those_that_cannot_say(tmp_path: Path):
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        end = time.monotonic() + 10
        while "sleep" not in Path(f"/proc/{sleeper.pid}/comm").read_text() and time.monotonic() < end:
            time.sleep(0.01)
        said = whereabouts.where_are({"rank 3": sleeper.pid}, tmp_path / "none")
        assert said == f"rank 3 (pid {sleeper.pid}) has not begun: sleep 600"
        assert sleeper.poll() is None  # a signal that it does not expect would have ended it
    finally:
        sleeper.send_signal(signal.SIGKILL)
        sleeper.wait()
    assert whereabouts.where_are({"rank 3": sleeper.pid}, tmp_path / "none").endswith("is gone")
