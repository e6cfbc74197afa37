"""How a rank's death is noticed where the kernel is slow to say it, or does not let us ask to be told."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct

import pytest

from symcomm import errors
from symcomm.group.failure import dumps_core
from symcomm.group.process_group import ProcessGroup
from tests.support.faults import delays, mark_fault, run_group

DUMPED = 384 << 20  # bytes, which take the kernel a fifth of a second at the very least


pytestmark = pytest.mark.usefixtures("nothing_is_left")


# --- a core dump -----------------------------------------------------------------------------------------------------


def _dump_core(g: ProcessGroup, folder: str, way: str) -> None:
    """Rank 1 dies; the others say whether it was still dumping when they learned of it."""
    import torch

    t = torch.ones(8)
    g.barrier()
    if g.rank == 1:
        os.chdir(folder)
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)
        _kept = b"\1" * DUMPED
        g.barrier()
        mark_fault()
        os.kill(os.getpid(), signal.SIGSEGV)
    g.barrier()
    try:
        g.all_reduce(t) if way == "collective" else g.recv(t, 1)
    except errors.RankFailedError as error:
        if not dumps_core(g.peers[1].pid):
            raise AssertionError("it was over when we learned of it") from error
        raise


@pytest.mark.parametrize("way", ["collective", "message"])
def test_a_rank_that_dumps_core_is_dead_at_once(tmp_path, way):
    with open("/proc/sys/kernel/core_pattern") as file:
        if file.read().startswith("|"):
            pytest.skip("core dumps go to a program here")
    outcomes = run_group(_dump_core, 3, str(tmp_path), way, timeout=60.0, deadline=90.0)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, errors.RankFailedError), outcome
        assert "died with SIGSEGV (it still writes a core dump)" in str(outcome.error)
    assert outcomes[1].kind == "died" and outcomes[1].value == -signal.SIGSEGV
    assert max(delays(outcomes)) < 20.0, "100 ms are promised, a test machine may be busy, and deadlines are 60 s"


# --- no robust list --------------------------------------------------------------------------------------------------

SET_ROBUST_LIST = {"aarch64": 99, "x86_64": 273}.get(platform.machine())
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
ALLOW, ERRNO = 0x7FFF0000, 0x00050000


def _refuse_system_call(number: int, error: int) -> None:
    """From now on, in this process: what a container's seccomp profile does."""

    def step(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("<HBBI", code, yes, no, value)

    program = b"".join(
        [step(0x20, 0, 0, 0), step(0x15, 0, 1, number), step(0x06, 0, 0, ERRNO | error), step(0x06, 0, 0, ALLOW)]
    )
    code = ctypes.create_string_buffer(program)
    filter_ = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(filter_), 0, 0) == 0


@pytest.mark.skipif(SET_ROBUST_LIST is None, reason="the number of the system call is not known here")
def test_a_rank_whose_death_nobody_would_notice_does_not_start():
    from symcomm.memory.arena import Arena

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
            _refuse_system_call(SET_ROBUST_LIST, 38)
            try:
                Arena()
                os.write(writer, b"it was made")
            except errors.ResourceError as error:
                after = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
                os.write(writer, f"{error} {after == before}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        told = file.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    assert "the kernel refuses set_robust_list (Function not implemented)" in told and "seccomp" in told
    assert told.endswith(" True"), "nothing is left of the attempt"
