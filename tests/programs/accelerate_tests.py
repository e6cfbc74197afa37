"""accelerate: what its own script of tests checks of its operations, as tests of pytest in our kit: no launcher.

They are an example, examples/distributed_tests/test_accelerate.py, and run on either backend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tests.programs.frame import Part, tell, tested

VERSION = "1.15.0"
NEEDS = (f"accelerate=={VERSION}", "pytest", "pytest-timeout")
PARTS = ("tests in the kit, processes",)
LAUNCH = ()  # one process
ROUNDS = 1
TESTS = Path(__file__).parents[2] / "examples" / "distributed_tests" / "test_accelerate.py"


def main(backend: str) -> Iterator[Part]:
    os.environ["BACKEND"] = backend
    yield tested(PARTS[0], str(TESTS))


if __name__ == "__main__":
    tell(main)
