"""Functions on several processes, with a hard deadline and a report of what each one did.

``run_ranks(fn, n)`` calls ``fn(rank, n, *args)`` in n processes and returns their results in rank order. It fails the
test when one raises, dies or does not end in time, and says what every rank did. ``outcomes=True`` returns an Outcome
per rank instead. ``Crowd`` starts processes one by one. The processes are forked by one that has loaded torch and ours,
and done nothing else (loading it takes 2 s of CPU time). ``start="fork"`` makes copies of the test, whose functions
need not be picklable, ``start="spawn"`` fresh interpreters.

Processes stay until all have said how they ended, so that no end is taken for a fault. Without ``linger`` they end by
themselves, as do those that ``run_ranks`` starts another way.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing as mp
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

LINGER = 60.0  # seconds at most
STACKS, ASK_STACKS = "stacks-of-a-test", signal.SIGRTMAX
START = "SYMCOMM_TESTS_START"  # how to start ranks where a call does not say
# The first process that is started this way decides for all what is loaded.
mp.get_context("forkserver").set_forkserver_preload(["tests.support.preloaded"])


@dataclass
class Outcome:
    """How one rank ended, and when (CLOCK_MONOTONIC, the same clock in all processes)."""

    rank: int
    kind: str  # "returned" | "raised" | "died" | "stuck"
    value: Any = None  # or the status of one that died
    error: Any = None
    text: str = ""
    when: float = 0.0

    def __str__(self) -> str:
        return f"rank {self.rank} {self.kind}: {self.text or self.value!r}"


def until(true: Callable[[], Any], seconds: float = 10.0) -> bool:
    """Wait until another process or thread has made ``true()`` hold; False if it has not in time."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True


def returned(outcomes: list[Outcome]) -> list[Any]:
    """What every rank returned; all must have."""
    if any(outcome.kind != "returned" for outcome in outcomes):
        raise AssertionError("not every rank returned:\n" + "\n".join(map(str, outcomes)))
    return [outcome.value for outcome in outcomes]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def become(environment: dict[str, str]) -> None:
    """Take over the environment of the process that asked the loaded one to fork this one."""
    os.environ.clear()
    os.environ.update(environment)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.distributed.set_debug_level_from_env()  # as torch does where it is loaded
        if "OMP_NUM_THREADS" in environment:
            torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        if environment.get("SYMCOMM_HEAP"):  # as where it is loaded, too
            importlib.import_module("symcomm.torch_backend.torch_patches").apply("cpu_allocator")


def _outcome(fn: Callable, rank: int, args: tuple) -> bytes:
    try:
        outcome = Outcome(rank, "returned", fn(*args))
    except BaseException as error:
        outcome = Outcome(rank, "raised", error=error, text=traceback.format_exc())
    outcome.when = time.monotonic()
    try:
        return pickle.dumps(outcome)
    except Exception:
        return pickle.dumps(Outcome(rank, outcome.kind, repr(outcome.value), None, outcome.text, outcome.when))


def _child(fn: Callable, rank: int, args: tuple, end: Any, environment: dict[str, str] | None, linger: bool) -> None:
    if environment is not None:
        become(environment)
    faulthandler.register(ASK_STACKS, os.memfd_create(STACKS))
    end.send_bytes(_outcome(fn, rank, args))
    if linger:
        end.poll(LINGER)
    end.close()


def _stacks(pid: int) -> str:
    """Where a rank is that does not end, thread by thread."""
    try:
        os.kill(pid, ASK_STACKS)
        time.sleep(0.3)
        files = [Path(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
        return "\n".join(file.read_text() for file in files if STACKS in os.readlink(file))
    except OSError as error:
        return f"not known where: {error}"


class _Copy:
    """A copy of this process, with as much of a Process as a crowd uses. Only join() collects it, because survivors
    read in /proc how a dead one ended."""

    def __init__(self, args: tuple, others: list[Any]):
        self.exitcode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for end in others:  # nobody else's
                    end.close()
                if "torch" in sys.modules:  # a forked child has none of its parent's OpenMP threads
                    sys.modules["torch"].set_num_threads(1)
                _child(*args)
            finally:
                os._exit(0)
        self._ended = os.pidfd_open(self.pid)

    def join(self, timeout: float | None = None) -> None:
        if self.exitcode is None and wait([self._ended], timeout):
            self.exitcode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        if self.exitcode is None:
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        os.close(self._ended)


class Crowd:
    """Processes that are started one by one."""

    def __init__(self, start: str = "forkserver", linger: bool = True):
        self.processes: list[Any] = []
        self._start, self._linger = start, linger
        self._ends: list[Any] = []

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def start(self, fn: Callable, *args: Any) -> int:
        """Start a process; returns its number."""
        mine, end = mp.Pipe()
        self._ends.append(mine)
        environment = dict(os.environ) if self._start == "forkserver" else None
        words = (fn, len(self.processes), args, end, environment, self._linger)
        if self._start == "fork":
            process: Any = _Copy(words, self._ends)
        else:
            process = mp.get_context(self._start).Process(target=_child, args=words, daemon=True)
            process.start()
        self.processes.append(process)
        end.close()
        return len(self.processes) - 1

    def outcomes(self, deadline: float = 30.0, during: Callable[[], None] | None = None) -> list[Outcome]:
        """How all ended; a process that runs at the deadline is killed and called stuck. ``during()`` runs
        meanwhile."""
        end = time.monotonic() + deadline
        said: dict[int, Outcome | None] = {}
        try:
            if during is not None:
                during()
            while len(said) < len(self._ends) and (left := end - time.monotonic()) > 0:
                ready = wait([mine for rank, mine in enumerate(self._ends) if rank not in said], timeout=left)
                said |= {rank: _said(mine) for rank, mine in enumerate(self._ends) if mine in ready}
        finally:  # even if the test was ended: no process may be left, stopped or spinning
            stuck = {rank: _stacks(pid) for rank, pid in enumerate(self.pids) if rank not in said}
            for mine in self._ends:
                mine.close()
            codes = [self._end(rank, 5 if rank in said else 0) for rank in range(len(self._ends))]
        late = f"still running after {deadline} s"
        return [
            (said[rank] or _died(rank, code)) if rank in said else Outcome(rank, "stuck", text=f"{late}\n{stuck[rank]}")
            for rank, code in enumerate(codes)
        ]

    def _end(self, rank: int, patience: float) -> int:
        """The exit code of a process that has so many seconds to end by itself."""
        process = self.processes[rank]
        process.join(patience)
        process.kill()
        process.join()
        code = process.exitcode
        process.close()
        return code


def _said(end: Any) -> Outcome | None:
    try:
        return pickle.loads(end.recv_bytes())
    except (EOFError, ConnectionResetError):
        return None


def _died(rank: int, code: int) -> Outcome:
    return Outcome(rank, "died", code, text=signal.Signals(-code).name if code < 0 else f"exit code {code}")


def run_ranks(
    fn: Callable,
    world: int,
    *args: Any,
    deadline: float = 60.0,
    outcomes: bool = False,
    start: str | None = None,
    linger: bool | None = None,
    during: Callable[[list[Any]], None] | None = None,
) -> list[Any]:
    """See the module's text. ``during(processes)`` runs in the test while the ranks run (to kill some, say)."""
    start = start or os.environ.get(START, "forkserver")
    crowd = Crowd(start, start == "forkserver" if linger is None else linger)
    for rank in range(world):
        crowd.start(fn, rank, world, *args)
    found = crowd.outcomes(deadline, None if during is None else lambda: during(crowd.processes))
    return found if outcomes else returned(found)
