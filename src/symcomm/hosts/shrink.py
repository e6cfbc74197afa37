"""How ranks on several hosts agree on something without a store: each tells the others, through their offices.

Used by ``shrink()`` (who is left), and by whatever makes a group of some ranks of another (their exchange).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.memory.share import Exchange

__all__ = ["Ballot"]


class Ballot:
    """What each rank of a group said, by topic. The record of ``agree_on_survivors`` for ranks that share no memory."""

    def __init__(self, group: Any):
        self._ref = weakref.ref(group)
        self.rank, self.size, self.name = group.rank, group.size, group.name
        self._said: dict[tuple[str, int], Any] = {}

    @property
    def _group(self) -> Any:
        return self._ref()

    def note(self, rank: int, header: dict[str, Any]) -> None:
        with self._group.news:
            self._said[header["topic"], rank] = header["says"]
            self._group.news.notify_all()

    def say(self, topic: str, says: Any, to: Sequence[int]) -> None:
        with self._group.news:
            self._said[topic, self.rank] = says
        for rank in to:
            if rank != self.rank:
                self._group.tell(rank, {"kind": "vote", "topic": topic, "says": says}, timeout=1.0)

    # --- for agree_on_survivors ---------------------------------------------------------------------------------

    def abort(self) -> None:
        if self._group.trouble.verdict is None:
            self._group.trouble.abort()

    def gone(self) -> set[int]:
        group = self._group
        report = native.group_report(group.local._handle)["ranks"]
        here = {group.layout.here[seen["rank"]] for seen in report if seen["gone"]}
        return here | {r for r in range(self.size) if r != self.rank and group.is_gone(r)}

    def publish(self, vote: dict[str, Any]) -> None:
        gone = self.gone()
        self.say("shrink", vote, [r for r in range(self.size) if r not in gone])

    def votes(self) -> dict[int, dict]:
        with self._group.news:
            return {rank: vote for (topic, rank), vote in self._said.items() if topic == "shrink"}

    # --- for groups from groups ---------------------------------------------------------------------------------

    def exchange_among(self, ranks: Sequence[int], topic: str, timeout: float) -> Exchange:
        """Everybody's bytes, among some ranks of the group, which all call it equally often."""
        rounds = 0

        def exchange(item: bytes) -> list[bytes]:
            nonlocal rounds
            rounds += 1
            place = f"{topic}/{rounds}"
            self.say(place, item.decode("latin-1"), ranks)
            self._await(place, ranks, timeout)
            with self._group.news:
                return [self._said.pop((place, r)).encode("latin-1") for r in ranks]

        return exchange

    def _await(self, place: str, ranks: Sequence[int], timeout: float) -> None:
        begun, group, gone = time.monotonic(), self._group, []
        what = f"new group from group {self.name!r}"
        with group.news:
            while missing := [r for r in ranks if (place, r) not in self._said]:
                gone = [r for r in missing if r != self.rank and group.is_gone(r)]
                if gone or group.trouble.verdict is not None:
                    break
                left = begun + timeout - time.monotonic()
                if left <= 0:
                    raise errors.deadline(what, timeout, missing=missing)
                group.news.wait(min(left, 0.5))
            else:
                return
        if gone:
            group.trouble.gone(gone)
        raise group._fail(what, time.monotonic() - begun)
