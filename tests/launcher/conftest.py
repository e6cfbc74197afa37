"""What tests of the launcher share."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from tests.support.jobs import DEADLINE, Jobs


@pytest.fixture
def jobs(tmp_path):
    jobs = Jobs(tmp_path)
    yield jobs
    for process in jobs.started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=DEADLINE)
    for pid in jobs.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
