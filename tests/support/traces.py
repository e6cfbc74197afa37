"""Records of calls, made by hand, and symcomm trace as a program."""

from __future__ import annotations

import subprocess
import sys

from symcomm.observe.recorder.records import Operation

SECOND = 10**9


def call(seq, name="all_reduce", state="completed", site="/job/train.py:88", group="world", size=4, **more):
    facts = {
        "rank": 0, "number": seq, "group": group, "ranks": tuple(range(size)), "seq": seq, "call": name,
        "dtype": "float32", "op": "SUM" if name == "all_reduce" else None, "root": None, "count": 10, "nbytes": 40,
        "created_ns": seq * SECOND, "finished_ns": None if state == "running" else (seq + 1) * SECOND, "waited_us": 0,
        "state": state, "plan": "one-shot", "zero_copy": False, "site": site, "exact_site": True,
    }  # fmt: skip
    return Operation(**{**facts, **more})


def symcomm_trace(*args: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "symcomm", "trace", *args], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr
