"""Messages of ordinary tensors, which both ranks copy by system call (`_core/exec/cma.c`), on weak memory.

Nobody can take the receiver's memory away from a sender that is stopped. Instead the kernel looks for the receiver's
grant when the sender's call begins: one that goes on later finds it revoked; one whose call has begun is waited for.
``kernel`` is 1 while that call lasts. A thread that is seen stopped is in no call; the kernel's own locks order that.
"""

from __future__ import annotations

from typing import Any

from tests.model.copying import MINE, PIECES, Steps, claim, pull
from tests.model.explorer import ACQUIRE, RELEASE, Model, check, choose, fence, load, store, swap, until
from tests.model.weak import Weak

FAILED = "failed"

MUTANTS = {
    "does not revoke": "p2p_revoke_receive(): does not call cma_revoke_writes()",
    "revokes late": "await_writer(): revokes after it has seen the sender stopped",
    "does not await a call": "await_writer(): returns although the sender is in the middle of a call",
    "cooperates again": "may_cooperate(): grants writes again although the sender was stopped before one",
    "counts what failed": "coop_push(): a piece that could not be written counts as copied",
}


def write(piece: int, to: int, number: int) -> Steps:
    """cma_put(): whether it was granted, and the kernel willing."""
    yield swap("kernel", 1)
    yield fence()
    granted = yield load("grant")
    if granted:
        granted = (yield choose("writes", "refuses")) == "writes"
    if granted:
        yield store((piece, to), number)
    yield swap("kernel", 0)
    return granted


def push(number: int, without: str) -> Steps:
    """coop_push()"""
    if (yield load("claims", ACQUIRE))[0] != number:
        return
    to = yield load("to")
    while True:
        back, _ = yield from claim(number, 2, without)
        if back < 0:
            return
        written = yield from write(PIECES - 1 - back, to, number)
        yield store("pushed", (number, back + 1 if written or without == "counts what failed" else FAILED), RELEASE)
        if not written:
            return


def receive(number: int, without: str, alone: bool) -> Steps:
    """copy(), with or without the sender, and what the caller finds."""
    claimed, pushed = PIECES, (number, FAILED)
    if not alone or without == "cooperates again":
        yield store("grant", 1)
        claimed = yield from pull(number, without)
        pushed = (yield until("pushed", (number, claimed), (number, FAILED))) if claimed else (number, 0)
    for piece in range(PIECES - claimed, PIECES):
        if pushed[1] == FAILED:
            yield store((piece, number), number)
    for piece in range(PIECES):
        found = yield load((piece, number))
        yield check(found == number, "a receive returned without a piece")
        found = None


def give_up(number: int, without: str) -> Steps:
    """p2p_revoke_receive(). Whether the next message is copied alone."""
    yield store("grant", 1)
    claimed = yield from pull(number, without)
    late = without == "revokes late"
    if without != "does not revoke" and not late:
        yield store("grant", 0)
        yield fence()
    if not claimed or without == "does not await a call":
        return False
    if (yield choose("waits", "is stopped")) == "waits":
        yield until("pushed", (number, claimed), (number, FAILED))
        return False
    yield until("kernel", 0)
    if late:
        yield store("grant", 0)
        yield fence()
    return True


def receiver(without: str, gives_up: bool) -> Steps:
    alone = False
    if gives_up:
        alone = yield from give_up(1, without)
        for piece in range(PIECES):
            yield store((piece, 1), MINE)
    else:
        yield from receive(1, without, False)
    yield from receive(2, without, alone)
    for piece in range(PIECES if gives_up else 0):
        found = yield load((piece, 1))
        yield check(found == MINE, "the sender wrote into a tensor whose receive had ended")
        found = None


def sender(without: str) -> Steps:
    for number in (1, 2):
        yield from push(number, without)


def attached(without: str = "", gives_up: bool = True) -> Model:
    """Two messages, one after the other. The receiver gives up the first."""
    processes: dict[str, Any] = {
        "receiver": lambda: receiver(without, gives_up),
        "sender": lambda: sender(without),
    }
    tensors = {(piece, number): None for piece in range(PIECES) for number in (1, 2)}
    words = {"claims": (0, 0, 0), "to": 2, "pushed": None, "grant": 0, "kernel": 0} | tensors
    name = "copied by system call, weak memory" + (", given up" if gives_up else "")
    return Model(
        name + (f", {without}" if without else ""), processes, Weak(words, 2, contended=list(tensors)), stuck=False,
    )  # fmt: skip
