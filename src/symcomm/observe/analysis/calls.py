"""The collectives of all ranks side by side, assembled once for verdicts and statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

from symcomm.observe.recorder.records import GroupKeys, Operation
from symcomm.observe.recorder.trace import Trace


@dataclass
class RecordedGroup:
    """One group, told apart by name and ranks: disjoint groups may share a name."""

    name: str
    ranks: tuple[int, ...]
    by_seq: dict[int, dict[int, Operation]] = field(default_factory=dict)  # sequence number -> rank -> its call
    reached: dict[int, int] = field(default_factory=dict)  # rank -> its last sequence number
    last: dict[int, Operation] = field(default_factory=dict)  # rank -> its last call


class RecordedCalls:
    """``operations`` by rank (of groups of one name, only the latest); ``groups`` with their collectives."""

    def __init__(self, trace: Trace):
        self.operations = trace.operations()
        self._key_of = GroupKeys()
        self._groups: dict[int, RecordedGroup] = {}
        for rank, operations in self.operations.items():
            for op in operations:
                if not op.is_message:
                    self._add(rank, op)

    def _add(self, rank: int, op: Operation) -> None:
        key = self._key_of(op)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = RecordedGroup(op.group, op.ranks)
        group.by_seq.setdefault(op.seq, {})[rank] = op
        group.reached[rank] = max(op.seq, group.reached.get(rank, op.seq))
        group.last[rank] = op

    @property
    def groups(self) -> list[RecordedGroup]:
        return list(self._groups.values())

    def group_of(self, op: Operation) -> RecordedGroup:
        return self._groups[self._key_of(op)]

    def last_collective(self, rank: int) -> Operation | None:
        return next((op for op in reversed(self.operations.get(rank, ())) if not op.is_message), None)

    def last_in(self, rank: int, name: str) -> Operation | None:
        """The rank's last collective in a group of this name."""
        known = [group.last[rank] for group in self._groups.values() if group.name == name and rank in group.last]
        return max(known, key=lambda op: op.number) if known else None
