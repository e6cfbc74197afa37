"""A barrier that says who is missing."""

from __future__ import annotations

import array
import time
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.group.buffers import Buffer
from symcomm.group.failure import call_site, format_site
from symcomm.group.p2p import Message, MessageCalls, MessageWork
from symcomm.group.refusal import pack, refused
from symcomm.group.work import Timeout, to_ns
from symcomm.types import DType

BARRIER_TAG = -(1 << 40)  # tags below are ours; users' are not negative


class MonitoredBarrier(MessageCalls):
    """Mixed into ProcessGroup."""

    _barriers: int

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose failure names the ranks that did not come, and leaves the group usable.

        With ``wait_all_ranks`` all missing ranks are named, otherwise the first.

        Raises: BadArgumentError, CallRefusedError, RankFailedError, DeadlineError, GroupUnusableError."""
        try:
            seconds = (self.timeout_ns if timeout is None else to_ns("monitored_barrier", timeout)) / 1e9
        except errors.BadArgumentError as error:
            self.refuse_monitored_barrier(error)
            raise
        tag = self._next_tag()
        missing, told = self._count_in(tag, seconds) if self.rank == 0 else self._report_in(tag, seconds)
        what = f"monitored_barrier #{self._barriers} on group {self.name!r}"
        if told:
            raise refused(what, told)
        if missing:
            named = missing if wait_all_ranks else missing[:1]
            arrived = [r for r in range(self.size) if r not in missing]
            raise errors.deadline(what, seconds, missing=named, arrived=arrived)

    def refuse_monitored_barrier(self, error: Exception) -> None:
        """Come to the next one only to tell the others why this rank does not make it."""
        self.check_usable()
        tag, (token, raw) = self._next_tag(), self._token()
        words = pack(self.rank, error, format_site(call_site(2)))
        token[self.size : self.size + len(words)] = array.array("B", words)
        for rank in range(1, self.size) if self.rank == 0 else [0]:
            self._post(Message.send(raw, rank, tag), "monitored_barrier", True)

    def _next_tag(self) -> int:
        self._barriers += 1
        return BARRIER_TAG - self._barriers

    def _token(self) -> tuple[array.array[Any], Any]:
        """What ranks send each other: a flag for each rank that is missing, and the words of one that refused."""
        token = array.array("B", bytes(self.size + native.REFUSAL_BYTES))
        return token, _Raw(token)

    def _words(self, token: array.array[Any]) -> bytes:
        return token[self.size :].tobytes().rstrip(b"\0")

    def _count_in(self, tag: int, seconds: float) -> tuple[list[int], bytes]:
        """(who is missing, what the first one said that refused)"""
        deadline = time.monotonic() + seconds
        tokens = [self._token() for _ in range(self.size)]
        arrivals = {
            r: self._post(Message.receive(tokens[r][1], r, tag), "monitored_barrier", True) for r in range(1, self.size)
        }
        missing = []
        for rank, work in arrivals.items():
            try:
                work.wait(max(1e-6, deadline - time.monotonic()))
            except errors.DeadlineError:
                missing.append(rank)
        refusing = [rank for rank in arrivals if self._words(tokens[rank][0])]
        token, raw = tokens[refusing[0]] if refusing else self._token()
        for rank in missing:
            token[rank] = 1
        answers: list[MessageWork] = []
        for rank in arrivals:
            if rank not in (*missing, *refusing):
                answers.append(self._post(Message.send(raw, rank, tag), "monitored_barrier", True))
        for answer in answers:
            answer.wait(max(1.0, seconds))
        return missing, self._words(token)

    def _report_in(self, tag: int, seconds: float) -> tuple[list[int], bytes]:
        token, raw = self._token()
        self.send(raw, 0, tag, seconds)
        try:
            # Rank 0 answers when its own deadline passes; a moment more lets that answer arrive.
            self._post(Message.receive(raw, 0, tag), "monitored_barrier", True).wait(seconds + 1.0)
        except errors.DeadlineError:
            return [0], b""
        return [rank for rank in range(self.size) if token[rank]], self._words(token)


class _Raw:
    """Bytes of our own, dressed as a tensor for the calls above."""

    def __init__(self, data: array.array[Any]):
        self.buffer = Buffer(data.buffer_info()[0], len(data), DType.UINT8, data)
