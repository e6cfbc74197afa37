"""What went wrong with a job, in one sentence, from what all its ranks recorded.

The order of suspicion: a rank that died, ranks that disagree, a rank that is stopped, a circle of ranks that wait for
each other, and at last whoever the others wait for, found by following who waits for whom to somebody who does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from symcomm.errors import words_for_ranks, words_for_seconds
from symcomm.observe.records import Operation
from symcomm.observe.stacks import short_site, where
from symcomm.observe.trace import RankTrace, Trace

__all__ = ["Verdict", "judge"]

PATIENCE = 1.0  # seconds for which an operation of a live job may wait before we speak of it
GroupKey = tuple[str, tuple[int, ...]]  # name and ranks: disjoint groups may share a name
Calls = dict[GroupKey, dict[int, dict[int, Operation]]]  # group -> sequence number -> rank -> its call


@dataclass(frozen=True)
class Verdict:
    """``kind``: fine, dead, mismatch, stopped, circle, missing, left, message, stuck or unknown."""

    kind: str
    sentence: str
    ranks: list[int] = field(default_factory=list)  # who is to blame
    group: str = ""
    seq: int = 0


@dataclass(frozen=True)
class _Wait:
    """An operation that did not end, and who did not come to it."""

    op: Operation  # one of those that came
    here: dict[int, Operation]
    absent: list[int]


def judge(trace: Trace) -> Verdict:
    calls = _by_sequence(trace)
    waits = _waits(trace, calls)
    return (
        _dead(trace, waits)
        or _mismatch(calls)
        or _stopped(trace, waits)
        or _circle(waits)
        or _missing(trace, waits)
        or _message(trace, calls)
        or _stuck(trace, calls)
        or _nothing(trace, calls)
    )


def _by_sequence(trace: Trace) -> Calls:
    calls: Calls = {}
    for rank, operations in trace.operations().items():
        for op in operations:
            if not op.is_message:
                calls.setdefault((op.group, op.ranks), {}).setdefault(op.seq, {})[rank] = op
    return calls


def _waits(trace: Trace, calls: Calls) -> dict[int, _Wait]:
    """By rank, what it waits for: its last operation, where that did not end and somebody did not come."""
    waits = {}
    reached = {group: _last_seq(by_seq) for group, by_seq in calls.items()}
    for rank, operations in trace.operations().items():
        op = next((o for o in reversed(operations) if not o.is_message), None)
        if op is None or op.state == "completed":
            continue
        if trace.live and trace.ranks[rank].noted_ns - op.created_ns < PATIENCE * 1e9:
            continue
        key = (op.group, op.ranks)
        here = calls[key][op.seq]
        absent = [r for r in op.ranks or trace.members(op.group) if reached[key].get(r, 0) < op.seq]
        if absent:
            waits[rank] = _Wait(op, here, absent)
    return waits


def _last_seq(by_seq: dict[int, dict[int, Operation]]) -> dict[int, int]:
    last: dict[int, int] = {}
    for seq, ranks in by_seq.items():
        for rank in ranks:
            last[rank] = max(seq, last.get(rank, 0))
    return last


# --- words -----------------------------------------------------------------------------------------------------------


def _who(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {words_for_ranks(ranks)}"


def _sites(operations: Iterable[Operation]) -> str:
    found = sorted({short_site(op.site) for op in operations if op.site})
    return f" at {' and '.join(found[:3])}" if found else ""


def _group(name: str) -> str:
    """torch numbers its groups; a bare number would say nothing."""
    return f"group {name}" if name.isdigit() else name


def _call(op: Operation) -> str:
    return f"{op.call} #{op.seq} ({_group(op.group)})"


def _last_words(trace: Trace, rank: int, group: str) -> str:
    """``after all_reduce #11 (world)``, ``in all_reduce #12 (world)``"""
    known = trace.operations().get(rank, [])
    mine = [op for op in known if op.group == group and not op.is_message]
    if not mine:
        return "before its first operation"
    last = mine[-1]
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


def _waiting(trace: Trace, wait: _Wait) -> str:
    """``while ranks 0, 2 waited for it in all_reduce #12 (world) at train.py:88``"""
    verb = "wait" if trace.live else "waited"
    verb += "s" if trace.live and len(wait.here) == 1 else ""
    return f"while {_who(wait.here)} {verb} for it in {_call(wait.op)}{_sites(wait.here.values())}"


# --- causes ----------------------------------------------------------------------------------------------------------


def _dead(trace: Trace, waits: dict[int, _Wait]) -> Verdict | None:
    gone = {r: t for r, t in trace.ranks.items() if t.end and t.end not in ("stopped", "left", "silent")}
    if not gone:
        return None
    first = min(gone.values(), key=lambda t: t.operations[-1].created_ns if t.operations else 0)
    wait = next((w for w in waits.values() if first.rank in w.absent or first.rank in w.here), None)
    group = wait.op.group if wait else _last_group(first)
    sentence = f"rank {first.rank} (pid {first.pid}) {first.end} {_last_words(trace, first.rank, group)}"
    others = {r: op for r, op in wait.here.items() if r not in gone} if wait else {}
    if wait is not None and others:
        sentence += f", {_waiting(trace, _Wait(wait.op, others, wait.absent))}"
    if len(gone) > 1:
        sentence += f"; {_who(r for r in gone if r != first.rank)} ended too"
    blamed = [first.rank, *(r for r in gone if r != first.rank)]
    return Verdict("dead", f"{sentence}.", blamed, group, wait.op.seq if wait else 0)


def _last_group(one: RankTrace) -> str:
    return next((op.group for op in reversed(one.operations) if not op.is_message), "")


def _mismatch(calls: Calls) -> Verdict | None:
    found = []
    for key, by_seq in calls.items():
        for seq, ranks in sorted(by_seq.items()):
            sides: dict[str, list[int]] = {}
            for rank, op in ranks.items():
                sides.setdefault(str(op), []).append(rank)
            noticed = any(op.state == "mismatch" for op in ranks.values()) and len(ranks) > 1
            if len(sides) > 1 or noticed:
                found.append((min(op.created_ns for op in ranks.values()), key, seq, sides))
                break
    if not found:
        return None
    _, key, seq, sides = min(found, key=lambda item: item[0])
    ranks, group = calls[key][seq], key[0]
    if len(sides) == 1:
        return _hidden_mismatch(seq, ranks)
    ordered = sorted(sides.items(), key=lambda side: (len(side[1]), -side[1][0]))
    told = [f"{_who(who)} called {text}{_sites(ranks[r] for r in who)}" for text, who in ordered]
    if len(ordered[-2][1]) < len(ordered[-1][1]):
        minority = sorted(r for _, who in ordered[:-1] for r in who)
        sentence = f"{', '.join(told[:-1])}, where {told[-1]} (#{seq} of {_group(group)})."
        return Verdict("mismatch", sentence, minority, group, seq)
    told = [told[ordered.index(side)] for side in sorted(ordered, key=lambda side: side[1])]
    sentence = f"the ranks did not make the same call as #{seq} of {_group(group)}: {'; '.join(told)}."
    return Verdict("mismatch", sentence, sorted(ranks), group, seq)


def _hidden_mismatch(seq: int, ranks: dict[int, Operation]) -> Verdict:
    """Differing lists of sizes show only in a hash that the ranks compared."""
    op = next(iter(ranks.values()))
    sentence = f"{_who(ranks)} called {_call(op)}{_sites(ranks.values())} with different lists of sizes."
    return Verdict("mismatch", sentence, sorted(ranks), op.group, seq)


def _stopped(trace: Trace, waits: dict[int, _Wait]) -> Verdict | None:
    for one in trace.ranks.values():
        if one.end != "stopped":
            continue
        wait = next((w for w in waits.values() if one.rank in w.absent), None)
        group = wait.op.group if wait else _last_group(one)
        said = f"rank {one.rank} (pid {one.pid}) is stopped {_last_words(trace, one.rank, group)}"
        story = f", {_waiting(trace, wait)}" if wait else ""
        sentence = f"{said}{story}; `kill -CONT {one.pid}` lets it go on."
        return Verdict("stopped", sentence, [one.rank], group, wait.op.seq if wait else 0)
    return None


def _circle(waits: dict[int, _Wait]) -> Verdict | None:
    """Ranks that wait for each other in different groups, each for one that waits itself."""
    for start in sorted(waits):
        path = [start]
        while True:
            after = next((r for r in waits[path[-1]].absent if r in waits), None)
            if after is None:
                break
            if after in path:
                return _circle_words(path[path.index(after) :], waits)
            path.append(after)
    return None


def _circle_words(ranks: list[int], waits: dict[int, _Wait]) -> Verdict:
    ranks = sorted(ranks)
    told = [f"rank {r} is in {_call(waits[r].op)}{_sites([waits[r].op])}" for r in ranks]
    sentence = (
        f"{_who(ranks)} wait for each other in different groups: {', '.join(told)}; "
        "make every rank use its groups in the same order."
    )
    return Verdict("circle", sentence, ranks, waits[ranks[0]].op.group, waits[ranks[0]].op.seq)


def _missing(trace: Trace, waits: dict[int, _Wait]) -> Verdict | None:
    """Whoever is waited for and does not wait itself; where there are several waits, the one that began first."""
    roots = [w for w in waits.values() if any(r not in waits for r in w.absent)]
    if not roots:
        return None
    wait = min(roots, key=lambda w: w.op.created_ns)
    absent = [r for r in wait.absent if r not in waits]
    call, came = _call(wait.op), f"{_who(wait.here)} called{_sites(wait.here.values())}"
    whereabouts = _whereabouts(trace, absent)
    left = [r for r in absent if r in trace.ranks and trace.ranks[r].end == "left"]
    if left:
        last = _last_words(trace, left[0], wait.op.group)
        sentence = f"{_who(left)} left {last} and never called {call}, which {came}."
        return Verdict("left", sentence, left, wait.op.group, wait.op.seq)
    if trace.live:
        now = max(t.noted_ns for t in trace.ranks.values())
        waited = words_for_seconds((now - min(op.created_ns for op in wait.here.values())) / 1e9)
        some = "have" if len(absent) > 1 else "has"
        others = "have" if len(wait.here) > 1 else "has"
        came = f"for which {_who(wait.here)} {others} waited {waited}{_sites(wait.here.values())}"
        sentence = f"{_who(absent)} {some} not called {call} yet, {came}{whereabouts}."
    else:
        sentence = f"{_who(absent)} never called {call}, which {came}{whereabouts}."
    return Verdict("missing", sentence, absent, wait.op.group, wait.op.seq)


def _message(trace: Trace, calls: Calls) -> Verdict | None:
    """A send or receive that did not end."""
    for rank, operations in trace.operations().items():
        last = operations[-1] if operations else None
        if last is None or not last.is_message or last.state == "completed":
            continue
        if trace.live and trace.ranks[rank].noted_ns - last.created_ns < PATIENCE * 1e9:
            continue
        verb, way = ("send", "to") if last.call == "send" else ("receive", "from")
        known = last.root is not None and 0 <= last.root < len(last.ranks)
        peer = last.ranks[last.root] if known else None  # type: ignore[index]
        other = f"rank {peer}" if peer is not None else "any rank"
        doing = "is still trying to" if last.state == "running" and trace.live else "could not"
        story = _whereabouts(trace, [peer]) if peer is not None else ""
        story = story.replace("; it ", f"; {other} ")
        what = f"{verb} {last.nbytes} bytes {way} {other} ({_group(last.group)})"
        sentence = f"rank {rank} {doing} {what}{_sites([last])}{story}."
        return Verdict("message", sentence, [r for r in (peer,) if r is not None], last.group, last.seq)
    return None


def _stuck(trace: Trace, calls: Calls) -> Verdict | None:
    """All came, and yet it did not end."""
    for (group, _), by_seq in calls.items():
        seq = max(by_seq)
        ranks = by_seq[seq]
        open_ = [r for r, op in ranks.items() if op.state != "completed"]
        waited = max((trace.ranks[r].noted_ns - ranks[r].created_ns for r in open_), default=0) / 1e9
        if open_ and not (trace.live and waited < PATIENCE):
            op = ranks[open_[0]]
            how = {ranks[r].state for r in open_} - {"running"}
            state = f" ({', '.join(sorted(how))})" if how else ""
            sentence = f"{_who(ranks)} called {_call(op)}{_sites(ranks.values())}, but it did not end on {_who(open_)}"
            return Verdict("stuck", f"{sentence}{state}.", open_, group, seq)
    return None


def _nothing(trace: Trace, calls: Calls) -> Verdict:
    errors = [(t.rank, text) for t in trace.ranks.values() for text in t.errors]
    if errors:
        return Verdict("unknown", f"rank {errors[0][0]}: {errors[0][1]}", [errors[0][0]])
    count = sum(len(by_seq) for by_seq in calls.values())
    if not trace.ranks or not count:
        return Verdict("unknown", f"nothing is recorded of {_who(trace.ranks) if trace.ranks else 'any rank'}.")
    groups = f"{len(calls)} groups" if len(calls) > 1 else _group(next(iter(calls))[0])
    number = f"{count} call{'s' if count > 1 else ''}"
    if trace.live:
        return Verdict("fine", f"nothing is wrong so far: {_who(trace.ranks)} made the same {number} ({groups}).")
    return Verdict("fine", f"nothing went wrong: {_who(trace.ranks)} made the same {number} ({groups}), and all ended.")
