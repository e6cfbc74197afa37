"""The sizes from which ranks read each other's ordinary tensors by system call, as ``symcomm bench attach`` found them.

They are kept in the user's cache directory. Machines may share it, so each figure names its CPU and kernel. A group's
first rank reads the figures for all ranks, so that all choose alike.
"""

from __future__ import annotations

import fcntl
import functools
import json
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from symcomm.collectives.limits import NO_BYTES, Limits
from symcomm.preflight import cache_directory

Sizes = tuple[int, int, int]  # of a piece, in an all_to_all, an all_gather and a scatter
Known = Mapping[str, Sizes]
ROOMY, CROWDED = "as many cores as ranks", "more ranks than cores"
CPU_FACTS = ("model name", "CPU implementer", "CPU part")
CPU_INFO = Path("/proc/cpuinfo")


def cache_file() -> Path:
    return cache_directory() / "attach.json"


@functools.cache
def machine_name() -> str:
    """What the figures depend on: this CPU and this kernel."""
    try:
        lines = [line.partition(":") for line in CPU_INFO.read_text().splitlines()]
    except OSError:
        lines = []
    facts = dict.fromkeys(value.strip() for name, _, value in lines if name.strip() in CPU_FACTS)
    return ", ".join([platform.machine(), *facts, platform.release()])


def load() -> Known:
    """This machine's figures; empty where the file is missing or malformed."""
    try:
        return _known(json.loads(cache_file().read_text()))
    except (OSError, ValueError, RecursionError):
        return {}


def _known(everything: Any) -> Known:
    mine: Any = everything.get(machine_name()) if isinstance(everything, dict) else None
    if not isinstance(mine, dict):
        return {}
    return {where: tuple(mine[where]) for where in (ROOMY, CROWDED) if _are_sizes(mine.get(where))}


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(type(n) is int and 0 < n <= NO_BYTES for n in value)


def save(where: str, sizes: Sizes) -> Path:
    """Add one figure to the file. Other machines may be doing the same; theirs are kept."""
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            everything = json.loads(path.read_text())
        except (FileNotFoundError, ValueError, RecursionError):
            everything = {}
        others = everything if isinstance(everything, dict) else {}
        text = json.dumps({**others, machine_name(): {**_known(everything), where: sizes}}, indent=1)
        fresh = path.with_suffix(".new")
        fresh.write_text(text + "\n")
        fresh.replace(path)  # a reader sees the old file or the new one
    return path


def tuned(limits: Limits, is_crowded: bool, known: Known) -> Limits:
    """``limits`` for a machine that is crowded or not, with the machine's own figures where there are some."""
    limits = limits.crowded() if is_crowded else limits
    sizes = known.get(CROWDED if is_crowded else ROOMY)
    if not sizes:
        return limits
    all_to_all, all_gather, scatter = sizes
    return replace(limits, attach_bytes=all_to_all, attach_gather_bytes=all_gather, attach_scatter_bytes=scatter)
