"""Programs that are forked from a process with torch (tests/support/loaded.py) do what fresh ones do; ranks that do not
end (tests/support/ranks.py) say where they are."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import loaded
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.torch_versions, pytest.mark.without_torch]

STARTS = """
import atexit, os, subprocess, sys
atexit.register(print, "the first one ends")
code = "import atexit, os, sys; atexit.register(print, 'the second one ends'); print(sys.argv, os.getcwd(), os.getenv('A')); exit(4)"
done = subprocess.run([sys.executable, "-c", code, "word"], capture_output=True, text=True, cwd="/", env={**os.environ, "A": "b"})
print(done.returncode, done.stdout, done.stderr)
inherits = subprocess.Popen([sys.executable, "-u", "-c", "import os; print(os.getsid(0) == os.getpid())"], start_new_session=True)
print(inherits.wait(), flush=True)
killed = subprocess.Popen([sys.executable, "-c", "import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)"])
print(killed.wait())
"""  # noqa: E501
SPAWNS = """
import multiprocessing as mp
if __name__ == "__main__":
    process = mp.get_context("spawn").Process(target=print, args=("spawned",))
    process.start(); process.join(); print(process.exitcode)
"""
PROGRAMS = {
    "code": "import sys; print(sys.argv, __name__, '__file__' in globals())",
    "exit": "import sys; sys.exit(3)",
    "exit with words": "import sys; sys.exit('these')",
    "error": "print(1)\nraise ValueError(2)",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "interrupted": "import os\ntry: os.kill(os.getpid(), 2)\nexcept KeyboardInterrupt: print('heard')",
    "at exit": "import atexit; atexit.register(print, 1); atexit.register(print, 2)",
    "thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "starts others": STARTS,
    "spawns": SPAWNS,
}  # fmt: skip


def both(*words: str, cwd: Path) -> list[tuple[int, str, list[str]]]:
    """Code, output and last word of errors, of a fresh interpreter and of a copy."""
    command, env = [sys.executable, *words], {**os.environ, "OMP_NUM_THREADS": "1"}
    fresh = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, cwd=cwd, check=False)
    found = [fresh, loaded.run(command, timeout=60, env=env, cwd=cwd)]
    return [(done.returncode, done.stdout, done.stderr.splitlines()[-1:]) for done in found]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_end_alike(name: str, tmp_path: Path):
    fresh, copied = both("-c", PROGRAMS[name], "a word", cwd=tmp_path)
    assert copied == fresh


def test_files_and_modules(tmp_path: Path):
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    program = tmp_path / "program.py"
    program.write_text("import sys, beside; print(beside.NAME, __file__, __name__, sys.argv)\n")
    for words in ((str(program), "-x"), ("-m", "program", "-x"), ("-u", str(program))):
        fresh, copied = both(*words, cwd=tmp_path)
        assert copied == fresh and fresh[0] == 0


def test_one_that_is_late_is_killed_and_what_it_said_is_known():
    done = loaded.run([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], timeout=1)
    assert (done.returncode, done.stdout) == (-9, "1\n")


def test_torch_is_there():
    done = loaded.run([sys.executable, "-c", "import sys; print('torch' in sys.modules)"], timeout=60)
    assert done.stdout == f"{importlib.util.find_spec('torch') is not None}\n"


def _hangs_in_this_function(rank: int, world: int) -> None:
    time.sleep(60)


@pytest.mark.parametrize("start", ["forkserver", "fork"])
def test_a_rank_that_is_stuck_says_where(start: str):
    [outcome] = run_ranks(_hangs_in_this_function, 1, deadline=3, outcomes=True, start=start)
    assert outcome.kind == "stuck" and "in _hangs_in_this_function" in outcome.text, outcome
