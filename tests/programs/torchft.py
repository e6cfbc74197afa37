"""torchft: its own tests of process groups, those that run without a GPU and in one process.

Its tests name its Gloo group; the tests of groups in processes of their own ("Baby") are of Gloo alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from tests.programs.frame import Part, tell

VERSION = "0.2.0"
NEEDS = (f"torchft=={VERSION}", "parameterized", "expecttest", "pytest", "pytest-timeout")
PARTS = ("its tests of process groups",)
ENVIRONMENT = "torchft"
LAUNCH = ()  # one process
ROUNDS = 1
LIMIT = 900.0


class Outcomes:
    """A plugin that counts them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome == "skipped":
            self.counts[report.outcome] += 1


def main(backend: str) -> Iterator[Part]:
    import pytest
    import torchft.process_group as groups

    if backend == "symcomm":
        from symcomm.torchft import ProcessGroupSymcomm

        groups.ProcessGroupGloo = ProcessGroupSymcomm
    only = "(test_gloo or NormalGloo or func_col) and not Baby"
    options = ["-q", "-p", "no:cacheprovider", "--timeout", "200", "--tb", "line", "-k", only]
    outcomes, begun = Outcomes(), time.perf_counter()
    pytest.main([*options, "--pyargs", "torchft.process_group_test"], [outcomes])
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.counts.items()))
    yield Part(PARTS[0], seconds=time.perf_counter() - begun, said=said)


if __name__ == "__main__":
    tell(main)
