"""torchft: its own tests of process groups, those that run without a GPU and in one process.

Its tests name its Gloo group; the tests of groups in processes of their own ("Baby") are of Gloo alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.programs.frame import Part, tell, tested

VERSION = "0.2.0"
NEEDS = (f"torchft=={VERSION}", "parameterized", "expecttest", "pytest", "pytest-timeout")
PARTS = ("its tests of process groups",)
ENVIRONMENT = "torchft"
LAUNCH = ()  # one process
ROUNDS = 1
LIMIT = 900.0


def main(backend: str) -> Iterator[Part]:
    import torchft.process_group as groups

    if backend == "symcomm":
        from symcomm.torchft import ProcessGroupSymcomm

        groups.ProcessGroupGloo = ProcessGroupSymcomm
    only = "(test_gloo or NormalGloo or func_col) and not Baby"
    yield tested(PARTS[0], "-k", only, "--pyargs", "torchft.process_group_test")


if __name__ == "__main__":
    tell(main)
