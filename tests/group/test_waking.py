"""Ranks that share cores, where a rank that was woken takes long to run: no disturbance leaves them asleep in every
call. Judged by the group's own counts of waits that ended in sleep, never by how long they took.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import waking_ranks
from tests.support.compiler import compile_c

pytestmark = pytest.mark.unused_process

SOURCE = Path(__file__).parent / "slow_waking.c"


@pytest.fixture(scope="module")
def slow_waking(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a program whose sleepers run 300 us after they were woken."""
    target = tmp_path_factory.mktemp("waking") / "slow_waking.so"
    library = compile_c(SOURCE, target, "-std=gnu11", "-shared", "-fPIC", "-ldl")
    return {**os.environ, "LD_PRELOAD": str(library)}


@pytest.mark.parametrize("call", ["broadcast", "pass_round"])
def test_ranks_that_wake_slowly_stay_awake(call: str, slow_waking: dict[str, str]):
    """If those that wait slept before one that was woken runs, it would find them asleep in turn, and so for ever."""
    command = [sys.executable, "-m", "tests.support.waking_ranks", "4", call]
    done = subprocess.run(command, env=slow_waking, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    sleeps = [int(word) for word in done.stdout.split()[1:]]
    assert sleeps[-1] <= waking_ranks.FEW, sleeps


def test_many_ranks_that_take_turns_stay_awake():
    """It takes more than 100 us until 24 ranks on two cores had their turns: no reason to sleep."""
    sleeps = waking_ranks.run(24, "broadcast")
    assert sleeps[-1] <= waking_ranks.FEW, sleeps
