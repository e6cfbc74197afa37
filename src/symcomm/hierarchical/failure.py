"""Failures of a group across hosts, described the same on every rank.

A rank that cannot go on asks all others what they are doing, describes the failure, and broadcasts the description;
every rank raises the first one that reaches it. A dead rank's own host reports it, since its kernel knows how the rank
ended; the other hosts report a host that vanished.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any

from symcomm import errors
from symcomm.errors import format_ranks
from symcomm.group import hooks
from symcomm.group.failure import Status, how_it_ended
from symcomm.group.failure_words import aborted, list_calls, mismatched, rank_failed, timed_out
from symcomm.group.state import GroupState
from symcomm.hierarchical.engines.base import Transfer
from symcomm.hierarchical.session import ProtocolViolation

SURVEY = 0.4  # seconds for all answers; a living rank answers within a few milliseconds
REACH = 1.5  # seconds to connect to a rank; a lost packet is sent again after 1
VERDICT_WAIT = 0.5  # seconds that a rank whose host was aborted waits for the reason
ENGINE_GRACE = 1.0  # seconds for the control channel to learn which rank is gone, when the engine noticed first


class OperationStopped(Exception):
    """An operation cannot go on; the group's ``failures`` knows why."""


class OperationRefused(Exception):
    """A rank refused its call; ``told``: its words. ``is_news``: the other ranks of this host do not know yet."""

    def __init__(self, told: bytes | None, is_news: bool = False):
        super().__init__()
        self.told, self.is_news = told, is_news


class Failures:
    """The failures of one group. ``verdict`` is the failure that all ranks raise, once there is one."""

    def __init__(self, group: Any):
        self._group: Callable[[], Any] = weakref.ref(group)  # must not keep the group alive
        self.verdict: dict[str, Any] | None = None
        self._answers: dict[int, dict[int, dict[str, Any]]] = {}  # survey number -> rank -> answer
        self._surveys = itertools.count(1)
        self._lock = threading.RLock()

    # --- surveys ----------------------------------------------------------------------------------------------

    def survey(self, ranks: Collection[int] | None = None, where: bool = False) -> dict[int, dict[str, Any]]:
        """Ask ``ranks``, or all, what they are doing; with ``where``, also where in its program each is. Returns the
        answers by rank, and notices ranks that cannot be reached."""
        group, number = self._group(), next(self._surveys)
        answers = self._answers[number] = {}
        ask = {"kind": "ask", "survey": number, "where": where}
        asked = [r for r in (range(group.size) if ranks is None else ranks) if r != group.rank and not group.is_gone(r)]
        group.tell_all(asked, ask, timeout=REACH)
        deadline = time.monotonic() + SURVEY
        while time.monotonic() < deadline and any(r not in answers and not group.is_gone(r) for r in asked):
            time.sleep(0.002)
        del self._answers[number]
        return {group.rank: self._own_answer(where), **answers}

    def _own_answer(self, where: bool) -> dict[str, Any]:
        group = self._group()
        seq, call, site = group.doing
        ended, place = self._ended_here(), hooks.place_of(group.arena.thread) if where else ""
        return {"seq": seq, "call": call, "site": site, "awaits": group.waits.words(), "ended": ended, "place": place}

    def _ended_here(self) -> dict[str, str]:
        """Rank -> how it ended, for the ranks of this host."""
        local = self._group().local  # None while the group is being made
        gone = {} if local is None else local.gone()
        pids = dict(zip(local.here, (peer.pid for peer in local.peers), strict=True)) if gone else {}
        return {str(r): how_it_ended(pids[r]) if how == Status.DEAD else "left the group" for r, how in gone.items()}

    def answer(self, rank: int, header: dict[str, Any]) -> None:
        """Answer a survey, in a thread: to find out how a process ended takes too long for the channel's."""
        group = self._group()

        def reply() -> None:
            own = self._own_answer(header["where"])
            group.tell(rank, {"kind": "answer", "survey": header["survey"], **own}, timeout=REACH)

        try:
            threading.Thread(target=reply, name="symcomm-answer", daemon=True).start()
        except RuntimeError:  # no thread could be started
            reply()

    def note_answer(self, rank: int, header: dict[str, Any]) -> None:
        if (answers := self._answers.get(header["survey"])) is not None:
            answers[rank] = header

    # --- describing failures ----------------------------------------------------------------------------------

    def gone(self, ranks: Collection[int]) -> None:
        """Record that ``ranks``, and maybe others, died, left or cannot be reached."""
        if self.verdict is not None:
            return
        group, answers = self._group(), self.survey()
        how: dict[int, str] = {}
        for answer in answers.values():
            how.update({int(rank): words for rank, words in answer["ended"].items()})
        lost = {r for r in range(group.size) if group.is_gone(r)} | set(ranks)
        lost |= {r for r, words in how.items() if words != "left the group"}
        lost.discard(group.rank)
        self._spread("gone", self._describe_lost(lost, how), sorted(lost))

    def _describe_lost(self, lost: Collection[int], how: dict[int, str]) -> str:
        group, parts = self._group(), []
        for h, ranks in enumerate(group.layout.hosts):
            missing = [r for r in ranks if r in lost]
            if len(missing) == len(ranks) > 0 and not any(r in how or r in group.left for r in missing):
                noun = "rank" if len(missing) == 1 else "ranks"
                name = group.peer_info[ranks[0]]["host"]
                parts.append(f"host {h} ({name}) with {noun} {format_ranks(missing)} cannot be reached any more")
                continue
            for r in missing:
                words = how.get(r) or ("left the group" if r in group.left else "is gone")
                parts.append(f"rank {r} (pid {group.peer_info[r]['pid']}) {words}")
        return "; ".join(parts)

    def late(
        self, seq: int | None, seconds: float, whom: Collection[int], has_ended: Callable[[], bool] = lambda: False
    ) -> None:
        """Record that a deadline passed while this rank waited for ``whom`` in operation ``seq`` (None: in a message
        that was half way), unless ``has_ended()`` says that the operation ended after all."""
        if self.verdict is not None:
            return
        group, answers = self._group(), self.survey()
        if has_ended():
            return
        behind = [r for r, answer in answers.items() if seq is not None and answer["seq"] < seq]
        silent = [r for r in range(group.size) if r not in answers]
        missing = sorted({*behind, *silent})
        if missing:
            arrived = [r for r in range(group.size) if r not in missing]
            last = [f"rank {r} was last seen {_last_seen(answers[r])}" for r in behind[:4]]
            last += [f"rank {r} does not answer (stopped, or cut off?)" for r in silent[:4]]
            story = f"did not come: {format_ranks(missing)}; arrived: {format_ranks(arrived)}; {'; '.join(last)}"
        elif seq is not None:
            missing = sorted(whom)
            story = f"all arrived, but rank {format_ranks(missing)} did not go on (stopped, or a slow network?)"
        else:
            missing = sorted(whom)
            why = group.waits.explain(whom, answers, f"rank {group.rank}") or "stopped, or a slow network?"
            story = f"rank {format_ranks(missing)} did not go on when the message was half way ({why})"
        self._spread("late", story, missing, seconds)

    def mismatch(self) -> None:
        """Record that ranks made different calls."""
        if self.verdict is not None:
            return
        sides: dict[str, list[int]] = {}
        answers, seq = self.survey(), self._group().doing[0]
        for rank, answer in sorted(answers.items()):
            side = f"{answer['call']} at {answer['site']}" if answer["seq"] >= seq else "nothing yet"
            sides.setdefault(side, []).append(rank)
        self._spread("mismatch", list_calls(sides), sorted(answers))

    def cut_off(self, ranks: Collection[int], reason: BaseException) -> None:
        """Record that the engine lost ``ranks`` though they live, or that they broke the protocol."""
        if self.verdict is not None:
            return
        first = str(reason).strip().splitlines()[0] if str(reason).strip() else type(reason).__name__
        by = "" if isinstance(reason, ProtocolViolation) else f"{self._group().engine_name}: "
        story = f"the connection to rank {format_ranks(ranks)} broke ({by}{first})"
        self._spread("gone", story, sorted(ranks))

    def on_transfer_error(self, transfer: Transfer) -> None:
        """The engine failed: either a rank is gone, which the control channel will notice, too, or the engine has a
        reason of its own."""
        deadline = time.monotonic() + ENGINE_GRACE
        while self.verdict is None and time.monotonic() < deadline:
            gone = [r for r in transfer.peers if self._group().is_gone(r)]
            if gone:
                self.gone(gone)
                return
            time.sleep(0.005)
        assert transfer.error is not None
        self.cut_off(transfer.peers, transfer.error)

    def end(self) -> None:
        """End this rank's own waits, since it leaves. Peers are not told why."""
        with self._lock:
            if self.verdict is None:
                self.verdict = {"fault": "aborted", "story": "", "ranks": [], "origin": self._group().rank}
        self._group().notify()

    def abort(self) -> None:
        self._spread("aborted", "", [self._group().rank])

    # --- spreading the verdict --------------------------------------------------------------------------------

    def _spread(self, kind: str, story: str, ranks: list[int], seconds: float = 0.0) -> None:
        group = self._group()
        verdict = {
            "kind": "fail", "fault": kind, "story": story, "ranks": ranks, "origin": group.rank, "seconds": seconds,
        }  # fmt: skip
        if not self.accept(verdict):
            return
        for rank in range(group.size):
            if rank != group.rank and not group.is_gone(rank):
                group.tell(rank, verdict, timeout=REACH)

    def accept(self, verdict: dict[str, Any]) -> bool:
        """Make this the verdict, unless there is one already (False). Ends all waits of this rank."""
        with self._lock:
            if self.verdict is not None:
                return False
            if self._group().local is not None:
                self._group().local.handle.abort()  # before a caller learns of the failure and reuses its tensors
            self._group().stop_engine()
            self.verdict = verdict
        self._group().notify()
        return True

    def await_verdict(self) -> None:
        """Wait for the verdict after this host's group was aborted. If none comes, a caller has aborted that group."""
        deadline = time.monotonic() + VERDICT_WAIT
        while self.verdict is None and time.monotonic() < deadline:
            time.sleep(0.001)
        if self.verdict is None:
            self.abort()

    def error(self, what: str, seconds: float) -> errors.SymcommError:
        """The verdict as this rank's exception. ``what``: the call, its number and its group."""
        verdict: Any = self.verdict
        group, story, ranks = self._group(), verdict["story"], verdict["ranks"]
        if verdict["fault"] == "gone":
            return rank_failed(what, group.rank, group.size, seconds, story, ranks)
        if verdict["fault"] == "late":
            return timed_out(what, group.rank, seconds, verdict["origin"], story, ranks)
        return mismatched(what, story) if verdict["fault"] == "mismatch" else aborted(what, verdict["origin"])


class HierarchicalState(GroupState):
    """The state of a group across hosts. The group has failed once there is a verdict."""

    __slots__ = ("doing", "failures", "since")
    failures: Failures
    doing: tuple[int, str, str]  # sequence number, call and call site of the last operation
    since: float  # when it began; 0: it has ended

    def check_usable(self) -> None:
        """The first call after a peer's failure raises its description; later ones refer to it."""
        verdict = self.failures.verdict
        if self.failure is None and verdict is not None and verdict["fault"] != "gone":
            raise self.fail_operation(f"an operation on group {self.name!r}", 0.0)
        super().check_usable()

    def let_go(self) -> None:
        group: Any = self.whole()
        if group is not None:
            group.let_go()
        super().let_go()

    def fail_operation(self, what: str, seconds: float) -> errors.SymcommError:
        """This rank's exception for a failure that ``failures`` has recorded. Do not hold the group's ``cond`` here:
        operations need it to end."""
        return self.fail(lambda: self.failures.error(what, seconds))


def _last_seen(answer: dict[str, Any]) -> str:
    last = f"after {answer['call']} #{answer['seq']}" if answer["seq"] > 0 else "before its first operation"
    return f"{last} and {answer['awaits']}" if answer["awaits"] else last
