"""Calls that a rank refuses (`_core/exec/exec.c`): all learn of it, in that rank's words, and nobody is left behind.

Every operation has a number; arrivals, words and staging areas have two places, by number % 2. A rank that refuses its
call arrives with its words and does not wait; a rank that finds a refusal leaves without looking at the rest. So
numbers of ranks may drift apart, and the wait before the next operation is all that keeps places from being used again
too early.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from tests.model.explorer import RELAXED, RELEASE, Model, Step, Strong, check, load, store, until
from tests.model.weak import Weak

Steps = Generator[Step, Any, Any]
CALL, REFUSED = "call", "refused"

MUTANTS = {
    "next one without waiting": "run_locked, refuse_locked: no await_previous",
    "words behind the arrival": "refuse_locked: arrives before refusal_publish",
    "arrival without a release": "arrive: the number is stored relaxed",
}


def await_previous(rank: int, seq: int, world: int) -> Steps:
    for r in range(world):
        if r != rank:
            yield until(("seq", r, (seq - 1) % 2), seq - 1)


def arrive(rank: int, seq: int, signature: str, without: str) -> Steps:
    yield store(("signature", rank, seq % 2), signature)
    yield store(("seq", rank, seq % 2), seq, RELAXED if without == "arrival without a release" else RELEASE)


def refuse(rank: int, seq: int, without: str) -> Steps:
    """refuse_locked(): the words, then the arrival."""
    late = without == "words behind the arrival"
    if late:
        yield from arrive(rank, seq, REFUSED, without)
    yield store(("words", rank, seq % 2), seq)
    if not late:
        yield from arrive(rank, seq, REFUSED, without)


def call(rank: int, seq: int, world: int, without: str) -> Steps:
    """run_whole(): the head, the arrival, all other arrivals, the body. A refusal ends it at once (compare_calls)."""
    yield store(("stage", rank, seq % 2), seq)
    yield from arrive(rank, seq, CALL, without)
    for r in range(world):
        if r == rank:
            continue
        yield until(("seq", r, seq % 2), seq)
        signature = yield load(("signature", r, seq % 2))
        if signature == REFUSED:
            words = yield load(("words", r, seq % 2))
            yield check(words == seq, f"rank {rank} reads words of another operation")
            return REFUSED
        signature = None
    for r in range(world):
        value = yield load(("stage", r, seq % 2))
        yield check(value == seq, f"rank {rank} reads what is staged for another operation")
        value = None
    return CALL


def member(rank: int, world: int, program: tuple, without: str) -> Steps:
    """exec_run() and exec_refuse(), one after the other. ``program``: whether this rank refuses each operation."""
    results: tuple = ()
    for seq in range(1, len(program) + 1):
        if results[-1:] == (REFUSED,) and without != "next one without waiting":
            yield from await_previous(rank, seq, world)
        if program[seq - 1]:
            yield from refuse(rank, seq, without)
            results = (*results, REFUSED)
        else:
            result = yield from call(rank, seq, world, without)
            results = (*results, result)
            result = None
    return results


def _right(results: dict) -> str:
    return "" if len(set(results.values())) == 1 else f"ranks do not agree on what took place: {results}"


def refusing(without: str = "", programs: tuple = ((0, 0, 0, 0), (1, 1, 1, 0)), weak: bool = False) -> Model:
    """``programs``: for each rank, which operations it refuses."""
    world = len(programs)
    places = [(r, half) for r in range(world) for half in (0, 1)]
    words = {(name, *place): 0 for name in ("seq", "words", "stage") for place in places}
    words |= {("signature", *place): "" for place in places}
    processes = {
        f"rank {r}": lambda r=r: member(r, world, programs[r], without) for r in range(world)
    }  # fmt: skip
    shape = " and ".join("".join("r" if refuses else "c" for refuses in one) for one in programs)
    name = f"calls refused, {shape}{', weak memory' if weak else ''}{f', {without}' if without else ''}"
    return Model(name, processes, Weak(words, world) if weak else Strong(words), _right)
