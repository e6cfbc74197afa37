"""One line on stderr when a call waits for long: who is missing in which call, and where that rank is in its program.

The core tells of a wait that has lasted SYMCOMM_HANG_SECONDS (``group/hooks.py``), in the thread that waits. One rank
of a group speaks for all. It speaks again when what it says has changed, after twice as long each time, and once the
call goes on. A place in a program that waits for the same ranks again is told of after twice as long as before.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from symcomm._core import native
from symcomm.errors import format_ranks, format_seconds
from symcomm.group.failure import Site, describe_call, format_site, waits_for_message
from symcomm.observe.recorder.processes import process_state
from symcomm.observe.recorder.stacks import ThreadStack, where
from symcomm.observe.recorder.whereabouts import Question

ANSWER = 0.5  # seconds for the missing ranks to say where they are
LOOK = 0.02  # seconds between two looks for their answers
ASKED = 3  # ranks, of those that are missing
SILENT = "does not say where it is (native code holds its interpreter lock?)"
REMEMBERED = 256  # places in the program that have waited


@dataclass(frozen=True)
class Missing:
    """What a rank waits for. ``ranks``: in its group. ``awaits``: what they wait for themselves, by rank."""

    call: str
    ranks: tuple[int, ...]
    awaits: Mapping[int, str] = field(default_factory=dict)


@dataclass
class Told:
    """What was said last of a wait that lasts: who is missing, and where."""

    said: str = field(default="", init=False)

    def say(self, place: tuple[Any, ...], group: Any, call: str, site: str, seconds: float, who: str) -> None:
        """Say it if it is news. ``place``: what waits, and for whom; next time, it is patient for twice as long."""
        if who == self.said:
            return
        if not self.said:
            if len(_patience) >= REMEMBERED:
                _patience.clear()
            _patience[place] = 2 * seconds
        self.said = who
        at = f" at {site}" if site else ""
        waited = f"rank {group.rank} has waited {format_seconds(seconds)} in {call} on group {group.name!r}{at}"
        _write(f"{waited} for {who}.")

    def say_it_goes_on(self, group: Any, call: str, ranks: Sequence[int], seconds: float) -> None:
        if self.said:
            who = f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"
            _write(f"{call} on group {group.name!r} goes on: {who} came after {format_seconds(seconds)}.")


@dataclass
class _Wait(Told):
    group: Any
    site: Site
    kind: int
    seconds: float = 0.0
    missing: Missing | None = None
    questions: dict[int, Question] = field(default_factory=dict)  # by rank
    asked_at: float = 0.0

    def look(self, first: int, seconds: float) -> float:
        """Ask, or say what was answered. Returns the seconds until the next look."""
        self.seconds = seconds
        if not self.questions:
            missing = _find(self.group, self.kind, first, bool(self.said))
            if missing is None:
                return seconds
            self.missing = missing
            if (patience := patience_with(self._key())) > seconds:
                return patience - seconds
            self.asked_at = time.monotonic()
            self.questions = {r: Question(self.group.peers[r].whereabouts) for r in self.missing.ranks[:ASKED]}
            return LOOK
        answers = {rank: question.answer() for rank, question in self.questions.items()}
        if None in answers.values() and time.monotonic() - self.asked_at < ANSWER:
            return LOOK
        self.questions = {}
        self._say(answers)
        return seconds

    def _key(self) -> tuple[Any, ...]:
        return (self.site, self.group.name, self.missing and self.missing.ranks)

    def _say(self, answers: Mapping[int, list[ThreadStack] | None]) -> None:
        missing = self.missing
        assert missing is not None
        pids = {rank: self.group.peers[rank].pid for rank in answers}
        places = {r: _place(pids[r], stacks) + missing.awaits.get(r, "") for r, stacks in answers.items()}
        who = who_is_where(missing.ranks, {rank: f"pid {pid}" for rank, pid in pids.items()}, places)
        at = format_site(self.site) if self.site[1] else ""
        self.say(self._key(), self.group, missing.call, at, self.seconds, who)

    def end(self, status: int, seconds: float) -> None:
        if self.missing is not None and status == 0:  # else an error says what happened
            self.say_it_goes_on(self.group, self.missing.call, self.missing.ranks, seconds)


_waits: dict[int, _Wait] = {}  # by what the core calls them
_patience: dict[tuple[Any, ...], float] = {}  # seconds before a place is told of, by what it is and whom it waits for


def patience_with(place: tuple[Any, ...]) -> float:
    return _patience.get(place, 0.0)


def told(group: Any, site: Site, wait: int, kind: int, missing: int, seconds: float, status: int) -> float:
    """Called by the core; see ``hooks.waits``."""
    known = _waits.get(wait)
    if status != native.WAIT_GOES_ON:
        _waits.pop(wait, None)
        if known is not None:
            known.end(status, seconds)
        return 0.0
    if known is None or known.group is not group or known.seconds > seconds:
        known = _waits[wait] = _Wait(group, site, kind)
    return known.look(missing, seconds)


# --- who is missing --------------------------------------------------------------------------------------------------


def _find(group: Any, kind: int, first: int, has_spoken: bool) -> Missing | None:
    """What this rank waits for; None: another one speaks, or nothing is known."""
    ranks = group.handle.report()["ranks"]
    if kind == native.WAITS_FOR_MESSAGE:
        return _for_message(group.rank, ranks)
    if kind == native.WAITS_FOR_SIGNAL:
        return None if first in (-1, group.rank) else Missing(f"a wait for a signal of rank {first}", (first,))
    return _for_ranks(group, ranks, first, has_spoken)


def _for_ranks(group: Any, ranks: Sequence[Mapping[str, Any]], first: int, has_spoken: bool) -> Missing | None:
    """The first rank that has come speaks; once one has spoken, no other does."""
    mine = ranks[group.rank]
    seq = mine["seq"]
    if not has_spoken and any(r["seq"] >= seq for r in ranks[: group.rank]):
        return None
    absent = tuple(r["rank"] for r in ranks if r["seq"] < seq and not r["gone"])
    if not absent and first >= 0:
        absent = (first,)  # it came, and does not go on
    if not absent or not group.handle.tells(seq):
        return None
    call = describe_call(mine["signature"], mine["count"])
    awaits = {r: text for r in absent if (text := waits_for_message(ranks[r]))}
    return Missing(f"{call} #{seq}", absent, awaits)


def _for_message(me: int, ranks: Sequence[Mapping[str, Any]]) -> Missing | None:
    """Whoever waits for a rank that does not wait speaks; of a circle, its first rank."""
    peer, is_send = divmod(ranks[me]["message"], 2)
    peer -= 2
    if ranks[me]["message"] == 0:
        return None
    call = ("send to " if is_send else "recv from ") + ("any rank" if peer < 0 else f"rank {peer}")
    if peer < 0:
        return Missing(call, tuple(r["rank"] for r in ranks if r["rank"] != me and not r["gone"]))
    chain = [me]
    while (ahead := ranks[chain[-1]]["message"] // 2 - 2) >= 0 and ahead not in chain:
        chain.append(ahead)
    circle = ahead == me
    if (circle and me != min(chain)) or (not circle and ranks[peer]["message"]):
        return None
    return Missing(call, (peer,), {peer: waits_for_message(ranks[peer])} if circle else {})


# --- words -----------------------------------------------------------------------------------------------------------


def who_is_where(ranks: Sequence[int], processes: Mapping[int, str], places: Mapping[int, str]) -> str:
    """``rank 3 (pid 4711), which is at loader.py:40 in next_batch``"""
    if len(ranks) == 1:
        rank = ranks[0]
        return f"rank {rank} ({processes[rank]}), which {places[rank]}"
    told = "; ".join(f"rank {rank} ({processes[rank]}) {place}" for rank, place in places.items())
    return f"ranks {format_ranks(ranks)}: {told}"


def _place(pid: int, stacks: list[ThreadStack] | None) -> str:
    frame = where(stacks) if stacks else None
    return stopped(pid) or SILENT if frame is None else f"is at {frame}"


def stopped(pid: int) -> str:
    """Where a process of this host is that is stopped; empty: it is not."""
    return f"is stopped (`kill -CONT {pid}` lets it go on)" if process_state(pid) in ("T", "t") else ""


def _write(sentence: str) -> None:
    with contextlib.suppress(Exception):  # there may be no stderr
        sys.stderr.write(f"symcomm: {sentence}\n")
        sys.stderr.flush()
