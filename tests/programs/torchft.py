"""torchft: its own tests of process groups, those that run without a GPU and in one process."""

from __future__ import annotations

import re

from tests.programs.frame import Outcome, ending, execute

VERSION = "0.2.0"
NEEDS = (f"torchft=={VERSION}", "parameterized", "expecttest", "numpy", "pytest", "pytest-timeout")
RAN = "its tests of process groups"

# Its tests name its Gloo group; the tests of groups in processes of their own ("Baby") are of Gloo alone.
SCRIPT = """
import sys
import pytest
import torchft.process_group as groups
if sys.argv[1] == "symcomm":
    from symcomm.torchft import ProcessGroupSymcomm
    groups.ProcessGroupGloo = ProcessGroupSymcomm
only = "(test_gloo or NormalGloo or func_col) and not Baby"
options = ["-q", "-p", "no:cacheprovider", "--timeout", "200", "--tb", "line", "-k", only]
sys.exit(pytest.main([*options, "--pyargs", "torchft.process_group_test"]))
"""


def run(python: str, backend: str) -> Outcome:
    done, seconds = execute(python, "-c", SCRIPT, backend)
    counts = re.findall(r"(\d+) (passed|failed|skipped)", done.stdout)
    values = ", ".join(f"{n} {what}" for n, what in counts)
    return Outcome(RAN, done.returncode == 0, seconds, values, "" if done.returncode == 0 else ending(done))
