"""How survivors of a failure agree on who goes on, with nothing but the memory they share.

The store may have died with rank 0, so it is not asked. Each survivor publishes the set of ranks it holds for dead in
its record of the old group, takes over every rank the others name, and is done once all that are left say the same.
Sets only grow, so this ends. A rank that does not come in time counts as dead, and learns that when it does come. Ranks
that the callers leave out by name count as dead from the start.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.errors import words_for_ranks
from symcomm.memory.share import Exchange

__all__ = ["agree_on_survivors"]


def _votes(group: Any) -> dict[int, dict]:
    votes = {}
    for rank, record in enumerate(native.group_records(group._handle)):
        data = json.loads(record) if record is not None else {}
        if "dead" in data:
            votes[rank] = data
    return votes


def agree_on_survivors(
    group: Any, timeout: float, exclude: Collection[int] = (), abort: bool = True
) -> tuple[list[int], Exchange]:
    """(ranks of ``group`` that go on, a way for them to exchange bytes).

    ``abort`` ends what other ranks still do on the group now; otherwise once everybody that goes on has come."""
    if abort:
        native.group_abort(group._handle)  # a no-op when the group has failed already
    deadline = time.monotonic() + timeout
    dead: set[int] = set(exclude)
    said: set[int] | None = None
    votes: dict[int, dict] = {}  # kept: a record that is being written reads as none
    while True:
        dead |= {r["rank"] for r in native.group_report(group._handle)["ranks"] if r["gone"]}
        if said != dead:
            native.group_publish(group._handle, json.dumps({"dead": sorted(dead), "items": []}).encode())
            said = set(dead)
        votes.update(_votes(group))
        named = {r for rank, vote in votes.items() if rank not in dead for r in vote["dead"]}
        if group.rank in named:
            raise errors.RankFailedError(
                f"shrink of group {group.name!r}: the other ranks went on without rank {group.rank}, which did not "
                "come in time; end this process, or join anew.",
                [group.rank],
            )
        living = [r for r in range(group.size) if r not in dead]
        if all(r in votes and set(votes[r]["dead"]) == dead for r in living):
            native.group_abort(group._handle)  # tells the ranks that were left out, should they still use it
            return living, _RecordExchange(group, living, dead, timeout)
        if named <= dead and time.monotonic() > deadline:
            dead |= {r for r in living if r not in votes}
            deadline = time.monotonic() + timeout
        dead |= named
        time.sleep(0.001)


class _RecordExchange:
    """Rounds of "everybody's bytes" over the records; earlier rounds stay in the record for slower readers."""

    def __init__(self, group: Any, living: list[int], dead: set[int], timeout: float):
        self._group, self._living, self._dead, self._timeout = group, living, sorted(dead), timeout
        self._items: list[str] = []

    def __call__(self, item: bytes) -> list[bytes]:
        self._items.append(item.decode("latin-1"))
        native.group_publish(self._group._handle, json.dumps({"dead": self._dead, "items": self._items}).encode())
        round_, deadline = len(self._items) - 1, time.monotonic() + self._timeout
        while True:
            ranks = native.group_report(self._group._handle)["ranks"]
            votes = _votes(self._group)  # after the report: a rank may leave the old group once it has said its part
            missing = [r for r in self._living if len(votes.get(r, {"items": []})["items"]) <= round_]
            if not missing:
                return [votes[r]["items"][round_].encode("latin-1") for r in self._living]
            gone = [r for r in missing if ranks[r]["gone"]]
            if gone:
                raise errors.RankFailedError(
                    f"shrink of group {self._group.name!r}: rank {words_for_ranks(gone)} died meanwhile; "
                    "call shrink() again.",
                    gone,
                )
            if time.monotonic() > deadline:
                raise errors.deadline(f"shrink of group {self._group.name!r}", self._timeout, missing=missing)
            time.sleep(0.001)
