"""Processors, clocks, limits, and whether this is a container."""

from __future__ import annotations

import os
import resource
from functools import partial
from pathlib import Path

from symcomm.memory.control_groups import granted_cores
from symcomm.observe.health import FAIL, OK, WARN, Check, Finding

FILES_PER_RANK = 4  # its arena, its connection to the store, and two for the launcher's pipes
FILES_BESIDES = 64
SLOW_CLOCKS = {"hpet", "acpi_pm", "jiffies", "refined-jiffies"}


def checks(ranks: int | None) -> list[tuple[str, Check]]:
    """``ranks``: how many will run here; None: one per core."""
    return [
        ("cores", partial(cores, ranks)),
        ("cpu quota", partial(quota, ranks)),
        ("numa", numa),
        ("clock", clock),
        ("open files", partial(open_files, ranks)),
        ("processes", partial(processes, ranks)),
        ("container", container),
    ]


def cores(ranks: int | None) -> Finding:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{usable} usable" + (f" of {there}" if usable < there else "")
    if ranks is None or ranks <= usable:
        return Finding("cores", OK, found)
    fix = f"{ranks} ranks take turns on {usable} cores: fine for tests, slow for work; use fewer ranks or more cores"
    return Finding("cores", WARN, found, fix)


def quota(ranks: int | None) -> Finding:
    granted, usable = granted_cores(), len(os.sched_getaffinity(0))
    if granted is None:
        return Finding("cpu quota", OK, "none: all of every core's time")
    found = f"{granted:.2g} cores' worth of time on {usable} cores"
    if granted >= (ranks or usable):
        return Finding("cpu quota", OK, found)
    fix = "ranks are paused in the middle of collectives when it is used up; raise it (docker run --cpus) or use fewer"
    return Finding("cpu quota", WARN, found, fix)


def numa() -> Finding:
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return Finding("numa", OK, "one node: all memory is equally near")
    return Finding("numa", OK, f"{len(nodes)} nodes", "bind each rank to one node's cores: symcomm run --bind-numa")


def clock() -> Finding:
    try:
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    except OSError:
        return Finding("clock", OK, "the kernel does not say which")
    if source in SLOW_CLOCKS:
        fix = "every deadline reads it; boot with tsc=reliable, or choose another machine type"
        return Finding("clock", WARN, f"{source}, which is slow to read", fix)
    return Finding("clock", OK, source)


def open_files(ranks: int | None) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = ranks or len(os.sched_getaffinity(0))
    need = FILES_BESIDES + FILES_PER_RANK * many
    if soft >= need:
        return Finding("open files", OK, f"{soft}")
    fix = f"{many} ranks need {need}: ulimit -n {min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536}"
    return Finding("open files", FAIL if soft < many else WARN, f"limited to {soft}", fix)


def processes(ranks: int | None) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    many = (ranks or len(os.sched_getaffinity(0))) * 8  # a torch process has several threads
    if soft == resource.RLIM_INFINITY or soft >= many:
        return Finding("processes", OK, "unlimited" if soft == resource.RLIM_INFINITY else f"{soft}")
    return Finding("processes", WARN, f"limited to {soft}", f"about {many} threads are needed: ulimit -u {many * 4}")


def container() -> Finding:
    signs = [
        name for path, name in (("/.dockerenv", "Docker"), ("/run/.containerenv", "Podman")) if os.path.exists(path)
    ]
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        signs.append("Kubernetes")
    user = f"user id {os.getuid()}"
    if not signs:
        return Finding("container", OK, f"none seen; {user}")
    fix = "ranks in several containers need one network namespace, or SYMCOMM_SHARE=named and --ipc=host"
    return Finding("container", OK, f"{', '.join(signs)}; {user}", fix)
