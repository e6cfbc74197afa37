"""The lines of a rank that a verdict shows."""

from __future__ import annotations

from pathlib import Path

import pytest

import symcomm
from symcomm.launcher.tail import SHOWN, WIDTH, last_lines

pytestmark = pytest.mark.without_torch

OURS = Path(symcomm.__file__).parent


def traceback(*frames: tuple[str, str], error: str) -> list[str]:
    lines = ["Traceback (most recent call last):"]
    for path, name in frames:
        lines += [f'  File "{path}", line 3, in {name}', f"    call {name}", "    ^^^^"]
    return [*lines, error]


TRACEBACK = traceback(
    ("train.py", "<module>"),
    ("train.py", "step"),
    ("/env/torch/distributed/c10d_logger.py", "wrapper"),
    ("/env/torch/distributed/distributed_c10d.py", "all_reduce"),
    (f"{OURS}/torch_backend/running.py", "call"),
    (f"{OURS}/group/executor.py", "_run"),
    error="symcomm.errors.RankFailedError: rank 1 died",
)


@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_frames_of_ours_below_the_users_are_left_out(prefix: str):
    shown = last_lines(["before", *(prefix + line for line in TRACEBACK)])
    assert shown == ["before", *(prefix + line for line in [*TRACEBACK[:7], TRACEBACK[-1]])]


def test_frames_that_call_the_user_stay():
    lines = traceback(("train.py", "main"), (f"{OURS}/comm.py", "hook"), ("train.py", "callback"), error="ValueError")
    assert last_lines(lines) == [*lines[:4], *lines[7:]]


def test_a_traceback_without_the_user_keeps_its_frames():
    lines = traceback((f"{OURS}/launcher/launch.py", "main"), error="ValueError: none of the user's")
    assert last_lines(lines) == lines


def test_few_lines_and_short_ones():
    assert last_lines([f"line {i}" for i in range(50)]) == [f"line {i}" for i in range(50 - SHOWN, 50)]
    assert last_lines(["x" * 1000]) == ["x" * WIDTH + " ..."]
    assert last_lines([]) == []
