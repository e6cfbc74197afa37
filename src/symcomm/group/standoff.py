"""Notices two ranks that seem to wait for each other: one in a collective, the other for a message to or from it.

A warning says so after a second, and so does the error at the deadline. It is no error by itself: another thread of
either rank, or a signal handler, may make the missing call, and no rank can know that none ever will.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from symcomm.errors import format_ranks
from symcomm.group.failure import describe_call
from symcomm.group.state import GroupState

ANY_SOURCE = -1
log = logging.getLogger(__name__)


def format_message(is_send: bool, peer: int, tag: int) -> str:
    who = "any rank" if peer == ANY_SOURCE else f"rank {peer}"
    return f"{'send to' if is_send else 'receive from'} {who}, tag {tag},"


def in_collective(ranks: Sequence[int], call: str, seq: int, this_rank: str) -> str:
    """``rank 0 waits in all_reduce(...) #2, which this rank has not called``"""
    who = f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {format_ranks(ranks)} wait"
    return f"{who} in {call} #{seq}, which {this_rank} has not called"


def format_standoff(state: GroupState, peer: int, this_rank: str = "this rank") -> str:
    """The same of ``peer``, or of all others (ANY_SOURCE); empty unless they wait in a later collective."""
    report = state.handle.report()
    others = [r for r in report["ranks"] if r["rank"] != state.rank and peer in (ANY_SOURCE, r["rank"])]
    if not others or any(r["seq"] <= report["seq"] for r in others):
        return ""
    call = describe_call(others[0]["signature"], others[0]["count"])
    return in_collective([r["rank"] for r in others], call, others[0]["seq"], this_rank)


def warn(state: GroupState, message: str, words: str) -> None:
    """``message``: what this rank waits for; ``words``: which ranks wait in which collective meanwhile."""
    log.warning(
        "%s on group %r: %s, and rank %d waits for it. Unless another thread sends, receives or calls, both wait until "
        "their deadlines (this one's group: %g s).",
        message, state.name, words, state.rank, state.timeout,
    )  # fmt: skip
