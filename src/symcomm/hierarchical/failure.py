"""What went wrong on a group across hosts, in words, the same on every rank.

Whoever cannot go on asks all ranks what they are doing, words the answer once, and tells everybody; the first story
that reaches a rank is the one it raises. A rank that dies is told about by its own host, where the kernel knows how it
ended; a host that vanishes, by the others.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.errors import words_for_ranks, words_for_seconds
from symcomm.group.failure import Status, how_it_ended
from symcomm.hierarchical.session import Refused

__all__ = ["Stopped", "Trouble"]

SURVEY = 0.4  # seconds for everybody's answer; a living rank answers within a few milliseconds
REACH = 1.5  # seconds for a connection to a rank that was not spoken to before; a lost packet is sent again after 1
NEWS = 0.5  # how long a rank whose host was aborted waits for the story


class Stopped(Exception):
    """An operation cannot go on; the group's trouble knows why."""


class Trouble:
    """The failures of one group. ``verdict`` is the story that counts, once there is one."""

    def __init__(self, group: Any):
        self._ref = weakref.ref(group)  # a group that is forgotten goes away at once
        self.verdict: dict[str, Any] | None = None
        self._answers: dict[int, dict[str, Any]] = {}
        self._survey = 0
        self._lock = threading.RLock()

    @property
    def _group(self) -> Any:
        return self._ref()

    # --- asking -----------------------------------------------------------------------------------------------

    def ask_everybody(self) -> dict[int, dict[str, Any]]:
        """What each rank that answers is doing; finds out who cannot be reached."""
        group = self._group
        with self._lock:
            self._survey += 1
            number, self._answers = self._survey, {}
        ask = {"kind": "ask", "survey": number}
        with ThreadPoolExecutor(16, thread_name_prefix="symcomm-ask") as pool:
            asked = [r for r in range(group.size) if r != group.rank and not group.is_gone(r)]
            list(pool.map(lambda r: group.tell(r, ask, timeout=REACH), asked))
        deadline = time.monotonic() + SURVEY
        while time.monotonic() < deadline and any(r not in self._answers and not group.is_gone(r) for r in asked):
            time.sleep(0.002)
        return {group.rank: self.own_answer(), **self._answers}

    def own_answer(self) -> dict[str, Any]:
        group = self._group
        seq, call, site = group.doing
        return {"seq": seq, "call": call, "site": site, "ended": self._ended_here()}

    def _ended_here(self) -> dict[str, str]:
        """How ranks of this host ended, by their number."""
        group, ended = self._group, {}
        for seen in native.group_report(group.local._handle)["ranks"]:
            if seen["gone"] == Status.DEAD:
                ended[str(group.layout.here[seen["rank"]])] = how_it_ended(group.local._peers[seen["rank"]].pid)
            elif seen["gone"] == Status.LEFT:
                ended[str(group.layout.here[seen["rank"]])] = "left the group"
        return ended

    def answer(self, rank: int, header: dict[str, Any]) -> None:
        """Somebody asks. Looking how a process ended may take a moment, which the office does not have."""

        group = self._group

        def reply() -> None:
            group.tell(rank, {"kind": "answer", "survey": header["survey"], **self.own_answer()}, timeout=REACH)

        threading.Thread(target=reply, name="symcomm-answer", daemon=True).start()

    def note_answer(self, rank: int, header: dict[str, Any]) -> None:
        if header["survey"] == self._survey:
            self._answers[rank] = header

    # --- wording ----------------------------------------------------------------------------------------------

    def gone(self, ranks: Collection[int]) -> None:
        """``ranks``, and maybe others, died, left or cannot be reached."""
        if self.verdict is not None:
            return
        group, answers = self._group, self.ask_everybody()
        how: dict[int, str] = {}
        for answer in answers.values():
            how.update({int(rank): words for rank, words in answer["ended"].items()})
        lost = {r for r in range(group.size) if group.is_gone(r)} | set(ranks)
        lost |= {r for r, words in how.items() if words != "left the group"}
        lost.discard(group.rank)
        self._spread("gone", self._story_of_lost(lost, how), sorted(lost))

    def _story_of_lost(self, lost: Collection[int], how: dict[int, str]) -> str:
        group, parts = self._group, []
        for h, ranks in enumerate(group.layout.hosts):
            missing = [r for r in ranks if r in lost]
            if len(missing) == len(ranks) > 0 and not any(r in how or r in group.left for r in missing):
                noun = "rank" if len(missing) == 1 else "ranks"
                name = group.cards[ranks[0]]["host"]
                parts.append(f"host {h} ({name}) with {noun} {words_for_ranks(missing)} cannot be reached any more")
                continue
            for r in missing:
                words = how.get(r) or ("left the group" if r in group.left else "is gone")
                parts.append(f"rank {r} (pid {group.cards[r]['pid']}) {words}")
        return "; ".join(parts)

    def late(self, seq: int, seconds: float, whom: Collection[int]) -> None:
        """A deadline passed while waiting for ``whom``."""
        if self.verdict is not None:
            return
        group, answers = self._group, self.ask_everybody()
        behind = [r for r, answer in answers.items() if answer["seq"] < seq]
        silent = [r for r in range(group.size) if r not in answers]
        missing = sorted({*behind, *silent})
        if missing:
            arrived = [r for r in range(group.size) if r not in missing]
            last = [f"rank {r} was last seen {_last_seen(answers[r])}" for r in behind[:4]]
            last += [f"rank {r} does not answer (stopped, or cut off?)" for r in silent[:4]]
            story = f"did not come: {words_for_ranks(missing)}; arrived: {words_for_ranks(arrived)}; {'; '.join(last)}"
        else:
            missing = sorted(whom)
            story = f"all arrived, but rank {words_for_ranks(missing)} did not go on (stopped, or a slow network?)"
        self._spread("late", story, missing, seconds)

    def mismatch(self) -> None:
        """Ranks made different calls."""
        if self.verdict is not None:
            return
        sides: dict[str, list[int]] = {}
        answers, seq = self.ask_everybody(), self._group.doing[0]
        for rank, answer in sorted(answers.items()):
            side = f"{answer['call']} at {answer['site']}" if answer["seq"] >= seq else "nothing yet"
            sides.setdefault(side, []).append(rank)
        listed = "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {words_for_ranks(ranks)} called {side}"
            for side, ranks in sides.items()
        )
        self._spread("mismatch", listed, sorted(answers))

    def cut_off(self, ranks: Collection[int], reason: BaseException) -> None:
        """The engine lost ``ranks`` though they live, or they sent what they should not."""
        if self.verdict is not None:
            return
        first = str(reason).strip().splitlines()[0] if str(reason).strip() else type(reason).__name__
        by = "" if isinstance(reason, Refused) else f"{self._group.engine_name}: "
        story = f"the connection to rank {words_for_ranks(ranks)} broke ({by}{first})"
        self._spread("gone", story, sorted(ranks))

    def end(self) -> None:
        """This rank leaves: its own waits end, nobody is told."""
        with self._lock:
            if self.verdict is None:
                self.verdict = {"fault": "aborted", "story": "", "ranks": [], "origin": self._group.rank}
        self._group.ring()

    def abort(self) -> None:
        self._spread("aborted", "", [self._group.rank])

    # --- telling ----------------------------------------------------------------------------------------------

    def _spread(self, kind: str, story: str, ranks: list[int], seconds: float = 0.0) -> None:
        group = self._group
        verdict = {
            "kind": "fail", "fault": kind, "story": story, "ranks": ranks, "origin": group.rank, "seconds": seconds,
        }  # fmt: skip
        if not self.accept(verdict):
            return
        for rank in range(group.size):
            if rank != group.rank and not group.is_gone(rank):
                group.tell(rank, verdict, timeout=REACH)

    def accept(self, verdict: dict[str, Any]) -> bool:
        """Take a story for the one that counts; False when there is one already. Ends all waits of this rank."""
        with self._lock:
            if self.verdict is not None:
                return False
            native.group_abort(self._group.local._handle)  # before a caller can know, and use its tensors anew
            self._group.stop_engine()
            self.verdict = verdict
        self._group.ring()
        return True

    def await_news(self) -> None:
        """Our host was told to stop: the reason is on its way, unless somebody just aborted the local group."""
        deadline = time.monotonic() + NEWS
        while self.verdict is None and time.monotonic() < deadline:
            time.sleep(0.001)
        if self.verdict is None:
            self.abort()

    def error(self, what: str, seconds: float) -> errors.SymcommError:
        """The verdict as this rank's exception. ``what``: the call, its number and its group."""
        verdict: Any = self.verdict
        group, story, ranks = self._group, verdict["story"], verdict["ranks"]
        if verdict["fault"] == "gone":
            left = [r for r in range(group.size) if r not in ranks]
            return errors.RankFailedError(
                f"{what} failed on rank {group.rank} after {words_for_seconds(seconds)}: {story}. "
                f"Survivors: {words_for_ranks(left)}. Call group.shrink() to go on without it.",
                ranks,
            )
        if verdict["fault"] == "late":
            who = "" if verdict["origin"] == group.rank else f" (rank {verdict['origin']}'s deadline)"
            return errors.DeadlineError(
                f"{what} timed out on rank {group.rank} after {words_for_seconds(seconds)}{who}: {story}. "
                "Look at what the missing ranks do, or give a longer timeout to the call.",
                ranks,
            )
        if verdict["fault"] == "mismatch":
            return errors.CollectiveMismatchError(
                f"{what}: the ranks did not make the same call: {story}. Make every rank call the same collectives, "
                "with the same dtype, count, operation and root, in the same order."
            )
        return errors.GroupUnusableError(
            f"{what} was aborted by rank {verdict['origin']}; destroy the group, or call group.shrink() to go on."
        )


def _last_seen(answer: dict[str, Any]) -> str:
    return f"after {answer['call']} #{answer['seq']}" if answer["seq"] else "before its first operation"
