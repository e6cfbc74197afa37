"""A part of PyTorch's own tests of its backends, on ours; ``make conformance`` runs all of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(170)
def test_tests_that_gloo_passes():
    pytest.importorskip("torch")
    pytest.importorskip("expecttest")
    with subprocess.Popen(
        [sys.executable, "-m", "tests.conformance", "--ranks", "2", "--quick", "--timeout", "30"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    ) as process:  # fmt: skip
        try:
            out, _ = process.communicate(timeout=150)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            out, _ = process.communicate()
    assert process.returncode == 0, out[-6000:]
    row = re.search(r"^ +2 +alias +gloo +(\d+) +(\d+) +(\d+) ", out, re.MULTILINE)
    assert row is not None and int(row[1]) >= 25 and row[2] == row[3] == "0", out[-3000:]
