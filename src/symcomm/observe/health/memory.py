"""Memory: how much there is, how much a container may use, and whether ranks can share it."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import shutil
from pathlib import Path

from symcomm.memory.limits import cgroup_room, format_bytes, system_room
from symcomm.observe.health import FAIL, OK, WARN, Finding

LITTLE = 1 << 30


def free_memory() -> Finding:
    room, says = min([system_room(), *filter(None, [cgroup_room()])])
    found = f"{format_bytes(room)} left ({says})"
    if room >= LITTLE:
        return Finding("memory", OK, found)
    fix = "raise the container's limit (docker run --memory)" if "memory.max" in says else "free memory"
    return Finding("memory", WARN, found, f"{fix}; symmetric memory and torch share it")


def memory_files() -> Finding:
    """An arena is a memfd: creating one, allocating its pages and mapping it shared must work."""
    try:
        fd = os.memfd_create("symcomm-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        fix = "allow memfd_create in the container's seccomp profile, or set SYMCOMM_SHARE=named"
        return Finding("memfd", FAIL, f"memfd_create is refused ({error.strerror})", fix)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        os.posix_fallocate(fd, 0, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as view:
            view[:2] = b"ok"
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if os.pread(fd, 2, 0) != b"ok":
            return Finding("memfd", FAIL, "a memory file does not show what was written to it", "use another kernel")
    except OSError as error:
        return Finding("memfd", FAIL, f"a memory file cannot be used ({error.strerror})", "use a kernel from 4.14 on")
    finally:
        os.close(fd)
    return Finding("memfd", OK, "made, mapped and shared")


def shared_directory() -> Finding:
    """/dev/shm matters only to torch's data loaders and to SYMCOMM_SHARE=named; Docker's default is 64 MiB."""
    path = os.environ.get("SYMCOMM_SHM_DIR", "/dev/shm")
    named = os.environ.get("SYMCOMM_SHARE") == "named"
    try:
        room = shutil.disk_usage(path)
    except OSError as error:
        state = FAIL if named else WARN
        return Finding("shared memory", state, f"{path}: {error.strerror}", f"mount a tmpfs at {path}")
    found = f"{path}: {format_bytes(room.free)} of {format_bytes(room.total)} free"
    if room.free >= LITTLE:
        return Finding("shared memory", OK, found)
    why = "arenas lie there (SYMCOMM_SHARE=named)" if named else "ours is elsewhere, but torch's DataLoader uses it"
    return Finding("shared memory", WARN, f"{found}; {why}", "docker run --shm-size=8g, or mount -o remount,size=8g")


def huge_pages() -> Finding:
    place = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    try:
        text = place.read_text()
    except OSError:
        return Finding("huge pages", OK, "this kernel has none for shared memory; all works without")
    chosen = text[text.index("[") + 1 : text.index("]")]
    if chosen in ("advise", "always", "within_size", "force"):
        return Finding("huge pages", OK, f"shared memory may use them ({chosen})")
    fix = f"for large tensors: echo advise | sudo tee {place}"
    return Finding("huge pages", OK, f"shared memory does not use them ({chosen}); all works without", fix)


def address_space() -> list[Finding]:
    findings = []
    for name, limit, least, fix in (
        ("address space", resource.RLIMIT_AS, 1 << 44, "ulimit -v unlimited: an arena maps far more than it fills"),
        ("locked memory", resource.RLIMIT_MEMLOCK, 64 << 20, "for GPUs and InfiniBand: ulimit -l unlimited"),
    ):
        soft, _ = resource.getrlimit(limit)
        if soft == resource.RLIM_INFINITY or soft >= least:
            findings.append(Finding(name, OK, "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)))
        else:
            state = WARN if limit == resource.RLIMIT_AS else OK
            findings.append(Finding(name, state, f"limited to {format_bytes(soft)}", fix))
    return findings


def ptrace_scope() -> Finding:
    """Whether processes may inspect each other: py-spy, debuggers, and reading a peer's memory directly."""
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return Finding("ptrace", OK, "processes of one user may look at each other")
    words = {0: "processes of one user may look at each other", 1: "only parents may look into their children",
             2: "only root may look into other processes", 3: "nobody may look into other processes"}  # fmt: skip
    fix = "ranks copy large tensors twice; for one copy, and py-spy on a stuck rank: sysctl kernel.yama.ptrace_scope=0"
    return Finding("ptrace", OK, f"{words.get(scope, 'unknown')} (ptrace_scope {scope})", fix if scope else "")


def attach_sizes() -> list[Finding]:
    """The sizes from which on ranks read each other's ordinary tensors by system call."""
    from symcomm.group import calibration  # needs the core; if that is missing, this check says so

    found = []
    for where, sizes in calibration.load().items():
        told = [
            f"{_size(size)} ({call})" for size, call in zip(sizes, ("all_to_all", "all_gather", "scatter"), strict=True)
        ]
        found.append(Finding("attach", OK, f"{where}: {', '.join(told)}, measured here"))
    fix = "for large all_to_alls, all_gathers and scatters: symcomm bench attach"
    return found or [Finding("attach", OK, "usual sizes", fix)]


def _size(nbytes: int) -> str:
    from symcomm.collectives.limits import NO_BYTES

    return "never" if nbytes == NO_BYTES else f"from {format_bytes(nbytes)} on"


CHECKS = (
    ("memory", free_memory),
    ("memfd", memory_files),
    ("shared memory", shared_directory),
    ("huge pages", huge_pages),
    ("address space", address_space),
    ("ptrace", ptrace_scope),
    ("attach", attach_sizes),
)
