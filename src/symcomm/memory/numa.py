"""Finds the NUMA node of a rank: the part of the machine's memory that is near it.

A rank that may run only on the cores of one node is on that node: its arena takes pages there, and groups make plans
that read other nodes' memory only once. If a rank may run on several nodes, the kernel moves it about; we ignore nodes.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

SYSFS = "/sys/devices/system/node"
UNBOUND = -1  # the "node" of a rank that may run on several


@functools.lru_cache(maxsize=8)
def nodes_of_cores(folder: str) -> dict[int, int]:
    """The node of each core, as the kernel lists them; empty if it does not."""
    found: dict[int, int] = {}
    for node in sorted(Path(folder).glob("node[0-9]*")):
        try:
            text = (node / "cpulist").read_text()
        except OSError:
            continue
        found.update(dict.fromkeys(_cores(text), int(node.name[4:])))
    return found


def _cores(text: str) -> list[int]:
    """The cores of a list: "0-2,8" has 0, 1, 2 and 8."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return [core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)]


def current_node() -> int:
    """The node of all cores that the calling thread may run on; UNBOUND if there are several."""
    known = nodes_of_cores(SYSFS)
    nodes = {known.get(core, UNBOUND) for core in os.sched_getaffinity(0)}
    return nodes.pop() if len(nodes) == 1 else UNBOUND


def cores_for(rank: int, ranks: int) -> set[int]:
    """The cores, of those that we may use, of one node for this rank. Consecutive ranks share a node."""
    usable = os.sched_getaffinity(0)
    known = nodes_of_cores(SYSFS)
    nodes = sorted({known[core] for core in usable if core in known})
    if not nodes:
        return usable
    mine = nodes[rank * len(nodes) // ranks]
    return {core for core in usable if known.get(core) == mine}
