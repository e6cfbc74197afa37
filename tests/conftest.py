"""How the test process ends."""

from __future__ import annotations

import os
import sys

_status = 0


def pytest_sessionfinish(exitstatus: int) -> None:
    global _status
    _status = int(exitstatus)


def pytest_unconfigure() -> None:
    """PyTorch's table of handlers lets go of Python functions after the interpreter has ended, and crashes. Tests that
    compare with it have put some there, so this process ends before."""
    if "tests.test_control_plane" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)
