"""The data-parallel layer on two ranks. The checks are in tests/ddp_checks.py and tests/ddp_more_checks.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = ("ddp_checks.py", "ddp_more_checks.py")
# Decorated functions, read from the text: this file needs no torch of its own.
CHECKS = [name for file in FILES for name in re.findall(r"@check\ndef (\w+)", (ROOT / "tests" / file).read_text())]


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    """What every rank has to say about every check."""
    pytest.importorskip("torch")
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment = {**kept, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.ddp_checks"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment, cwd=ROOT, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=150)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            out, err = process.communicate()
    told: dict[str, list[str]] = {name: [] for name in CHECKS}
    for line in out.splitlines():
        said = json.loads(line)
        told[said["check"]].append(said["text"])
    told["stderr"] = [err]
    return told


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str, told: dict[str, list[str]]):
    assert told[name] == ["", ""], "\n".join([*told[name], *told["stderr"]])[-6000:]
