"""Two ranks that seem to wait for each other: one in a collective, the other for a message to or from it.

It is said in a warning, after a second, and in the error at the deadline. It is no error by itself: another thread of
either rank, or a signal handler, may make the call that is missing, and no rank can know that it never will.
"""

from __future__ import annotations

import logging
from typing import Any

from symcomm._core import native
from symcomm.errors import format_ranks
from symcomm.group import registry
from symcomm.group.failure import describe_call

ANY_SOURCE = -1
log = logging.getLogger(__name__)


def format_message(is_send: bool, peer: int, tag: int) -> str:
    who = "any rank" if peer == ANY_SOURCE else f"rank {peer}"
    return f"{'send to' if is_send else 'receive from'} {who}, tag {tag},"


def format_standoff(group: Any, peer: int, this_rank: str = "this rank") -> str:
    """``rank 0 waits in all_reduce(...) #2, which this rank has not called``, if it does; ANY_SOURCE: if all do."""
    report = native.group_report(group.handle)
    others = [r for r in report["ranks"] if r["rank"] != group.rank and peer in (ANY_SOURCE, r["rank"])]
    if not others or any(r["seq"] <= report["seq"] for r in others):
        return ""
    ranks, call = [r["rank"] for r in others], describe_call(others[0]["signature"], others[0]["count"])
    who = f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {format_ranks(ranks)} wait"
    return f"{who} in {call} #{others[0]['seq']}, which {this_rank} has not called"


def _tell(handle: Any, is_send: bool, peer: int, tag: int) -> None:
    """The core has seen it for a second."""
    group = registry.of_handle(handle)
    me = f"rank {group.rank}" if group is not None else ""
    words = format_standoff(group, peer, me) if group is not None else ""
    if group is not None and words:
        log.warning(
            "%s on group %r: %s, and %s waits for it. Unless another thread sends, receives or calls, both wait until "
            "their deadlines (this one's group: %g s).",
            format_message(is_send, peer, tag), group.name, words, me, group.timeout,
        )  # fmt: skip


native.use_deadlock_callback(_tell)
