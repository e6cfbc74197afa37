"""Which ranks are in a group, as they have told in the store that the launcher keeps (store/standing.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from symcomm.errors import DeadlineError, PeerError
from symcomm.store.standing import MEMBER, standing_key


class Numbered(Protocol):
    """A rank's number, and how often ranks had been restarted when it was started."""

    number: int
    restarts: int


class Standings:
    """Of the ranks of one attempt; without a store nobody says anything."""

    def __init__(self, store: Any, attempt: int):
        self._store, self._prefix = store, f"attempt_{attempt}/"  # as in store/bootstrap.py
        self._told = False  # anything, by any of them

    def none_is_member(self, living: Sequence[Numbered], ranks: Sequence[Numbered]) -> bool:
        """Whether it is certain that none of ``living`` is in a group. A program that says nothing may meet elsewhere;
        one of which any rank has said something says everything."""
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
