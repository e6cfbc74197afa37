"""Presence: which ranks of a group are still there, as far as this rank knows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from symcomm.hierarchical.control_channel import ControlChannel, Endpoint
from symcomm.hierarchical.leader_links import LeaderLinks


class Presence:
    """The presence of one group's ranks. A change wakes all threads that wait for a rank, in ``cond`` or ``links``."""

    _control: ControlChannel
    _endpoints: Sequence[Endpoint]

    def __init__(self, links: LeaderLinks):
        self._links = links
        self.cond = threading.Condition()  # notified whenever something changes that a thread may wait for
        self.left: set[int] = set()

    def watch(self, control: ControlChannel, endpoints: Sequence[Endpoint]) -> None:
        """``endpoints``: those of all ranks' control channels, in order."""
        self._control, self._endpoints = control, endpoints

    def is_gone(self, rank: int) -> bool:
        """Whether a rank left, or its connection to this one broke."""
        return rank in self.left or self._control.is_lost(self._endpoints[rank].nonce)

    def notify(self, _: Any = None) -> None:
        """Something changed: wake all waiters."""
        with self.cond:
            self.cond.notify_all()
        self._links.wake()

    def after_fork(self) -> None:
        """In a forked child: a thread of the parent may have held the lock."""
        self.cond = threading.Condition()
