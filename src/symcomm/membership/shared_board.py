"""The board of ranks that share memory (see succession.py).

The store may have died with rank 0, so no rank asks it. There is one *word* for all, in the memory of rank 0, which
outlives that rank: the number of the attempt, the rank that proposed it, and whether it is open. Each rank's record is
in its own memory and holds its proposals: a rank publishes a proposal before it swaps in the word that names it."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from symcomm._core import native
from symcomm.membership.succession import Attempt, Board, Record, Standing, pack_ranks, unpack_ranks

POLL_S = 0.001  # seconds between two looks


class AttemptWord(NamedTuple):
    """Names the attempt that all ranks are at; 64 bits in memory."""

    number: int
    author: int
    is_open: bool

    @classmethod
    def unpack(cls, value: int) -> AttemptWord:
        return cls(value >> 17, value >> 1 & 0xFFFF, bool(value & 1))

    def pack(self) -> int:
        return self.number << 17 | self.author << 1 | self.is_open


def unpack_record(data: bytes | None) -> Record:
    if data is None:
        return Record()
    head, _, item = data.partition(b"\n")
    proposals, vote, done = json.loads(head)
    return Record(tuple(Attempt(n, since, unpack_ranks(dead)) for n, since, dead in proposals), vote, done, item)


def pack_record(record: Record) -> bytes:
    proposals = [[p.number, p.since, pack_ranks(p.dead)] for p in record.proposals]
    head = json.dumps([proposals, record.vote, record.done], separators=(",", ":"))
    return head.encode() + b"\n" + record.item


class Records:
    """The word and the records in the memory of one group."""

    def __init__(self, handle: native.Group):
        self.handle = handle

    def gone(self) -> set[int]:
        return {r["rank"] for r in self.handle.report()["ranks"] if r["gone"]}

    def word(self) -> AttemptWord:
        return AttemptWord.unpack(self.handle.agree(0, 0))

    def swap(self, before: AttemptWord, after: AttemptWord) -> None:
        """Change the word if it is still ``before``."""
        self.handle.agree(before.pack(), after.pack())

    def publish(self, record: Record) -> None:
        self.handle.publish(native.RECORD_VOTE, pack_record(record))

    def read(self) -> list[Record]:
        return [unpack_record(data) for data in self.handle.records(native.RECORD_VOTE)]


class SharedBoard(Board):
    def __init__(self, records: Any, rank: int, size: int, name: str):
        self._records, self.rank, self.size, self.name = records, rank, size, name
        self._mine: Record = records.read()[rank]  # an earlier call may have left one

    def now(self) -> Standing:
        while True:
            word = self._records.word()
            if word.number == 0:
                return Standing()
            for attempt in self._records.read()[word.author].proposals:
                if attempt.number == word.number:
                    return Standing(attempt, word.is_open, word.author)
            time.sleep(POLL_S)  # its author has gone on, and so has the word

    def propose(self, before: Standing, dead: Collection[int], since: int) -> None:
        """``before`` may be this rank's own proposal, which others may still have to read."""
        number = before.attempt.number
        kept = tuple(p for p in self._mine.proposals if p.number == number)
        self.publish(proposals=(*kept, Attempt(number + 1, since, frozenset(dead))))
        self._records.swap(AttemptWord(number, before.author, before.is_open), AttemptWord(number + 1, self.rank, True))

    def decide(self, before: Standing) -> None:
        word = AttemptWord(before.attempt.number, before.author, True)
        self._records.swap(word, word._replace(is_open=False))

    def publish(self, **changes: Any) -> None:
        self._mine = self._mine._replace(**changes)
        self._records.publish(self._mine)

    def read(self) -> list[Record]:
        return self._records.read()

    def gone(self) -> set[int]:
        return self._records.gone()

    def pause(self, seconds: float = 0.0) -> None:
        time.sleep(POLL_S)

    def find_culprits(self, attempt: Attempt, missing: Collection[int]) -> Collection[int]:
        """All of them: to vote takes no time, so a rank that has not voted has not come."""
        return missing

    def withdraw(self) -> None:
        while True:
            standing = self.now()
            if not standing.is_open or self.rank in standing.attempt.dead:
                return
            self.propose(standing, standing.attempt.dead | {self.rank}, standing.attempt.since)
