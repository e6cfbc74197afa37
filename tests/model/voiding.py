"""Failing and succeeding (`_core/sync/fail.c`, `_core/exec/exec.c`), on weak memory.

A rank that fails tells all others before it returns to its caller, who may then overwrite its tensors. A rank that has
done its last step looks whether the operation was void before it says that it succeeded. So nobody succeeds who has
read what was written after a failure, and nobody writes into a tensor whose owner has returned with an error.

Tensors are read and written like relaxed atomics: ``RIGHT`` is what the operation should move, ``JUNK`` what a caller
scribbles over its tensor as soon as its call has failed.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from tests.model.explorer import (
    ACQUIRE,
    RELEASE,
    Model,
    Step,
    check,
    choose,
    compare_and_swap,
    fence,
    fetch_max,
    load,
    store,
    until,
)
from tests.model.weak import Weak

Steps = Generator[Step, Any, Any]
RIGHT, JUNK, MINE = "right", "junk", "mine"

MUTANTS = {
    "no fence after voiding": "abort_all(): no seq_cst fence before the call returns",
    "no acquire fence": "sync_is_void(): no acquire fence between the last step and the look",
    "no look at voided": "run_locked(): success without a look at `voided`",
    "not passed on": "run_locked(): a rank that learns of a failure tells nobody else",
    "signals without a fence": "sync_signal(): no acquire fence before a value that was read is handed on",
    "scribbles first": "abandon(): the caller gets its tensor back before the others are told",
}
PUSH_MUTANTS = {
    "arrives without a fence": "arrive(): no seq_cst fence between the arrival and the look at `voided`",
    "no fence after voiding": "abort_all(): no seq_cst fence before it looks who has arrived",
    "pushes without looking": "run_body(): writes a peer's output without a look at `voided`",
    "leaves before its last write": "run_locked(): sets `left` before it writes",
    "left is relaxed": "run_locked(): `left` is no release store",
    "does not wait": "abandon(): returns although a peer that has arrived has not left",
    "keeps its pages": "abandon(): gives up waiting and returns without isolate()",
    "fails without leaving": "run_locked(): fails without setting `left`, so two that fail wait for each other",
}


def fail(rank: int, world: int, without: str, mine: bool = True) -> Steps:
    """abort_all(): before an operation returns with an error. ``mine``: this rank is the first to know."""
    for i in range(world):
        peer = (rank + i) % world
        if without == "not passed on" and not mine and peer != rank:
            continue
        yield compare_and_swap(("abort", peer), 0, 1)
        yield fetch_max(("voided", peer), 1)
    if without != "no fence after voiding":
        yield fence()


def finish(rank: int, world: int, without: str) -> Steps:
    """The end of run_locked(), after the last step."""
    if without == "no look at voided":
        return "ok"
    if without != "no acquire fence":
        yield fence("acquire")
    if not (yield load(("voided", rank))):
        return "ok"
    yield from fail(rank, world, without, mine=False)
    return "failed"


# --- reading from a rank that fails --------------------------------------------------------------------


def failing(rank: int, world: int, without: str) -> Steps:
    """A rank that gives up (deadline, interrupt, a dead peer), and whose caller scribbles over its tensor."""
    if without == "scribbles first":
        yield store(("tensor", rank), JUNK)
    yield from fail(rank, world, without)
    yield store(("tensor", rank), JUNK)
    return "failed"


def relay(rank: int, source: int, world: int, without: str) -> Steps:
    """Reads a peer's tensor, shows what came of it, and looks at last; having failed, its caller scribbles too."""
    got = yield load(("tensor", source))
    yield store(("stage", rank), got)
    if without != "signals without a fence":
        yield fence("acquire")
    yield store(("progress", rank), 1, RELEASE)
    result = yield from finish(rank, world, without)
    if result == "failed":
        yield store(("tensor", rank), JUNK)
        return "failed"
    return "ok", got


def reader(rank: int, sources: tuple, world: int, without: str) -> Steps:
    """Waits for a relay, or learns of the failure while it waits."""
    got = RIGHT
    for word, source in sources:
        if word == "stage" and not (yield until(("progress", source), 1)):
            continue
        value = yield load((word, source))
        if value == JUNK:
            got = JUNK
        value = None
    result = yield from finish(rank, world, without)
    return (result, got) if result == "ok" else "failed"


def _values(world: int) -> dict:
    words: dict = {}
    for rank in range(world):
        words |= {("abort", rank): 0, ("voided", rank): 0, ("life", rank): 0}
    return words


def _right(results: dict) -> str:
    wrong = [name for name, result in results.items() if result == ("ok", JUNK)]
    return f"{' and '.join(wrong)} succeeded with values from after a failure" if wrong else ""


def two(without: str = "") -> Model:
    """One fails, one reads its tensor."""
    processes = {
        "rank 0": lambda: failing(0, 2, without),
        "rank 1": lambda: reader(1, (("tensor", 0),), 2, without),
    }
    memory = Weak(_values(2) | {("tensor", 0): RIGHT}, 2)
    name = "reading from one that fails, weak memory"
    return Model(name + (f", {without}" if without else ""), processes, memory, _right)


def passed_on(without: str = "", deaths: int = 1) -> Model:
    """0 fails, and may be killed half-way. 1 and 2 read its tensor; 2 reads 1's too, whose caller scribbles if it
    fails.
    """
    processes = {
        "rank 0": lambda: failing(0, 3, without),
        "rank 1": lambda: relay(1, 0, 3, without),
        "rank 2": lambda: reader(2, (("tensor", 1), ("tensor", 0)), 3, without),
    }
    words = _values(3) | {("tensor", 0): RIGHT, ("tensor", 1): RIGHT, ("stage", 1): None, ("progress", 1): 0}
    return Model(
        "failure passed on, weak memory" + (f", {without}" if without else ""), processes, Weak(words, 3), _right,
        mortal=["rank 0"], deaths=deaths, life=lambda name: ("life", int(name[5:])),
    )  # fmt: skip


def relayed(without: str = "", one_copy: bool = False) -> Model:
    """0 fails. 1 reads its tensor and passes the value on; 2 reads only what 1 has passed on.

    1 reads the junk without an acquire, so C11 needs the fence before its signal to order 0's telling before 2's look.
    Processors on which a store is seen by all others at once (arm64, x86) do so without: ``one_copy``.
    """
    processes = {
        "rank 0": lambda: failing(0, 3, without),
        "rank 1": lambda: relay(1, 0, 3, without),
        "rank 2": lambda: reader(2, (("stage", 1),), 3, without),
    }
    words = _values(3) | {("tensor", 0): RIGHT, ("tensor", 1): RIGHT, ("stage", 1): None, ("progress", 1): 0}
    name = "value handed on, weak memory" + (" of one copy" if one_copy else "")
    return Model(name + (f", {without}" if without else ""), processes, Weak(words, 3, one_copy=one_copy), _right)


# --- writing into a rank that fails --------------------------------------------------------------------


def push(rank: int, owner: int, world: int, without: str, may_fail: bool = False) -> Steps:
    """arrive(), meet(), run_body(): waits for all, and writes into the owner's output unless the operation is void."""
    yield store(("seq", rank), 1, RELEASE)
    if without != "arrives without a fence":
        yield fence()
    for r in range(world):
        if r != rank:
            yield until(("seq", r), 1)
    if without != "pushes without looking" and (yield load(("voided", rank), ACQUIRE)):
        yield from fail_owning(rank, world, without)
        return "failed"
    if without == "leaves before its last write":
        yield store(("left", rank), 1, RELEASE)
    for part in ("low", "high"):
        yield store((part, owner), RIGHT)
    if may_fail and (yield choose("goes on", "gives up")) == "gives up":
        yield from fail_owning(rank, world, without)
        return "failed"
    yield store(("left", rank), 1, "relaxed" if without == "left is relaxed" else RELEASE)
    return "pushed"


def fail_owning(rank: int, world: int, without: str, stopped: bool = False) -> Steps:
    """abandon(), for a rank with a symmetric output. Returns where its tensor is then: its pages, or a copy of
    them.
    """
    if without != "fails without leaving":
        yield store(("left", rank), 1, RELEASE)
    yield from fail(rank, world, without)
    for r in range(world):
        if r == rank or without == "does not wait":
            continue
        if (yield load(("seq", r), ACQUIRE)) != 1 or (yield load(("left", r), ACQUIRE)) == 1:
            continue
        if stopped and (yield choose("waits", "gives up")) == "gives up":
            return "pages" if without == "keeps its pages" else "copy"
        yield until(("left", r), 1)
    return "pages"


def owner(rank: int, world: int, without: str, stopped: bool) -> Steps:
    """Arrives, fails at some time, and from then on must find in its tensor what its caller put there."""
    if (yield choose("arrives", "fails early")) == "arrives":
        yield store(("seq", rank), 1, RELEASE)
        yield fence()
    kept = yield from fail_owning(rank, world, without, stopped)
    if kept == "copy":
        return "failed"  # what is written into the old pages nobody sees
    for part in ("low", "high"):
        yield store((part, rank), MINE)
    for part in ("high", "low"):
        found = yield load((part, rank))
        yield check(found == MINE, "a peer wrote into a tensor whose owner had returned with an error")
        found = None
    return "failed"


def pushing(without: str = "", stopped: bool = True) -> Model:
    """0 fails while 1 writes into its output; 1 may be stopped for ever, or die."""
    processes = {"rank 0": lambda: owner(0, 2, without, stopped), "rank 1": lambda: push(1, 0, 2, without)}
    words = _values(2) | {(w, r): 0 for w in ("seq", "left") for r in range(2)} | {("low", 0): None, ("high", 0): None}
    memory = Weak(words, 2, contended=[("low", 0), ("high", 0)])
    name = "writing into one that fails, weak memory" + (", given up" if stopped else "")
    return Model(name + (f", {without}" if without else ""), processes, memory, stuck=False)


def both_fail(without: str = "") -> Model:
    """Two that have written into each other's outputs and both fail: neither waits for the other for ever."""
    processes = {f"rank {r}": lambda r=r: push(r, 1 - r, 2, without, may_fail=True) for r in range(2)}
    words = _values(2) | {(w, r): 0 for w in ("seq", "left") for r in range(2)}
    words |= {(part, r): None for part in ("low", "high") for r in range(2)}
    memory = Weak(words, 2)
    return Model("two that fail, weak memory" + (f", {without}" if without else ""), processes, memory)
