"""Long waits for messages in a group across hosts.

A rank that waits long for a message asks the awaited ranks what they are doing. That shows whether one is gone that
never talked to this rank, and whether they wait in a collective that this rank has not called: a stand-off, see
group/standoff.py.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from symcomm.errors import format_ranks
from symcomm.group.standoff import ANY_SOURCE, format_message, in_collective, warn

FIRST = 0.5  # seconds until ranks are asked, and until they are asked again before a stand-off is reported
RARELY = 5.0  # seconds between later questions, at most


class Lasting(NamedTuple):
    """The call that a rank waits in. ``key`` tells it from others: the number of a collective, or the id of a wait."""

    key: int
    call: str
    site: str
    since: float
    awaited: Collection[int] | None  # the ranks that a message waits for; None: it is a collective


class Waits:
    """The waits of one rank for messages of one group."""

    def __init__(self, group: Any):
        self._group: Callable[[], Any] = weakref.ref(group)
        self._works: dict[Wait, Any] = {}

    @contextlib.contextmanager
    def of(self, work: Any) -> Iterator[Wait]:
        """Within the block, a thread waits for ``work``."""
        wait = Wait(self, work)
        self._works[wait] = work
        try:
            yield wait
        finally:
            del self._works[wait]

    def words(self) -> str:
        """``waits for a message from rank 0``, of one thread if several wait; empty if none does."""
        for message in [work.message for work in list(self._works.values())]:
            return f"waits {'to send to' if message.is_send else 'for a message from'} {_peer_of(message)}"
        return ""

    def longest(self) -> Lasting | None:
        """The wait that has lasted longest."""
        for wait, work in list(self._works.items()):
            call = f"{'send to' if work.message.is_send else 'recv from'} {_peer_of(work.message)}"
            return Lasting(id(wait), call, "", wait.begun, work.awaited())
        return None

    def describe(self, ranks: Collection[int]) -> str:
        """Ask ``ranks`` why none of them did its part of a message."""
        return self.explain(ranks, self._group().failures.survey(ranks))

    def explain(self, ranks: Collection[int], answers: dict[int, dict[str, Any]], me: str = "this rank") -> str:
        silent = [r for r in ranks if r not in answers and not self._group().is_gone(r)]
        if silent:
            verb = "does" if len(silent) == 1 else "do"
            return f"rank {format_ranks(silent)} {verb} not answer (stopped, or cut off?)"
        return self._standoff(ranks, answers, me)[1]

    def ask(self, ranks: Collection[int]) -> tuple[int, str]:
        """(number, words) of a collective in which all of ``ranks`` wait, and which this rank has not called."""
        group = self._group()
        return self._standoff(ranks, group.failures.survey(ranks), f"rank {group.rank}")

    def _standoff(self, ranks: Collection[int], answers: dict[int, dict[str, Any]], me: str) -> tuple[int, str]:
        group = self._group()
        here, theirs = group.doing[0], [answers[r] for r in ranks if r in answers and r != group.rank]
        if len(theirs) < max(1, len(ranks)) or group.executor.is_operating or any(a["seq"] <= here for a in theirs):
            return 0, ""
        seq = theirs[0]["seq"]
        return seq, in_collective(sorted(ranks), theirs[0]["call"], seq, me)

    def on_standoff(self, is_send: bool, rank: int, tag: int) -> None:
        """The core calls this when it has seen a stand-off on this host for a second. The core cannot know whether this
        rank is in a collective: an operation that waits for the network is in no call of the core."""
        words = self.ask([rank])[1]
        if words:
            warn(self._group().state, format_message(is_send, rank, tag), words)


def _peer_of(message: Any) -> str:
    return "any rank" if message.peer == ANY_SOURCE else f"rank {message.peer}"


class Wait:
    """One wait for a message."""

    def __init__(self, waits: Waits, work: Any):
        self._waits, self._work = waits, work
        self.begun = time.monotonic()
        self._ask_at = self.begun + FIRST
        self._asking: threading.Thread | None = None
        self._seen = 0  # the number of the collective in which the others waited when they were last asked
        self._told = False

    def look(self) -> None:
        """Called again and again during the wait. Another thread asks the ranks: an answer may take long."""
        now = time.monotonic()
        if now < self._ask_at or (self._asking is not None and self._asking.is_alive()):
            return
        self._ask_at = now + min(RARELY, FIRST + (now - self.begun) / 8)
        self._asking = threading.Thread(target=self._ask, name="symcomm-standoff", daemon=True)
        with contextlib.suppress(RuntimeError):  # without a thread there is no warning, but the wait goes on
            self._asking.start()

    def _ask(self) -> None:
        seen, words = self._waits.ask(self._work.awaited())
        if seen and seen == self._seen and not self._told and not self._work.look():
            self._told = True
            warn(self._work.group.state, self._work.what, words)
        if seen and seen != self._seen:
            self._ask_at = min(self._ask_at, time.monotonic() + FIRST)
        self._seen = seen
