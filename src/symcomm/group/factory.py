"""One way to make a group, wherever its ranks are.

Ranks that share memory form a LocalGroup. Where they turn out to be on several hosts, the layer above takes over: it
is loaded by name, and only then, since this one must not depend on it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from symcomm.collectives.select import Limits
from symcomm.group.local import LocalGroup
from symcomm.group.work import Timeout
from symcomm.memory.share import Exchange, SeveralHostsError

ACROSS_HOSTS = "symcomm.hierarchical.group"


def make_group(
    rank: int,
    size: int,
    exchange: Exchange,
    name: str = "world",
    timeout: Timeout = None,
    limits: Limits | None = None,
    global_ranks: Sequence[int] | None = None,
    engine: str | None = None,
) -> Any:
    """A group of ``size`` ranks that reach each other through ``exchange``; all of them call this at once.

    A LocalGroup, or a HierarchicalGroup with the same methods. ``engine`` names what carries data between hosts."""
    try:
        return LocalGroup(rank, size, exchange, name, timeout, limits, global_ranks)
    except SeveralHostsError as found:
        hosts = found.hosts
    make: Any = importlib.import_module(ACROSS_HOSTS).HierarchicalGroup
    return make(rank, size, exchange, hosts, name, timeout, limits, global_ranks, engine)


def finish_meeting(group: Any, exchange: Exchange) -> None:
    """Return when all ranks have made ``group`` and nobody reads what was exchanged any more.

    A rank that fails between the two tells the others, who would wait for it in the group's first operation."""
    try:
        group.meet(exchange)
        group.barrier()
    except BaseException as error:
        if (tell := getattr(exchange, "give_up", None)) is not None:
            tell(error)
        group.leave_now()
        raise
