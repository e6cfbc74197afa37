"""The control groups of this process, in both of Linux's versions, and the processor time that they grant."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc/self")
LIMITS = {"cgroup2": "cpu.max", "cgroup": "cpu.cfs_quota_us"}  # kind of file system -> file with the quota
PERIOD = "cpu.cfs_period_us"  # in version 1; version 2 has the period in the same file


def folders(proc: Path, kind: str, controller: str, file: str) -> tuple[Path, ...]:
    """This process's control group and those above it, if they are mounted here and have ``file``.

    They are looked up once for each place and set of mounts: it takes milliseconds, and forks share the answer."""
    try:
        mounts = os.readlink(proc / "ns" / "mnt")
    except OSError:
        mounts = ""
    return _look_up(proc, kind, controller, file, tuple(_lines(proc / "cgroup")), mounts)


@functools.lru_cache(maxsize=64)
def _look_up(
    proc: Path, kind: str, controller: str, file: str, places: tuple[str, ...], _mounts: str
) -> tuple[Path, ...]:
    return tuple(_folders(proc, kind, controller, file, places))


def _folders(proc: Path, kind: str, controller: str, file: str, places: Iterable[str]) -> Iterator[Path]:
    fields = [line.split(":", 2) for line in places]
    place = next((f[2] for f in fields if len(f) == 3 and _is_named(kind, f[1], controller)), None)
    if place is None:
        return
    for line in _lines(proc / "mountinfo"):
        mount, _, rest = line.partition(" - ")
        mounted, _, options = [*rest.split(), "", "", ""][:3]
        if mounted != kind or not (kind == "cgroup2" or controller in options.split(",")):
            continue
        root, point = mount.split()[3:5]
        below = place.removeprefix(root) if root != "/" and place.startswith(root) else place  # a container's own part
        folder = Path(point) / below.lstrip("/")
        while folder.is_relative_to(point):
            if (folder / file).exists():
                yield folder
            folder = folder.parent


def _is_named(kind: str, controllers: str, controller: str) -> bool:
    """Whether a line of /proc/self/cgroup, ``number:controllers:place``, is about this controller."""
    return controllers == "" if kind == "cgroup2" else controller in controllers.split(",")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


@dataclass(frozen=True)
class Quota:
    """The files in which a control group says how much processor time its processes share."""

    limit: Path
    period: Path | None  # None: in the same file as the limit

    @property
    def cores(self) -> float | None:
        """Cores' worth of time; None: no limit."""
        try:
            text = self.limit.read_text() + (f" {self.period.read_text()}" if self.period else "")
            granted, period = (int(word) for word in text.split())
        except (OSError, ValueError):  # "max"
            return None
        return granted / period if granted > 0 and period > 0 else None


def quotas(proc: Path = PROC) -> list[Quota]:
    """The quotas of all control groups of this process."""
    return [
        Quota(folder / limit, folder / PERIOD if kind == "cgroup" else None)
        for kind, limit in LIMITS.items()
        for folder in folders(proc, kind, "cpu", limit)
    ]


def granted_cores() -> float | None:
    """The cores that the tightest quota grants; None: no limit."""
    return min((cores for quota in quotas() if (cores := quota.cores) is not None), default=None)


def watch_quotas(found: list[Quota] | None = None) -> None:
    """Have the core read these files when it checks whether each rank has a core of its own."""
    from symcomm._core import native  # `symcomm doctor` asks for quotas even if the core was not built

    native.watch_quotas(tuple(
        (str(quota.limit), str(quota.period) if quota.period else None, str(quota.limit.with_name("cpu.stat")),
         os.stat(quota.limit.parent).st_ino)
        for quota in (quotas() if found is None else found)
    ))  # fmt: skip
