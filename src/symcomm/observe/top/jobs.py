"""Which jobs of this user run on this host: processes that own arenas. Processes that map each other's arenas are one
job. (Each must map the other's: a forked child still maps what its parent had mapped.)

Only processes of a job hold the file of a rank's arena. Another process of the same user can open it again through
``/proc/PID/fd``, read-only, without help from the ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from dataclasses import dataclass, field

from symcomm import errors
from symcomm.memory.arena import MAGIC
from symcomm.observe.recorder.processes import ancestors_of, command_of, environment_of, numbers_of, open_file

ARENA = re.compile(r"^/memfd:symcomm\b|/symcomm-[0-9a-f]{32}\b")
SHOWN = 8  # how many jobs an error names


@dataclass
class JobFacts:
    """The processes of one job. ``names``: what a user may call it."""

    command: str
    pids: list[int] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    @property
    def title(self) -> str:
        return f"{self.command or 'job'}, {len(self.pids)} process{'es' if len(self.pids) != 1 else ''}"


def find_jobs() -> list[JobFacts]:
    """All jobs of this user on this host; this process is left out."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]
    made = {pid: inodes for pid in pids if (inodes := _inodes(arenas_of(pid)))}
    mapped = {pid: arenas_mapped(pid) for pid in made}
    jobs = []
    while mapped:
        members, fresh = set(), [next(iter(mapped))]
        while fresh:
            pid = fresh.pop()
            members.add(pid)
            theirs = mapped.pop(pid)
            peers = [p for p in mapped if made[p] & theirs and made[pid] & mapped[p]]
            fresh += [p for p in peers if p not in fresh]
        jobs.append(_facts(sorted(members)))
    return sorted(jobs, key=lambda job: job.pids)


def _inodes(paths: list[str]) -> set[str]:
    found = set()
    for path in paths:
        with contextlib.suppress(OSError):
            found.add(str(os.stat(path).st_ino))
    return found


def arenas_of(pid: int) -> list[str]:
    """Paths of the arenas that process ``pid`` made (a forked child holds its parent's too)."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    found = []
    for name in sorted(names, key=int):
        path = f"{folder}/{name}"
        with contextlib.suppress(OSError):
            if ARENA.search(os.readlink(path)) and _owner(path) in numbers_of(pid):
                found.append(path)
    return found


def _owner(path: str) -> int:
    """The pid of the process that made an arena, from its first page."""
    descriptor = open_file(path)
    try:
        magic, _, pid = struct.unpack("<Q16sQ", os.pread(descriptor, 32, 0).ljust(32, b"\0"))
        return pid if magic == MAGIC else 0
    finally:
        os.close(descriptor)


def arenas_mapped(pid: int) -> set[str]:
    """Inodes of the arenas that a process has mapped, its own and its peers'."""
    found = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as file:
        for line in file:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and ARENA.search(fields[5]):
                found.add(fields[4])
    return found


def _facts(pids: list[int]) -> JobFacts:
    names = {str(pid) for pid in pids}
    for pid in pids:
        env = environment_of(pid)
        names |= {env.get(name, "") for name in ("SYMCOMM_LAUNCH_ID", "TORCHELASTIC_RUN_ID")} - {"", "none"}
    return JobFacts(command_of(pids[0]), pids, names)


def choose_jobs(who: str, wanted: str | None, jobs: list[JobFacts]) -> list[JobFacts]:
    """The jobs that match a pid (of a rank, or of an ancestor of ranks) or a name; without one, all."""
    if not jobs:
        raise errors.ResourceError(
            f"{who}: no job found; ranks must run on this host, as this user, and have joined a group."
        )
    if wanted is None:
        return jobs
    found = [job for job in jobs if wanted in job.names]
    if not found and wanted.isdigit():
        found = [job for job in jobs if any(int(wanted) in ancestors_of(pid) for pid in job.pids)]
    if not found:
        raise errors.bad_argument(who, "JOB", wanted, f"the pid or name of a job; there are: {_listed(jobs)}")
    return found


def choose_job(who: str, wanted: str | None, jobs: list[JobFacts]) -> JobFacts:
    """The one job that matches; refuses several."""
    found = choose_jobs(who, wanted, jobs)
    if len(found) > 1:
        raise errors.BadArgumentError(f"{who}: there are {len(found)} jobs; name one by a pid: {_listed(found)}.")
    return found[0]


def _listed(jobs: list[JobFacts]) -> str:
    return "; ".join(f"{job.pids[0]} ({job.title})" for job in jobs[:SHOWN])
