"""Asks a running job's processes on demand: where its ranks are in the program, and the store's keys.

Ranks are asked through their arenas (``recorder/whereabouts.py``). Where native code holds a rank's interpreter lock,
py-spy and the kernel still know a little.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from symcomm import errors
from symcomm.observe.recorder.processes import environment_of
from symcomm.observe.recorder.stacks import ThreadStack
from symcomm.observe.recorder.whereabouts import QuestionThroughFile, await_answers

ANSWER = 2.0  # seconds for all ranks to report where they are
SPY_DEADLINE = 10.0
STORE_DEADLINE = 3.0
KEYS_SHOWN = 2000


def ask_stacks(arenas: Mapping[int, tuple[int, str]], seconds: float = ANSWER) -> dict[int, list[ThreadStack]]:
    """Stacks of ranks, given the process of each and the path of its arena; ``[]`` for one that did not answer."""
    questions: dict[int, QuestionThroughFile] = {}
    with contextlib.ExitStack() as stack:
        for rank, (pid, path) in arenas.items():
            with contextlib.suppress(OSError, ValueError):  # it ended meanwhile, or is not what it says
                asked = QuestionThroughFile(path, pid)
                questions[rank] = stack.enter_context(contextlib.closing(asked))
        return {rank: [] for rank in arenas} | await_answers(questions, seconds)


def format_stacks(stacks: list[ThreadStack]) -> str:
    """Every thread, innermost frame first."""
    return "\n\n".join(
        "\n".join([f"Thread {stack.name}{' (rank)' if stack.is_rank else ''}", *(f"    {f}" for f in stack.frames)])
        for stack in stacks
    )


def spied_stacks(pid: int) -> str | None:
    """Python frames of a process, without its help: py-spy reads them, where it is installed and permitted."""
    spy = shutil.which("py-spy")
    if spy is None:
        return None
    try:
        done = subprocess.run([spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=SPY_DEADLINE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def kernel_stacks(pid: int) -> str:
    """What the kernel says about each thread: its name, its state, and what it sleeps in."""
    advice = "native code holds its interpreter lock; for Python frames, `pip install py-spy` here"
    lines = [f"pid {pid}: what the kernel says ({advice})", ""]
    with contextlib.suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda t: int(t.name)):
            with contextlib.suppress(OSError):  # the thread ended meanwhile
                name = (task / "comm").read_text().strip()
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                wait = (task / "wchan").read_text().strip().strip("0") or "-"
                lines.append(f"  thread {task.name:>7}  {name:<16} {STATES.get(state, state):<10} in {wait}")
    return "\n".join(lines)


STATES = {"R": "running", "S": "sleeping", "D": "in the disk", "T": "stopped", "t": "traced", "Z": "dead", "I": "idle"}


def list_store(pid: int | None) -> list[str]:
    """Keys of the rendezvous store of process ``pid``; raises ResourceError where there is none."""
    env = environment_of(pid) if pid is not None else {}
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise errors.ResourceError("the ranks' environment names no store (MASTER_ADDR, MASTER_PORT).")
    from symcomm.store.tcp import TCPStore

    token = env.get("SYMCOMM_TOKEN") or os.environ.get("SYMCOMM_TOKEN") or None
    store = TCPStore(host, int(port), is_master=False, timeout=STORE_DEADLINE, token=token, wait_for_workers=False)
    try:
        return sorted(store.list_keys())[:KEYS_SHOWN]
    finally:
        store.close()
