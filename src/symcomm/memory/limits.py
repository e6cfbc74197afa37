"""How much memory this process may still take, and which setting limits it."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from symcomm.errors import ResourceError
from symcomm.memory.control_groups import PROC, folders

UNLIMITED = 1 << 62  # in version 1 a number of about 2**63 means "no limit"
ENLARGE = "enlarge it (docker run --shm-size=8g, mount -o remount,size=8g), or let ranks share one network namespace"


def format_bytes(n: int) -> str:
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _numbers(path: Path) -> dict[str, int]:
    """Reads a file whose lines are a name and a number."""
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    except (OSError, ValueError):
        return {}


@dataclass(frozen=True)
class _Hierarchy:
    """A version of control groups, and its file names."""

    kind: str  # the kind of file system
    limit: str
    used: str
    cache: str  # prefix of the counters in memory.stat that include the groups below


HIERARCHIES = (
    _Hierarchy("cgroup2", "memory.max", "memory.current", ""),
    _Hierarchy("cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


@functools.lru_cache(maxsize=4)
def _groups(proc: Path, _pid: int) -> list[tuple[Path, _Hierarchy, int]]:
    """Each control group with memory limits, and the tightest limit above it, if it names one.

    Looked up only once, because that takes longer than all reading."""
    found = [(folder, h) for h in HIERARCHIES for folder in folders(proc, h.kind, "memory", h.limit)]
    name = "hierarchical_memory_limit"
    return [(folder, kind, _numbers(folder / "memory.stat").get(name, UNLIMITED)) for folder, kind in found]


def _room_in(folder: Path, hierarchy: _Hierarchy, above: int, wanted: int) -> tuple[int, str] | None:
    """How much a control group may still take. Half of its active cached files count as free, as in MemAvailable; they
    are read only if they matter."""
    limit, cached = min(_number(folder / hierarchy.limit) or UNLIMITED, above), 0
    if limit >= UNLIMITED or (used := _number(folder / hierarchy.used)) is None:
        return None
    if limit - used < wanted:
        stat = _numbers(folder / "memory.stat")
        cached = stat.get(f"{hierarchy.cache}inactive_file", 0) + stat.get(f"{hierarchy.cache}active_file", 0) // 2
    return limit - used + min(cached, used), f"{folder}/{hierarchy.limit} = {format_bytes(limit)}"


def cgroup_room(wanted: int = UNLIMITED) -> tuple[int, str] | None:
    """The tightest limit of this process's control groups: (bytes left, the file that sets it)."""
    rooms = [_room_in(*group, wanted) for group in _groups(PROC, os.getpid())]
    return min((room for room in rooms if room is not None), default=None)


def system_room() -> tuple[int, str]:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024, "MemAvailable in /proc/meminfo"
    return physical_bytes(), "physical memory"


def _mount_room(directory: str) -> tuple[int, str]:
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize, f"free space in {directory}"


def check_room(nbytes: int, directory: str | None = None) -> None:
    """Raise if so much memory could make the kernel kill us. ``directory``: where the arena is a named file."""
    rooms = [system_room()]
    if (cgroup := cgroup_room(nbytes)) is not None:
        rooms.append(cgroup)
    if directory is not None:
        rooms.append(_mount_room(directory))
    room, says = min(rooms)
    if nbytes <= room:
        return
    fix = "free memory, use a machine with more, or allocate less"
    if any(f"/{hierarchy.limit} = " in says for hierarchy in HIERARCHIES):
        fix = "raise the container's memory limit (docker run --memory, resources.limits.memory), or allocate less"
    elif "free space" in says:
        fix = ENLARGE
    raise ResourceError(
        f"symmetric memory: {format_bytes(nbytes)} asked, {format_bytes(max(room, 0))} left ({says}); {fix}."
    )
