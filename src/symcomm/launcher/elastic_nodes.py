"""Elastic nodes (``--nnodes MIN:MAX``): which launchers are alive, and which node each starts.

Launchers meet in the store at the endpoint. The one that serves it is the *first*: only it decides, and the job ends
with it. Below ``nodes/`` the store has::

    count     how many launchers have joined; each takes the next number as its own
    beat/I    launcher I's heartbeat: counts up while it lives. Then the round, while none of its ranks is in a group
              of that round, and "lost" once one of them has failed in it
    left/I    why launcher I left: DONE when its ranks succeeded
    again/R   why the ranks of round R have to start again (--restart all)
    seats/R   who takes part in round R: {launcher: node rank}
    late/R/I  the node rank of a launcher that joins round R under way (--restart failed)
    end       why the job is over
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import replace
from typing import Any, NamedTuple

from symcomm.errors import DeadlineError, PeerError, StoreConnectionError, bad_argument, format_seconds
from symcomm.launcher.job import CALL, Job
from symcomm.launcher.launch import LOOK_S, JobAttempt, StopRequest, judge, watched
from symcomm.launcher.output import Output
from symcomm.launcher.reaper import Reaper

GONE_S = 10.0  # seconds without a heartbeat after which a launcher is gone
JOIN_S = 600.0  # seconds to wait for MIN nodes, as under torchrun
DONE = "done"
OVER = "the job is over"
STORE_GONE = "the launcher that keeps the store is gone"


class NodeAssignment(NamedTuple):
    """The node that a launcher starts in a round, with the others or joining them."""

    round: int
    node_rank: int
    nodes: int
    late: bool


class ElasticNodes:
    """One launcher's view of the elastic job."""

    def __init__(self, job: Job):
        assert job.endpoint is not None and job.min_nodes is not None
        self.job, self.least, self.most = job, job.min_nodes, job.nodes
        self.store, self.is_first = _meet(*job.endpoint, job.given_token, job.admits_unauthenticated)
        self.number = self.store.add("nodes/count", 1)
        self.round = -1
        self._beats = 0
        self._looked = 0.0
        # what only the first keeps
        self._assignments: dict[int, int] = {}
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._failures = 0
        self._waiting: dict[int, int] = {}  # each launcher's beat when all began to report that none is in a group
        self._has_lost_nodes = False  # in this round
        self.beat()

    # -- everybody's part

    def beat(self, words: str = "") -> None:
        self._beats += 1
        self.store.set(f"nodes/beat/{self.number}", f"{self._beats} {words}")

    def look(self, attempt: JobAttempt | None = None) -> str:
        """Polled: why the ranks of this node must end now, or ""."""
        if time.monotonic() < self._looked + LOOK_S:
            return ""
        try:
            alone = attempt is not None and attempt.none_is_member()
            self.beat(f"{self.round} {'lost' * attempt.has_lost}" if attempt and alone else "")
            if self.is_first:
                self._decide()
            if why := self._told("end"):
                return why
            if self.round >= 0 and self._told(f"seats/{self.round + 1}"):
                return self._told(f"again/{self.round}") or "nodes came or went"
        except (PeerError, DeadlineError):
            return STORE_GONE
        finally:
            self._looked = time.monotonic()
        return ""

    def next_assignment(self, stop: StopRequest) -> NodeAssignment | str:
        """Wait for an assignment in the next round; returns it, or why there is none."""
        end = time.monotonic() + JOIN_S
        while not stop.signum:
            self.look()
            if why := self._told("end"):
                return why
            if assignment := self._find_assignment():
                self.round = assignment.round
                return assignment
            if time.monotonic() > end and self.round < 0 and not self._told("seats/0"):
                return f"fewer than {self.least} nodes came within {format_seconds(JOIN_S)}"
            time.sleep(LOOK_S / 4)
        return "stopped"

    def _find_assignment(self) -> NodeAssignment | None:
        newest = self.round + 1
        while self._told(f"seats/{newest + 1}"):
            newest += 1
        assignments = json.loads(self._told(f"seats/{newest}") or "{}")
        if str(self.number) in assignments:
            return NodeAssignment(newest, assignments[str(self.number)], len(assignments), late=False)
        if late := self._told(f"late/{newest}/{self.number}"):
            return NodeAssignment(newest, int(late), max(self.least, int(late) + 1), late=True)
        return None

    def leave(self, why: str) -> None:
        with contextlib.suppress(PeerError, DeadlineError):  # then no launcher is left to tell
            self.store.set(f"nodes/left/{self.number}", why)

    def linger(self, stop: StopRequest) -> None:
        """The first launcher stays as long as others need the store."""
        if not self.is_first:
            return
        while not stop.signum and (self._alive() & self._assignments.keys()) - {self.number}:
            self.look()
            time.sleep(LOOK_S)
        if not self._told("end"):
            self.store.set("nodes/end", OVER)
        time.sleep(2 * LOOK_S)  # so that launchers that wait for a seat can read it

    def _told(self, key: str) -> str:
        key = f"nodes/{key}"
        return bytes(self.store.get(key)).decode() if self.store.check([key]) else ""

    # -- the first one's part

    def _alive(self) -> set[int]:
        """Launchers that have not left and whose heartbeat goes on."""
        now, alive = time.monotonic(), set()
        for number in range(1, self.store.add("nodes/count", 0) + 1):
            if self._told(f"left/{number}"):
                continue
            beat = self._told(f"beat/{number}").encode()
            if number not in self._seen or self._seen[number][0] != beat:
                self._seen[number] = (beat, now)
            if now - self._seen[number][1] < GONE_S:
                alive.add(number)
        return alive

    def _decide(self) -> None:
        alive = self._alive()
        if any(self._told(f"left/{number}") == DONE for number in self._assignments):
            return  # the others will soon be done, too
        if not self._assignments:
            if len(alive) >= self.least:
                self._assign(0, alive)
            return
        if self._told(f"seats/{self.round + 1}"):
            return  # the next round is on its way
        playing = alive & self._assignments.keys()
        if len(alive) < self.least:
            allowed = f"--nnodes {self.least}:{self.most}"
            words = f"{len(alive)} of {len(self._assignments)} nodes are left, less than {allowed} allows"
            self.store.set("nodes/end", words)
        elif self.job.restart == "failed" and not self._is_deserted(playing):
            self._has_lost_nodes = self._has_lost_nodes or len(playing) < len(self._assignments)
            self._assignments = {number: self._assignments[number] for number in playing}
            self._let_in(sorted(alive - playing))
        elif self.job.restart == "failed":
            self._start_over(alive, "no rank is left in a group that others could join")
        else:
            self._restart_if_needed(alive, playing)

    def _assign(self, round_: int, alive: set[int]) -> None:
        kept = sorted(alive, key=lambda number: (self._assignments.get(number, self.most), number))[: self.most]
        self._assignments = {number: place for place, number in enumerate(kept)}
        self.store.set(f"nodes/seats/{round_}", json.dumps(self._assignments))

    def _let_in(self, newcomers: list[int]) -> None:
        for number in newcomers[: self.most - len(self._assignments)]:
            place = next(p for p in range(self.most) if p not in self._assignments.values())
            self._assignments[number] = place
            self.store.set(f"nodes/late/{self.round}/{number}", str(place))

    def _is_deserted(self, playing: set[int]) -> bool:
        """Whether no rank of any node is in a group, and some were lost: the living wait for those in vain. Every
        launcher checks again after all have reported that: until then, members elsewhere may let a newcomer in."""
        beats, lost = {}, self._has_lost_nodes
        for number in playing:
            count, *words = self._told(f"beat/{number}").split()
            if words[:1] != [str(self.round)]:
                self._waiting = {}
                return False
            beats[number], lost = int(count), lost or "lost" in words
        if self._waiting.keys() != beats.keys():
            self._waiting = beats
        return lost and all(beats[number] > self._waiting[number] + 1 for number in beats)

    def _start_over(self, alive: set[int], why: str) -> None:
        if self._failures == self.job.max_restarts:
            self.store.set("nodes/end", f"{why}, and no restarts are left")
            return
        self._failures += 1
        self._waiting, self._has_lost_nodes = {}, False
        self.store.set(f"nodes/again/{self.round}", why)
        self._assign(self.round + 1, alive)

    def _restart_if_needed(self, alive: set[int], playing: set[int]) -> None:
        if why := self._told(f"again/{self.round}"):
            self._start_over(alive, why)
        elif len(playing) < len(self._assignments) or (
            len(alive) > len(playing) and len(self._assignments) < self.most
        ):
            self._assign(self.round + 1, alive)


def _meet(host: str, port: int, token: str, optional: bool) -> tuple[Any, bool]:
    """The store at the endpoint, and whether it is ours. The first launcher that can listen there serves it."""
    from symcomm.store.tcp import TCPStore

    if _is_here(host):
        with contextlib.suppress(StoreConnectionError):  # another launcher of this host was faster
            server = TCPStore(
                host, port, is_master=True, wait_for_workers=False, token=token, token_is_optional=optional
            )
            return server, True
    return TCPStore(host, port, token=token), False


def _is_here(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise bad_argument(CALL, "--rdzv-endpoint", host, f"a name with an address ({error.strerror})") from None
    for family, _, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((address[0], 0))
            return True
    return False


def launch_nodes(job: Job, output: Output) -> int:
    """Like ``launch``, for one node of an elastic job."""
    with watched(job) as (stop, reaper):
        try:
            nodes = ElasticNodes(job)
            code = _run_rounds(job, nodes, output, reaper, stop)
            nodes.linger(stop)
            return code
        except (PeerError, DeadlineError) as error:
            output.say([f"{STORE_GONE} ({error})"])
            return 1


def _run_rounds(job: Job, nodes: ElasticNodes, output: Output, reaper: Reaper, stop: StopRequest) -> int:
    code = 1
    while True:
        assignment = nodes.next_assignment(stop)
        if isinstance(assignment, str):
            output.say([f"this node does not take part: {assignment}."])
            nodes.leave(assignment)
            return 128 + stop.signum if stop.signum else 0 if assignment == OVER else code
        here = replace(job, node_rank=assignment.node_rank, nodes=max(assignment.nodes, assignment.node_rank + 1))
        attempt = JobAttempt(here, assignment.round, output, reaper, stop, nodes.look, assignment.late, nodes.store)
        attempt.run()
        failed = attempt.first_failed is not None and not attempt.first_failed.stopping
        if attempt.cut_short and not failed:
            again = nodes._told(f"seats/{nodes.round + 1}") if attempt.cut_short != STORE_GONE else ""
            output.say([f"ended the ranks of this node: {attempt.cut_short}."], bad=not again)
            if again:
                continue
            nodes.leave(attempt.cut_short)
            return 1
        code = judge(attempt, stop.signum, output)
        if code and not stop.signum and job.restart == "all":
            nodes.store.set(f"nodes/again/{nodes.round}", f"a rank of node {assignment.node_rank} failed")
            continue
        nodes.leave(f"its ranks failed (exit code {code})" if code else DONE)
        return code
