"""What long_waits.py says, of groups across hosts.

Their calls wait in many places, so a thread looks now and then which call has lasted. One rank of a host asks the
others in the group what they do, through the control channel; the first of those that have come speaks for all.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from symcomm.group import hooks
from symcomm.observe.long_waits import ASKED, SILENT, Told, patience_with, stopped, who_is_where

LONGEST_PAUSE = 0.5  # seconds between two looks
CUT_OFF = "does not answer (stopped, or cut off?)"


@dataclass
class _Wait(Told):
    doing: Any  # hierarchical.standoff.Lasting
    look_at: float = 0.0
    missing: Sequence[int] = ()

    def look(self, group: Any, now: float) -> None:
        """Say who is missing, if that is ours to say and news."""
        seconds = now - self.doing.since
        self.look_at = now + seconds
        find = _find_late if self.doing.awaited is None else _find_partners
        answers = find(group, self.doing, bool(self.said))
        if not answers:
            return
        place = (self.doing.site, group.name, tuple(answers))
        if not self.said and patience_with(place) > seconds:
            return
        named = list(answers)[:ASKED]
        who = who_is_where(
            list(answers), {r: _process(group, r) for r in named}, {r: _place(group, r, answers[r]) for r in named}
        )
        self.missing = list(answers)
        at = self.doing.site or hooks.place_of(group.arena.thread).partition(" in ")[0]
        self.say(place, group, self.doing.call, at, seconds, who)

    def end(self, group: Any) -> None:
        if group.failures.verdict is None:  # else an error says what happened
            self.say_it_goes_on(group, self.doing.call, self.missing, time.monotonic() - self.doing.since)


# --- the thread ------------------------------------------------------------------------------------------------------

_waits: weakref.WeakKeyDictionary[Any, _Wait | None] = weakref.WeakKeyDictionary()  # by group
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(group: Any, seconds: float) -> None:
    """From now on, tell of its calls that last longer."""
    global _thread
    with _lock:
        _waits[group] = None
        if _thread is None or not _thread.is_alive():  # a forked child has none
            _thread = threading.Thread(target=_run, args=(seconds,), name="symcomm-long-waits", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread: it is only not said
                _thread.start()


def _run(seconds: float) -> None:
    global _thread
    while True:
        time.sleep(min(seconds / 4, LONGEST_PAUSE))
        with _lock:
            groups = list(_waits)
            if not groups:
                _thread = None
                return
        for group in groups:
            with contextlib.suppress(Exception):  # whatever happens here, the group goes on
                _look(group, seconds)
        del groups


def _look(group: Any, seconds: float) -> None:
    if group.has_left:
        with _lock:
            _waits.pop(group, None)
        return
    doing, wait, now = group.lasts(), _waits.get(group), time.monotonic()
    if wait is not None and (doing is None or doing.key != wait.doing.key):
        _waits[group] = None
        wait.end(group)
        wait = None
    if doing is None or now - doing.since < seconds or group.failures.verdict is not None:
        return
    if wait is None:
        wait = _waits[group] = _Wait(doing)
    if now >= wait.look_at:
        wait.look(group, now)


# --- who is missing --------------------------------------------------------------------------------------------------


def _find_late(group: Any, doing: Any, has_spoken: bool) -> Mapping[int, Any]:
    """Ranks that have not come, and what they answered; none if another rank speaks."""
    if not has_spoken:
        near = group.failures.survey([rank for rank in group.layout.here if rank < group.rank])
        if _first_of(near, doing.key) != group.rank:
            return {}
    answers = group.failures.survey(where=True)
    if not has_spoken and _first_of(answers, doing.key) != group.rank:
        return {}
    silent = {"seq": -1}
    found = {rank: answers.get(rank, silent) for rank in range(group.size) if not group.is_gone(rank)}
    return {rank: answer for rank, answer in found.items() if answer["seq"] < doing.key}


def _first_of(answers: Mapping[int, Any], seq: int) -> int:
    return min(rank for rank, answer in answers.items() if answer["seq"] >= seq)


def _find_partners(group: Any, doing: Any, has_spoken: bool) -> Mapping[int, Any]:
    """Ranks of which one has to do its part of a message. Whoever waits for a rank that waits for none speaks; of two
    that wait for each other, the first."""
    answers = group.failures.survey(doing.awaited, where=True)
    here = answers.pop(group.rank)
    found = {rank: answers.get(rank, {"seq": -1, "awaits": ""}) for rank in doing.awaited if not group.is_gone(rank)}
    if any(answer["awaits"] and rank < group.rank for rank, answer in found.items()):
        return {}
    if all(answer["seq"] > here["seq"] for answer in found.values()):  # a stand-off, of which the group itself tells
        return {}
    return found


def _process(group: Any, rank: int) -> str:
    facts = group.peer_info[rank]
    return f"pid {facts['pid']} on {facts['host']}"


def _place(group: Any, rank: int, answer: Mapping[str, Any]) -> str:
    if "place" not in answer:
        return (stopped(group.peer_info[rank]["pid"]) if rank in group.layout.here else "") or CUT_OFF
    awaits = f" and {answer['awaits']}" if answer["awaits"] else ""
    return (f"is at {answer['place']}" if answer["place"] else SILENT) + awaits
