"""A barrier that says who is missing."""

from __future__ import annotations

import array
import time
from typing import Any

from symcomm import errors
from symcomm.group.buffers import Buffer
from symcomm.group.p2p import Message, MessageCalls, MessageWork
from symcomm.group.work import Timeout, to_ns
from symcomm.types import DType

BARRIER_TAG = -(1 << 40)  # tags below are ours; users' are not negative


class MonitoredBarrier(MessageCalls):
    """Mixed into ProcessGroup."""

    _barriers: int

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose failure names the ranks that did not come, and leaves the group usable.

        With ``wait_all_ranks`` all missing ranks are named, otherwise the first.

        Raises: RankFailedError, DeadlineError, GroupUnusableError."""
        self._barriers += 1
        tag = BARRIER_TAG - self._barriers
        seconds = (self.timeout_ns if timeout is None else to_ns("monitored_barrier", timeout)) / 1e9
        missing = self._count_in(tag, seconds) if self.rank == 0 else self._report_in(tag, seconds)
        if missing:
            named = missing if wait_all_ranks else missing[:1]
            arrived = [r for r in range(self.size) if r not in missing]
            raise errors.deadline(
                f"monitored_barrier #{self._barriers} on group {self.name!r}", seconds, missing=named, arrived=arrived
            )

    def _flags(self) -> tuple[array.array[Any], Any]:
        flags = array.array("B", bytes(self.size))
        return flags, _Raw(flags)

    def _count_in(self, tag: int, seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        tokens = [self._flags() for _ in range(self.size)]
        arrivals = {
            r: self._post(Message.receive(tokens[r][1], r, tag), "monitored_barrier", True) for r in range(1, self.size)
        }
        missing = []
        for rank, work in arrivals.items():
            try:
                work.wait(max(1e-6, deadline - time.monotonic()))
            except errors.DeadlineError:
                missing.append(rank)
        flags, raw = self._flags()
        for rank in missing:
            flags[rank] = 1
        answers: list[MessageWork] = []
        for rank in arrivals:
            if rank not in missing:
                answers.append(self._post(Message.send(raw, rank, tag), "monitored_barrier", True))
        for answer in answers:
            answer.wait(max(1.0, seconds))
        return missing

    def _report_in(self, tag: int, seconds: float) -> list[int]:
        flags, raw = self._flags()
        self.send(raw, 0, tag, seconds)
        try:
            # Rank 0 answers when its own deadline passes; a moment more lets that answer arrive.
            self._post(Message.receive(raw, 0, tag), "monitored_barrier", True).wait(seconds + 1.0)
        except errors.DeadlineError:
            return [0]
        return [rank for rank, flag in enumerate(flags) if flag]


class _Raw:
    """Bytes of our own, dressed as a tensor for the calls above."""

    def __init__(self, data: array.array[Any]):
        self.buffer = Buffer(data.buffer_info()[0], len(data), DType.UINT8, data)
