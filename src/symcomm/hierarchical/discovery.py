"""Chooses the engine of a group across hosts, and refuses ranks that cannot reach each other.

All ranks exchange facts when they build the group, and draw the same conclusions from them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from symcomm import errors


def agree_on_engine(infos: Sequence[dict[str, Any]]) -> str:
    wanted = {info["wanted"] for info in infos}
    if len(wanted) > 1:
        told = ", ".join(sorted(name or "none" for name in wanted))
        raise errors.CollectiveMismatchError(
            f"groups across hosts: ranks ask for different engines ({told}); ask for the same."
        )
    [name] = wanted
    if name:
        return name
    for name in infos[0]["engines"]:
        if all(name in info["engines"] for info in infos):
            return name
    raise errors.ResourceError(
        "the ranks are on several hosts, and no engine between hosts is on all of them; install torch (Gloo) or mpi4py."
    )


def check_addresses(infos: Sequence[dict[str, Any]]) -> None:
    """Refuse at once ranks that only their own machine, or container, can reach."""
    for rank, info in enumerate(infos):
        if (address := info["control"][1]).startswith("127."):
            advice = network_advice(infos)
            raise errors.ResourceError(f"rank {rank} is at {address}, where the others cannot reach it; {advice}.")


def network_advice(infos: Sequence[dict[str, Any]]) -> str:
    """What to do when ranks do not reach each other."""
    machines = {tuple(info["machine"]) for info in infos}
    if len({boot for boot, _ in machines}) < len(machines):
        return (
            "ranks of one machine are in different network namespaces: start their containers with --network=host, or "
            "with --ipc=host and SYMCOMM_SHARE=named on all ranks"
        )
    return "open the network between the hosts, or set SYMCOMM_ADDRESS to the interface that the others reach"


def wants_wide_sums() -> bool:
    """SYMCOMM_WIDE_SUMS: whether partial sums of small floats cross between hosts as float32, as they are added."""
    value = os.environ.get("SYMCOMM_WIDE_SUMS", "")
    if value not in ("", "0", "1"):
        raise errors.bad_argument("groups across hosts", "SYMCOMM_WIDE_SUMS", value, "0 or 1")
    return value == "1"
