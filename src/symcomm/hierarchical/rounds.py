"""Everybody's bytes, among some ranks of a group across hosts, without a store: each tells the others by its office.

What groups made of groups exchange goes this way, and so does what is left when a group is shrunk.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from symcomm import errors
from symcomm._core import native

__all__ = ["Rounds"]

SLICE = 0.05  # seconds between two looks at who is gone


class Rounds:
    """What each rank of a group said, by topic."""

    def __init__(self, group: Any):
        self._ref = weakref.ref(group)
        self.rank, self.size, self.name = group.rank, group.size, group.name
        self._said: dict[tuple[str, int], str] = {}

    @property
    def _group(self) -> Any:
        return self._ref()

    def note(self, rank: int, header: dict[str, Any]) -> None:
        """Called by the office, in its thread."""
        with self._group.news:
            self._said[header["topic"], rank] = header["says"]
            self._group.news.notify_all()

    def gone(self) -> set[int]:
        """Ranks that died or left: those of this host as the kernel knows it, others by their connection to us."""
        group = self._group
        report = native.group_report(group.local._handle)["ranks"]
        here = {group.layout.here[seen["rank"]] for seen in report if seen["gone"]}
        return here | {r for r in range(self.size) if r != self.rank and group.is_gone(r)}

    def exchange_among(
        self,
        ranks: Sequence[int],
        topic: str,
        timeout: float,
        check: Callable[[], None] | None = None,
        late: Callable[[list[int]], BaseException] | None = None,
    ) -> Exchanging:
        """For ``ranks``, which all call it equally often. ``check`` raises when there is no use in waiting any more;
        unless given, when one of them is gone, or the group has failed. ``late(missing)``: what to raise when the time
        is over."""
        begun, what = time.monotonic(), f"new group from group {self.name!r}"
        return Exchanging(
            self, ranks, topic, timeout,
            check or (lambda: self.check_members(ranks, begun, what)),
            late or (lambda missing: errors.deadline(what, timeout, missing=missing)),
        )  # fmt: skip

    def say(self, place: str, says: str, to: Sequence[int]) -> None:
        with self._group.news:
            self._said[place, self.rank] = says
        for rank in to:
            if rank != self.rank:
                self._group.tell(rank, {"kind": "vote", "topic": place, "says": says}, timeout=1.0)

    def heard(self, place: str, ranks: Sequence[int], seconds: float) -> list[int]:
        """Those of ``ranks`` that have not said it, when all have, or something has happened, or the time is over."""
        with self._group.news:
            if any((place, r) not in self._said for r in ranks):
                self._group.news.wait(seconds)
            return [r for r in ranks if (place, r) not in self._said]

    def take(self, place: str, ranks: Sequence[int]) -> list[str]:
        with self._group.news:
            return [self._said.pop((place, r)) for r in ranks]

    def check_members(self, ranks: Collection[int], begun: float, what: str) -> None:
        """Raise if the group has failed, or one of ``ranks`` is gone: then it fails now."""
        group = self._group
        gone = sorted(self.gone().intersection(ranks))
        if gone and group.trouble.verdict is None:
            group.trouble.gone(gone)
        if group.trouble.verdict is not None:
            raise group.fail(what, time.monotonic() - begun)

    def forget(self, prefix: str) -> None:
        """What was said about topics that are over."""
        with self._group.news:
            for key in [key for key in self._said if key[0].startswith(prefix)]:
                del self._said[key]


class Exchanging:
    """An exchange (see memory/share.py) among some ranks."""

    def __init__(
        self,
        rounds: Rounds,
        ranks: Sequence[int],
        topic: str,
        timeout: float,
        check: Callable[[], None],
        late: Callable[[list[int]], BaseException],
    ):
        self._rounds, self._ranks, self._topic, self._timeout = rounds, ranks, topic, timeout
        self.check, self._late = check, late
        self._turn = 0

    def __call__(self, item: bytes) -> list[bytes]:
        self._turn += 1
        place, deadline = f"{self._topic}/{self._turn}", time.monotonic() + self._timeout
        self._rounds.say(place, item.decode("latin-1"), self._ranks)
        while missing := self._rounds.heard(place, self._ranks, SLICE):
            self.check()
            if time.monotonic() > deadline:
                raise self._late(missing)
        return [text.encode("latin-1") for text in self._rounds.take(place, self._ranks)]
