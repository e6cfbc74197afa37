"""How much memory this process may still take, and which setting says so."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from symcomm.errors import ResourceError

__all__ = ["check_room", "physical_bytes", "words_for_bytes"]

UNLIMITED = 1 << 62  # version 1 says so by a number of about 2**63
PROC = Path("/proc/self")
ENLARGE = "enlarge it (docker run --shm-size=8g, mount -o remount,size=8g), or let ranks share one network namespace"


def words_for_bytes(n: int) -> str:
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
    """A file of lines that are a name and a number."""
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    except (OSError, ValueError):
        return {}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


@dataclass(frozen=True)
class _Hierarchy:
    """A version of control groups: how its lines in /proc look, and what it calls its files."""

    kind: str  # of file system
    limit: str
    used: str
    cache: str  # what precedes the names of cached pages in memory.stat, so that they include the groups below

    def is_mounted_by(self, options: str) -> bool:
        return self.kind == "cgroup2" or "memory" in options.split(",")

    def is_named_by(self, controllers: str) -> bool:
        """Of a line in /proc/self/cgroup, ``number:controllers:place``."""
        return controllers == "" if self.kind == "cgroup2" else "memory" in controllers.split(",")


HIERARCHIES = (
    _Hierarchy("cgroup2", "memory.max", "memory.current", ""),
    _Hierarchy("cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


@functools.lru_cache(maxsize=4)
def _groups(proc: Path, _pid: int) -> list[tuple[Path, _Hierarchy, int]]:
    """And the tightest limit above each, where it says so. Looked up once: that takes longer than reading the rest."""
    found = [(folder, hierarchy) for hierarchy in HIERARCHIES for folder in _folders(proc, hierarchy)]
    name = "hierarchical_memory_limit"
    return [(folder, kind, _numbers(folder / "memory.stat").get(name, UNLIMITED)) for folder, kind in found]


def _folders(proc: Path, hierarchy: _Hierarchy) -> Iterator[Path]:
    """The control group of this process and those above it, as far as they are mounted here."""
    fields = [line.split(":", 2) for line in _lines(proc / "cgroup")]
    place = next((f[2] for f in fields if len(f) == 3 and hierarchy.is_named_by(f[1])), None)
    if place is None:
        return
    for line in _lines(proc / "mountinfo"):
        mount, _, rest = line.partition(" - ")
        kind, _, options = [*rest.split(), "", "", ""][:3]
        if kind != hierarchy.kind or not hierarchy.is_mounted_by(options):
            continue
        root, point = mount.split()[3:5]
        below = place.removeprefix(root) if root != "/" and place.startswith(root) else place  # a container's own part
        folder = Path(point) / below.lstrip("/")
        while folder.is_relative_to(point):
            if (folder / hierarchy.limit).exists():
                yield folder
            folder = folder.parent


def _room_in(folder: Path, hierarchy: _Hierarchy, above: int, wanted: int) -> tuple[int, str] | None:
    """What a control group may still take. Of cached files, half of those in use count as free, as in MemAvailable;
    that is looked up only where it matters."""
    limit, cached = min(_number(folder / hierarchy.limit) or UNLIMITED, above), 0
    if limit >= UNLIMITED or (used := _number(folder / hierarchy.used)) is None:
        return None
    if limit - used < wanted:
        stat = _numbers(folder / "memory.stat")
        cached = stat.get(f"{hierarchy.cache}inactive_file", 0) + stat.get(f"{hierarchy.cache}active_file", 0) // 2
    return limit - used + min(cached, used), f"{folder}/{hierarchy.limit} = {words_for_bytes(limit)}"


def _cgroup_room(wanted: int = UNLIMITED) -> tuple[int, str] | None:
    """The tightest limit of this process's control groups: (bytes left, which file says so)."""
    rooms = [_room_in(*group, wanted) for group in _groups(PROC, os.getpid())]
    return min((room for room in rooms if room is not None), default=None)


def _system_room() -> tuple[int, str]:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024, "MemAvailable in /proc/meminfo"
    return physical_bytes(), "physical memory"


def _mount_room(directory: str) -> tuple[int, str]:
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize, f"free space in {directory}"


def check_room(nbytes: int, directory: str | None = None) -> None:
    """Raise before the kernel would kill us. ``directory`` is set when the arena is a named file there."""
    rooms = [_system_room()]
    if (cgroup := _cgroup_room(nbytes)) is not None:
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
        f"symmetric memory: {words_for_bytes(nbytes)} asked, {words_for_bytes(max(room, 0))} left ({says}); {fix}."
    )
