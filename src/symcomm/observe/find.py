"""Which jobs run on this host: processes that own arenas, grouped by who started them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from symcomm import errors
from symcomm.observe.ask import environment_of
from symcomm.observe.feed import arenas_of

__all__ = ["JobFacts", "choose_job", "find_jobs"]

LAUNCH_ID = "SYMCOMM_LAUNCH_ID"  # what `symcomm run` marks its ranks with
SHOWN = 8  # jobs named in an error


@dataclass
class JobFacts:
    """Processes that belong together. ``key`` says why; ``names`` are what a user may call the job."""

    key: tuple[str, str]
    command: str
    pids: list[int] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    @property
    def title(self) -> str:
        return f"{self.command or 'job'}, {len(self.pids)} process{'es' if len(self.pids) != 1 else ''}"


def find_jobs(skip: int | None = None) -> list[JobFacts]:
    """All jobs of this user on this host; process ``skip`` is left out."""
    jobs: dict[tuple[str, str], JobFacts] = {}
    for entry in sorted((e for e in os.listdir("/proc") if e.isdigit()), key=int):
        pid = int(entry)
        if pid == skip or not arenas_of(pid):
            continue
        env = environment_of(pid)
        key = _key(pid, env)
        job = jobs.setdefault(key, JobFacts(key, _command(pid)))
        job.pids.append(pid)
        job.names |= {str(pid), key[1], env.get("TORCHELASTIC_RUN_ID", "")} - {"", "none"}
    return list(jobs.values())


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
    while pid > 1 and pid not in found:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
        found.add(pid)
    return found


def _key(pid: int, env: dict[str, str]) -> tuple[str, str]:
    """Ranks of one launch share its mark; those of torchrun or mpirun a meeting place; those of spawn() a parent."""
    if LAUNCH_ID in env:
        return "launch", env[LAUNCH_ID]
    if "MASTER_PORT" in env and "RANK" in env:
        return "store", f"{env.get('MASTER_ADDR', 'localhost')}:{env['MASTER_PORT']}"
    try:
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    except (OSError, IndexError):
        parent = "1"
    if _command(int(parent)) != _command(pid) and not _is_python(int(parent)):
        return "process", str(pid)  # ranks as threads, started from a shell
    return "parent", parent


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def _is_python(pid: int) -> bool:
    words = _words(pid)
    return bool(words) and "python" in os.path.basename(words[0])


def _command(pid: int) -> str:
    """The script's name, or the program's."""
    words = _words(pid)
    script = next((w for w in words[1:] if w.endswith(".py")), "")
    module = next((words[i + 1] for i, w in enumerate(words[:-1]) if w == "-m"), "")
    return os.path.basename(script) or module or os.path.basename(words[0] if words else "")
