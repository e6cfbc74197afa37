"""The one way to make a group, wherever its ranks are.

The ranks meet (meeting.py). If all of them share memory, they make a LocalGroup, else a HierarchicalGroup. The latter
is in the layer above, so it is loaded by name, and only when it is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from symcomm import errors
from symcomm.collectives.select import Limits
from symcomm.group.local import LocalGroup, tell_of_long_waits
from symcomm.group.meeting import meet
from symcomm.group.process_group import DEFAULT_TIMEOUT
from symcomm.group.work import Timeout, to_ns
from symcomm.memory.share import Exchange, naming_shortages

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
    if not 0 <= rank < size:
        raise errors.bad_argument("ProcessGroup", "rank", rank, f"0 to {size - 1}")
    tell_of_long_waits()
    members = list(range(size) if global_ranks is None else global_ranks)
    seconds = to_ns("ProcessGroup", DEFAULT_TIMEOUT if timeout is None else timeout) / 1e9
    with naming_shortages(f"group {name!r}", rank):
        met = meet(rank, size, exchange, seconds, limits, members)
        if len(met.hosts) == 1:
            return LocalGroup(met, name, timeout)
        make: Any = importlib.import_module(ACROSS_HOSTS).HierarchicalGroup
        return make(met, name, timeout, engine)


def finish_meeting(group: Any, exchange: Exchange) -> None:
    """Return when all ranks have made ``group`` and none reads what was exchanged any more.

    The barrier here has number 0, so that the program's calls count from 1. A rank that does not get there tells the
    others, which would wait for it."""
    try:
        group.meet(exchange)
        group.barrier()
    except BaseException as error:
        if (tell := getattr(exchange, "give_up", None)) is not None:
            tell(error)
        group.leave()
        raise
