"""What went wrong with a job, in one sentence, from what all its ranks recorded.

In order of suspicion: a rank that died, ranks that disagree, a stopped rank, a cycle of ranks that wait for each other,
and finally the rank that all the others wait for and that waits for nobody.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from symcomm.errors import format_ranks
from symcomm.observe.analysis.calls import RecordedCalls
from symcomm.observe.recorder.records import REFUSED, Operation
from symcomm.observe.recorder.stacks import short_site, where
from symcomm.observe.recorder.trace import RankTrace, Trace

PATIENCE = 1.0  # seconds that an operation of a live job may wait before it is reported
CIRCLE_TOLD = 8  # ranks of a cycle whose calls are named


@dataclass(frozen=True)
class Verdict:
    """``kind``: fine, dead, mismatch, stopped, circle, missing, left, message, stuck or unknown."""

    kind: str
    sentence: str
    ranks: list[int] = field(default_factory=list)  # the ranks at fault
    group: str = ""
    seq: int = 0
    since_ns: int = 0  # when the failure began, as far as operations show it (CLOCK_MONOTONIC)


@dataclass(frozen=True)
class _Wait:
    """An operation that did not end, and the ranks missing from it; shared by all ranks that wait in it."""

    op: Operation  # one of those that came
    here: dict[int, Operation]
    absent: list[int]

    @property
    def since_ns(self) -> int:
        return min(op.created_ns for op in self.here.values())


def judge(trace: Trace, patience: float = PATIENCE) -> Verdict:
    """The verdict on a running job, or on the dumps of one that ended. ``patience`` applies to running jobs."""
    calls = RecordedCalls(trace)
    waits = _waits(trace, calls, patience)
    return (
        _noticed_mismatch(calls)
        or _dead(trace, calls, waits)
        or _mismatch(calls)
        or _stopped(trace, calls, waits)
        or _circle(waits)
        or _missing(trace, calls, waits)
        or _message(trace, calls, patience)
        or _stuck(trace, calls, patience)
        or _nothing(trace, calls)
    )


def _waits(trace: Trace, calls: RecordedCalls, patience: float) -> dict[int, _Wait]:
    """For each rank whose last operation did not end because ranks are missing from it: that wait."""
    waits: dict[int, _Wait] = {}
    known: dict[tuple[int, int], _Wait] = {}  # by group and sequence number
    for rank in calls.operations:
        op = calls.last_collective(rank)
        if op is None or op.is_over or _is_young(trace, rank, op, patience):
            continue
        group = calls.group_of(op)
        wait = known.get((id(group), op.seq))
        if wait is None:
            members = op.ranks or trace.members(op.group)
            absent = [r for r in members if group.reached.get(r, -1) < op.seq]
            wait = known[id(group), op.seq] = _Wait(op, group.by_seq[op.seq], absent)
        if wait.absent:
            waits[rank] = wait
    return waits


def _is_young(trace: Trace, rank: int, op: Operation, patience: float) -> bool:
    """Whether it may still end by itself."""
    return trace.live and op.state == "running" and trace.ranks[rank].noted_ns - op.created_ns < patience * 1e9


def _distinct(waits: dict[int, _Wait]) -> list[_Wait]:
    return list({id(wait): wait for wait in waits.values()}.values())


# --- words -----------------------------------------------------------------------------------------------------------


def _who(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"


def _sites(operations: Iterable[Operation]) -> str:
    found = sorted({short_site(site) for site in {op.site for op in operations} if site})
    return f" at {' and '.join(found[:3])}" if found else ""


def _group(name: str) -> str:
    """A group's name in words: torch numbers its groups, and a bare number says nothing."""
    return f"group {name}" if name.isdigit() else name


def plain(error: str) -> str:
    """A rank's error with its group named as in our sentences: all_reduce #2 (world)."""
    return re.sub(r" on group '([^']*)'", lambda found: f" ({_group(found[1])})", error)


def _call(op: Operation) -> str:
    return f"{op.call} #{op.seq} ({_group(op.group)})"


def _last_words(calls: RecordedCalls, rank: int, group: str) -> str:
    """``after all_reduce #11 (world)``, ``in all_reduce #12 (world)``"""
    last = calls.last_in(rank, group)
    if last is None or last.seq <= 0:
        return "before its first operation"
    return f"{'after' if last.state == 'completed' else 'in'} {_call(last)}"


def _whereabouts(trace: Trace, ranks: Sequence[int]) -> str:
    """``; it is at loader.py:40 in next_batch``"""
    parts = []
    for rank in ranks[:3]:
        known = trace.ranks.get(rank)
        place = where(known.stacks) if known else None
        name = "it" if len(ranks) == 1 else f"rank {rank}"
        if known is None:
            parts.append(f"{name} has no process any more" if trace.live else f"{name} left no dump")
        elif place is not None:
            parts.append(f"{name} is at {place}")
        elif known.end == "silent":
            parts.append(f"{name} (pid {known.pid}) runs no Python that could tell where it is")
    return f"; {', '.join(parts)}" if parts else ""


def _waiting(wait: _Wait) -> str:
    """``while ranks 0, 2 waited for it in all_reduce #12 (world) at train.py:88``"""
    return f"while {_who(wait.here)} waited for it in {_call(wait.op)}{_sites(wait.here.values())}"


# --- causes ----------------------------------------------------------------------------------------------------------


def _dead(trace: Trace, calls: RecordedCalls, waits: dict[int, _Wait]) -> Verdict | None:
    gone = {r: t for r, t in trace.ranks.items() if t.end and t.end not in ("stopped", "left", "silent")}
    if not gone:
        return None
    first = min(gone.values(), key=lambda t: t.operations[-1].created_ns if t.operations else 0)
    wait = next((w for w in _distinct(waits) if first.rank in w.absent or first.rank in w.here), None)
    group = wait.op.group if wait else _last_group(first)
    sentence = f"rank {first.rank} (pid {first.pid}) {first.end} {_last_words(calls, first.rank, group)}"
    others = {r: op for r, op in wait.here.items() if r not in gone} if wait else {}
    if wait is not None and others:
        sentence += f", {_waiting(_Wait(wait.op, others, wait.absent))}"
    if len(gone) > 1:
        sentence += f"; {_who(r for r in gone if r != first.rank)} ended too"
    blamed = [first.rank, *(r for r in gone if r != first.rank)]
    seq, since = (wait.op.seq, wait.since_ns) if wait else (0, 0)
    return Verdict("dead", f"{sentence}.", blamed, group, seq, since)


def _last_group(one: RankTrace) -> str:
    return next((op.group for op in reversed(one.operations) if not op.is_message), "")


def _noticed_mismatch(calls: RecordedCalls) -> Verdict | None:
    """A mismatch that the ranks noticed themselves: ranks that ended later ended because of it."""
    seen = any(op.state == "mismatch" for group in calls.groups for op in group.last.values())
    return _mismatch(calls) if seen else None


def _mismatch(calls: RecordedCalls) -> Verdict | None:
    """The earliest collective that ranks of a group called differently."""
    found = []
    for group in calls.groups:
        for seq, ranks in sorted(group.by_seq.items()):
            if any(op.state == REFUSED for op in ranks.values()):
                continue  # all were told
            noticed = any(op.state == "mismatch" for op in ranks.values()) and len(ranks) > 1
            if noticed or len({_signature(op) for op in ranks.values()}) > 1:
                found.append((min(op.created_ns for op in ranks.values()), seq, ranks))
                break
    if not found:
        return None
    since, seq, ranks = min(found, key=lambda item: item[0])
    sides: dict[str, list[int]] = {}
    for rank, op in ranks.items():
        sides.setdefault(str(op), []).append(rank)
    group_name = next(iter(ranks.values())).group
    sentence, blamed = _mismatch_words(group_name, seq, ranks, sides)
    return Verdict("mismatch", sentence, blamed, group_name, seq, since)


def _signature(op: Operation) -> tuple[Any, ...]:
    """All that ``str(op)`` says of a call."""
    return (op.call,) if op.call == "barrier" else (op.call, op.dtype, op.count, op.op, op.root)


def _mismatch_words(
    group: str, seq: int, ranks: dict[int, Operation], sides: dict[str, list[int]]
) -> tuple[str, list[int]]:
    """The sentence, and the ranks at fault: the minority, if there is one."""
    if len(sides) == 1:  # lists of sizes differ, which shows only in a hash that ranks compare
        call = _call(next(iter(ranks.values())))
        return f"{_who(ranks)} called {call}{_sites(ranks.values())} with different lists of sizes.", sorted(ranks)
    ordered = sorted(sides.items(), key=lambda side: (len(side[1]), -side[1][0]))
    told = [f"{_who(who)} called {text}{_sites(ranks[r] for r in who)}" for text, who in ordered]
    if len(ordered[-2][1]) < len(ordered[-1][1]):
        minority = sorted(r for _, who in ordered[:-1] for r in who)
        return f"{', '.join(told[:-1])}, where {told[-1]} (#{seq} of {_group(group)}).", minority
    told = [told[ordered.index(side)] for side in sorted(ordered, key=lambda side: side[1])]
    return f"the ranks did not make the same call as #{seq} of {_group(group)}: {'; '.join(told)}.", sorted(ranks)


def _stopped(trace: Trace, calls: RecordedCalls, waits: dict[int, _Wait]) -> Verdict | None:
    for one in trace.ranks.values():
        if one.end != "stopped":
            continue
        wait = next((w for w in _distinct(waits) if one.rank in w.absent), None)
        group = wait.op.group if wait else _last_group(one)
        said = f"rank {one.rank} (pid {one.pid}) is stopped {_last_words(calls, one.rank, group)}"
        story = f", {_waiting(wait)}" if wait else ""
        sentence = f"{said}{story}; `kill -CONT {one.pid}` lets it go on."
        seq, since = (wait.op.seq, wait.since_ns) if wait else (0, 0)
        return Verdict("stopped", sentence, [one.rank], group, seq, since)
    return None


def _circle(waits: dict[int, _Wait]) -> Verdict | None:
    """A deadlock: a cycle of ranks that wait for each other in different groups."""
    ahead = {id(wait): next((r for r in wait.absent if r in waits), None) for wait in _distinct(waits)}
    seen: set[int] = set()
    for start in sorted(waits):
        path = []
        rank: int | None = start
        while rank is not None and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = ahead[id(waits[rank])]
        if rank is not None and rank in path:
            return _circle_words(path[path.index(rank) :], waits)
    return None


def _circle_words(ranks: list[int], waits: dict[int, _Wait]) -> Verdict:
    ranks = sorted(ranks)
    theirs = {r: waits[r].here[r] for r in ranks}
    told = [f"rank {r} is in {_call(op)}{_sites([op])}" for r, op in list(theirs.items())[:CIRCLE_TOLD]]
    if len(ranks) > CIRCLE_TOLD:
        told.append("and so on")
    sentence = (
        f"{_who(ranks)} wait for each other in different groups: {', '.join(told)}; "
        "make every rank use its groups in the same order."
    )
    first = theirs[ranks[0]]
    return Verdict("circle", sentence, ranks, first.group, first.seq, max(op.created_ns for op in theirs.values()))


def _missing(trace: Trace, calls: RecordedCalls, waits: dict[int, _Wait]) -> Verdict | None:
    """The rank that others wait for and that waits for nobody; of several, the one whose wait began first."""
    roots = [w for w in _distinct(waits) if any(r not in waits for r in w.absent)]
    if not roots:
        return None
    wait = min(roots, key=lambda w: w.since_ns)
    absent = [r for r in wait.absent if r not in waits]
    call, came = _call(wait.op), f"{_who(wait.here)} called{_sites(wait.here.values())}"
    left = [r for r in absent if r in trace.ranks and trace.ranks[r].end == "left"]
    if left:
        last = _last_words(calls, left[0], wait.op.group)
        sentence = f"{_who(left)} left {last} and never called {call}, which {came}."
        return Verdict("left", sentence, left, wait.op.group, wait.op.seq, wait.since_ns)
    have = "have" if len(absent) > 1 else "has"
    sentence = f"{_who(absent)} {have} not called {call}, which {came}{_whereabouts(trace, absent)}."
    return Verdict("missing", sentence, absent, wait.op.group, wait.op.seq, wait.since_ns)


def _message(trace: Trace, calls: RecordedCalls, patience: float) -> Verdict | None:
    """A send or receive that did not end."""
    for rank, operations in calls.operations.items():
        last = operations[-1] if operations else None
        if last is None or not last.is_message or last.is_over or _is_young(trace, rank, last, patience):
            continue
        verb, way = ("send", "to") if last.call == "send" else ("receive", "from")
        known = last.root is not None and 0 <= last.root < len(last.ranks)
        peer = last.ranks[last.root] if known else None  # type: ignore[index]
        other = f"rank {peer}" if peer is not None else "any rank"
        doing = "is still trying to" if last.state == "running" else "could not"
        story = _whereabouts(trace, [peer]) if peer is not None else ""
        story = story.replace("; it ", f"; {other} ")
        what = f"{verb} {last.nbytes} bytes {way} {other} ({_group(last.group)})"
        sentence = f"rank {rank} {doing} {what}{_sites([last])}{story}."
        blamed = [peer] if peer is not None else []
        return Verdict("message", sentence, blamed, last.group, last.seq, last.created_ns)
    return None


def _stuck(trace: Trace, calls: RecordedCalls, patience: float) -> Verdict | None:
    """All ranks arrived, but it did not end."""
    for group in calls.groups:
        seq = max(group.by_seq)
        ranks = group.by_seq[seq]
        open_ = [r for r, op in ranks.items() if not op.is_over]
        if open_ and not all(_is_young(trace, r, ranks[r], patience) for r in open_):
            op = ranks[open_[0]]
            how = {ranks[r].state for r in open_} - {"running"}
            state = f" ({', '.join(sorted(how))})" if how else ""
            sentence = f"{_who(ranks)} called {_call(op)}{_sites(ranks.values())}, but it did not end on {_who(open_)}"
            return Verdict("stuck", f"{sentence}{state}.", open_, group.name, seq, op.created_ns)
    return None


def _nothing(trace: Trace, calls: RecordedCalls) -> Verdict:
    errors = [(t.rank, text) for t in trace.ranks.values() for text in t.errors]
    if errors:
        return Verdict("unknown", f"rank {errors[0][0]}: {plain(errors[0][1])}", [errors[0][0]])
    count = sum(len(group.by_seq) for group in calls.groups)
    if not trace.ranks or not count:
        return Verdict("unknown", f"nothing is recorded of {_who(trace.ranks) if trace.ranks else 'any rank'}.")
    groups = f"{len(calls.groups)} groups" if len(calls.groups) > 1 else _group(calls.groups[0].name)
    number = f"{count} call{'s' if count > 1 else ''}"
    if trace.live:
        return Verdict("fine", f"nothing is wrong so far: {_who(trace.ranks)} made the same {number} ({groups}).")
    return Verdict("fine", f"nothing went wrong: {_who(trace.ranks)} made the same {number} ({groups}), and all ended.")
