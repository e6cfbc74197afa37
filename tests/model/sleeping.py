"""Sleeping and waking (`_core/sync/wait.c`, `_core/sync/sync.c`): no wake-up is lost, whoever arrives, fails or aborts
in whatever order.

Every rank arrives, then waits until all have arrived. Sleeps end by a wake-up alone: the 10 ms slices in which the core
looks for dead peers would hide a lost one, so they exist here only once somebody has died.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Any

from tests.model.explorer import (
    ACQUIRE,
    RELEASE,
    Model,
    Step,
    Strong,
    choose,
    compare_and_swap,
    fence,
    fetch_add,
    futex_wait,
    futex_wake,
    load,
    store,
)
from tests.model.weak import Weak

Steps = Generator[Step, Any, Any]
AWAKE, ASLEEP, RUNG = range(3)
WORDS = ("seq", "sleeping", "target", "doorbell", "abort", "life")

# what is left out of the core, by name; each must be found
MUTANTS = {
    "sleeper without a fence": "publish_condition: no atomic_thread_fence",
    "signaller without a fence": "sync_wake_peers: no atomic_thread_fence",
    "no second look": "sleep_until_over: sleeps without looking again after it has published what it waits for",
    "doorbell read late": "sleep_until_over: reads the doorbell after it looked again",
    "doorbell not moved": "ring: wakes without changing the doorbell",
    "failure does not ring": "sync_fail: sets the abort word only",
    "abort not looked at": "sleep_until_over: no look at the abort word after publishing",
    "given up, no second look": "is_over: does not look at the condition again after it saw the abort word",
    "death not looked for": "sleep_until_over: no find_gone",
}


def arrived(rank: int, sleeper: int, target: int, world: int) -> Steps:
    """holds() for WAIT_ARRIVED_ALL."""
    for r in range(world):
        if r != sleeper and not (yield load(("seq", r), ACQUIRE)) >= target:
            return False
    return True


def ring(peer: int, without: str) -> Steps:
    if without != "doorbell not moved":
        yield fetch_add(("doorbell", peer), 1, RELEASE)
    yield futex_wake(("doorbell", peer))


def wake_peers(rank: int, world: int, without: str) -> Steps:
    """sync_wake_peers()"""
    if without != "signaller without a fence":
        yield fence()
    for r in range(world):
        if r == rank or (yield load(("sleeping", r), ACQUIRE)) != ASLEEP:
            continue
        target = yield load(("target", r))
        if not (yield from arrived(rank, r, target, world)):
            continue
        if (yield compare_and_swap(("sleeping", r), ASLEEP, RUNG)):
            yield from ring(r, without)


def fail(rank: int, world: int, without: str) -> Steps:
    """sync_fail()"""
    for i in range(world):
        peer = (rank + i) % world
        yield compare_and_swap(("abort", peer), 0, 1)
        if without != "failure does not ring":
            yield store(("sleeping", peer), AWAKE, RELEASE)
            yield from ring(peer, without)


def given_up(rank: int, target: int, world: int, without: str) -> Steps:
    if not (yield load(("abort", rank), ACQUIRE)):
        return False
    return without == "given up, no second look" or not (yield from arrived(rank, rank, target, world))


def find_gone(rank: int, target: int, world: int) -> Steps:
    for r in range(world):
        if r == rank or (yield load(("seq", r), ACQUIRE)) >= target:
            continue
        if (yield load(("life", r), ACQUIRE)) and not (yield load(("seq", r), ACQUIRE)) >= target:
            return True
    return False


def sleep_until_over(rank: int, target: int, world: int, without: str) -> Steps:
    while True:
        late = without == "doorbell read late"
        seen = None if late else (yield load(("doorbell", rank), ACQUIRE))
        yield store(("target", rank), target)
        yield store(("sleeping", rank), ASLEEP, RELEASE)
        if without != "sleeper without a fence":
            yield fence()
        if without != "no second look" and (yield from arrived(rank, rank, target, world)):
            result = "ok"
            break
        if without != "abort not looked at" and (yield from given_up(rank, target, world, without)):
            result = "failed"
            break
        if without != "death not looked for" and (yield from find_gone(rank, target, world)):
            yield from fail(rank, world, without)
            result = "failed"
            break
        if late:
            seen = yield load(("doorbell", rank), ACQUIRE)
        yield from futex_wait(("doorbell", rank), seen)
        seen = None
    yield store(("sleeping", rank), AWAKE)
    return result


def member(rank: int, world: int, operations: int, without: str, sleeps: bool = True) -> Steps:
    """arrive() and meet(), several times; one that never sleeps stands for a rank that looks until it finds."""
    result = "ok"
    for seq in range(1, operations + 1):
        yield store(("seq", rank), seq, RELEASE)
        yield from wake_peers(rank, world, without)
        if sleeps and result == "ok":
            result = yield from sleep_until_over(rank, seq, world, without)
        if result != "ok":
            break
    return result


def aborter(rank: int, world: int, without: str) -> Steps:
    """A rank that fails instead of arriving (a deadline, an interrupt, abort() called by another thread), or that finds
    the meeting complete and gives the group up."""
    what = yield choose("arrives", "fails", "arrives and gives up")
    if what != "fails":
        yield store(("seq", rank), 1, RELEASE)
        yield from wake_peers(rank, world, without)
        if what == "arrives" or not (yield from arrived(rank, rank, 1, world)):
            return "ok"
    yield from fail(rank, world, without)
    return "failed" if what == "fails" else "ok"


def words(world: int) -> dict:
    return {(word, rank): 0 for rank in range(world) for word in WORDS}


def _contended(world: int) -> list:
    return [("sleeping", rank) for rank in range(world)]


def meeting(
    without: str = "", operations: int = 1, world: int = 3, deaths: int = 0, sleepers: Collection[int] = (0, 1, 2)
) -> Model:
    """All arrive, and those in ``sleepers`` sleep until all have."""
    processes = {f"rank {r}": lambda r=r: member(r, world, operations, without, r in sleepers) for r in range(world)}

    def ends(results: dict) -> str:
        if not deaths and set(results.values()) != {"ok"}:
            return f"a meeting without a failure fails: {results}"
        return ""

    return Model(
        f"meeting of {world}, {operations} operations, {deaths} deaths" + (f", {without}" if without else ""),
        processes, Strong(words(world)), ends, mortal=list(processes), deaths=deaths, life=lambda name: ("life",
    int(name[5:])), )  # fmt: skip


def weak_meeting(without: str = "", sleepers: Collection[int] = (0, 1)) -> Model:
    """Two ranks on weak memory."""
    processes = {f"rank {r}": lambda r=r: member(r, 2, 1, without, r in sleepers) for r in range(2)}

    def ends(results: dict) -> str:
        return "" if set(results.values()) == {"ok"} else f"a meeting without a failure fails: {results}"

    memory = Weak(words(2), 2, contended=_contended(2))
    return Model("meeting of 2, weak memory" + (f", {without}" if without else ""), processes, memory, ends)


def weak_wake(without: str = "") -> Model:
    """One sleeper and two who arrive, on weak memory: the last of them must wake it."""
    processes = {f"rank {r}": lambda r=r: member(r, 3, 1, without, r == 0) for r in range(3)}

    def ends(results: dict) -> str:
        return "" if set(results.values()) == {"ok"} else f"a meeting without a failure fails: {results}"

    memory = Weak(words(3), 3, contended=_contended(1))
    return Model("one sleeper, two arrive, weak memory" + (f", {without}" if without else ""), processes, memory, ends)


def weak_failure(without: str = "") -> Model:
    """One sleeper, one who arrives or fails, on weak memory."""
    processes = {"rank 0": lambda: member(0, 2, 1, without), "rank 1": lambda: aborter(1, 2, without)}

    def ends(results: dict) -> str:
        wrong = results["rank 1"] == "ok" and results["rank 0"] != "ok"
        return "a meeting that was complete fails" if wrong else ""

    memory = Weak(words(2), 2, contended=_contended(1))
    return Model("one sleeper, one failure, weak memory" + (f", {without}" if without else ""), processes, memory, ends)
