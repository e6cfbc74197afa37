"""How survivors of a failure agree on who goes on, with nothing but the memory they share.

The store may have died with rank 0, so it is not asked. Each survivor publishes the set of ranks it holds for dead,
takes over every rank the others name, and is done once all that are left say the same. Sets only grow, so this ends. A
rank that does not come in time counts as dead, and learns that when it does come. Ranks that the callers leave out by
name count as dead from the start. Ranks on several hosts publish elsewhere (hosts/shrink.py), and agree alike.
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

__all__ = ["Records", "agree_on_survivors", "check_excluded"]


class Records:
    """Where ranks of one host read what the others say: their records of the group."""

    def __init__(self, group: Any):
        self._group = group
        self.rank, self.size, self.name = group.rank, group.size, group.name

    def abort(self) -> None:
        native.group_abort(self._group._handle)  # a no-op when the group has failed already

    def gone(self) -> set[int]:
        return {r["rank"] for r in native.group_report(self._group._handle)["ranks"] if r["gone"]}

    def publish(self, vote: dict[str, Any]) -> None:
        native.group_publish(self._group._handle, json.dumps(vote).encode())

    def votes(self) -> dict[int, dict]:
        votes = {}
        for rank, record in enumerate(native.group_records(self._group._handle)):
            data = json.loads(record) if record is not None else {}
            if "dead" in data:
                votes[rank] = data
        return votes


def check_excluded(group: Any, exclude: Collection[int]) -> None:
    """Refuse ranks to leave out that are none, or the caller's own."""
    if any(not isinstance(r, int) or not 0 <= r < group.size for r in exclude):
        raise errors.bad_argument("shrink", "exclude", list(exclude), f"ranks of this group, 0 to {group.size - 1}")
    if group.rank in exclude:
        raise errors.bad_argument(
            "shrink", "exclude", list(exclude), f"without this rank ({group.rank})", "only ranks that stay call it"
        )


def agree_on_survivors(
    records: Any, timeout: float, exclude: Collection[int] = (), abort: bool = True
) -> tuple[list[int], Exchange]:
    """(ranks that go on, a way for them to exchange bytes). ``records``: how they read each other, as Records does.

    ``abort`` ends what other ranks still do on the group now; otherwise once everybody that goes on has come."""
    if abort:
        records.abort()
    deadline = time.monotonic() + timeout
    dead: set[int] = set(exclude)
    said: set[int] | None = None
    votes: dict[int, dict] = {}  # kept: a record that is being written reads as none
    while True:
        dead |= records.gone()
        if said != dead:
            records.publish({"dead": sorted(dead), "items": []})
            said = set(dead)
        votes.update(records.votes())
        named = {r for rank, vote in votes.items() if rank not in dead for r in vote["dead"]}
        if records.rank in named:
            raise errors.RankFailedError(
                f"shrink of group {records.name!r}: the other ranks went on without rank {records.rank}, which did not "
                "come in time; end this process, or join anew.",
                [records.rank],
            )
        living = [r for r in range(records.size) if r not in dead]
        if all(r in votes and set(votes[r]["dead"]) == dead for r in living):
            records.abort()  # tells the ranks that were left out, should they still use it
            return living, _RecordExchange(records, living, dead, timeout)
        if named <= dead and time.monotonic() > deadline:
            dead |= {r for r in living if r not in votes}
            deadline = time.monotonic() + timeout
        dead |= named
        time.sleep(0.001)


class _RecordExchange:
    """Rounds of "everybody's bytes" over the records; earlier rounds stay in the record for slower readers."""

    def __init__(self, records: Any, living: list[int], dead: set[int], timeout: float):
        self._records, self._living, self._dead, self._timeout = records, living, sorted(dead), timeout
        self._items: list[str] = []

    def __call__(self, item: bytes) -> list[bytes]:
        self._items.append(item.decode("latin-1"))
        self._records.publish({"dead": self._dead, "items": self._items})
        round_, deadline = len(self._items) - 1, time.monotonic() + self._timeout
        what = f"shrink of group {self._records.name!r}"
        while True:
            departed = self._records.gone()
            votes = self._records.votes()  # after asking: a rank may leave the old group once it has said its part
            missing = [r for r in self._living if len(votes.get(r, {"items": []})["items"]) <= round_]
            if not missing:
                return [votes[r]["items"][round_].encode("latin-1") for r in self._living]
            gone = [r for r in missing if r in departed]
            if gone:
                raise errors.RankFailedError(
                    f"{what}: rank {words_for_ranks(gone)} died meanwhile; call shrink() again.", gone
                )
            if time.monotonic() > deadline:
                raise errors.deadline(what, self._timeout, missing=missing)
            time.sleep(0.001)
