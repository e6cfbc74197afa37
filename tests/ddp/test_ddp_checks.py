"""The data-parallel layer on two ranks. The checks are in tests/ddp/checks.py and tests/ddp/more_checks.py."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.check_runner import run_checks

pytestmark = pytest.mark.torch_versions

FILES = ("checks.py", "more_checks.py")
# Decorated functions, read from the text: this file needs no torch of its own.
CHECKS = [
    name for file in FILES for name in re.findall(r"@check\ndef (\w+)", (Path(__file__).parent / file).read_text())
]


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    """What every rank has to say about every check."""
    pytest.importorskip("torch")
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment = {**kept, "OMP_NUM_THREADS": "1"}
    return run_checks("tests.ddp.checks", CHECKS, environment, 150)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str, told: dict[str, list[str]]):
    assert told[name] == ["", ""], "\n".join([*told[name], *told["stderr"]])[-6000:]
