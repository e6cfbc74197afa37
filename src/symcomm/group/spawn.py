"""Ranks from one Python function: processes, or threads of this process.

``spawn(fn, 4)`` calls ``fn(group, *args)`` on four ranks and returns their results in rank order. Threads start in
milliseconds and see the caller's variables, which suits notebooks and tests; processes are what a real job uses.
Both run the same plans, with the same checks.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.reduction import DupFd
from typing import Any

from symcomm import errors
from symcomm.errors import format_exit
from symcomm.group import hooks
from symcomm.group.default import join_ranks, set_default
from symcomm.group.factory import make_group
from symcomm.group.leaving import free_retired
from symcomm.group.local import leave_groups_of
from symcomm.group.process_group import ProcessGroup
from symcomm.group.work import Timeout
from symcomm.memory.arena import Arena, use_arena
from symcomm.memory.hosts import pretend_host

PR_SET_PDEATHSIG = 1
GRACE = 5.0  # seconds for the other ranks to end by themselves after one has failed


def spawn(
    fn: Callable[..., Any],
    n: int,
    args: tuple[Any, ...] = (),
    *,
    mode: str = "processes",
    timeout: Timeout = None,
    deadline: float | None = None,
    hosts: Sequence[int] | None = None,
) -> list[Any]:
    """Run ``fn(group, *args)`` on ``n`` ranks. ``timeout`` is the group's; ``deadline`` (seconds) ends the run.

    ``hosts``: the number of ranks on each pretended host, to try out what a job does on several: ``hosts=[2, 2]``.

    Raises: the first rank's error; BadArgumentError, DeadlineError, CallerError where a script would start itself."""
    if not isinstance(n, int) or n < 1:
        raise errors.bad_argument("spawn", "n", n, "a positive number of ranks")
    names = _hosts_of_ranks(n, hosts)
    if mode == "threads":
        return _spawn_threads(fn, n, args, timeout, deadline, names)
    if mode == "processes":
        return _spawn_processes(fn, n, args, timeout, deadline, names)
    raise errors.bad_argument("spawn", "mode", mode, "'processes' or 'threads'")


def _hosts_of_ranks(n: int, hosts: Sequence[int] | None) -> list[str]:
    """The host that each rank pretends to be on; empty names: the real one."""
    if hosts is None:
        return [""] * n
    if any(not isinstance(k, int) or k < 1 for k in hosts) or sum(hosts) != n:
        raise errors.bad_argument("spawn", "hosts", list(hosts), f"numbers of ranks that add up to {n}")
    return [f"host{h}" for h, k in enumerate(hosts) for _ in range(k)]


# --- threads ---------------------------------------------------------------------------------------


class _ThreadExchange:
    """An all-gather of bytes among threads of one process."""

    def __init__(self, n: int):
        self.barrier = threading.Barrier(n, timeout=60)
        self.items: list[bytes] = [b""] * n

    def of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def exchange(item: bytes) -> list[bytes]:
            self.items[rank] = item
            self.barrier.wait()
            everyone = list(self.items)
            self.barrier.wait()
            return everyone

        return exchange


def _spawn_threads(
    fn: Callable[..., Any],
    n: int,
    args: tuple[Any, ...],
    timeout: Timeout,
    deadline: float | None,
    hosts: Sequence[str],
) -> list[Any]:
    meeting = _ThreadExchange(n)
    results: list[Any] = [None] * n
    failures: list[tuple[float, int, BaseException]] = []

    def run(rank: int) -> None:
        group: ProcessGroup | None = None
        try:
            use_arena(Arena())
            pretend_host(hosts[rank])
            group = make_group(rank, n, meeting.of(rank), timeout=timeout)
            set_default(group, of_thread=True)
            results[rank] = fn(group, *args)
        except BaseException as error:
            failures.append((time.monotonic(), rank, error))
            if group is None:
                meeting.barrier.abort()
            else:
                leave_groups_of(group.arena)  # tells the others at once; pending operations here would wait for them
        finally:
            if group is not None:
                group.destroy()
                leave_groups_of(group.arena)  # those that fn made and did not destroy
            set_default(None, of_thread=True)
            use_arena(None)

    threads = [threading.Thread(target=run, args=(r,), name=f"symcomm-rank-{r}", daemon=True) for r in range(n)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:
        meeting.barrier.abort()
        raise errors.no_thread(f"{n} ranks", error) from None
    end = None if deadline is None else time.monotonic() + deadline
    for thread in threads:
        thread.join(None if end is None else max(0.0, end - time.monotonic()))
    stuck = [r for r, thread in enumerate(threads) if thread.is_alive()]
    free_retired()
    if failures:
        raise _first_cause(failures)
    if stuck:
        raise errors.deadline("spawn", deadline or 0.0, missing=stuck)
    return results


def _first_cause(failures: list[tuple[float, int, BaseException]]) -> BaseException:
    """The root cause: an error that only reports a failed peer gives way to any other."""
    own = [f for f in failures if not isinstance(f[2], (errors.PeerError, threading.BrokenBarrierError))]
    _, rank, error = min(own or failures, key=lambda f: f[0])
    error.add_note(f"(raised on rank {rank})") if hasattr(error, "add_note") else None
    return error


# --- processes -------------------------------------------------------------------------------------


def _pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bytes, str]:
    """The function for a fresh process, and the start method: notebooks need cloudpickle or fork."""
    try:
        packed = pickle.dumps((fn, args, {}))
        if getattr(fn, "__module__", "") != "__main__" or hasattr(__import__("__main__"), "__file__"):
            return packed, "spawn"
    except Exception:
        packed = b""
    with contextlib.suppress(ImportError):
        import cloudpickle

        return cloudpickle.dumps((fn, args, errors.notebook_cells())), "spawn"
    return packed, "fork"


class _SharedFile:
    """A file without a name, so that it cannot be left behind. New processes get its descriptor."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self.descriptor}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _received_file, (DupFd(self.descriptor),)


def _nameless_file() -> int:
    try:
        return os.memfd_create("store-of-ranks", os.MFD_CLOEXEC)
    except OSError:  # some containers refuse that call
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def _received_file(duplicate: Any) -> _SharedFile:
    descriptor = duplicate.detach()
    os.set_inheritable(descriptor, False)
    return _SharedFile(descriptor)


def _end_with_parent() -> None:
    """Have the kernel kill this rank when the thread that called spawn() ends."""
    parent = multiprocessing.parent_process()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent.pid:  # it was killed before that
        os._exit(1)


def _rank_main(
    packed: bytes, fn: Any, args: Any, rank: int, n: int, file: _SharedFile, timeout: Timeout, conn: Any, host: str
) -> None:
    _end_with_parent()
    if packed and fn is None:
        fn, args, cells = pickle.loads(packed)
        errors.inherited_cells.update(cells)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(n))
    if host:
        os.environ["SYMCOMM_HOST_ID"] = host
    from symcomm.store import FileStore

    store = FileStore(file.path, n)
    try:
        group = join_ranks(store, rank, n, 60.0, partial(make_group, timeout=timeout), tidy=False)
        set_default(group)
        hooks.joined(group, store)
        result: tuple[bool, Any] = (True, fn(group, *args))
        group.destroy()
    except BaseException as error:
        if hasattr(error, "add_note"):
            error.add_note(f"(raised on rank {rank})\n{''.join(traceback.format_tb(error.__traceback__))}")
        result = (False, error)
    hooks.ending()
    try:
        payload = pickle.dumps(result)
    except Exception as error:
        payload = pickle.dumps((False, errors.SymcommError(f"rank {rank}: {result[1]!r} cannot be pickled: {error}")))
    conn.send_bytes(payload)
    conn.close()


def _spawn_processes(
    fn: Callable[..., Any],
    n: int,
    args: tuple[Any, ...],
    timeout: Timeout,
    deadline: float | None,
    hosts: Sequence[str],
) -> list[Any]:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise errors.CallerError(
            "spawn: this rank's process imports the script that started it, and reaches the same call; "
            "put it under `if __name__ == '__main__':`, or use mode='threads'."
        )
    packed, method = _pack(fn, args)
    context: Any = multiprocessing.get_context(method)
    file = _SharedFile(_nameless_file())
    pipes = [context.Pipe(duplex=False) for _ in range(n)]
    payload = (packed, None, None) if method == "spawn" else (b"", fn, args)
    processes = [
        context.Process(
            target=_rank_main,
            args=(*payload, r, n, file, timeout, pipes[r][1], hosts[r]),
            name=f"symcomm-rank-{r}",
            daemon=False,
        )
        for r in range(n)
    ]
    try:
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        return _collect(processes, [receiver for receiver, _ in pipes], deadline)
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            if process.pid is not None:
                process.join()
        os.close(file.descriptor)


def _collect(processes: list[Any], receivers: list[Any], deadline: float | None) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, BaseException]] = []
    waiting = {conn: rank for rank, conn in enumerate(receivers)}
    end = None if deadline is None else time.monotonic() + deadline
    while waiting:
        left = None if end is None else max(0.0, end - time.monotonic())
        ready = wait(list(waiting), left)
        if not ready:
            break
        for conn in ready:
            rank = waiting.pop(conn)
            ok, value = _outcome(processes[rank], conn, rank)
            if ok:
                results[rank] = value
            else:
                failures.append((time.monotonic(), rank, value))
                end = min(end or float("inf"), time.monotonic() + GRACE)
    if failures:
        raise _first_cause(failures)
    if waiting:
        raise errors.deadline("spawn", deadline or 0.0, missing=sorted(waiting.values()))
    return [results[r] for r in range(len(processes))]


def _outcome(process: Any, conn: Any, rank: int) -> tuple[bool, Any]:
    try:
        return pickle.loads(conn.recv_bytes())
    except EOFError:
        process.join(5)
        why = "; what it printed says why" if process.exitcode == 1 else ""
        return False, errors.RankFailedError(f"rank {rank} {format_exit(process.exitcode or 0)}{why}.", [rank])
