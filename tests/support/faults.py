"""Real faults for real ranks: forked processes that join one group, and a report of what each one did.

``run_group(fn, n)`` forks n children of this process, each joins a group through a file and calls ``fn(group, *args)``.
``during(pids)`` runs here meanwhile, to stop or kill some. Every child keeps living after it returned or raised until
all have, so that nobody's end is mistaken for the fault. Afterwards nothing may be left: ``leftovers()`` looks.
"""

from __future__ import annotations

import mmap
import os
import resource
import select
import struct
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from symcomm import errors
from symcomm.collectives.select import Limits
from symcomm.group.default import join_ranks
from symcomm.group.factory import make_group
from symcomm.group.process_group import ProcessGroup
from symcomm.store import FileStore
from tests.support.ranks import Crowd, Outcome


def join_group(rank: int, world: int, folder: str, timeout: float, limits: Limits | None = None) -> ProcessGroup:
    """The group of ranks that meet in a file of ``folder``. Its first operation is the test's own."""
    make = partial(make_group, timeout=timeout, limits=limits)
    return join_ranks(FileStore(os.path.join(folder, "store"), world), rank, world, 30.0, make, tidy=False)


def readable(descriptors: Iterable[int], seconds: float) -> list[int]:
    """The descriptors that can be read, or have ended, within that time; numbers may be too large for select()."""
    poll = select.poll()
    for fd in descriptors:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(seconds * 1000)]


def run_group(
    fn: Callable,
    world: int,
    *args: Any,
    timeout: float = 10.0,
    deadline: float = 30.0,
    during: Callable[[list[int]], None] | None = None,
    linger: bool = True,
    join: Callable[..., Any] = join_group,
) -> list[Outcome]:
    """See the module's text. ``timeout`` is the group's; a rank that runs at ``deadline`` is killed and called
    stuck."""
    crowd = Crowd("fork", linger)
    groups = []  # keeps the group until the process ends

    def run(rank: int) -> Any:
        groups.append(join(rank, world, folder, timeout))
        return fn(groups[0], *args)

    with tempfile.TemporaryDirectory(prefix="symcomm-test-", ignore_cleanup_errors=True) as folder:
        for rank in range(world):
            crowd.start(run, rank)
        return crowd.outcomes(deadline, None if during is None else lambda: during(crowd.pids))


def attempt(call: Callable[[], Any]) -> str:
    """The name of the error it raised, or "" when it returned."""
    try:
        call()
    except errors.SymcommError as error:
        return type(error).__name__
    return ""


def leftovers() -> list[str]:
    """Children and files of ours that should not be there any more."""
    found = os.listdir(os.environ["SYMCOMM_SHM_DIR"]) if "SYMCOMM_SHM_DIR" in os.environ else []
    try:
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) > 0:
            found.append(f"child {pid}")
    except ChildProcessError:
        pass
    return found


_clock = mmap.mmap(-1, 4096)  # shared with forked ranks: when the fault happened


def few_descriptors(spare: int) -> None:
    """This process can have so many more than it has now."""
    used = set(map(int, os.listdir("/proc/self/fd")))
    while (filler := os.open(os.devnull, os.O_RDONLY)) < max(used):
        pass
    os.close(filler)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (filler + spare, hard))


def mark_fault() -> None:
    _clock[:8] = struct.pack("d", time.monotonic())


def delays(outcomes: list[Outcome]) -> list[float]:
    """Seconds from the fault to the error, on every rank that raised; kept for the record that pytest -s prints."""
    at = struct.unpack("d", _clock[:8])[0]
    found = [o.when - at for o in outcomes if o.kind == "raised"]
    print(f"detected after {', '.join(f'{1000 * d:.1f}' for d in found)} ms")
    return found
