"""Tells ranks on all hosts that a rank refuses its call.

Ranks of its host find the refusal in the first step of the operation, in place of that rank's arrival. The rank also
sends a message to the leaders of the other hosts. A leader finds it while it waits for that host's arrival, and refuses
the next step on its own host, where all other ranks wait for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from symcomm import errors
from symcomm.group.refusal import refused
from symcomm.group.work import Batch
from symcomm.hierarchical.failure import REACH, OperationRefused
from symcomm.hierarchical.session import ProtocolViolation

MOST = 10_000  # refused calls that this rank has not reached


class RefusalsAcrossHosts:
    """The refusals of one group's calls."""

    def __init__(self, group: Any):
        self._group: Callable[[], Any] = weakref.ref(group)  # must not keep the group alive
        self._elsewhere: dict[int, bytes] = {}  # sequence number -> the words of a rank of another host

    def tell(self, seq: int, told: bytes) -> None:
        """Tell the leaders of the other hosts that this rank refuses its call."""
        group = self._group()
        leaders = map(group.layout.leader, group.layout.others)
        group.tell_all(leaders, {"kind": "refusal", "seq": seq, "told": told.decode()}, timeout=REACH)

    def note(self, rank: int, header: dict[str, Any]) -> None:
        """Called in the control channel's thread."""
        group = self._group()
        with group.cond:
            for past in [seq for seq in self._elsewhere if seq < group.doing[0]]:
                del self._elsewhere[past]
            if len(self._elsewhere) >= MOST:
                raise ProtocolViolation("refused more calls than this rank can be behind")
            if header["seq"] >= group.doing[0]:
                self._elsewhere[header["seq"]] = header["told"].encode()
        group.notify()

    def check(self, seq: int) -> None:
        """Raise if a rank of another host has refused its call of this operation."""
        with self._group().cond:
            told = self._elsewhere.pop(seq, None)
        if told is not None:
            raise OperationRefused(told, is_news=True)

    def found(self, refusal: OperationRefused, what: str, batch: Batch | None) -> errors.CallRefusedError:
        """The exception for a refusal. Tells the ranks of this host, if they do not know."""
        group = self._group()
        if refusal.is_news and refusal.told is not None and len(group.layout.here) > 1:
            group.local.handle.refuse(refusal.told, group.timeout_ns, 0)
        error = refused(what, refusal.told)
        if batch is not None:
            batch.refused = error
        return error
