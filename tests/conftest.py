"""What holds for all tests: what one file leaves to the next, how the process ends, and what it says last."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile

import pytest

LINES, WIDTH = 12, 400  # of a failure that is told again
_status = 0


def pytest_configure() -> None:
    """Files that arenas are, where they have names, lie in a directory of this process's own: what another process has
    there, such as the other half of ``make test``, is not a leak of ours."""
    os.environ["SYMCOMM_SHM_DIR"] = tempfile.mkdtemp(dir="/dev/shm", prefix="tests-")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What looks at the whole process comes first, before other tests have left ranks and sockets in it."""
    items.sort(key=lambda item: item.get_closest_marker("unused_process") is None)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Groups that a file forgot are collected at its end. With as many objects as torch has, the collector comes too
    seldom, and their sockets are taken for another test's leak."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()


def pytest_sessionfinish(exitstatus: int) -> None:
    global _status
    _status = int(exitstatus)
    shutil.rmtree(os.environ["SYMCOMM_SHM_DIR"], ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Failures once more, in a few lines each: what is printed last is what people see, and what logs keep."""
    for report in terminalreporter.getreports("failed") + terminalreporter.getreports("error"):
        terminalreporter.section(f"{report.nodeid}, {report.when}", "-", red=True)
        told = [line for line in report.longreprtext.splitlines() if line.startswith(("E ", "> "))]
        terminalreporter.write_line("\n".join(line[:WIDTH] for line in told[-LINES:]))


def pytest_unconfigure() -> None:
    """PyTorch's table of handlers lets go of Python functions after the interpreter has ended, and crashes. Tests that
    compare with it have put some there, so this process ends before."""
    if "tests.test_control_plane" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)
