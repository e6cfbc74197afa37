"""Gathers bytes among some ranks of a group across hosts, over control channels instead of a store.

Used to build groups from groups, and to shrink a group.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from symcomm import errors
from symcomm.group.failure import Status

SLICE = 0.05  # seconds between liveness checks


class Rounds:
    """The items that each rank of a group has published, by topic."""

    def __init__(self, group: Any):
        self._group: Callable[[], Any] = weakref.ref(group)
        self.rank, self.size, self.name = group.rank, group.size, group.name
        self._published: dict[tuple[str, int], str] = {}

    def note(self, rank: int, header: dict[str, Any]) -> None:
        """Called in the control channel's thread."""
        with self._group().cond:
            self._published[header["topic"], rank] = header["item"]
            self._group().cond.notify_all()

    def gone(self) -> set[int]:
        """Ranks that died or left. Of this host, the kernel says so; of others, the end of their connection."""
        group = self._group()
        return {*group.local.gone(), *(r for r in range(self.size) if r != self.rank and group.is_gone(r))}

    def dead(self) -> set[int]:
        """Those of the gone ranks that died."""
        group = self._group()
        here = {r for r, how in group.local.gone().items() if how == Status.DEAD}
        return here | {r for r in group.layout.away if group.is_gone(r) and r not in group.left}

    def publish(self, key: str, item: str, to: Sequence[int]) -> None:
        with self._group().cond:
            self._published[key, self.rank] = item
        for rank in to:
            if rank != self.rank:
                self._group().tell(rank, {"kind": "exchange", "topic": key, "item": item}, timeout=1.0)

    def await_missing(self, key: str, ranks: Sequence[int], seconds: float) -> list[int]:
        """Wait until all ``ranks`` have published, something else changes, or the time is up. Returns those that have
        not."""
        with self._group().cond:
            if any((key, r) not in self._published for r in ranks):
                self._group().cond.wait(seconds)
            return [r for r in ranks if (key, r) not in self._published]

    def published(self, key: str, rank: int) -> str:
        """The item that ``rank`` has published, or "". A rank's own does not count."""
        with self._group().cond:
            return "" if rank == self.rank else self._published.get((key, rank), "")

    def take(self, key: str, ranks: Sequence[int]) -> list[str]:
        with self._group().cond:
            return [self._published.pop((key, r)) for r in ranks]

    def check_members(self, ranks: Collection[int], begun: float, what: str) -> None:
        """Raise if the group has failed. It fails now if one of ``ranks`` is gone."""
        group = self._group()
        gone = sorted(self.gone().intersection(ranks))
        if gone and group.failures.verdict is None:
            group.failures.gone(gone)
        if group.failures.verdict is not None:
            raise group.state.fail_operation(what, time.monotonic() - begun)

    def forget(self, prefix: str) -> None:
        """Drop the items of topics that are over."""
        with self._group().cond:
            for key in [key for key in self._published if key[0].startswith(prefix)]:
                del self._published[key]


class ControlExchange:
    """An exchange (see memory/share.py) among ``ranks``, which all call it equally often. ``check`` raises once waiting
    is useless; by default, when one of them is gone, or the group has failed. ``late(missing)`` makes the error that is
    raised at the deadline."""

    def __init__(
        self,
        rounds: Rounds,
        ranks: Sequence[int],
        topic: str,
        timeout: float,
        check: Callable[[], None] | None = None,
        late: Callable[[list[int]], BaseException] | None = None,
    ):
        self._rounds, self._ranks, self._topic, self._timeout = rounds, ranks, topic, timeout
        begun, what = time.monotonic(), f"new group from group {rounds.name!r}"
        self._what, self._checks = what, [check or (lambda: rounds.check_members(ranks, begun, what))]
        self._late = late or (lambda missing: errors.deadline(what, timeout, missing=missing))
        self._turn = 0
        self._is_over = False

    def __call__(self, item: bytes) -> list[bytes]:
        self._turn += 1
        key, deadline = f"{self._topic}/{self._turn}", time.monotonic() + self._timeout
        self._rounds.publish(key, item.decode("latin-1"), self._ranks)
        while missing := self._rounds.await_missing(key, self._ranks, SLICE):
            self.check()
            if time.monotonic() > deadline:
                raise self._late(missing)
        return [text.encode("latin-1") for text in self._rounds.take(key, self._ranks)]

    def add_check(self, check: Callable[[], None]) -> None:
        """``check`` raises, too, once waiting is useless."""
        self._checks.append(check)

    def check(self) -> None:
        """Raise once waiting for the others is useless."""
        for check in self._checks:
            check()
        for rank in self._ranks:
            if why := self._rounds.published(f"{self._topic}/failed", rank):
                self._is_over = True
                raise errors.RankFailedError(f"{self._what}: rank {rank} gave up: {why}", [rank])

    def give_up(self, error: BaseException) -> None:
        """Tell the others why this rank cannot take part, unless another rank gave up first."""
        if not self._is_over and not isinstance(error, (errors.PeerError, errors.DeadlineError)):
            self._is_over = True
            self._rounds.publish(f"{self._topic}/failed", str(error) or type(error).__name__, self._ranks)
