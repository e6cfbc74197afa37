"""The live page's data: the model as JSON, bounded, with only what is new since the page's version."""

from __future__ import annotations

from typing import Any

from symcomm.errors import format_ranks
from symcomm.observe.top.model import BIN_NS, BINS, STATES, WAIT_NS, CollectiveInstance, Live

INSTANCES_SENT = 2_000  # in one reply; the newest
RANK_OPERATIONS_SENT = 60_000
PULSE_NS = 10_000_000_000  # over which rates are measured
MEMBERS_SENT = 80  # characters


def snapshot(live: Live, since: int = 0) -> dict[str, Any]:
    """Everything small, and the collectives and heat columns that changed after version ``since``."""
    if not 0 <= since <= live.version:
        since = 0  # of another run of the server: start afresh
    instances, skipped = _instances(live, since)
    return {
        "version": live.version,
        "since": since,
        "now": live.sample.now_ns / 1e6,
        "title": live.feed.title,
        "states": STATES,
        "ranks": _ranks(live),
        "verdict": _verdict(live),
        "pulse": _pulse(live),
        "meetings": instances,
        "skipped": skipped,
        "heat": _heat(live, since),
        "numbers": [{"call": call, **row.row()} for (call, _), row in sorted(live.numbers.items())],
        "stragglers": [late.row() for late in live.stragglers()],
        "straggler": worst.row() if (worst := live.straggler()) else None,
        "groups": [
            {"name": g.name, "size": g.size, "about": g.description, "ranks": format_ranks(g.ranks)[:MEMBERS_SENT]}
            for g in live.groups
        ],
    }


def _ranks(live: Live) -> dict[str, list[Any]]:
    """Column by column: for 1,000 ranks, a third of the bytes of rows."""
    doing = [live.current.get(fact.rank) for fact in live.ranks]
    now = live.sample.now_ns
    return {
        "rank": [fact.rank for fact in live.ranks],
        "pid": [fact.pid for fact in live.ranks],
        "state": live.states(),
        "lag": live.lags(),
        "done": [fact.operations for fact in live.ranks],
        "missed": [fact.missed for fact in live.ranks],
        "memory": [fact.arena_bytes for fact in live.ranks],
        "doing": [f"{o.call} #{o.seq} on {o.group}" if o else "" for o in doing],
        "site": [o.site if o else "" for o in doing],
        "since": [round((now - (o.finished_ns or o.created_ns)) / 1e6) if o else 0 for o in doing],
    }


def _verdict(live: Live) -> dict[str, Any] | None:
    found = live.verdict()
    if found is None:
        return None
    since = found.since_ns or live.sample.now_ns
    return {"kind": found.kind, "sentence": found.sentence, "ranks": found.ranks, "since": since / 1e6}


def _pulse(live: Live) -> dict[str, float]:
    """Rates of the last seconds: operations, bytes, and the share of the ranks' time spent waiting for the last one."""
    begin = live.sample.now_ns - PULSE_NS
    count, nbytes, waited = 0, 0, 0
    for instance in reversed(live.over):
        last = instance.last_start
        if last < begin:
            break
        count += 1
        nbytes += instance.first.nbytes
        waited += last * len(instance.starts) - sum(instance.starts.values())
    for instance, _ in live.waited_for():
        for start in instance.starts.values():
            waited += live.sample.now_ns - max(start, begin)
    seconds = PULSE_NS / 1e9
    share = waited / (PULSE_NS * max(1, len(live.ranks)))
    return {"operations": count / seconds, "bytes": nbytes / seconds, "waiting": min(1.0, share)}


def _instances(live: Live, since: int) -> tuple[list[list[Any]], int]:
    """The newest that fit, oldest first, and how many did not. Running ones are always included."""
    rows: list[list[Any]] = []
    operations = skipped = 0
    place = {fact.rank: i for i, fact in enumerate(live.ranks)}
    running = {m.ident for m in live.running.values()}
    awaited = {m.ident for m, _ in live.waited_for() if live.sample.now_ns - m.last_start > WAIT_NS}
    changed = [m for m in live.running.values() if m.version > since or not m.is_over]
    for instance in reversed(live.over):
        if instance.version <= since:
            break
        changed.append(instance)
    for instance in changed:
        if len(rows) >= INSTANCES_SENT or (rows and operations + len(instance.starts) > RANK_OPERATIONS_SENT):
            skipped += 1
            continue
        operations += len(instance.starts)
        late = live.absent(instance) if instance.ident in awaited else []
        rows.append(
            [*_row(instance, place), instance.ident in running, [place[rank] for rank in late if rank in place]]
        )
    return rows[::-1], skipped


def _row(instance: CollectiveInstance, place: dict[int, int]) -> list[Any]:
    call = instance.first
    ranks = sorted(rank for rank in instance.starts if rank in place)
    begin = min(instance.starts.values())
    return [
        instance.ident,
        call.call,
        call.group,
        call.seq,
        f"{call.dtype} x {call.count:,}" + (f", {call.op}" if call.op else ""),
        call.nbytes,
        call.plan,
        call.site,
        instance.failure,
        instance.size,
        begin / 1e6,
        [place[rank] for rank in ranks] if len(ranks) < len(place) else None,
        [(instance.starts[rank] - begin) // 1000 for rank in ranks],
        [(instance.ends[rank] - begin) // 1000 if rank in instance.ends else -1 for rank in ranks],
    ]


def _heat(live: Live, since: int) -> dict[str, Any]:
    """Microseconds behind the pack, by column and rank. A column may still change for a few seconds."""
    newest = live.sample.now_ns // BIN_NS
    first = newest - BINS + 1 if not since else newest - 5
    columns = {}
    for column in range(first, newest + 1):
        late = live.heat.get(column)
        if late is not None:
            columns[str(column)] = [late.get(fact.rank, 0) // 1000 for fact in live.ranks]
    return {"newest": newest, "count": BINS, "ms": BIN_NS / 1e6, "columns": columns}
