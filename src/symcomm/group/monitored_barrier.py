"""A barrier that says who is missing. Rank 0 counts the others in, by messages, and tells them who did not come."""

from __future__ import annotations

import array
import time
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.group.buffers import Buffer
from symcomm.group.failure import call_site, format_site
from symcomm.group.p2p import Message, Messages
from symcomm.group.refusal import pack, refused
from symcomm.group.work import Timeout, to_ns
from symcomm.types import DType

BARRIER_TAG = -(1 << 40)  # tags below are ours; users' are not negative
CALL = "monitored_barrier"


class MonitoredBarriers:
    """The monitored barriers of one group. Each has a number, which the tag of its messages holds."""

    def __init__(self, messages: Messages):
        self._messages, self._state = messages, messages.state
        self._count = 0

    def wait(self, timeout: Timeout, wait_all_ranks: bool) -> None:
        state = self._state
        try:
            seconds = (state.timeout_ns if timeout is None else to_ns(CALL, timeout)) / 1e9
        except errors.BadArgumentError as error:
            self.refuse(error)
            raise
        tag = self._next_tag()
        missing, told = self._count_in(tag, seconds) if state.rank == 0 else self._report_in(tag, seconds)
        what = f"{CALL} #{self._count} on group {state.name!r}"
        if told:
            raise refused(what, told)
        if missing:
            named = missing if wait_all_ranks else missing[:1]
            arrived = [r for r in range(state.size) if r not in missing]
            raise errors.deadline(what, seconds, missing=named, arrived=arrived)

    def refuse(self, error: Exception) -> None:
        """Take part in the next barrier only to tell the others why this rank refuses it."""
        state = self._state
        state.check_usable()
        tag, (token, raw) = self._next_tag(), self._token()
        words = pack(state.rank, error, format_site(call_site(2)))
        token[state.size : state.size + len(words)] = array.array("B", words)
        for rank in range(1, state.size) if state.rank == 0 else [0]:
            self._send(raw, rank, tag)

    def _next_tag(self) -> int:
        self._count += 1
        return BARRIER_TAG - self._count

    def _token(self) -> tuple[array.array[Any], Any]:
        """What ranks send each other: a flag for each rank that is missing, and the words of one that refused."""
        token = array.array("B", bytes(self._state.size + native.REFUSAL_BYTES))
        return token, _Raw(token)

    def _words(self, token: array.array[Any]) -> bytes:
        return token[self._state.size :].tobytes().rstrip(b"\0")

    def _send(self, raw: Any, rank: int, tag: int) -> Any:
        return self._messages.post(Message.send(raw, rank, tag), CALL, True)

    def _receive(self, raw: Any, rank: int, tag: int) -> Any:
        return self._messages.post(Message.receive(raw, rank, tag), CALL, True)

    def _count_in(self, tag: int, seconds: float) -> tuple[list[int], bytes]:
        """(the missing ranks, the words of the first rank that refused)"""
        deadline = time.monotonic() + seconds
        tokens = [self._token() for _ in range(self._state.size)]
        arrivals = {rank: self._receive(tokens[rank][1], rank, tag) for rank in range(1, self._state.size)}
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
        answers = [self._send(raw, rank, tag) for rank in arrivals if rank not in (*missing, *refusing)]
        for answer in answers:
            answer.wait(max(1.0, seconds))
        return missing, self._words(token)

    def _report_in(self, tag: int, seconds: float) -> tuple[list[int], bytes]:
        token, raw = self._token()
        self._messages.send(raw, 0, tag, seconds)
        try:
            # Rank 0 answers when its own deadline passes; a moment more lets that answer arrive.
            self._receive(raw, 0, tag).wait(seconds + 1.0)
        except errors.DeadlineError:
            return [0], b""
        return [rank for rank in range(self._state.size) if token[rank]], self._words(token)


class _Raw:
    """Bytes of our own, dressed as a tensor for messages."""

    def __init__(self, data: array.array[Any]):
        self.buffer = Buffer(data.buffer_info()[0], len(data), DType.UINT8, data)
