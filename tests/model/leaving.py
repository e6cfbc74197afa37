"""Leaving a group and giving its memory back (`_core/group/leave.c`, `_core/group/group.c`): nobody touches a block
that was given back.

A rank's process has several threads: one that leaves, one in an operation (under the group's lock), one that aborts or
sends at any time without the lock (a *visit*). Blocks are what the peers have mapped: once a rank knows that all
others have departed or died it gives its own block back, and it becomes something else.
All of these words are seq_cst in the core, and pointers are only switched when nobody uses them, so memory is
``Strong``; but for the end of an operation, which looks without a fence whether a departure waits for it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from tests.model.explorer import (
    ACQUIRE,
    RELEASE,
    Model,
    Step,
    Strong,
    check,
    choose,
    compare_and_swap,
    fetch_add,
    fetch_max,
    give_back,
    load,
    lock,
    store,
    unlock,
    until,
)
from tests.model.weak import Weak

Steps = Generator[Step, Any, Any]
OWN, COPY = "own", "copy"

MUTANTS = {
    "does not settle": "group_leave(): departs while another thread is in an operation",
    "lets go of the lock": "leave_group(): switches pointers without the lock that operations hold",
    "does not wait for visitors": "leave_group(): departs while another thread aborts or sends",
    "visits without looking": "visit_begin(): does not look whether the group is being left",
    "looks before it counts": "visit_begin(): looks at `leaving` before it has counted itself",
    "keeps its pointers": "depart(): the group still looks at the shared blocks",
    "gives back at once": "group_detach(): does not wait for every rank to depart",
    "waits for the dead": "group_detach(): does not count a dead rank as departed",
}


def touch_all(me: int, world: int, mark: int) -> Steps:
    """abort_all(): abort word, voided and doorbell of every rank."""
    where = yield load(f"pointers {me}")
    if where == COPY:
        return
    for i in range(world):
        peer = (me + i) % world
        yield compare_and_swap(("abort", peer), 0, 1)
        if mark:
            yield fetch_max(("voided", peer), mark)
        yield fetch_add(("doorbell", peer), 1)


def refused(me: int) -> Steps:
    """sync_aborted(): looks at the own block, by whatever pointer it finds."""
    where = yield load(f"pointers {me}")
    if where == COPY:
        return True
    return (yield load(("abort", me))) != 0


def operation(me: int, world: int, without: str) -> Steps:
    """exec_run(): under the lock; refused once the group is left; an operation that fails tells everybody."""
    yield lock(f"lock {me}")
    if not (yield from refused(me)):
        for peer in range(world):
            if peer != me:
                yield load(("seq", peer))
        if (yield choose("succeeds", "fails")) == "fails":
            yield from touch_all(me, world, 1)
    yield unlock(f"lock {me}")
    return "done"


def visit(me: int, world: int, without: str) -> Steps:
    """abort(), or a message: without the lock."""
    late = 0
    if without == "looks before it counts":
        late = yield load(f"leaving {me}")
    yield fetch_add(f"visitors {me}", 1)
    if without == "looks before it counts":
        leaving = late
    elif without == "visits without looking":
        leaving = 0
    else:
        leaving = yield load(f"leaving {me}")
    if not leaving:
        yield from touch_all(me, world, 0)
    yield fetch_add(f"visitors {me}", -1)
    return "done"


def depart(me: int, world: int, without: str) -> Steps:
    """depart(): with the lock held, so that no operation is in the middle of its look at a block."""
    if without != "does not settle":
        yield lock(f"lock {me}")
    if without == "lets go of the lock":
        yield unlock(f"lock {me}")
    for i in range(world):
        yield fetch_add(("departed", (me + i) % world), 1 << me)  # a byte of its own in the core
    if without != "keeps its pointers":
        yield store(f"pointers {me}", COPY)
    if without not in ("does not settle", "lets go of the lock"):
        yield unlock(f"lock {me}")


def leave(me: int, world: int, without: str) -> Steps:
    """group_leave(), then group_detach() until it may give the memory back."""
    yield store(f"leaving {me}", 1)
    yield compare_and_swap(("abort", me), 0, 2)
    if without != "does not wait for visitors":
        yield until(f"visitors {me}", 0)
    yield from depart(me, world, without)
    if without != "gives back at once":
        for r in range(world):
            yield from await_departed(me, r, without)
    yield give_back(me)
    return "left"


def await_departed(me: int, rank: int, without: str) -> Steps:
    while True:
        departed = yield load(("departed", me))
        if departed >> rank & 1:
            return
        departed = None
        if without != "waits for the dead" and (yield load(f"life {rank}")):
            return


def peer(me: int, world: int, without: str) -> Steps:
    """A rank with one thread: runs or fails an operation, then leaves."""
    if (yield choose("fails", "leaves")) == "fails":
        yield from touch_all(me, world, 1)
    return (yield from leave(me, world, without))


def leaving(without: str = "", world: int = 2, deaths: int = 0, threads: tuple = ("operation", "visit")) -> Model:
    """Rank 0 has several threads, the others one. ``deaths``: how many of the others may die, at any step."""
    processes: dict = {"rank 0 leaves": lambda: leave(0, world, without)}
    if "operation" in threads:
        processes["rank 0 operates"] = lambda: operation(0, world, without)
    if "visit" in threads:
        processes["rank 0 visits"] = lambda: visit(0, world, without)
    processes |= {f"rank {r}": lambda r=r: peer(r, world, without) for r in range(1, world)}
    words: dict = {(w, r): 0 for r in range(world) for w in ("seq", "abort", "voided", "doorbell", "departed")}
    for r in range(world):
        words |= {f"leaving {r}": 0, f"visitors {r}": 0, f"lock {r}": 0, f"pointers {r}": OWN, f"life {r}": 0}
    return Model(
        f"leaving, {world} ranks, {deaths} deaths, {' and '.join(threads)}" + (f", {without}" if without else ""),
        processes, Strong(words), mortal=[f"rank {r}" for r in range(1, world)], deaths=deaths,
        life=lambda name: f"life {name[5:]}",  # in the arena's header, which is never given back
    )  # fmt: skip


# --- a thread that leaves in the middle of a call ------------------------------------------------------

LATE_MUTANTS = {
    "nobody looks again": "group_detach(): does not try a departure that was put off",
    "departs twice": "leave_late(): departs without the lock",
}


def try_to_depart(without: str) -> Steps:
    """leave_late(): unless an operation runs, whose end comes here too."""
    if without != "departs twice" and not (yield compare_and_swap("lock", 0, 1)):
        return
    if not (yield load("left")):
        yield fetch_add("departures", 1)
        yield store("left", 1, RELEASE)
    yield unlock("lock")


def leave_within(without: str) -> Steps:
    """group_leave() by a signal handler within a call of its own thread, whose end departs; then group_detach()."""
    yield store("departs_late", 1, RELEASE)
    yield from try_to_depart(without)
    if without != "nobody looks again":
        while not (yield load("left", ACQUIRE)):
            yield from try_to_depart(without)
    return "left"


def ending(without: str) -> Steps:
    """exec_run(): lets go of the lock, and looks."""
    yield unlock("lock")
    if (yield load("departs_late")):
        yield from try_to_depart(without)
    return "ended"


def observer(without: str) -> Steps:
    """A peer that waits for the departure."""
    yield until("left", 1)
    yield check((yield load("departures")) == 1, "departed twice")
    return "seen"


def late_departure(without: str = "") -> Model:
    processes = {
        "leaver": lambda: leave_within(without),
        "operation": lambda: ending(without),
        "peer": lambda: observer(without),
    }
    memory = Weak({"lock": 1, "departs_late": 0, "left": 0, "departures": 0}, 3)
    return Model("late departure, weak memory" + (f", {without}" if without else ""), processes, memory)
