"""Running jobs of this user, seen from outside: their flight recorders are read through ``/proc``, without their help.

A rank's arena is a file that only its processes hold. Whoever may look into ``/proc/PID/fd`` (the same user, says the
kernel) can open it again, read-only. Ranks that map each other's arenas are one job.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from symcomm.errors import BadArgumentError
from symcomm.memory.arena import MAGIC
from symcomm.memory.flight import read_groups
from symcomm.memory.heap import PAGE
from symcomm.observe.dump import PREFIXES, boot_id
from symcomm.observe.records import operations_at
from symcomm.observe.trace import RankTrace, Trace, read_dump
from symcomm.observe.tracer import answer_name, ask_name, process_state

__all__ = ["Job", "live_jobs", "look"]

ARENA = re.compile(r"^/memfd:symcomm\b|/symcomm-[0-9a-f]{32}\b")
CLOCK = 0.1  # seconds over which the rate of the processor's counter is measured before it is trusted
ANSWER = 2.0  # seconds that ranks get to say where they are


@dataclass(frozen=True)
class Job:
    """Processes that share arenas. ``arenas`` are paths below /proc of those that they own."""

    pids: tuple[int, ...]
    arenas: tuple[tuple[int, str], ...]  # (process, path)


def live_jobs() -> list[Job]:
    """What runs now, and may be looked at."""
    owned: dict[int, list[str]] = {}
    seen: dict[int, set[str]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                pid = int(entry)
                paths = _own_arenas(pid)
                if paths:
                    owned[pid], seen[pid] = paths, _mapped_arenas(pid)
    jobs = []
    rest = set(owned)
    while rest:
        members = {min(rest)}
        while more := {p for p in rest - members if any(seen[p] & seen[m] for m in members)}:
            members |= more
        rest -= members
        arenas = tuple((pid, path) for pid in sorted(members) for path in owned[pid])
        jobs.append(Job(tuple(sorted(members)), arenas))
    return jobs


def _own_arenas(pid: int) -> list[str]:
    """Paths of arenas that this process made (a forked child holds its parent's too)."""
    paths = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        with contextlib.suppress(OSError):
            if ARENA.search(os.readlink(path)) and _owner(path) in _names_of(pid):
                paths.append(path)
    return paths


def _owner(path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        magic, _, pid = struct.unpack("<Q16sQ", os.pread(descriptor, 32, 0))
        return pid if magic == MAGIC else 0
    finally:
        os.close(descriptor)


def _names_of(pid: int) -> list[int]:
    """The process's numbers, here and in the containers it is in."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return [int(number) for number in line.split()[1:]]
    return [pid]


def _mapped_arenas(pid: int) -> set[str]:
    """Inodes of the arenas that a process has mapped."""
    found = set()
    with open(f"/proc/{pid}/maps") as file:
        for line in file:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and ARENA.search(fields[5]):
                found.add(fields[4])
    return found


def look(job: Job) -> Trace:
    """What the ranks of a job have recorded, and, where they trace, where they are."""
    time.sleep(CLOCK)
    found: dict[int, RankTrace] = {}
    for pid, path in job.arenas:
        with contextlib.suppress(OSError):
            one = _read(pid, path)
            if one.groups and (one.rank not in found or _last(one) > _last(found[one.rank])):
                found[one.rank] = one
    trace = Trace(found, live=True)
    _ask_for_stacks(trace)
    return trace


def _last(one: RankTrace) -> int:
    return one.operations[-1].created_ns if one.operations else 0


def _read(pid: int, path: str) -> RankTrace:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:

        def peek(place: int, length: int) -> bytes:
            return os.pread(descriptor, length, place)

        groups = list(read_groups(PAGE, peek).values())
        largest: dict = max(groups, key=lambda g: g["size"], default={"ranks": [], "rank": 0})
        return RankTrace(
            rank=largest["ranks"][largest["rank"]] if largest["ranks"] else largest["rank"],
            pid=pid,
            boot=boot_id(),
            noted_ns=time.monotonic_ns(),
            noted_wall_ns=time.time_ns(),
            end="stopped" if process_state(pid) in ("T", "t") else "",
            operations=operations_at(PAGE, peek),
            groups=groups,
        )
    finally:
        os.close(descriptor)


def _folder_of(pid: int) -> str | None:
    """Where the process writes dumps, if it traces."""
    with contextlib.suppress(OSError):
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        variables = dict(item.split("=", 1) for item in raw.split("\0") if "=" in item)
        if folder := variables.get("SYMCOMM_TRACE_DIR"):
            return os.path.join(os.readlink(f"/proc/{pid}/cwd"), folder)
        for name in PREFIXES:
            if prefix := variables.get(name):
                return os.path.join(os.readlink(f"/proc/{pid}/cwd"), os.path.dirname(prefix))
    return None


def _ask_for_stacks(trace: Trace) -> None:
    asked: dict[int, Path] = {}
    for rank, one in trace.ranks.items():
        folder = None if one.end else _folder_of(one.pid)
        if folder is not None:
            with contextlib.suppress(OSError):
                os.makedirs(folder, exist_ok=True)
                Path(folder, ask_name(one.pid)).touch()
                asked[rank] = Path(folder, answer_name(one.pid, rank))
    if not asked:
        trace.problems.append(
            "ranks tell where they are only when they run with SYMCOMM_TRACE_DIR, or under `symcomm run --trace DIR`."
        )
    deadline = time.monotonic() + ANSWER
    while asked and time.monotonic() < deadline:
        for rank, path in list(asked.items()):
            if path.exists():
                with contextlib.suppress(Exception):
                    trace.ranks[rank].stacks = read_dump(rank, path).stacks
                path.unlink(missing_ok=True)
                del asked[rank]
        time.sleep(0.02)
    for rank, path in asked.items():
        (path.parent / ask_name(trace.ranks[rank].pid)).unlink(missing_ok=True)
        trace.problems.append(f"rank {rank} (pid {trace.ranks[rank].pid}) did not say where it is.")


def find_job(pid: int | None) -> list[Job]:
    """All jobs, or that of one process."""
    jobs = live_jobs()
    if pid is not None:
        jobs = [job for job in jobs if pid in job.pids]
    if not jobs:
        of = f" that process {pid} is part of" if pid is not None else " of this user"
        raise BadArgumentError(f"symcomm trace: there is no running job{of}; start one, or give a folder with dumps.")
    return jobs
