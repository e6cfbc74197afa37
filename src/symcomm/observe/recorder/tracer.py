"""Writes a rank's dump when something fails; loaded when the environment asks for dumps (see dump.py).

A rank that sees an operation fail writes at once. A rank that hangs in its program does not see that its peers gave up
on it: a thread writes its dump, with stacks that show where it hangs. For a rank that died or is stopped, a peer writes
what that rank's memory holds. Ranks that saw the failure wait a moment for the others' dumps before they raise, because
a launcher ends all ranks once the first has ended.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from typing import Any

from symcomm.group import hooks
from symcomm.group.failure import Status, how_it_ended
from symcomm.observe.recorder.dump import note, prefix_from_environment, write
from symcomm.observe.recorder.processes import process_state
from symcomm.observe.recorder.records import on_this_host
from symcomm.observe.recorder.stacks import thread_stacks
from symcomm.observe.recorder.trace import RankTrace

LOOK = 0.1  # seconds between two polls of the thread
GRACE = 0.2  # seconds for a rank to see a failure by itself, before the thread writes
OTHERS = 2.0  # seconds that a rank waits for the others' dumps


class _TracedRank:
    """A rank of this process; there are several if threads are ranks."""

    def __init__(self, rank: int, arena: Any):
        self.rank = rank
        self.arena = arena
        self.thread = threading.get_ident()
        self.errors: list[str] = []
        self.groups: weakref.WeakSet[Any] = weakref.WeakSet()
        self.suspicion: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()  # when first seen to fail
        self.written: weakref.WeakSet[Any] = weakref.WeakSet()  # groups whose failure is in the dump


class Tracer:
    """All ranks of this process, and the thread that watches them."""

    def __init__(self, prefix: str):
        self.prefix = prefix
        self.started_wall_ns = time.time_ns()
        self._pid = os.getpid()
        self._ranks: dict[bytes, _TracedRank] = {}  # by the nonce of the arena
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def group_made(self, group: Any) -> None:
        with self._lock:
            mine = self._ranks.get(group.arena.nonce)
            if mine is None:
                mine = self._ranks[group.arena.nonce] = _TracedRank(group.global_ranks[group.rank], group.arena)
            mine.groups.add(group)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, name="symcomm-tracer", daemon=True)
                self._thread.start()

    def group_failed(self, group: Any, error: BaseException) -> None:
        mine = self._ranks.get(group.arena.nonce)
        if mine is None:
            return
        mine.errors.append(str(error))
        self._write(mine, group)
        self._await_others(mine, group)

    # --- writing ---------------------------------------------------------------------------------------------------

    def _write(self, mine: _TracedRank, group: Any) -> None:
        """Write this rank's dump, and those of peers that can no longer write theirs."""
        with self._lock:
            mine.written.add(group)
            trace = self._note(mine)
            timeouts = {g.name: int(g.timeout * 1000) for g in mine.groups}
            try:
                write(trace, f"{self.prefix}{trace.rank}", timeouts_ms=timeouts)
                for peer in self._silent_peers(group):
                    self._write_for(peer, mine)
            except OSError as error:
                print(f"symcomm: the dump of rank {mine.rank} could not be written: {error}", file=sys.stderr)

    def _note(self, mine: _TracedRank) -> RankTrace:
        address = mine.arena.flight.address
        trace = note(mine.rank, self._pid, address, thread_stacks(mine.thread), self.started_wall_ns)
        trace.errors = list(mine.errors)
        return trace

    def _silent_peers(self, group: Any) -> list[RankTrace]:
        """What is known of ranks of ``group`` on this host that died, left or are stopped."""
        group = on_this_host(group)
        seen = group.handle.report()["ranks"]
        found = []
        for rank, peer in enumerate(group.peers):
            gone = seen[rank]["gone"]
            if gone == Status.DEAD:
                end = how_it_ended(peer.pid)
            elif gone == Status.LEFT:
                end = "left"
            else:
                end = "stopped" if process_state(peer.pid) in ("T", "t") else ""
            if end and rank != group.rank:
                found.append(self._note_of(group.global_ranks[rank], peer, end))
        return found

    def _note_of(self, rank: int, peer: Any, end: str) -> RankTrace:
        """What the memory of a peer holds that does not write itself."""
        trace = note(rank, peer.pid, peer.flight, (), self.started_wall_ns)
        trace.end = end
        return trace

    def _write_for(self, trace: RankTrace, mine: _TracedRank) -> None:
        trace.noted_by = mine.rank
        write(trace, f"{self.prefix}{trace.rank}", replace=not self._is_fresh(trace.rank))

    def _is_fresh(self, rank: int) -> bool:
        """Whether this run has written a dump of ``rank``."""
        try:
            return os.stat(f"{self.prefix}{rank}").st_mtime_ns >= self.started_wall_ns - 1_000_000_000
        except OSError:
            return False

    def _await_others(self, mine: _TracedRank, group: Any) -> None:
        """Wait for the others' dumps, and write those of ranks that have no tracer or hold the interpreter lock."""
        group = on_this_host(group)
        deadline = time.monotonic() + OTHERS
        while time.monotonic() < deadline and not all(self._is_fresh(r) for r in group.global_ranks):
            time.sleep(0.01)
        for peer, rank in zip(group.peers, group.global_ranks, strict=True):
            if not self._is_fresh(rank):
                with contextlib.suppress(OSError):
                    self._write_for(self._note_of(rank, peer, "silent"), mine)

    # --- the thread ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while os.getpid() == self._pid:
            time.sleep(LOOK)
            with self._lock:
                ranks = list(self._ranks.items())
            for nonce, mine in ranks:
                groups = [g for g in list(mine.groups) if not g.has_left]
                if not groups and not list(mine.groups):
                    with self._lock:  # the rank has ended: release its memory
                        self._ranks.pop(nonce, None)
                for group in groups:
                    self._look_at(mine, group)

    def _look_at(self, mine: _TracedRank, group: Any) -> None:
        """Write if the group has failed and this rank did not notice by itself."""
        if group in mine.written or not group.handle.report()["status"]:
            return
        first = mine.suspicion.setdefault(group, time.monotonic())
        if time.monotonic() - first >= GRACE:
            self._write(mine, group)


_tracer: Tracer | None = None


def _current() -> Tracer | None:
    """This process's; a forked child gets its own."""
    global _tracer
    if _tracer is None or _tracer._pid != os.getpid():
        prefix = prefix_from_environment()
        _tracer = Tracer(prefix) if prefix is not None else None
    return _tracer


def _made(group: Any) -> None:
    if (tracer := _current()) is not None:
        tracer.group_made(group)


def _failed(group: Any, error: BaseException) -> None:
    if (tracer := _current()) is not None:
        tracer.group_failed(group, error)


hooks.on_group.append(_made)
hooks.on_failure.append(_failed)
