"""Faults at chosen calls, by their sentences, and a fault at every call in turn.

A sentence is ``rank 2 at all_reduce 3`` (the third all_reduce of that rank), ``rank 2 at call 5`` (its fifth call of
any kind) or ``rank 2`` (its first call); a delay goes on with ``by 0.5`` (seconds).
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from symcomm import errors
from symcomm.ops import OPS

SENTENCE = re.compile(r"rank (\d+)(?: at ([a-z_]+) (\d+))?(?: by ([\d.]+)(?: s)?)?$")
KINDS = ("kill", "stop", "raise", "delay")
ANY_CALL = "call"
SHORT = 0.2  # seconds that a delay takes which does not say, and a stop


class Killed(BaseException):
    """Ends a rank that is a thread, in place of SIGKILL."""


class Injected(RuntimeError):
    """What a scripted rank raises."""


@dataclass(frozen=True)
class Fault:
    """``kind`` happens to ``rank`` when it makes the ``number``-th call (from 1) of that ``name``; "call": of any."""

    kind: str
    rank: int
    name: str = ANY_CALL
    number: int = 1
    seconds: float = SHORT

    @classmethod
    def of(cls, kind: str, sentence: str) -> Fault:
        found = SENTENCE.match(sentence.strip())
        if found is None:
            allowed = "such as 'rank 2 at all_reduce 3', 'rank 2 at call 5' or 'rank 2 at barrier 1 by 0.5'"
            raise errors.bad_argument("symcomm.testing", kind, sentence, allowed)
        rank, name, number, seconds = found.groups()
        if name not in (None, ANY_CALL, *NAMES):
            raise errors.bad_argument("symcomm.testing", kind, name, f"'call', or one of {', '.join(sorted(NAMES))}")
        return cls(kind, int(rank), name or ANY_CALL, int(number or 1), float(seconds or SHORT))

    def __str__(self) -> str:
        by = f" by {self.seconds:g}" if self.kind == "delay" else ""
        return f"{self.kind}: rank {self.rank} at {self.name} {self.number}{by}"


BY_HOOK = {op.hook or op.op_type: op.name for op in reversed(OPS)}  # as hooks name calls
NAMES = frozenset(BY_HOOK.values())


class Faults:
    """Those of one test; ``attach`` them to a rank's group. ``counts``: without any, calls are counted all the same."""

    def __init__(self, faults: Iterable[Fault] = (), counts: bool = False):
        self.faults = tuple(faults)
        self.counts = counts

    @classmethod
    def of(cls, scripts: dict[str, Any]) -> Faults:
        """``scripts``: a sentence, or several, by kind."""
        found = []
        for kind, sentences in scripts.items():
            listed = [sentences] if isinstance(sentences, str) else list(sentences or ())
            found += [Fault.of(kind, sentence) for sentence in listed]
        return cls(found)

    def check(self, n: int, mode: str) -> None:
        for fault in self.faults:
            if fault.rank >= n:
                raise errors.bad_argument("symcomm.testing", fault.kind, str(fault), f"a rank of 0 to {n - 1}")
            if fault.kind == "stop" and mode == "threads":
                raise errors.bad_argument("symcomm.testing", "stop", str(fault), "used with mode='processes'")

    def killed(self) -> set[int]:
        return {fault.rank for fault in self.faults if fault.kind == "kill"}

    def attach(self, group: Any, rank: int, happen: Callable[[Fault], None]) -> Callable[[], list[str]]:
        """Make them happen at this rank's calls. Returns a function that lists the calls it has made."""
        if not (self.faults or self.counts):  # the hook costs a rank milliseconds
            return list
        mine = [fault for fault in self.faults if fault.rank == rank]
        calls: list[str] = []

        def before(call: Any) -> None:
            name = BY_HOOK.get(call.name.name, "")
            calls.append(name)
            counts = {ANY_CALL: len(calls), name: calls.count(name)}
            for fault in mine:
                if counts.get(fault.name) == fault.number:
                    happen(fault)

        group.register_pre_hook(HOOK, before)
        return lambda: list(calls)


HOOK = 1 << 40  # an id that programs do not use


def happen_in_thread(fault: Fault) -> None:
    if fault.kind == "kill":
        raise Killed
    happen(fault, lambda seconds: None)


def happen(fault: Fault, stopping: Callable[[float], None]) -> None:
    """In a process. ``stopping(seconds)`` announces a stop to whoever continues the process afterwards."""
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    elif fault.kind == "stop":
        stopping(fault.seconds)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "raise":
        raise Injected(str(fault))
    else:
        time.sleep(fault.seconds)


# --- a fault at every call -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tried:
    """What ``every_fault`` did: the faults, in their order, and the calls of groups that the test never made."""

    seed: int
    faults: tuple[Fault, ...]
    never_made: tuple[str, ...]


def every_fault(
    test: Callable[..., Any],
    n: int = 2,
    *,
    kinds: Iterable[str] = ("kill", "stop", "delay"),
    allowed: tuple[type[BaseException], ...] = (errors.SymcommError,),
    mode: str = "processes",
    seed: int | None = None,
    at_most: int | None = None,
    deadline: float = 30.0,
) -> Tried:
    """Run ``test(group)`` on ``n`` ranks once without a fault, and then with one at each call of each rank, in an
    order that follows from ``seed``; ``at_most`` so many of them.

    With a fault a rank may raise what is ``allowed``, or return. Whatever else it does, such as a wrong assertion or
    a hang, raises RanksFailed, whose text has the fault and the seed."""
    from symcomm.testing.running import RanksFailed, run

    kinds = list(kinds)
    if wrong := [kind for kind in kinds if kind not in KINDS]:
        raise errors.bad_argument("every_fault", "kinds", wrong, f"some of {', '.join(KINDS)}")
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    plain = run(test, n, mode=mode, deadline=deadline, faults=Faults(counts=True))
    todo = [
        Fault(kind, rank, ANY_CALL, number + 1)
        for rank, done in enumerate(plain)
        for number in range(len(done.calls))
        for kind in kinds
    ]
    random.Random(seed).shuffle(todo)
    tried = tuple(todo[:at_most])
    for fault in tried:
        try:
            run(test, n, mode=mode, deadline=deadline, faults=Faults([fault]), allowed=(*allowed, Injected))
        except RanksFailed as failed:
            raise RanksFailed(f"with {fault} (seed {seed}):\n{failed}", failed.ends) from None
    made = {name for done in plain for name in done.calls}
    return Tried(seed, tried, tuple(sorted(NAMES - made)))
