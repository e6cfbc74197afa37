"""Messages that both ranks copy (`_core/p2p/cooperative_copy.c`, `_core/p2p/progress.c`), on weak memory.

The sender writes into the receiver's tensor. A receiver that returns has every piece, also where the sender died; one
that gives up has its tensor for itself from then on, also where the sender was stopped in the middle of a piece, and
the next message finds nothing of the one before.

A message has two pieces. What it moves into tensor ``n`` is ``n``; ``MINE`` is what the receiver's caller writes into
its tensor when its call has failed.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from tests.model.explorer import (
    ACQUIRE,
    RELAXED,
    RELEASE,
    Model,
    Step,
    check,
    choose,
    compare_and_swap,
    load,
    store,
    until,
)
from tests.model.weak import Weak

Steps = Generator[Step, Any, Any]
MINE = "mine"
PIECES = 2

MUTANTS = {
    "opens relaxed": "coop_open(): the word is no release store, so the sender may find another tensor's place",
    "place after the claim": "coop_push(): where the tensor is, is read after a piece was claimed",
    "claims without comparing": "claim(): the word is loaded and stored, not compared and swapped",
    "pushed is relaxed": "coop_push(): `pushed` is no release store",
    "pushed has no number": "coop_push(): `pushed` does not say of which message",
    "leaves pieces": "coop_pull(): returns before all pieces are claimed",
    "does not wait": "p2p_revoke_receive(): returns although the sender is in the middle of a piece",
    "keeps its pages": "p2p_revoke_receive(): gives up waiting and returns without isolate()",
}
DEATH_MUTANTS = {
    "leaves it": "coop_pull(): takes what a dead sender has claimed for copied",
}


def claim(number: int, side: int, without: str) -> Steps:
    """Which piece from this side (1: the front, 2: the back), or -1: none is left. And the word."""
    while True:
        word = yield load("claims", ACQUIRE)
        if word[0] != number or word[1] + word[2] >= PIECES:
            return -1, word
        more = (number, word[1] + (side == 1), word[2] + (side == 2))
        if without == "claims without comparing":
            yield store("claims", more, RELEASE)
            return word[side], word
        if (yield compare_and_swap("claims", word, more)):
            return word[side], word


def pull(number: int, without: str) -> Steps:
    """coop_open() and coop_pull(). Returns how many pieces the sender has claimed."""
    yield store("to", number)
    yield store("claims", (number, 0, 0), RELAXED if without == "opens relaxed" else RELEASE)
    while True:
        piece, word = yield from claim(number, 1, without)
        if piece < 0 or without == "leaves pieces":
            return word[2]
        yield store((piece, number), number)


def all_pushed(number: int, count: int, without: str) -> Any:
    return count if without == "pushed has no number" else (number, count)


def receive(number: int, without: str, may_die: bool) -> Steps:
    """The rest of coop_pull(), and what the caller finds."""
    claimed = yield from pull(number, without)
    if claimed and may_die and (yield load("life", ACQUIRE)):
        for piece in range(PIECES - claimed, PIECES):
            if without != "leaves it":
                yield store((piece, number), number)
    elif claimed:
        yield until("pushed", all_pushed(number, claimed, without))
    for piece in range(PIECES):
        found = yield load((piece, number))
        yield check(found == number, "a receive returned without a piece, or with another message's")
        found = None


def give_up(number: int, without: str) -> Steps:
    """p2p_revoke_receive(). Whether the tensor has kept its pages."""
    claimed = yield from pull(number, without)
    if not claimed or without == "does not wait":
        return True
    if (yield choose("waits", "isolates")) == "isolates":
        return without == "keeps its pages"
    yield until("pushed", all_pushed(number, claimed, without))
    return True


def receiver(without: str, gives_up: bool, may_die: bool) -> Steps:
    mine = False
    if gives_up:
        mine = yield from give_up(1, without)
        for piece in range(PIECES if mine else 0):
            yield store((piece, 1), MINE)
    else:
        yield from receive(1, without, may_die)
    yield from receive(2, without, may_die)
    for piece in range(PIECES if mine else 0):
        found = yield load((piece, 1))
        yield check(found == MINE, "the sender wrote into a tensor whose receive had ended")
        found = None


def push(number: int, without: str) -> Steps:
    """coop_push()"""
    if (yield load("claims", ACQUIRE))[0] != number:
        return
    to = yield load("to")
    while True:
        back, _ = yield from claim(number, 2, without)
        if back < 0:
            return
        if without == "place after the claim":
            to = yield load("to")
        yield store((PIECES - 1 - back, to), number)
        order = RELAXED if without == "pushed is relaxed" else RELEASE
        yield store("pushed", all_pushed(number, back + 1, without), order)


def sender(without: str) -> Steps:
    for number in (1, 2):
        yield from push(number, without)


def joint(without: str = "", gives_up: bool = True, deaths: int = 0) -> Model:
    """Two messages, one after the other. The receiver gives up the first, or the sender may die."""
    processes = {
        "receiver": lambda: receiver(without, gives_up, deaths > 0),
        "sender": lambda: sender(without),
    }
    tensors = {(piece, number): None for piece in range(PIECES) for number in (1, 2)}
    words = {"claims": (0, 0, 0), "to": 2, "pushed": None, "life": 0} | tensors
    name = "copied by both, weak memory" + (", given up" if gives_up else "") + (", a death" if deaths else "")
    return Model(
        name + (f", {without}" if without else ""), processes, Weak(words, 2, contended=list(tensors)),
        mortal=["sender"] if deaths else [], deaths=deaths, life=lambda _: "life", stuck=False,
    )  # fmt: skip
