"""How tests are run: each file says itself where, and a shell's settings change nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import what_was_not_run
from tests.tools.check import choose, modules_of, names
from tests.tools.selections import SELECTIONS, TESTS, markers

pytestmark = pytest.mark.without_torch


def test_no_two_files_have_one_name():
    """Logs and `make check` name files without their folders."""
    times = Counter(path.stem for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in times.items() if count > 1] == []


def test_markers_are_read_from_the_source():
    assert markers("import pytest\n") == set()
    assert markers("pytestmark = pytest.mark.without_torch  # as yet\n") == {"without_torch"}
    assert markers("pytestmark = [pytest.mark.long, pytest.mark.timeout(60), since_2_13]\n") == {"long", "timeout"}
    assert markers("@pytest.mark.torch_versions\ndef test_one(): ...\n") == set()


def test_selections_are_those_of_pytest(request: pytest.FixtureRequest):
    """Of files that this process has collected: all of them in `make test`. A marker of a single test selects nothing,
    so there is none."""
    items = request.session.items
    said = {path: markers(path.read_text()) & set(SELECTIONS) for path in {item.path for item in items}}
    asked = [(item.path, {mark.name for mark in item.iter_markers()} & set(SELECTIONS)) for item in items]
    assert [(path.name, names) for path, names in asked if names != said[path]] == []
    assert said[Path(__file__)] == {"without_torch"}


@pytest.mark.parametrize("marker", SELECTIONS)
def test_selecting_imports_neither_torch_nor_tests(marker):
    code = f"""
import sys
from tests.tools.selections import selected
print(*selected({marker!r}))
print([name for name in sys.modules if name.split('.')[0] == 'torch' or '.test_' in name])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    paths, imported = done.stdout.splitlines()
    assert len(paths.split()) > 30 and all((TESTS.parent / path).exists() for path in paths.split())
    assert imported == "[]"


def test_no_file_of_tests_imports_another():
    """What two of them need is in tests/support."""
    imports = re.compile(r"^ *(?:from|import) (tests\.(?:\w+\.)*test_\w+)", re.MULTILINE)
    assert [(path.name, name) for path in TESTS.rglob("*.py") for name in imports.findall(path.read_text())] == []


UNDER_NOHUP = """
import signal, subprocess
heeded = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1}
for signum in heeded:
    signal.signal(signum, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, heeded)
from tests.conftest import heed_signals
heed_signals()
signal.raise_signal(signal.SIGHUP)  # a hang-up is still nothing to this process
said = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
fields = dict(line.split(":", 1) for line in said.splitlines())
mask = int(fields["SigIgn"], 16) | int(fields["SigBlk"], 16)
print([signum.name for signum in heeded if mask >> signum - 1 & 1])
"""


def test_programs_get_signals_that_a_shell_has_us_ignore():
    command = [sys.executable, "-c", UNDER_NOHUP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_what_was_not_run():
    reasons = {"needs a CUDA GPU": 205, "torch has it since 2.15; this is 2.13.0": 24, "waits for ever": 4}
    assert what_was_not_run(Counter(reasons)) == [
        "  205  needs a CUDA GPU; `make test-gpu` where there is one runs it",
        "   24  torch has it since 2.15; this is 2.13.0; `make test-torch TORCH=2.15.0` runs it",
        "    4  waits for ever",
    ]


def test_what_is_checked_after_a_change():
    assert modules_of(["src/symcomm/_core/sync/sync.c", "src/symcomm/store/__init__.py", "docs/a.md"]) == [
        "symcomm._core",
        "symcomm.store",
    ]
    assert names("from symcomm.store import lease, tcp\n", "symcomm.store.tcp")
    assert not names("from symcomm.store import lease\nimport symcomm.store.tcp2", "symcomm.store.tcp")
    chosen, left_out = choose(
        ["src/symcomm/store/lease.py", "tests/bench/test_sites.py"], {"test_group_life": 100.0}, 120
    )
    assert {"test_layers", "test_sites"} <= set(chosen) and not set(chosen) & set(left_out)
    everything = choose(["src/symcomm/_core/sync/sync.c"], {}, 1e6)[0]
    assert set(choose(["src/symcomm/_core/sync/sync.c"], {}, 200)[0]) < set(everything)
