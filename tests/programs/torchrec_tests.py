"""torchrec: what its own tests check of its exchanges, as tests of pytest in our kit.

They are an example, examples/distributed_tests/test_torchrec.py, and run on either backend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tests.programs.frame import Part, tell, tested
from tests.programs.torchrec import NEEDS as TORCHREC

VERSION = "1.8.0"
NEEDS = (*TORCHREC, "pytest", "pytest-timeout")
PARTS = ("tests in the kit, processes",)
ENVIRONMENT = "torchrec"
LAUNCH = ()  # one process
ROUNDS = 1
TESTS = Path(__file__).parents[2] / "examples" / "distributed_tests" / "test_torchrec.py"


def main(backend: str) -> Iterator[Part]:
    os.environ["BACKEND"] = backend
    yield tested(PARTS[0], str(TESTS))


if __name__ == "__main__":
    tell(main)
