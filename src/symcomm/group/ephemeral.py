"""More time for the next operations, once: for a step that is known to take long, such as a first one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from symcomm.group.call_hooks import HookCalls
from symcomm.group.interception import Call
from symcomm.group.work import to_ns


class EphemeralTimeouts(HookCalls):
    """Mixed into ProcessGroup."""

    timeout_ns: int
    extended_ns = 0  # what of timeout_ns is extensions
    _failure_lock: Any

    def add_ephemeral_timeout(self, timeout: float | timedelta) -> None:
        """Operations may take longer than the group's time-out by this much, until the first that is called from now
        on has ended. Several extensions add up, each with an end of its own. A call's own time-out stays as it is."""
        extension = _Extension(self, to_ns("add_ephemeral_timeout", timeout))
        self.extend_timeout(extension.nanoseconds)
        self.interception.add(extension.around)

    def extend_timeout(self, nanoseconds: int) -> None:
        """Add to what operations may take, or take that back."""
        with self._failure_lock:
            self.extended_ns += nanoseconds
            self.change_timeout(self.timeout_ns + nanoseconds)

    def change_timeout(self, nanoseconds: int) -> None:
        """From now on calls that do not say otherwise may take so long."""
        self.timeout_ns = nanoseconds


class _Extension:
    """One extension: it ends with the first operation."""

    def __init__(self, group: EphemeralTimeouts, nanoseconds: int):
        self.nanoseconds = nanoseconds
        self._group = group
        self._is_first = threading.Lock()  # taken by the first call
        self._over = threading.Lock()

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
            self._group.interception.remove(self.around)
            self._group.extend_timeout(-self.nanoseconds)


def _when_ended(work: Any, act: Callable[[], None]) -> None:
    """``work``: what a call returned; nothing, where it blocked."""
    if hasattr(work, "add_done_callback"):
        work.add_done_callback(act)
    elif hasattr(work, "is_completed") and not work.is_completed():
        work.get_future().add_done_callback(lambda _: act())
    else:
        act()
