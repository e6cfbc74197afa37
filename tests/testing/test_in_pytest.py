"""The kit in pytest itself, started as users start it: what is captured, -x, --pdb, pytest-xdist."""

from __future__ import annotations

import ast
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.loaded import run

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
SECONDS = 100.0

FAILING = """
import sys
from symcomm import testing

@testing.ranks(2, mode="MODE")
def test_first(group):
    sys.stdout.write(f"from rank {group.rank}\\n")
    sys.stderr.write(f"and on stderr {group.rank}\\n")
    group.barrier()
    assert group.rank == 0, "not here"

@testing.ranks(2, mode="MODE")
def test_second(group):
    group.barrier()
"""
MODES = pytest.mark.parametrize("mode", ["threads", "processes"])


def write(folder: Path, text: str, mode: str = "") -> None:
    (folder / "test_it.py").write_text(text.replace("MODE", mode))


def said(folder: Path, *words: str) -> tuple[int, str]:
    done = run([*PYTEST, *words, "test_it.py"], cwd=folder, timeout=SECONDS)
    return done.returncode, done.stdout


@MODES
def test_tracebacks_and_what_ranks_printed(mode, tmp_path):
    """The ranks' own, and nothing of the kit."""
    write(tmp_path, FAILING, mode)
    code, out = said(tmp_path)
    assert code == 1 and "1 failed, 1 passed" in out and "rank 1 raised:" in out and "not here" in out, out
    assert "running.py" not in out and "decorator.py" not in out and "tracebackhide" not in out
    stdout, stderr = out.split("Captured stdout call")[1].split("Captured stderr call")
    assert sorted(re.findall(r"^from rank \d", stdout, re.M)) == ["from rank 0", "from rank 1"], out
    assert sorted(re.findall(r"^and on stderr \d", stderr, re.M)) == ["and on stderr 0", "and on stderr 1"], out


PRINTING = """
from symcomm import testing

@testing.ranks(3, mode="processes")
def test_it(group):
    for _ in range(100):
        print("rank", group.rank, "prints", "five", "words")
"""


@pytest.mark.parametrize("how", ["fd", "sys"])
def test_lines_of_processes_are_whole(how, tmp_path):
    """Also with --capture=sys, which keeps what is printed in memory: that of a fork would be lost."""
    write(tmp_path, PRINTING)
    code, out = said(tmp_path, f"--capture={how}", "-rP")
    expected = [f"rank {rank} prints five words" for rank in range(3) for _ in range(100)]
    assert code == 0 and sorted(line for line in out.splitlines() if "words" in line) == expected, out


def test_the_plugin_loads_nothing():
    """It is loaded in every pytest of an environment that has Symcomm."""
    ask = "import sys, symcomm.testing.plugin as p; print([m for m in sys.modules if 'symcomm.' in m])"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=SECONDS)
    loaded = {"symcomm.errors", "symcomm.testing", "symcomm.testing.plugin"}
    assert set(ast.literal_eval(done.stdout)) == loaded, done.stderr


@MODES
def test_exit_first(mode, tmp_path):
    write(tmp_path, FAILING, mode)
    code, out = said(tmp_path, "-x")
    assert code == 1 and "stopping after 1 failures" in out and "passed" not in out, out


MANY = """
import os
import pytest, symcomm
from symcomm import testing

@pytest.mark.parametrize("run", range(6))
@testing.ranks([2, 3], mode="MODE")
def test_many(group, run, worker_id):
    assert worker_id == os.environ["PYTEST_XDIST_WORKER"]
    assert group.all_gather_object(worker_id) == [worker_id] * group.size
"""


@MODES
def test_xdist(mode, tmp_path):
    pytest.importorskip("xdist", reason="pip install pytest-xdist")
    write(tmp_path, MANY, mode)
    code, out = said(tmp_path, "-n", "2")
    assert code == 0 and "12 passed" in out and "bringing up nodes" in out, out


BOTH_RAISE = """
from symcomm import testing

@testing.ranks(2, mode="MODE", deadline=1.0)
def test_it(group):
    seen = 40 + group.rank
    raise ValueError(f"{seen}")
"""


def typed(folder: Path, words: list[str], keys: list[tuple[str, str]]) -> str:
    """What a terminal shows, where each of the keys is pressed once the words before it are there."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execv(PYTEST[0], [*PYTEST, *words, "test_it.py"])
    shown, todo, end = "", list(keys), time.monotonic() + SECONDS
    try:
        while time.monotonic() < end:
            if todo and re.search(todo[0][0], shown):
                time.sleep(1.5)  # longer than the test's deadline
                os.write(terminal, todo.pop(0)[1].encode())
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    shown += os.read(terminal, 1 << 16).decode(errors="replace")
                except OSError:  # it has ended
                    break
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    assert not todo, shown
    return shown


@MODES
def test_a_debugger_in_one_rank(mode, tmp_path):
    """Rank 0 has raised, too, and the deadline is long over."""
    write(tmp_path, BOTH_RAISE, mode)
    shown = typed(tmp_path, ["--symcomm-pdb", "1"], [(r"\(Pdb\) $", "p seen + 100\n"), (r"141\r\n\(Pdb\) $", "q\n")])
    assert "rank 1: ValueError: 41" in shown and "rank 0: ValueError" not in shown and "1 failed" in shown, shown


@MODES
def test_a_debugger_in_the_first_rank_that_raises(mode, tmp_path):
    """With --pdb; then comes pytest's own, in the process that tests."""
    write(tmp_path, BOTH_RAISE, mode)
    shown = typed(
        tmp_path,
        ["--pdb"],
        [(r"\(Pdb\) $", "p seen + 100\n"), (r"14[01]\r\n\(Pdb\) $", "q\n"), (r"entering PDB(.|\n)*\(Pdb\) $", "q\n")],
    )
    assert len(re.findall(r"rank \d: ValueError: 4\d\r", shown)) == 1, shown


@MODES
def test_a_debugger_without_a_terminal(mode, tmp_path):
    """The failure is reported as without it."""
    write(tmp_path, BOTH_RAISE, mode)
    done = subprocess.run(
        [*PYTEST, "--symcomm-pdb", "1", "test_it.py"], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS,
        start_new_session=True,
    )  # fmt: skip
    assert done.returncode == 1 and "rank 1 raised:" in done.stdout and "ValueError: 41" in done.stdout, done.stdout
