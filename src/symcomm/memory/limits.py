"""How much memory this process may still take, and which setting says so."""

from __future__ import annotations

import os
from pathlib import Path

from symcomm.errors import ResourceError

__all__ = ["check_room", "physical_bytes", "words_for_bytes"]

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


def _cgroup_room() -> tuple[int, str] | None:
    """The tightest limit of this process's control groups: (bytes left, which file says so)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    place = next((line.split("::", 1)[1] for line in lines if line.startswith("0::")), None)
    if place is None:
        return None
    best: tuple[int, str] | None = None
    folder = Path("/sys/fs/cgroup") / place.lstrip("/")
    while folder != folder.parent and str(folder).startswith("/sys/fs/cgroup"):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None and (best is None or limit - used < best[0]):
            best = (limit - used, f"{folder}/memory.max = {words_for_bytes(limit)}")
        folder = folder.parent
    return best


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
    if (cgroup := _cgroup_room()) is not None:
        rooms.append(cgroup)
    if directory is not None:
        rooms.append(_mount_room(directory))
    room, says = min(rooms)
    if nbytes <= room:
        return
    fix = "free memory, use a machine with more, or allocate less"
    if "memory.max" in says:
        fix = "raise the container's memory limit (docker run --memory, resources.limits.memory), or allocate less"
    elif "free space" in says:
        fix = ENLARGE
    raise ResourceError(
        f"symmetric memory: {words_for_bytes(nbytes)} asked, {words_for_bytes(max(room, 0))} left ({says}); {fix}."
    )
