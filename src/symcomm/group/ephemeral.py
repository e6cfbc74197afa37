"""Ephemeral time-outs: more time for one step that is known to take long, such as the first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from symcomm.group.interception import Call, Interception
from symcomm.group.state import GroupState


class Extension:
    """Lengthens a group's time-out until the first operation that is called from now on has ended."""

    def __init__(self, state: GroupState, interception: Interception, nanoseconds: int):
        self._state, self._interception, self._nanoseconds = state, interception, nanoseconds
        self._is_first = threading.Lock()  # taken by the first call
        self._over = threading.Lock()

    def begin(self) -> None:
        self._state.extend_timeout(self._nanoseconds)
        self._interception.add(self.around)

    def around(self, call: Call, make: Callable[[], Any]) -> Any:
        if not self._is_first.acquire(blocking=False):
            return make()
        try:
            work = make()
        except BaseException:
            self.end()
            raise
        _when_ended(work, self.end)
        return work

    def end(self) -> None:
        if self._over.acquire(blocking=False):
            self._interception.remove(self.around)
            self._state.extend_timeout(-self._nanoseconds)


def _when_ended(work: Any, act: Callable[[], None]) -> None:
    """``act()`` once a call has ended. ``work``: what it returned; None if it blocked."""
    if hasattr(work, "add_done_callback"):
        work.add_done_callback(act)
    elif hasattr(work, "is_completed") and not work.is_completed():
        work.get_future().add_done_callback(lambda _: act())
    else:
        act()
