"""Real faults for real ranks: forked processes that join one group, and a report of what each one did.

``run_group(fn, n)`` forks n children of this process, each joins a group through a file and calls ``fn(group, *args)``.
``during(pids)`` runs here meanwhile, to stop or kill some. Every child keeps living after it returned or raised until
all have, so that nobody's end is mistaken for the fault. Afterwards nothing may be left: ``leftovers()`` looks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import shutil
import signal
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from symcomm import errors
from symcomm.collectives.select import Limits
from symcomm.group.default import join_ranks
from symcomm.group.local import LocalGroup
from symcomm.group.process_group import ProcessGroup
from symcomm.store import FileStore


@dataclass
class Outcome:
    """How one rank ended, and when (CLOCK_MONOTONIC, the same clock in all processes)."""

    rank: int
    kind: str  # "returned" | "raised" | "died" | "stuck"
    value: Any = None
    error: Any = None
    text: str = ""
    when: float = 0.0

    def __str__(self) -> str:
        return f"rank {self.rank} {self.kind}: {self.text or self.value!r}"


def join_group(rank: int, world: int, folder: str, timeout: float, limits: Limits | None = None) -> ProcessGroup:
    """The group of ranks that meet in a file of ``folder``. Its first operation is the test's own."""
    make = partial(LocalGroup, timeout=timeout, limits=limits)
    return join_ranks(FileStore(os.path.join(folder, "store"), world), rank, world, 30.0, make, tidy=False)


def _child(
    fn: Callable, rank: int, world: int, folder: str, timeout: float, args: tuple, tell: int, hear: int, linger: bool,
    join: Callable,
) -> None:  # fmt: skip
    torch.set_num_threads(1)  # a forked child has none of its parent's OpenMP threads
    try:
        group = join(rank, world, folder, timeout)
        value = fn(group, *args)
        outcome = Outcome(rank, "returned", value, when=time.monotonic())
    except BaseException as error:
        outcome = Outcome(rank, "raised", error=error, text=traceback.format_exc(), when=time.monotonic())
    try:
        payload = pickle.dumps(outcome)
    except Exception:
        payload = pickle.dumps(Outcome(rank, outcome.kind, repr(outcome.value), None, outcome.text, outcome.when))
    os.write(tell, len(payload).to_bytes(8, "little"))
    while payload:
        payload = payload[os.write(tell, payload) :]
    os.close(tell)
    if linger:
        readable([hear], 60)


def readable(descriptors: Iterable[int], seconds: float) -> list[int]:
    """Those that can be read, or have ended, within that time; numbers may be beyond what select() knows."""
    poll = select.poll()
    for fd in descriptors:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(seconds * 1000)]


def _read(fd: int) -> Outcome | None:
    data = b""
    while piece := os.read(fd, 1 << 16):
        data += piece
    return pickle.loads(data[8:]) if len(data) >= 8 and len(data) == 8 + int.from_bytes(data[:8], "little") else None


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
    """See the module's text. ``timeout`` is the group's; whoever runs at ``deadline`` is killed and called stuck."""
    folder = tempfile.mkdtemp(prefix="symcomm-test-")
    go_read, go_write = os.pipe()
    readers, pids = [], []
    for rank in range(world):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                for fd in [go_write, reader, *readers]:
                    os.close(fd)
                _child(fn, rank, world, folder, timeout, args, writer, go_read, linger, join)
            finally:
                os._exit(0)
        os.close(writer)
        readers.append(reader)
        pids.append(pid)
    try:
        return _collect(readers, pids, go_write, deadline, during)
    except BaseException:  # the test was ended: nobody may be left, stopped or spinning
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        raise
    finally:
        os.close(go_read)
        shutil.rmtree(folder, ignore_errors=True)


def _collect(
    readers: list[int], pids: list[int], go: int, deadline: float, during: Callable[[list[int]], None] | None
) -> list[Outcome]:
    end = time.monotonic() + deadline
    if during is not None:
        during(pids)
    outcomes: dict[int, Outcome | None] = {}
    while len(outcomes) < len(pids) and (left := end - time.monotonic()) > 0:
        waiting = {fd: r for r, fd in enumerate(readers) if r not in outcomes}
        for fd in readable(waiting, left):
            outcomes[waiting[fd]] = _read(fd)
    os.close(go)
    done = []
    for rank, pid in enumerate(pids):
        outcome = outcomes.get(rank)
        if rank not in outcomes:
            outcome = Outcome(rank, "stuck", text=f"still running after {deadline} s")
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        done.append(outcome or Outcome(rank, "died", status, text=f"status {status}"))
        os.close(readers[rank])
    return done


def process_state(pid: int) -> str:
    """A letter, as the kernel shows it: T is stopped, Z dead and not collected."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def returned(outcomes: list[Outcome]) -> list[Any]:
    """What every rank gave; all must have."""
    assert all(o.kind == "returned" for o in outcomes), "\n".join(map(str, outcomes))
    return [o.value for o in outcomes]


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


def mark_fault() -> None:
    _clock[:8] = struct.pack("d", time.monotonic())


def delays(outcomes: list[Outcome]) -> list[float]:
    """Seconds from the fault to the error, on every rank that raised; kept for the record that pytest -s prints."""
    at = struct.unpack("d", _clock[:8])[0]
    found = [o.when - at for o in outcomes if o.kind == "raised"]
    print(f"detected after {', '.join(f'{1000 * d:.1f}' for d in found)} ms")
    return found
