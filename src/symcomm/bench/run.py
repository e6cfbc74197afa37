"""Runs a benchmark: starts every side's ranks once, then measures them in turns.

A *side* is a library with its ranks (symcomm, gloo, mpich, openmpi); a *series* is one column of results: a peer, or
ours with tensors of one kind (ordinary, symmetric, ordinary ones in the shared heap) or with asynchronous calls, waited
for at once. All series of a case are measured one after the other, several rounds long, so that a noisy neighbour hits
them all.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from symcomm import errors
from symcomm.bench.peers import MPIS, start_of
from symcomm.bench.whereabouts import SLOW, family_of, where_are
from symcomm.errors import format_exit, format_ranks
from symcomm.types import DType

Tick = Callable[[str], None]  # called after every turn, with its name
Seen = Callable[[list[Any]], None]  # called after every part, with all figures so far

OURS = ("ordinary", "symmetric", "heap", "async")  # series of our own side; every other series is a side of that name
# Which forms a collective has: in place, out of place. The first one is what a summary shows.
PLACES = {
    "all_reduce": (True, False), "reduce": (True, False), "broadcast": (True,), "all_gather": (False, True),
    "reduce_scatter": (False, True), "gather": (False, True), "scatter": (False, True), "all_to_all": (False,),
    "barrier": (True,), "p2p": (False,), "put": (False,), "put_signal": (False,),
}  # fmt: skip
# The others' sizes count one piece per rank.
ONE_PIECE = ("all_reduce", "reduce", "broadcast", "p2p", "put", "put_signal")
WORKER = "symcomm.bench.worker"
START_DEADLINE = 60.0
ORDER_DEADLINE = 120.0  # for one order, plus the expected time of the work
FINISH_DEADLINE, KILL_DEADLINE = 3.0, 10.0


def quiet(_: Any) -> None:
    """For callers that do not follow the progress."""


@dataclass(frozen=True)
class Case:
    """One row: a collective on ``count`` elements per rank and piece; ``nbytes`` as nccl-tests counts."""

    collective: str
    nbytes: int
    count: int
    dtype: str
    op: str
    root: int
    in_place: bool


def make_cases(
    collective: str, sizes: Sequence[int], world: int, dtype: str, op: str, root: int, one_place: bool
) -> list[Case]:
    """The rows of one collective: every size, in every form it has."""
    if collective == "barrier":
        return [Case("barrier", 0, 0, dtype, op, root, True)]
    places = PLACES[collective][:1] if one_place else PLACES[collective]
    pieces = 1 if collective in ONE_PIECE else world
    item = DType[dtype.upper()].itemsize
    counts = dict.fromkeys(max(1, nbytes // (item * pieces)) for nbytes in sizes)
    return [Case(collective, n * item * pieces, n, dtype, op, root, place) for n in counts for place in places]


@dataclass(frozen=True)
class Effort:
    """How long to measure: ``rounds`` turns of every series, each of ``repetitions`` that last about ``seconds``."""

    rounds: int = 3
    repetitions: int = 3
    seconds: float = 0.025
    iterations: int = 0  # 0: as many as fill ``seconds``
    warmup: int = 5
    check: bool = True


@dataclass
class CaseResult:
    """What one series did in one case. ``seconds`` is None if it cannot do it; ``reason`` says why."""

    case: Case
    series: str
    seconds: float | None = None
    fastest: float | None = None
    wrong: int | None = None
    iterations: int = 0
    reason: str = ""
    calls: int = 0  # timed calls of ours, of all ranks
    long: int = 0  # those that took the slow path, through Python
    stood_still: bool = False  # in this case or an earlier one


# --- sides -------------------------------------------------------------------------------------------------------


@dataclass
class SideRank:
    number: int
    pid: int
    connection: socket.socket
    unread: bytes = b""


class Side:
    """The ranks of one library. They live for the whole run, and sleep unless they have an order."""

    def __init__(self, name: str, world: int, folder: Path, pinned: bool, worker: str, call: str, python: str):
        self.name, self.world, self.call = name, world, call
        self._closed = False
        self.stood_still = ""  # in what, if it has; then its ranks are gone
        self.ranks: list[SideRank] = []
        self.log = folder / f"{name}.log"
        address = str(folder / f"{name}.socket")
        start = start_of(name, world, address, str(folder / f"{name}.store"), pinned, worker, python)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen(world)
        self.processes: list[subprocess.Popen[Any]] = []
        with self.log.open("wb") as log:
            for command in start.commands:
                process = subprocess.Popen(
                    command, env=start.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
                self.processes.append(process)

    def connect(self) -> None:
        begun = time.monotonic()
        end, slow = begun + START_DEADLINE, begun + SLOW
        self.listener.settimeout(0.1)
        newcomers: list[socket.socket] = []
        while len(newcomers) < self.world:
            with contextlib.suppress(TimeoutError):
                newcomers.append(self.listener.accept()[0])
            self._check_started(end)
            if time.monotonic() > slow:
                slow = end
                self._say_slow("starting", START_DEADLINE, [])
        for connection in newcomers:
            self.ranks.append(SideRank(-1, 0, connection))
        hellos = self._answers("starting", max(1.0, end - time.monotonic()))
        for rank, hello in zip(self.ranks, hellos, strict=True):
            rank.number, rank.pid = hello["rank"], hello["pid"]
        self.ranks.sort(key=lambda rank: rank.number)

    def _check_started(self, end: float) -> None:
        gone = [p.returncode for p in self.processes if p.poll() is not None]
        if gone:
            raise self._lost(f"a process {format_exit(gone[0])} while starting")
        if time.monotonic() > end:
            raise self._late("starting", START_DEADLINE, [])

    def ask(self, what: str, order: dict[str, Any], seconds: float = 0.0) -> list[dict[str, Any]]:
        """Give every rank the order; their answers, in rank order. ``what`` is for errors."""
        self.tell(order)
        return self.hear(what, seconds)

    def hear(self, what: str, seconds: float = 0.0) -> list[dict[str, Any]]:
        """The answers to an order."""
        answers = self._answers(what, ORDER_DEADLINE + 5 * seconds)
        for rank, answer in zip(self.ranks, answers, strict=True):
            if "error" in answer:
                raise errors.SymcommError(f"{self.call}: {self.name} rank {rank.number}, {what}: {answer['error']}")
        return answers

    def tell(self, order: dict[str, Any]) -> None:
        line = json.dumps(order).encode() + b"\n"
        for rank in self.ranks:
            with contextlib.suppress(OSError):  # a dead rank is noticed, and named, when its answer is read
                rank.connection.sendall(line)

    def _answers(self, what: str, seconds: float) -> list[dict[str, Any]]:
        begun = time.monotonic()
        end, slow = begun + seconds, begun + SLOW
        got: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for index, rank in enumerate(self.ranks):
                selector.register(rank.connection, selectors.EVENT_READ, index)
            while len(got) < len(self.ranks):
                ready = selector.select(max(0.0, min(slow, end) - time.monotonic()))
                missing = [rank for i, rank in enumerate(self.ranks) if i not in got]
                if not ready and time.monotonic() >= end:
                    raise self._late(what, seconds, missing)
                if not ready:
                    slow = end
                    self._say_slow(what, seconds, missing)
                for key, _ in ready:
                    answer = self._read_line(self.ranks[key.data], what)
                    if answer is not None:
                        got[key.data] = answer
                        selector.unregister(key.fileobj)
        return [got[index] for index in range(len(self.ranks))]

    def _say_slow(self, what: str, seconds: float, missing: Sequence[SideRank]) -> None:
        numbers = [rank.number for rank in missing if rank.pid]
        who = f", rank {format_ranks(numbers)}" if numbers else ""
        words = f"{self.name} has not answered for {SLOW:g} s: {what}{who}; it has {seconds:g} s"
        print(f"# {self.call}: {words}", file=sys.stderr, flush=True)

    def _late(self, what: str, seconds: float, missing: Sequence[SideRank]) -> errors.DeadlineError:
        """The error for ranks that stand still, with where they are; before they have said who they are, for all."""
        known = {f"rank {rank.number}": rank.pid for rank in missing if rank.pid}
        pids = known or {f"process {i}": pid for i, pid in enumerate(family_of([p.pid for p in self.processes]))}
        numbers = [rank.number for rank in missing if rank.pid]
        fix = f"Where {'it is' if len(pids) == 1 else 'they are'}:\n{where_are(pids, self.log)}"
        return errors.deadline(f"{self.call}: {self.name}, {what}", seconds, missing=numbers, fix=fix)

    def _read_line(self, rank: SideRank, what: str) -> dict[str, Any] | None:
        try:
            data = rank.connection.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            who = f"rank {rank.number} (pid {rank.pid})" if rank.pid else "a rank"
            raise self._lost(f"{who} {self._how_it_ended(rank)} while {what}")
        rank.unread += data
        line, newline, rest = rank.unread.partition(b"\n")
        if not newline:
            return None
        rank.unread = rest
        return json.loads(line)

    def _how_it_ended(self, rank: SideRank) -> str:
        """How a rank ended. An MPI's ranks are children of its launcher, which alone knows."""
        for process in self.processes:
            if process.pid == rank.pid:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return format_exit(process.wait(5))
        return "went away"

    def _lost(self, what: str) -> errors.RankFailedError:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        words = f" Its last line was: {lines[-1]}" if lines else ""
        return errors.RankFailedError(f"{self.call}: {self.name}: {what}.{words}")

    def close(self) -> None:
        """End every process of the side. Ranks end when their connection does; what is left is killed."""
        if self._closed:
            return
        self._closed = True
        if self.name in MPIS and not self.stood_still:  # MPICH leaves files in /dev/shm otherwise
            self.tell({"do": "finish"})
            with contextlib.suppress(errors.SymcommError):  # a rank is dead or stuck
                self._answers("it ends", FINISH_DEADLINE)
        for rank in self.ranks:
            rank.connection.close()
        self.listener.close()
        end = time.monotonic() + 3.0
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
                process.wait(KILL_DEADLINE)


@contextlib.contextmanager
def open_sides(
    names: Sequence[str], world: int, pinned: bool = True, worker: str = WORKER, call: str = "symcomm bench",
    pythons: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[dict[str, Side]]:  # fmt: skip
    """Start the ranks of every side, running the module ``worker``; all are gone afterwards, whatever happened.

    ``call`` is who failed, in the words of an error. ``pythons``: the interpreters of sides that do not run on ours."""
    folder = Path(tempfile.mkdtemp(prefix="symcomm-bench-"))
    sides: dict[str, Side] = {}
    try:
        for name in names:
            sides[name] = Side(name, world, folder, pinned, worker, call, pythons.get(name, sys.executable))
        for side in sides.values():
            side.connect()
        yield sides
    finally:
        for side in sides.values():
            side.close()
        shutil.rmtree(folder, ignore_errors=True)


# --- measuring ---------------------------------------------------------------------------------------------------


@dataclass
class _Series:
    """One column of one case while it is measured."""

    side: Side
    number: int  # the case's number on that side
    result: CaseResult
    effort: Effort
    what: str
    means: list[float] = field(default_factory=list)  # seconds of one call: the slowest rank's mean, per repetition

    def ask(self, do: str, seconds: float = 0.0, **more: Any) -> list[dict[str, Any]]:
        return self.side.ask(self.what, {"do": do, "case": self.number, **more}, seconds)

    def attempt(self, act: Callable[..., Any], *args: Any) -> None:
        """``act(*args)`` unless the side stands still; a side that does is named, ended and left out from then on."""
        side, result = self.side, self.result
        try:
            if not side.stood_still:
                act(*args)
        except errors.DeadlineError as error:
            print(f"# {error}", file=sys.stderr, flush=True)
            side.stood_still = self.what
            side.close()
        if side.stood_still:
            result.stood_still, result.reason = True, f"stood still in {side.stood_still}"

    def prepare(self) -> None:
        kind = self.result.series if self.result.series in OURS else "ordinary"
        answers = self.ask("prepare", spec=asdict(self.result.case) | {"kind": kind})
        self.result.reason = next((a["unsupported"] for a in answers if "unsupported" in a), "")

    def calibrate(self) -> None:
        """Check values, then find out how many calls make a repetition."""
        if self.result.reason:
            return
        if self.effort.check:
            self.result.wrong = sum(answer["wrong"] for answer in self.ask("check"))
        self.result.iterations = self.effort.iterations or calls_that_fill(
            self.effort.seconds, self._try, 2, 20_000, 4096
        )

    def _try(self, calls: int) -> float:
        return calls * min(self.time(calls, 2, self.effort.warmup if calls == 2 else 0))

    def take_turn(self) -> None:
        count, effort = self.result.iterations, self.effort
        warmup, expected = effort.warmup if count > 10 else 1, effort.seconds * effort.repetitions
        self.means += self.time(count, effort.repetitions, warmup, expected)

    def time(self, iterations: int, repetitions: int, warmup: int, expect: float = 0.0) -> list[float]:
        answers = self.ask("time", expect, iterations=iterations, repetitions=repetitions, warmup=warmup)
        self.result.calls += sum(answer.get("calls", 0) for answer in answers)
        self.result.long += sum(answer.get("long", 0) for answer in answers)
        return [max(ns) / 1e9 for ns in zip(*(answer["ns"] for answer in answers), strict=True)]


def measure(
    sides: dict[str, Side], case: Case, series: Sequence[str], effort: Effort, tick: Callable[[], None] = lambda: None
) -> list[CaseResult]:
    """Every series of one case: values first, then time, in turns. ``tick`` is called after every turn."""
    what = f"{case.collective} of {case.nbytes} bytes"
    columns = [
        _Series(sides["symcomm" if name in OURS else name], number, CaseResult(case, name), effort, what)
        for number, name in enumerate(series)
    ]
    for column in columns:
        column.attempt(column.prepare)
    for column in columns:
        column.attempt(column.calibrate)
    for _ in range(effort.rounds):
        for column in [column for column in columns if not column.result.reason]:
            column.attempt(column.take_turn)
            tick()
    for column in columns:
        column.attempt(column.ask, "drop")
        if column.means and not column.result.stood_still:
            column.result.seconds = statistics.median(column.means)
            column.result.fastest = min(column.means)
    return [column.result for column in columns]


def calls_that_fill(seconds: float, took: Callable[[int], float], fewest: int, most: int, tried: int) -> int:
    """How many calls take ``seconds``. ``took``: how long so many do; with ``tried`` or more it is asked no more."""
    calls = fewest
    while True:
        spent = took(calls)
        if spent > seconds / 8 or calls >= tried:
            return max(fewest, min(most, round(calls * seconds / max(spent, 1e-9))))
        calls *= 8
