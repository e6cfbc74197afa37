"""Shell completion in real shells: installed by one command, Tab is pressed, and the line that comes of it is run."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.command import SRC, symcomm
from tests.support.faults import readable

pytestmark = pytest.mark.without_torch

MARK = "typed-to-the-end"
# After a prompt: a unique beginning of a command, of an option, of a value; and what stands there after Tab.
TYPED = {
    "symcomm vers": "symcomm version",
    "symcomm doctor --stri": "symcomm doctor --strict",
    "symcomm bench reduce_s": "symcomm bench reduce_scatter",
    "symcomm run --restart fai": "symcomm run --restart failed",
    "symcomm run tra": "symcomm run train.py",
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home of its own, with a ``symcomm`` on PATH that says how it was called, unless it is to complete."""
    program = tmp_path / "bin" / "symcomm"
    program.parent.mkdir()
    asked = f'[ -n "$_SYMCOMM_COMPLETE" ] && PYTHONPATH={SRC} exec {sys.executable} -m symcomm "$@"'
    program.write_text(f'#!/bin/sh\n{asked}\necho "ran: symcomm $*"; echo {MARK}\n')
    program.chmod(0o755)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def environment(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "PATH": f"{home}/bin:{os.environ['PATH']}", "TERM": "xterm", "LC_ALL": "C.UTF-8"}


def installed(shell: str, home: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = symcomm("completion", shell, "--install", HOME=str(home))
    path = Path(done.stdout.partition(": ")[0])
    assert done.returncode == 0 and path.is_relative_to(home) and path.exists(), done.stderr


def type_all(command: list[str], home: Path) -> list[str]:
    """The lines that an interactive shell runs after each of TYPED, Tab and Enter."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(home)
        os.execvpe(command[0], command, environment(home))
    try:
        _press(terminal, "PS1='rea''dy:'\r", "ready:")  # which is not what the terminal echoes
        lines = []
        for typed, completed in TYPED.items():
            _press(terminal, f"{typed}\t", completed)
            lines.append(_press(terminal, "\r", f"\n{MARK}\n").rpartition(": ")[2].split("\n")[0].strip())
        return lines
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)


def _press(terminal: int, keys: str, until: str) -> str:
    """What is shown after ``keys``, up to and with ``until``, or within 20 seconds."""
    os.write(terminal, keys.encode())
    shown, deadline = "", time.monotonic() + 20
    while until not in shown and (left := deadline - time.monotonic()) > 0 and readable([terminal], left):
        shown += os.read(terminal, 65536).decode(errors="replace")
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r|.\x08", "", shown)  # how a terminal is to draw it
    return shown


@pytest.mark.parametrize("command", [["bash", "--noprofile", "-i"], ["zsh", "-i"]], ids=lambda command: command[0])
def test_tab_completes(home, command):
    installed(command[0], home)
    assert type_all(command, home) == list(TYPED.values())


def test_fish(home):
    """It says itself what it would complete to."""
    installed("fish", home)
    script = "; ".join(f"complete -C {typed!r}" for typed in TYPED)
    done = subprocess.run(
        ["fish", "-c", script], cwd=home, env=environment(home), capture_output=True, text=True, timeout=60
    )
    offered = {line.partition("\t")[0] for line in done.stdout.splitlines()}
    assert {completed.split()[-1] for completed in TYPED.values()} <= offered, done.stderr


def test_bash_without_installing(home):
    """As the help says: eval, in this shell only."""
    script = (
        f'eval "$({sys.executable} -m symcomm completion bash)"; COMP_WORDS=(symcomm bench --against gloo,m); '
        'COMP_CWORD=3; _symcomm_completion symcomm; echo "${COMPREPLY[@]}"'
    )
    env = environment(home)
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("gloo,mpich\n", "")


def test_installing_twice_changes_nothing(home):
    installed("bash", home)
    first = (home / ".bashrc").read_text()
    installed("bash", home)
    assert (home / ".bashrc").read_text().split() == first.split()


@pytest.mark.parametrize(
    ("words", "shell", "sentence"),
    [
        (["tcsh"], "", "SHELL must be one of bash, zsh, fish, got 'tcsh'."),
        (["--install"], "/bin/tcsh", "SHELL must be one of bash, zsh, fish, got 'tcsh'."),
        (["--install", "bash"], "/proc", "/proc/.bashrc cannot be written"),
    ],
)
def test_refused(words, shell, sentence):
    done = symcomm("completion", *words, SHELL=shell, HOME="/proc")
    assert done.returncode == 2 and done.stderr.startswith(f"symcomm completion: {sentence}"), done.stderr
    assert done.stderr.count("\n") == 1
