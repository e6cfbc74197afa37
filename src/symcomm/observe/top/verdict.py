"""What is stuck in a running job, in one sentence."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from symcomm.errors import words_for_ranks, words_for_seconds

if TYPE_CHECKING:
    from symcomm.observe.top.model import Live, Meeting

__all__ = ["Verdict", "find_verdict"]

RANKS_JUDGED = 128  # it compares each rank with each: 0.1 s with so many, 6.5 s with 1,000, and we look twice a second


@dataclass(frozen=True)
class Verdict:
    """The sentence, who is to blame, and since when (CLOCK_MONOTONIC)."""

    sentence: str
    ranks: tuple[int, ...]
    since_ns: int


def find_verdict(live: Live) -> Verdict | None:
    """None while nothing is wrong."""
    found = _waiting(live) or _failed(live) or _ended(live)
    return found and (_judged(live, found) or found)


def _waiting(live: Live) -> Verdict | None:
    dead = {fact.rank for fact in live.ranks if not fact.alive}
    for meeting, absent in live.waited_for():
        waited = live.sample.now_ns - meeting.last_start
        gone = [rank for rank in absent if rank in dead]
        if waited > live.stuck_ns or gone:
            return Verdict(_words(live, meeting, absent, gone, waited / 1e9), tuple(absent), meeting.last_start)
    return None


def _words(live: Live, meeting: Meeting, absent: list[int], gone: list[int], seconds: float) -> str:
    waiting = len(meeting.starts) - len(meeting.ends)
    they = f"{waiting} rank{' has' if waiting == 1 else 's have'} waited {words_for_seconds(round(seconds, 1))}"
    text = f"Stuck: {they} in {meeting.words} for {_ranks(absent).lower()}"
    if gone:
        return f"{text}; {_ranks(gone).lower()} ended."
    last = live.current.get(absent[0])
    if len(absent) > 1 or last is None:
        return f"{text}."
    verb = "is still in" if last.finished_ns is None else "last finished"
    site = f" at {last.site}" if last.site else ""
    return f"{text}, which {verb} {last.call} #{last.seq} on {last.group!r}{site}."


def _failed(live: Live) -> Verdict | None:
    if not live.failures:
        return None
    rank, words = next(iter(live.failures.items()))
    return Verdict(f"Rank {rank} failed in {words}.", tuple(live.failures), live.sample.now_ns)


def _ended(live: Live) -> Verdict | None:
    dead = [fact.rank for fact in live.ranks if not fact.alive]
    if not dead or len(dead) == len(live.ranks):
        return None
    return Verdict(f"{_ranks(dead)} ended while others still run.", tuple(dead), live.sample.now_ns)


def _judged(live: Live, found: Verdict) -> Verdict | None:
    """The same in the words of `symcomm trace`, which looks deeper, where that is part of the installation."""
    if len(live.ranks) > RANKS_JUDGED:
        return None
    try:
        judge = importlib.import_module("symcomm.observe.verdict").judge
        trace = importlib.import_module("symcomm.observe.trace")
    except ImportError:
        return None
    groups = [{"name": g.name, "rank": 0, "size": g.size, "ranks": list(g.ranks)} for g in live.groups]
    now = live.sample.now_ns
    ranks = {
        fact.rank: trace.RankTrace(
            rank=fact.rank, pid=fact.pid, noted_ns=now, end="" if fact.alive else "ended",
            operations=list(live.recent.get(fact.rank, {}).values()), groups=groups,
        )
        for fact in live.ranks
    }  # fmt: skip
    judged = judge(trace.Trace(ranks, live=True))
    if judged.kind in ("fine", "unknown"):
        return None
    sentence = f"{judged.sentence[:1].upper()}{judged.sentence[1:]}"
    return Verdict(f"Stuck: {sentence}", tuple(judged.ranks) or found.ranks, found.since_ns)


def _ranks(ranks: list[int]) -> str:
    return f"Rank{'s' if len(ranks) > 1 else ''} {words_for_ranks(ranks)}"
