"""How much memory a control group leaves: both versions of them, from trees as containers see them."""

from __future__ import annotations

from pathlib import Path

import pytest

from symcomm import errors
from symcomm.memory import limits

pytestmark = pytest.mark.without_torch

MIB = 1 << 20
UNLIMITED = 9223372036854771712  # what version 1 says where there is no limit


class Tree:
    """A fake /proc/self and the control groups that it names."""

    def __init__(self, folder: Path):
        self.proc, self.groups = folder / "proc", folder / "cgroup"
        self.proc.mkdir()
        self.groups.mkdir()
        self.mounts: list[str] = ["21 1 0:20 / /proc rw - proc proc rw"]

    def mount(self, kind: str, point: str, options: str, root: str = "/") -> Path:
        path = self.groups / point
        path.mkdir(parents=True, exist_ok=True)
        self.mounts.append(
            f"{30 + len(self.mounts)} 20 0:30 {root} {path} rw,nosuid shared:9 - {kind} {kind} {options}"
        )
        (self.proc / "mountinfo").write_text("\n".join(self.mounts) + "\n")
        return path

    def named(self, *lines: str) -> None:
        (self.proc / "cgroup").write_text("\n".join(lines) + "\n")


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Tree:
    made = Tree(tmp_path)
    monkeypatch.setattr(limits, "PROC", made.proc)
    return made


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / f"memory.{name}").write_text(f"{value}\n")


def test_version_2(tree):
    root = tree.mount("cgroup2", "", "rw,nsdelegate")
    tree.named("0::/job/step")
    write(root / "job", max=100 * MIB, current=40 * MIB)
    write(root / "job/step", max="max", current=30 * MIB)
    assert limits.cgroup_room() == (60 * MIB, f"{root}/job/memory.max = 100 MiB")


def test_version_1(tree):
    root = tree.mount("cgroup", "memory", "rw,memory")
    tree.mount("cgroup", "cpu", "rw,cpu,cpuacct")
    tree.named("5:cpu,cpuacct:/job", "4:memory:/job/step", "1:name=systemd:/job", "0::/")
    write(root, limit_in_bytes=UNLIMITED, usage_in_bytes=500 * MIB)
    write(root / "job", limit_in_bytes=100 * MIB, usage_in_bytes=40 * MIB)
    write(root / "job/step", limit_in_bytes=80 * MIB, usage_in_bytes=30 * MIB)
    assert limits.cgroup_room() == (50 * MIB, f"{root}/job/step/memory.limit_in_bytes = 80 MiB")
    with pytest.raises(errors.ResourceError, match=r"60 MiB asked, 50 MiB left .*limit_in_bytes.*docker run --memory"):
        limits.check_room(60 * MIB)


def test_version_1_in_a_container_that_sees_its_own_part_only(tree):
    """The kernel names the group as the host does; what is mounted here begins at it."""
    root = tree.mount("cgroup", "memory", "rw,memory", root="/docker/abc")
    tree.named("4:memory:/docker/abc/inner", "0::/")
    write(root, limit_in_bytes=64 * MIB, usage_in_bytes=60 * MIB)
    write(root / "inner", limit_in_bytes=UNLIMITED, usage_in_bytes=MIB)
    assert limits.cgroup_room() == (4 * MIB, f"{root}/memory.limit_in_bytes = 64 MiB")


def test_version_1_knows_of_limits_above_what_is_mounted(tree):
    root = tree.mount("cgroup", "memory", "rw,memory", root="/docker/abc")
    tree.named("4:memory:/docker/abc")
    stat = f"cache 5\nhierarchical_memory_limit {32 * MIB}"
    write(root, limit_in_bytes=64 * MIB, usage_in_bytes=20 * MIB, stat=stat)
    assert limits.cgroup_room() == (12 * MIB, f"{root}/memory.limit_in_bytes = 32 MiB")


def test_both_versions_at_once(tree):
    """As systemd's hybrid hierarchy has it: version 2 is there, but memory is version 1's."""
    unified, memory = tree.mount("cgroup2", "unified", "rw"), tree.mount("cgroup", "memory", "rw,memory")
    tree.named("4:memory:/job", "0::/job")
    write(unified / "job")
    write(memory / "job", limit_in_bytes=10 * MIB, usage_in_bytes=MIB)
    assert limits.cgroup_room() == (9 * MIB, f"{memory}/job/memory.limit_in_bytes = 10 MiB")


@pytest.mark.parametrize(("kind", "prefix"), [("cgroup2", ""), ("cgroup", "total_")])
def test_cached_files_make_room(tree, kind, prefix):
    """A job that has read its data has a full control group, and yet all the memory that it may have."""
    root = tree.mount(kind, "memory", "rw,memory")
    tree.named("0::/", "4:memory:/")
    stat = f"{prefix}inactive_file {40 * MIB}\n{prefix}active_file {20 * MIB}\nanon 1"
    names = ("max", "current") if kind == "cgroup2" else ("limit_in_bytes", "usage_in_bytes")
    write(root, **dict(zip(names, (100 * MIB, 99 * MIB), strict=True)), stat=stat)
    room = limits.cgroup_room()
    assert room is not None and room[0] == MIB + 50 * MIB


@pytest.mark.parametrize("named", [(), ("nonsense",), ("4:memory:/gone",), ("0::/../..",), ("0::/",)])
def test_nothing_to_be_found(tree, named):
    tree.mount("cgroup2", "", "rw")
    tree.named(*named)
    assert limits.cgroup_room() is None


def test_no_limit(tree):
    root = tree.mount("cgroup", "memory", "rw,memory")
    tree.named("4:memory:/job")
    for folder in (root, root / "job"):
        write(folder, limit_in_bytes=UNLIMITED, usage_in_bytes=MIB)
    assert limits.cgroup_room() is None


def test_no_proc(tree, monkeypatch):
    monkeypatch.setattr(limits, "PROC", Path("/no/such"))
    assert limits.cgroup_room() is None
    limits.check_room(1)
