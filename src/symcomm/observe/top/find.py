"""Which jobs run on this host: processes that own arenas. Those that map each other's are one job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from symcomm import errors
from symcomm.observe.top.ask import environment_of
from symcomm.observe.top.feed import ARENA, arenas_of

__all__ = ["JobFacts", "choose_job", "find_jobs"]

SHOWN = 8  # jobs named in an error


@dataclass
class JobFacts:
    """Processes that belong together. ``names`` are what a user may call the job."""

    command: str
    pids: list[int] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    @property
    def title(self) -> str:
        return f"{self.command or 'job'}, {len(self.pids)} process{'es' if len(self.pids) != 1 else ''}"


def find_jobs(skip: int | None = None) -> list[JobFacts]:
    """All jobs of this user on this host; process ``skip`` is left out."""
    mapped = {pid: arenas_mapped(pid) for pid in _pids() if pid != skip and arenas_of(pid)}
    jobs = []
    while mapped:
        pid, shared = mapped.popitem()
        members = {pid}
        while more := [p for p, theirs in mapped.items() if theirs & shared]:
            for other in more:
                members.add(other)
                shared |= mapped.pop(other)
        jobs.append(_facts(sorted(members)))
    return sorted(jobs, key=lambda job: job.pids)


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def arenas_mapped(pid: int) -> set[str]:
    """Inodes of the arenas that a process has mapped, its own and its peers'."""
    found = set()
    try:
        with open(f"/proc/{pid}/maps") as file:
            for line in file:
                fields = line.rstrip("\n").split(maxsplit=5)
                if len(fields) == 6 and ARENA.search(fields[5]):
                    found.add(fields[4])
    except OSError:  # it ended, or it is not ours
        pass
    return found


def _facts(pids: list[int]) -> JobFacts:
    names = {str(pid) for pid in pids}
    for pid in pids:
        env = environment_of(pid)
        names |= {env.get(name, "") for name in ("SYMCOMM_LAUNCH_ID", "TORCHELASTIC_RUN_ID")} - {"", "none"}
    return JobFacts(_command(pids[0]), pids, names)


def choose_job(wanted: str | None, jobs: list[JobFacts], ancestors: Callable[[int], set[int]]) -> JobFacts:
    """The job a user means: a pid (of a rank, or of what started the ranks), a name, or the only one there is."""
    if not jobs:
        raise errors.ResourceError(
            "symcomm top: no job found; ranks must run on this host, as this user, and have joined a group. "
            "`symcomm top --simulate 8` shows one that does not exist."
        )
    found = jobs
    if wanted is not None:
        found = [job for job in jobs if wanted in job.names]
        if not found and wanted.isdigit():
            found = [job for job in jobs if any(int(wanted) in ancestors(pid) for pid in job.pids)]
    if len(found) == 1:
        return found[0]
    listed = "; ".join(f"{job.pids[0]} ({job.title})" for job in (found or jobs)[:SHOWN])
    if not found:
        raise errors.bad_argument("symcomm top", "JOB", wanted, f"the pid or name of a job; there are: {listed}")
    raise errors.BadArgumentError(f"symcomm top: there are {len(found)} jobs; name one by a pid: {listed}.")


def ancestors_of(pid: int) -> set[int]:
    """The processes above ``pid``."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        while pid > 1:
            pid = _parent(pid)
            found.add(pid)
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def _command(pid: int) -> str:
    """The script's name, or the program's."""
    words = _words(pid)
    if any("multiprocessing" in word for word in words):  # a child of spawn(): its parent has the name
        return _command(_parent(pid)) if _parent(pid) > 1 else "python"
    script = next((w for w in words[1:] if w.endswith(".py")), "")
    module = next((words[i + 1] for i, w in enumerate(words[:-1]) if w == "-m"), "")
    return os.path.basename(script) or module or os.path.basename(words[0] if words else "")
