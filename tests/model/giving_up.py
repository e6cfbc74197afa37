"""Giving up asynchronous operations (`_core/exec/async.c`, `_core/sync/wait.c`), on weak memory.

A rank's own thread runs three operations; another thread of it waits no longer for the second. The thread must end that
one, whatever it waits for, and the third has all the time it needs if the second ended well. Peers come at any time, or
never; sleeps end by a wake-up alone.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from tests.model.explorer import (
    ACQUIRE,
    RELEASE,
    Model,
    Step,
    choose,
    fetch_add,
    fetch_max,
    futex_wait,
    futex_wake,
    load,
    store,
    until,
)
from tests.model.weak import Weak

Steps = Generator[Step, Any, Any]
OPERATIONS, GIVEN_UP = 3, 2

MUTANTS = {
    "does not wake": "async_give_up(): no sync_wake_own()",
    "says so after it rang": "async_give_up(): raises given_up after it has rung",
    "doorbell read late": "sleep_until_over(): reads the doorbell after it looked at given_up",
    "not looked at asleep": "sleep_until_over(): no look at given_up",
    "never ended": "work(): does not count what has ended",
}


def has_given_up() -> Steps:
    given_up = yield load("given_up", ACQUIRE)
    ended = yield load("ended", ACQUIRE)
    return given_up > ended


def sleep_until_over(operation: int, without: str) -> Steps:
    """The wait for the peer's arrival, with an open end."""
    while True:
        late = without == "doorbell read late"
        seen = None if late else (yield load("doorbell", ACQUIRE))
        if (yield load("arrived", ACQUIRE)) >= operation:
            return "ok"
        if without != "not looked at asleep" and (yield from has_given_up()):
            return "late"
        if late:
            seen = yield load("doorbell", ACQUIRE)
        yield from futex_wait("doorbell", seen)
        seen = None


def run(operation: int, without: str) -> Steps:
    """run_whole(), whose wait looks for a while before it sleeps."""
    if (yield from has_given_up()):
        return "late"
    if (yield load("arrived", ACQUIRE)) >= operation:
        return "ok"
    return (yield from sleep_until_over(operation, without))


def worker(without: str) -> Steps:
    """work(): whatever comes after one that failed is refused."""
    result, last = "ok", 0  # that was run
    for operation in range(1, OPERATIONS + 1):
        if result == "ok":
            result = yield from run(operation, without)
            last = operation
        if without != "never ended":
            yield store("ended", operation, RELEASE)
        yield store("done", operation, RELEASE)
    return result, last


def waiter(without: str) -> Steps:
    """async_give_up(), and the return of wait()."""
    if without != "says so after it rang":
        yield fetch_max("given_up", GIVEN_UP)
    if without != "does not wake":
        yield fetch_add("doorbell", 1, RELEASE)
        yield futex_wake("doorbell")
    if without == "says so after it rang":
        yield fetch_max("given_up", GIVEN_UP)
    yield until("done", GIVEN_UP, OPERATIONS)
    return "told"


def peer(without: str) -> Steps:
    """Comes to the first operations, or to none of them; to the third whenever it has come to the second."""
    for operation in range(1, OPERATIONS + 1):
        if operation < OPERATIONS and (yield choose("comes", "stays away")) == "stays away":
            return "away"
        yield store("arrived", operation, RELEASE)
        yield fetch_add("doorbell", 1, RELEASE)
        yield futex_wake("doorbell")
    return "came"


def giving_up(without: str = "") -> Model:
    processes = {"worker": lambda: worker(without), "waiter": lambda: waiter(without), "peer": lambda: peer(without)}

    def ends(results: dict) -> str:
        result, last = results["worker"]
        return "an operation behind one that ended well had no time" if result == "late" and last > GIVEN_UP else ""

    memory = Weak({"given_up": 0, "ended": 0, "done": 0, "doorbell": 0, "arrived": 0}, 3)
    return Model("giving up, weak memory" + (f", {without}" if without else ""), processes, memory, ends)
