"""Run a function on several processes, with a hard deadline and a report of what each one did.

``run_ranks(fn, n)`` calls ``fn(rank, n, *args)`` in n processes and returns their results in rank order. It fails the
test when one raises, dies or does not end in time, and says what every rank did. ``outcomes=True`` returns an Outcome
per rank instead. The processes are forked by one that has loaded torch and ours, and done nothing else (loading it
takes 2 s of CPU time), and stay until all have said how they ended, so that no end is taken for a fault.
``start="spawn"`` makes fresh interpreters, ``start="fork"`` copies of the test; these end by themselves.
"""

from __future__ import annotations

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
from typing import Any

LINGER = 60.0  # seconds at most
# Whoever is the first to start a process this way decides for all of them what is loaded.
mp.get_context("forkserver").set_forkserver_preload(["tests.support.preloaded"])


@dataclass
class Outcome:
    """How one rank ended: a value, an exception, a signal, or still running at the deadline."""

    rank: int
    kind: str  # "returned" | "raised" | "died" | "stuck"
    value: Any = None
    error: BaseException | None = None
    text: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.kind}: {self.text or self.value!r}"


def become(environment: dict[str, str]) -> None:
    """What a process that was forked by the loaded one takes over from whoever asked for it."""
    os.environ.clear()
    os.environ.update(environment)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.distributed.set_debug_level_from_env()  # as torch does where it is loaded
        if "OMP_NUM_THREADS" in environment:
            torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))


def _child(fn: Callable, rank: int, world: int, args: tuple, conn: Any, environment: dict[str, str] | None) -> None:
    if environment is not None:
        become(environment)
    try:
        result = ("returned", fn(rank, world, *args), None, "")
    except BaseException as error:
        result = ("raised", None, error, traceback.format_exc())
    try:
        payload = pickle.dumps(result)
    except Exception:
        payload = pickle.dumps((result[0], repr(result[1]), None, result[3]))
    conn.send_bytes(payload)
    if environment is not None:
        conn.poll(LINGER)
    conn.close()


def run_ranks(
    fn: Callable,
    world: int,
    *args: Any,
    deadline: float = 60.0,
    outcomes: bool = False,
    start: str = "forkserver",
    during: Callable[[list[mp.process.BaseProcess]], None] | None = None,
) -> list[Any]:
    """See the module's text. ``during(processes)`` runs in the test while the ranks run (to kill some, say)."""
    ctx: Any = mp.get_context(start)
    pipes = [ctx.Pipe() for _ in range(world)]
    environment = dict(os.environ) if start == "forkserver" else None
    procs = [
        ctx.Process(target=_child, args=(fn, r, world, args, pipes[r][1], environment), daemon=True)
        for r in range(world)
    ]
    for proc in procs:
        proc.start()
    for _, send in pipes:
        send.close()
    end = time.monotonic() + deadline
    if during is not None:
        during(procs)
    results: list[Outcome | None] = [None] * world
    pending = {pipes[r][0]: r for r in range(world)}
    while pending and (left := end - time.monotonic()) > 0:
        for conn in wait(list(pending), timeout=left):
            rank = pending.pop(conn)  # type: ignore[call-overload]
            try:
                kind, value, error, text = pickle.loads(conn.recv_bytes())  # type: ignore[union-attr]
                results[rank] = Outcome(rank, kind, value, error, text)
            except EOFError:
                procs[rank].join(5)
                code = procs[rank].exitcode
                how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
                results[rank] = Outcome(rank, "died", value=code, text=how)
    for conn, _ in pipes:
        conn.close()
    for rank, proc in enumerate(procs):
        if results[rank] is None:
            results[rank] = Outcome(rank, "stuck", text=f"still running after {deadline} s")
        proc.join(0.2 if results[rank].kind == "stuck" else 5)  # type: ignore[union-attr]
        if proc.is_alive():
            os.kill(proc.pid, signal.SIGKILL)  # type: ignore[arg-type]
            proc.join()
    done = [r for r in results if r is not None]
    if outcomes:
        return done
    bad = [r for r in done if r.kind != "returned"]
    if bad:
        raise AssertionError("not every rank returned:\n" + "\n".join(str(r) for r in done))
    return [r.value for r in done]
