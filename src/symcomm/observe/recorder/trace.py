"""A job's trace: one record per rank, merged from dump files or from the ranks' memory."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from symcomm.errors import BadArgumentError, format_ranks
from symcomm.observe.recorder.records import Operation
from symcomm.observe.recorder.stacks import ThreadStack
from symcomm.observe.recorder.torch_format import latest_of_each_group


@dataclass
class RankTrace:
    """One rank: its operations, and what else its dump says."""

    rank: int
    pid: int = 0
    host: str = ""
    boot: str = ""  # which boot of which host: ranks with the same value have the same clock
    noted_ns: int = 0  # when this was written, on CLOCK_MONOTONIC
    noted_wall_ns: int = 0  # the same moment, as time of day
    started_wall_ns: int = 0  # when the rank began to trace
    end: str = ""  # if another rank wrote this: "died with SIGKILL", "stopped", "left", or "silent" (it did not write)
    noted_by: int | None = None  # which rank wrote this, if it was another
    errors: list[str] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    stacks: list[ThreadStack] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list[Any])  # name, rank, size, ranks, description

    def to_dict(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        operations, stacks = ([item.to_dict() for item in items] for items in (self.operations, self.stacks))
        return {**facts, "operations": operations, "stacks": stacks}

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> RankTrace:
        operations = [Operation.from_dict(op) for op in facts["operations"]]
        stacks = [ThreadStack.from_dict(stack) for stack in facts["stacks"]]
        return cls(**{**facts, "operations": operations, "stacks": stacks})


@dataclass
class Trace:
    """All ranks of a job, and sentences about what could not be read."""

    ranks: dict[int, RankTrace]
    problems: list[str] = field(default_factory=list)
    live: bool = False

    @property
    def missing(self) -> list[int]:
        """Ranks of some group of which nothing was found."""
        members = {r for trace in self.ranks.values() for group in trace.groups for r in group["ranks"]}
        return sorted(members - set(self.ranks))

    def members(self, group: str) -> list[int]:
        """The ranks of a group. Recorders leave out long lists; then the ranks that recorded something of it."""
        known = [(one.rank, g["ranks"]) for one in self.ranks.values() for g in one.groups if g["name"] == group]
        listed = next((ranks for _, ranks in reversed(known) if ranks), None)
        return list(listed) if listed is not None else [rank for rank, _ in known]

    def operations(self) -> dict[int, list[Operation]]:
        """By rank; of each group only the latest of its name."""
        return {rank: latest_of_each_group(trace.operations) for rank, trace in sorted(self.ranks.items())}


class _OnlyData(pickle.Unpickler):
    """Loads plain data only: any other pickle could run code, and a dump may come from anywhere."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it wants {module}.{name}, but a dump holds nothing but plain data")


def load(place: str | os.PathLike[str]) -> Trace:
    """The dumps in a folder, or those whose names are a prefix and the rank's number."""
    ranks: dict[int, RankTrace] = {}
    problems = []
    for rank, path in sorted(_dumps_in(Path(place))):
        try:
            ranks[rank] = parse_dump(rank, path.read_bytes())
        except Exception as error:
            empty = path.is_file() and not path.stat().st_size
            why = "is empty" if empty else f"cannot be read ({type(error).__name__}: {error})"
            problems.append(f"the dump of rank {rank} {why}: {path}")
    trace = Trace(ranks, problems)
    _drop_old(trace)
    unseen = [r for r in trace.missing if not any(f"of rank {r} " in p for p in trace.problems)]
    if unseen:
        trace.problems.append(f"there is no dump of rank{'s' if len(unseen) > 1 else ''} {format_ranks(unseen)}.")
    return trace


def _dumps_in(place: Path) -> Iterable[tuple[int, Path]]:
    folder, prefix = (place, "") if place.is_dir() else (place.parent, place.name)
    if not folder.is_dir():
        raise BadArgumentError(f"symcomm trace: there is no folder {folder}; give the one that dumps were written to.")
    found = []
    for path in folder.iterdir():
        match = re.fullmatch(r"(.*?)(\d+)", path.name)
        if match and path.name.startswith(prefix) and path.is_file():
            found.append((match[1], int(match[2]), path))
    if not found:
        raise BadArgumentError(
            f"symcomm trace: there are no dumps in {place}; ranks write them there when an operation fails and "
            "SYMCOMM_TRACE_DIR, or `symcomm run --trace`, names the folder."
        )
    prefixes = sorted({p for p, _, _ in found})
    if len(prefixes) > 1:
        choice = " or ".join(str(folder / p) for p in prefixes)
        raise BadArgumentError(f"symcomm trace: there are dumps of several names in {place}; give one: {choice}.")
    return [(rank, path) for _, rank, path in found]


def parse_dump(rank: int, data: bytes) -> RankTrace:
    """The dump of a rank; raises if something is wrong with it."""
    dump = _OnlyData(io.BytesIO(data)).load()
    if not isinstance(dump, dict) or "version" not in dump:
        raise ValueError("it is not a flight recorder's dump")
    if "symcomm" in dump:
        return RankTrace.from_dict(dump["symcomm"])
    from symcomm.observe.recorder.foreign import from_torch

    return from_torch(rank, dump)


def _drop_old(trace: Trace) -> None:
    """Drops dumps of an earlier run: they were written before other ranks had started."""
    started = max((t.started_wall_ns for t in trace.ranks.values()), default=0)
    for rank, one in list(trace.ranks.items()):
        if one.noted_wall_ns < started:
            del trace.ranks[rank]
            trace.problems.append(f"the dump of rank {rank} is of an earlier run, and was left out.")
