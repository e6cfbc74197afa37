"""Everybody's bytes, among some ranks of a group across hosts, without a store: each tells the others by its office.

What groups made of groups exchange goes this way, and so does what is left when a group is shrunk.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from symcomm import errors
from symcomm._core import native

__all__ = ["Lost", "Rounds", "Silent"]

SLICE = 0.05  # seconds between two looks at who is gone


class Lost(errors.RankFailedError):
    """Ranks that were waited for are gone; they are counted as in the group that the exchange goes through."""


class Silent(errors.DeadlineError):
    """The same, for ranks that did not come."""


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
        self, ranks: Sequence[int], topic: str, timeout: float, check: Callable[[], None] | None = None
    ) -> Exchanging:
        """For ``ranks``, which all call it equally often. ``check`` raises when there is no use in waiting any more;
        unless given, when one of them is gone, or the group has failed."""
        return Exchanging(self, ranks, topic, timeout, check)

    def say(self, place: str, says: str, to: Sequence[int]) -> None:
        with self._group.news:
            self._said[place, self.rank] = says
        for rank in to:
            if rank != self.rank:
                self._group.tell(rank, {"kind": "vote", "topic": place, "says": says}, timeout=1.0)

    def await_all(self, place: str, ranks: Sequence[int], timeout: float, check: Callable[[], None]) -> list[str]:
        deadline, news = time.monotonic() + timeout, self._group.news
        while True:
            with news:
                missing = [r for r in ranks if (place, r) not in self._said]
                if not missing:
                    return [self._said.pop((place, r)) for r in ranks]
                left = deadline - time.monotonic()
                if left > 0:
                    news.wait(min(left, SLICE))
                    missing = [r for r in ranks if (place, r) not in self._said]
            if missing:
                check()
                if left <= 0:
                    raise Silent(str(errors.deadline(self.what, timeout, missing=missing)), missing)

    @property
    def what(self) -> str:
        return f"new group from group {self.name!r}"

    def check_members(self, ranks: Sequence[int], begun: float) -> None:
        """Raise if the group has failed, or one of ``ranks`` is gone: then it fails now."""
        group = self._group
        gone = sorted(self.gone().intersection(ranks))
        if gone and group.trouble.verdict is None:
            group.trouble.gone(gone)
        if group.trouble.verdict is not None:
            raise group.fail(self.what, time.monotonic() - begun)

    def forget(self, prefix: str) -> None:
        """What was said about topics that are over."""
        with self._group.news:
            for key in [key for key in self._said if key[0].startswith(prefix)]:
                del self._said[key]


class Exchanging:
    """An exchange (see memory/share.py) among some ranks."""

    def __init__(
        self, rounds: Rounds, ranks: Sequence[int], topic: str, timeout: float, check: Callable[[], None] | None
    ):
        self._rounds, self._ranks, self._topic, self._timeout = rounds, ranks, topic, timeout
        self._turn = 0
        begun = time.monotonic()
        self.check = check or (lambda: rounds.check_members(ranks, begun))

    def __call__(self, item: bytes) -> list[bytes]:
        self._turn += 1
        place = f"{self._topic}/{self._turn}"
        self._rounds.say(place, item.decode("latin-1"), self._ranks)
        said = self._rounds.await_all(place, self._ranks, self._timeout, self.check)
        return [text.encode("latin-1") for text in said]
