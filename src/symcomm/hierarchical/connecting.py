"""Notices deaths while a group across hosts is being made.

As soon as ranks can reach each other they watch each other, as in a group's operations, and all raise the same words.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from symcomm import errors
from symcomm.memory.share import Deadline, Exchange

REDIAL = 0.5  # seconds until a rank connects to a peer that should have connected to it, and between two attempts
GRACE = 1.0  # seconds for a rank that left to say why
DIAL = 1.0  # seconds for an attempt


class DeathWatch:
    """Watches one group's ranks. From now on, waits in ``exchange`` raise once a rank has died. Within the context, an
    error that a death caused gives way to one that names the rank."""

    def __init__(self, group: Any, exchange: Exchange):
        self._group: Callable[[], Any] = weakref.ref(group)  # an exchange must not keep the group alive
        self._left_at: dict[int, float] = {}
        counterparts = {r for host in group.layout.others for r in group.layout.counterparts(host)}
        self._watched = sorted(counterparts)
        for rank in self._watched:
            if rank > group.rank:  # the other rank of each pair waits for that
                group.tell(rank, {"kind": "hello"}, timeout=group.timeout)
        self._redial_at = time.monotonic() + REDIAL
        if (add := getattr(exchange, "add_check", None)) is not None:
            add(self.check)
        self.check_all = getattr(exchange, "check", self.check)  # raises, too, once a rank has given up

    def __enter__(self) -> DeathWatch:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        says_why = isinstance(error, (errors.ResourceError, errors.CallerError))
        says_who = isinstance(error, errors.RankFailedError) and error.ranks
        if isinstance(error, RuntimeError) and not says_why and not says_who:  # also torch's
            Deadline(self._group().timeout, self.check_all).await_reason()

    def check(self) -> None:
        """Raise once a rank has died."""
        if (group := self._group()) is None:
            return
        if time.monotonic() > self._redial_at:
            self._redial()
        dead = sorted(group.rounds.dead() | self._silent())
        if dead and group.failures.verdict is None:
            group.failures.gone(dead)
        if (verdict := group.failures.verdict) is not None:
            raise errors.RankFailedError(
                f"group {group.name!r}: {verdict['story']}, while the ranks were making the group.", verdict["ranks"]
            )

    def _silent(self) -> set[int]:
        """Ranks that left more than GRACE ago; before that, they may still say why."""
        now, left = time.monotonic(), self._group().presence.left
        for rank in left:
            self._left_at.setdefault(rank, now)
        return {rank for rank, at in self._left_at.items() if now - at > GRACE}

    def _redial(self) -> None:
        """Connect to all: a rank that died before it said hello has no connection that would end."""
        group = self._group()
        group.tell_all([r for r in self._watched if not group.is_gone(r)], {"kind": "hello"}, timeout=DIAL)
        self._redial_at = time.monotonic() + REDIAL
