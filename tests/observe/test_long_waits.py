"""The line on stderr about a call that waits: who is missing, where that rank is, and when it goes on."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy
import pytest

import symcomm
from symcomm.group import hooks
from symcomm.observe import long_waits
from tests.support.faults import run_group
from tests.support.loaded import run
from tests.support.ranks import returned, until

pytestmark = pytest.mark.without_torch

HERE = Path(__file__).name
LINES = {
    found[1]: number
    for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
    if (found := re.search(r"# line: (.*)$", text))
}


def at(name: str) -> str:
    return f"{HERE}:{LINES[name]}"


def exact(text: str) -> str:
    """With paths shortened, and numbers that differ from run to run left out: the waits all take a second or two."""
    text = re.sub(r"[\w./-]*(?=test_long_waits\.py)", "", text)
    return re.sub(r"(pid|kill -CONT) \d+", r"\1 N", re.sub(r"(waited|after) [\d.]+ m?s", r"\1 N s", text))


def lines_of(capfd) -> list[str]:
    return [exact(line) for line in capfd.readouterr().err.splitlines() if line.startswith("symcomm: ")]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Waits are told of after 0.3 s, and nothing is remembered of other tests."""
    monkeypatch.setenv("SYMCOMM_HANG_SECONDS", "0.3")
    long_waits._patience.clear()


def be_late(seconds: float = 2.0) -> None:
    time.sleep(seconds)  # line: late


def one_is_late(group) -> float:
    x = numpy.ones(8, "f4")
    group.barrier()
    if group.rank == 2:
        be_late()
    group.all_reduce(x)  # line: all_reduce
    return float(x[0])


SAID = [
    f"symcomm: rank 0 has waited N s in all_reduce(float32 x 8, SUM) #2 on group 'world' at {at('all_reduce')} for "
    f"rank 2 (pid N), which is at {at('late')} in be_late.",
    "symcomm: all_reduce(float32 x 8, SUM) #2 on group 'world' goes on: rank 2 came after N s.",
]


def test_processes(capfd):
    """One rank speaks for all."""
    assert returned(run_group(one_is_late, 4)) == [4.0] * 4
    assert lines_of(capfd) == SAID


def test_threads(capfd):
    assert symcomm.spawn(one_is_late, 4, mode="threads") == [4.0] * 4
    assert lines_of(capfd) == SAID


def test_never(capfd, monkeypatch):
    monkeypatch.setenv("SYMCOMM_HANG_SECONDS", "0")
    assert symcomm.spawn(one_is_late, 3, mode="threads") == [3.0] * 3
    assert lines_of(capfd) == []


def late_again(group) -> None:
    x = numpy.ones(8, "f4")
    for _ in range(3):
        if group.rank == 1:
            be_late(1.5)
        group.barrier()  # line: again
    group.all_reduce(x)


def test_a_place_that_waits_again_is_told_of_later(capfd, monkeypatch):
    """After twice as long: once of three waits that take one and a half times as long each."""
    monkeypatch.setenv("SYMCOMM_HANG_SECONDS", "1")
    symcomm.spawn(late_again, 2, mode="threads")
    assert [line for line in lines_of(capfd) if "has waited" in line] == [
        f"symcomm: rank 0 has waited N s in barrier() #1 on group 'world' at {at('again')} for rank 1 (pid N), "
        f"which is at {at('late')} in be_late."
    ]


def moves_on(group) -> None:
    if group.rank == 1:
        be_late(1.5)
        time.sleep(3)  # line: elsewhere
    group.barrier()


def test_it_is_said_again_when_it_changes(capfd):
    symcomm.spawn(moves_on, 2, mode="threads")
    places = [re.search(r"which is at (.*)\.$", line) for line in lines_of(capfd)]
    assert [found[1] for found in places if found] == [f"{at('late')} in be_late", f"{at('elsewhere')} in moves_on"]


def waits_for_a_message(group) -> None:
    """Rank 2 waits for 1, which waits for 0: only rank 1 waits for one that is late."""
    x = numpy.ones(4)
    if group.rank == 0:
        be_late()
        group.send(x, 1)
    if group.rank == 1:
        group.recv(x, 0)  # line: recv
        group.send(x, 2)
    if group.rank == 2:
        group.recv(x, 1)


def test_messages(capfd):
    symcomm.spawn(waits_for_a_message, 3, mode="threads")
    assert lines_of(capfd) == [
        f"symcomm: rank 1 has waited N s in recv from rank 0 on group 'world' at {at('recv')} for rank 0 (pid N), "
        f"which is at {at('late')} in be_late.",
        "symcomm: recv from rank 0 on group 'world' goes on: rank 0 came after N s.",
    ]


def asynchronous(group) -> None:
    x = numpy.ones(8, "f4")
    if group.rank == 1:
        be_late()
    group.all_reduce(x, async_op=True).wait()  # line: wait


def test_whoever_waits_for_an_asynchronous_call_says_so(capfd):
    symcomm.spawn(asynchronous, 2, mode="threads")
    assert lines_of(capfd) == [
        f"symcomm: rank 0 has waited N s in all_reduce(float32 x 8, SUM) #1 on group 'world' at {at('wait')} for "
        f"rank 1 (pid N), which is at {at('late')} in be_late.",
        "symcomm: all_reduce(float32 x 8, SUM) #1 on group 'world' goes on: rank 1 came after N s.",
    ]


def stops(group) -> None:
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.barrier()  # line: stopped


def test_a_stopped_rank(capfd):
    """It cannot say where it is, and the kernel says why."""

    def during(pids: list[int]) -> None:
        state = Path(f"/proc/{pids[1]}/stat")
        assert until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
        time.sleep(1.5)
        os.kill(pids[1], signal.SIGCONT)

    returned(run_group(stops, 2, during=during))
    assert lines_of(capfd)[0] == (
        f"symcomm: rank 0 has waited N s in barrier() #1 on group 'world' at {at('stopped')} for rank 1 (pid N), "
        "which is stopped (`kill -CONT N` lets it go on)."
    )


def fails(group) -> str:
    if group.rank == 1:
        be_late()
        group.destroy()
        return "left"
    with pytest.raises(symcomm.errors.RankFailedError):
        group.barrier()
    return "told"


def test_a_failure_has_its_own_words(capfd):
    """Nothing is said of going on."""
    assert symcomm.spawn(fails, 2, mode="threads") == ["told", "left"]
    assert [line.split(" ")[3] for line in lines_of(capfd)] == ["has"]


def quick(group) -> int:
    calls = []
    hooks_waits, hooks.waits = hooks.waits, lambda *facts: calls.append(facts) or 0.0
    try:
        for _ in range(200):
            group.barrier()
    finally:
        hooks.waits = hooks_waits
    return len(calls)


def test_quick_calls_ask_nothing():
    assert returned(run_group(quick, 3)) == [0, 0, 0]


PROGRAM = """
import numpy, time, symcomm

def next_batch():
    time.sleep(4)

group = symcomm.init()
if group.rank == 1:
    next_batch()
group.all_reduce(numpy.ones(4))
"""
LAUNCHERS = {
    "symcomm": ["-m", "symcomm", "run", "-n", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_under_launchers(launcher, tmp_path):
    if launcher == "torchrun":
        pytest.importorskip("torch")
    (tmp_path / "job.py").write_text(PROGRAM)
    env = {**os.environ, "SYMCOMM_HANG_SECONDS": "0.3"}
    done = run([sys.executable, *LAUNCHERS[launcher], "job.py"], timeout=100, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = [exact(line.removeprefix("[rank 0] ")) for line in done.stderr.splitlines() if "symcomm: " in line]
    assert told == [
        "symcomm: rank 0 has waited N s in all_reduce(float64 x 4, SUM) #1 on group 'world' at job.py:10 for rank 1 "
        "(pid N), which is at job.py:5 in next_batch.",
        "symcomm: all_reduce(float64 x 4, SUM) #1 on group 'world' goes on: rank 1 came after N s.",
    ]


CELL = """\
import numpy, time, symcomm

def next_batch():
    time.sleep(4)

def work(group):
    if group.rank == 1:
        next_batch()
    group.all_reduce(numpy.ones(4))

symcomm.spawn(work, 2, mode=MODE)
"""


def test_in_a_notebook(tmp_path, monkeypatch):
    """It stands below the cell, and names lines of cells; also where ranks are processes, which have no notebook."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # where it is set, ipykernel does not show what other processes write
    nbclient = pytest.importorskip("nbclient", reason="notebooks are run by nbclient (pip install nbclient ipykernel)")
    pytest.importorskip("ipykernel")
    pytest.importorskip("cloudpickle")
    nbformat = pytest.importorskip("nbformat")
    cells = [f"MODE = {mode!r}\n{CELL}" for mode in ("threads", "processes")]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=90, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for number, cell in enumerate(notebook.cells, 1):
        told = [exact(line) for out in cell.outputs for line in out.get("text", "").splitlines() if "symcomm: " in line]
        assert told == [
            f"symcomm: rank 0 has waited N s in all_reduce(float64 x 4, SUM) #1 on group 'world' at In [{number}]:10 "
            f"for rank 1 (pid N), which is at In [{number}]:5 in next_batch.",
            "symcomm: all_reduce(float64 x 4, SUM) #1 on group 'world' goes on: rank 1 came after N s.",
        ]


def test_a_bad_setting(monkeypatch):
    monkeypatch.setenv("SYMCOMM_HANG_SECONDS", "soon")
    with pytest.raises(symcomm.errors.BadArgumentError, match="SYMCOMM_HANG_SECONDS must be a number of seconds, or 0"):
        hooks.seconds_of_long_waits()
