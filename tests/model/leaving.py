"""Leaving a group and giving its memory back (`_core/group/visit.c`): nobody touches a block that was given back.

A rank's process has several threads: one that leaves, one in an operation (under the group's lock), others that abort,
fail, send or ask at any time without the lock (a *visit*). Blocks are what the peers have mapped: once a rank knows
that all others have departed or died it gives its own block back, and it becomes something else.
All of these words are seq_cst in the core, so memory is ``Strong``; but for the end of an operation, which looks
without a fence whether a departure waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
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
    swap,
    unlock,
    until,
)
from tests.model.weak import Weak

Steps = Generator[Step, Any, Any]

MUTANTS = {
    "does not settle": "leave_end(): departs while another thread is in an operation",
    "lets go of the lock": "leave_end(): departs without the lock that operations hold",
    "does not wait for visitors": "leave_end(): departs while another thread aborts or sends",
    "visits without looking": "visit_begin(): does not look whether the group is being left",
    "looks before it counts": "visit_begin(): looks at `leaving` before it has counted itself",
    "locks without looking": "visit_lock(): does not look whether the group was left",
    "gives back at once": "leave_is_done_by_all(): does not wait for every rank to depart",
    "waits for the dead": "leave_is_done_by_all(): does not count a dead rank as departed",
}

# What the compiler refuses: a caller without a visit.
CALLER_MUTANTS = {
    "abort without a visit": "abort(): a thread aborts the group",
    "fail without a visit": "fail(): a watchdog's thread fails the group",
    "queued without a visit": "abort_queue(): Ctrl-C ends a call that waits its turn",
    "report without a visit": "look_at_all(): an observer looks at all ranks",
    "records without a visit": "records(): a thread reads what ranks have published",
    "status without a visit": "status(): a thread asks whether the group has failed",
    "background without a visit": "background(): the thread that drives messages goes on",
}

TWO_LEAVERS = {"both leave": "leave_begin(): a second thread leaves beside the first, which departs meanwhile"}


def touch_all(me: int, world: int, mark: int) -> Steps:
    """abort_all(): abort word, voided and doorbell of every rank."""
    for i in range(world):
        peer = (me + i) % world
        yield compare_and_swap(("abort", peer), 0, 1)
        if mark:
            yield fetch_max(("voided", peer), mark)
        yield fetch_add(("doorbell", peer), 1)


def look_at_all(world: int, word: str) -> Steps:
    for peer in range(world):
        yield load((word, peer))


def operation(me: int, world: int, without: str) -> Steps:
    """exec_run(): under the lock; refused once the group is left; an operation that fails tells everybody."""
    yield lock(f"lock {me}")
    left = 0
    if without != "locks without looking":
        left = yield load(f"left {me}")  # visit_lock(): then it sees the private block, which refuses it
    if not left and not (yield load(("abort", me))):
        for peer in range(world):
            if peer != me:
                yield load(("seq", peer))
        if (yield choose("succeeds", "fails")) == "fails":
            yield from touch_all(me, world, 1)
    yield unlock(f"lock {me}")
    return "done"


def visit_begin(me: int, without: str) -> Steps:
    """Whether the shared blocks may be touched; otherwise a private one is seen, which no model needs."""
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
    if leaving:
        yield fetch_add(f"visitors {me}", -1)
    return not leaving


def visit_end(me: int) -> Steps:
    yield fetch_add(f"visitors {me}", -1)


def visiting(me: int, without: str, caller: str, touch: Callable[[], Steps]) -> Steps:
    """``touch``, within a visit unless this caller has none."""
    if without == f"{caller} without a visit":
        yield from touch()
    elif (yield from visit_begin(me, without)):
        yield from touch()
        yield from visit_end(me)
    return "done"


def abort(me: int, world: int, without: str) -> Steps:
    """abort(), or a message: without the lock."""
    return (yield from visiting(me, without, "abort", lambda: touch_all(me, world, 0)))


def fail_group(me: int, world: int, without: str) -> Steps:
    """fail(), by a watchdog's thread."""
    return (yield from visiting(me, without, "fail", lambda: touch_all(me, world, 0)))


def report(me: int, world: int, without: str) -> Steps:
    """report(): arrivals and states of all."""
    return (yield from visiting(me, without, "report", lambda: look_at_all(world, "seq")))


def records(me: int, world: int, without: str) -> Steps:
    return (yield from visiting(me, without, "records", lambda: look_at_all(world, "record")))


def status(me: int, world: int, without: str) -> Steps:
    """status(): only the own block, which is given back, too."""
    return (yield from visiting(me, without, "status", lambda: look_at_all(1, "abort")))


def background(me: int, world: int, without: str) -> Steps:
    """The thread that drives messages: a visit for each turn, and one may be its first after the group was left."""
    for _turn in ("first", "second"):
        yield from visiting(me, without, "background", lambda: look_at_all(world, "doorbell"))
    return "ended"


def queued(me: int, world: int, without: str) -> Steps:
    """async_run_queued(): a caller whose operation the group's thread runs; Ctrl-C aborts it, then it is waited for."""
    if (yield choose("waits", "is interrupted")) == "is interrupted":
        yield from visiting(me, without, "queued", lambda: touch_all(me, world, 0))
    return "done"


CALLERS: dict[str, Callable[[int, int, str], Steps]] = {
    "operation": operation,
    "abort": abort,
    "fail": fail_group,
    "report": report,
    "records": records,
    "status": status,
    "background": background,
    "queued": queued,
}


def depart(me: int, world: int, without: str) -> Steps:
    """depart(): with the lock held, so that no operation is in the middle of its look at a block."""
    if without != "does not settle":
        yield lock(f"lock {me}")
    if without == "lets go of the lock":
        yield unlock(f"lock {me}")
    if not (yield load(f"left {me}")):
        for i in range(world):
            yield fetch_add(("departed", (me + i) % world), 1 << me)  # a byte of its own in the core
        yield store(f"left {me}", 1)
    if without not in ("does not settle", "lets go of the lock"):
        yield unlock(f"lock {me}")


def leave(me: int, world: int, without: str) -> Steps:
    """group_leave(), then is_left_by_all() until it may give the memory back."""
    if without != "both leave" and (yield swap(f"leaver {me}", 1)):
        return "left to the other"
    yield compare_and_swap(("abort", me), 0, 2)
    yield store(f"leaving {me}", 1)
    yield load(("seq", (me + 1) % world))  # p2p_close(): in the visit of whoever leaves
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


def leaving(
    without: str = "",
    world: int = 2,
    deaths: int = 0,
    threads: Sequence[str] = ("operation", "abort"),
    leavers: int = 1,
) -> Model:
    """Rank 0 has several threads, the others one. ``deaths``: how many of the others may die, at any step."""
    processes: dict = {f"rank 0 leaves {n}": lambda: leave(0, world, without) for n in range(leavers)}
    processes |= {f"rank 0: {name}": lambda name=name: CALLERS[name](0, world, without) for name in threads}
    processes |= {f"rank {r}": lambda r=r: peer(r, world, without) for r in range(1, world)}
    shared = ("seq", "abort", "voided", "doorbell", "departed", "record")
    words: dict = {(w, r): 0 for r in range(world) for w in shared}
    for r in range(world):
        words |= {f"{word} {r}": 0 for word in ("leaver", "leaving", "visitors", "lock", "left", "life")}
    name = f"leaving, {world} ranks, {deaths} deaths, {' and '.join(threads)}" + (", twice" if leavers > 1 else "")
    return Model(
        name + (f", {without}" if without else ""),
        processes, Strong(words), mortal=[f"rank {r}" for r in range(1, world)], deaths=deaths,
        life=lambda name: f"life {name[5:]}",  # in the arena's header, which is never given back
    )  # fmt: skip


def careless(without: str) -> Model:
    """One of ``CALLER_MUTANTS``."""
    return leaving(without, threads=(without.split()[0],))


# --- a thread that leaves in the middle of a call ------------------------------------------------------

LATE_MUTANTS = {
    "nobody looks again": "leave_is_done_by_all(): does not try a departure that was put off",
    "departs twice": "depart_late(): departs without the lock",
}


def try_to_depart(without: str) -> Steps:
    """depart_late(): unless an operation runs, whose end comes here too."""
    if without != "departs twice" and not (yield compare_and_swap("lock", 0, 1)):
        return
    if not (yield load("left")):
        yield fetch_add("departures", 1)
        yield store("left", 1, RELEASE)
    yield unlock("lock")


def leave_within(without: str) -> Steps:
    """group_leave() by a signal handler within a call of its own thread, whose end departs; then
    is_left_by_all()."""
    yield store("departs_late", 1, RELEASE)
    yield from try_to_depart(without)
    if without != "nobody looks again":
        while not (yield load("left", ACQUIRE)):
            yield from try_to_depart(without)
    return "left"


def ending(without: str) -> Steps:
    """visit_unlock(): lets go of the lock, and looks."""
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
