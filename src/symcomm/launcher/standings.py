"""Which ranks are in a group, as they report it in the store that the launcher keeps (store/standing.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from symcomm.errors import DeadlineError, PeerError
from symcomm.store.standing import MEMBER, standing_key


class Numbered(Protocol):
    """A rank's number, and how many restarts there had been when it started."""

    number: int
    restarts: int


class Standings:
    """What the ranks of one attempt report; without a store, nothing."""

    def __init__(self, store: Any, attempt: int):
        self._store, self._prefix = store, f"attempt_{attempt}/"  # as in store/bootstrap.py
        self._told = False  # anything, by any of them

    def none_is_member(self, living: Sequence[Numbered], ranks: Sequence[Numbered]) -> bool:
        """Whether it is certain that none of ``living`` is in a group. A program that reports nothing may meet
        elsewhere; if any of its ranks has reported anything, the reports are complete."""
        try:
            if any(self._standing(rank) == MEMBER for rank in living):
                return False
            self._told = self._told or any(self._standing(rank) for rank in ranks)
        except (PeerError, DeadlineError):
            return False
        return self._told

    def _standing(self, rank: Numbered) -> str:
        if self._store is None:
            return ""
        key = self._prefix + standing_key(rank.number, rank.restarts)
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else ""
