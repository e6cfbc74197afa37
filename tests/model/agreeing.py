"""Succession (`membership/succession.py`) on one host: whoever gets a group has the same members as all who get one.

One word (number, author, is_open) is moved by compare-and-swap alone. Each rank has a record that only it writes, as a
whole: its last two proposals (number, since, dead), the attempt it has voted for, and the last attempt that it has
finished. A deadline may pass at any time; a rank may die, be stopped, be interrupted, or leave the old group once it
has returned.

``coarse``: a rank looks at the word and all records at once. Without it each is a load of its own, which three ranks
are too many for.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

from tests.model.explorer import Model, Step, Strong, choose, compare_and_swap, load, own, store

Steps = Generator[Step, Any, Any]
NOBODY: frozenset[int] = frozenset()

MUTANTS = {
    "goes without all votes": "vote: decides although a member has not voted for the attempt",
    "no compare-and-swap": "propose, decide: the word is stored, whatever it has become",
    "word before proposal": "propose: moves the word before the proposal that it names is in the record",
    "keeps one proposal": "propose: overwrites the proposal that the word still names",
    "keeps the wrong proposal": "propose: keeps its last proposal, also one that lost and has the same number",
    "frees too early": "vote: gives its part back although its agreement may have been decided",
    "does not look for itself": "next_attempt: a rank that was left out goes on",
    "does not wait for others": "_is_over: a new agreement begins although members still read the votes of the last",
}


class Record(NamedTuple):
    proposals: tuple = ()  # of (number, since, dead), the newest last
    vote: int = 0
    done: int = 0


class Rank(NamedTuple):
    """What does not change."""

    me: int
    world: int
    without: str
    interrupted: bool
    hurried: bool  # its deadline may pass


def read(rank: Rank) -> Steps:
    """Records.read()"""
    records: tuple = ()
    for r in range(rank.world):
        record = yield load(("record", r))
        records = (*records, record)
        record = None
    return records


def gone_ranks(rank: Rank) -> Steps:
    """Records.gone()"""
    gone = NOBODY
    for r in range(rank.world):
        if r != rank.me and (yield load(("gone", r))):
            gone = gone | {r}
    return gone


def propose(rank: Rank, word: tuple, dead: frozenset, since: int) -> Steps:
    mine = yield own(("record", rank.me))
    kept = tuple(p for p in mine.proposals if p[0] == word[0])
    if rank.without == "keeps one proposal":
        kept = ()
    elif rank.without == "keeps the wrong proposal":
        kept = kept or mine.proposals[-1:]
    record = mine._replace(proposals=(*kept, (word[0] + 1, since, dead)))
    after = (word[0] + 1, rank.me, True)
    mine, kept, dead, since = None, None, None, None
    if rank.without == "word before proposal":
        yield compare_and_swap("word", word, after)
        yield store(("record", rank.me), record)
    else:
        yield store(("record", rank.me), record)
        yield from swap_word(rank, word, after)


def swap_word(rank: Rank, word: tuple, after: tuple) -> Steps:
    if rank.without == "no compare-and-swap":
        yield store("word", after)
    else:
        yield compare_and_swap("word", word, after)


def attempt_now(rank: Rank) -> Steps:
    """SharedBoard.now(): the word, and the proposal that it names."""
    while True:
        word = yield load("word")
        if word[0] == 0:
            return word, (0, 0, NOBODY)
        record = yield load(("record", word[1]))
        for proposal in record.proposals:
            if proposal[0] == word[0]:
                return word, proposal
        word, record, proposal = None, None, None


def next_attempt(rank: Rank, voted: int) -> Steps:
    """The attempt to take part in, or None: left out."""
    while True:
        word, attempt = yield from attempt_now(rank)
        number, since, dead = attempt
        if rank.me in dead and rank.without != "does not look for itself":
            return None
        if word[2] and 0 < voted < since:
            return None
        lost = (yield from gone_ranks(rank)) - dead
        if word[2] and not lost:
            return attempt
        attempt = None
        if word[2]:
            yield from propose(rank, word, dead | lost, since)
        elif (yield from is_over(rank, number, dead)):
            yield from propose(rank, word, dead | lost, number + 1)
        word, number, since, dead, lost = None, None, None, None, None


def is_over(rank: Rank, number: int, dead: frozenset) -> Steps:
    """Or the deadline has passed."""
    if rank.without == "does not wait for others":
        return True
    records = yield from read(rank)
    gone = yield from gone_ranks(rank)
    if all(records[r].done >= number or r in gone for r in range(rank.world) if r not in dead):
        return True
    records, gone = None, None
    return rank.hurried and (yield choose("waits", "deadline")) == "deadline"


def take_part(rank: Rank, attempt: tuple) -> Steps:
    """The members, "failed": a later attempt has begun, "left out" or "interrupted"."""
    number, since, dead = attempt
    members = tuple(r for r in range(rank.world) if r not in dead)
    mine = yield own(("record", rank.me))
    yield store(("record", rank.me), mine._replace(vote=number))
    mine = None
    while True:
        word = yield load("word")
        if word[0] != number:
            return (yield from overtaken(rank, number))
        records = yield from read(rank)
        missing = frozenset(r for r in members if records[r].vote != number)
        mine, records = records[rank.me], None
        if not word[2]:
            if missing and rank.without != "goes without all votes":
                return "left out"
            yield store(("record", rank.me), mine._replace(done=number))
            return members
        mine = None
        lost = (yield from gone_ranks(rank)) & frozenset(members)
        now = "waits"
        if missing and not lost:
            ways = ("waits", *(("deadline",) if rank.hurried else ()), *(("interrupt",) if rank.interrupted else ()))
            now, ways = (yield choose(*ways)), None
        if now == "interrupt":
            return "interrupted"
        if now == "deadline":
            lost = missing
        if lost:
            yield from propose(rank, word, dead | lost, since)
        elif not missing or rank.without == "goes without all votes":
            yield from swap_word(rank, word, (*word[:2], False))
        word, missing, lost, now = None, None, None, None


def overtaken(rank: Rank, number: int) -> Steps:
    """The word names another attempt. Only within the same agreement is it sure that nobody has decided the last
    one.
    """
    if rank.without == "frees too early":
        return "failed"
    _, attempt = yield from attempt_now(rank)
    return "left out" if attempt[1] > number else "failed"


def withdraw(rank: Rank) -> Steps:
    while True:
        word, attempt = yield from attempt_now(rank)
        if not word[2] or rank.me in attempt[2]:
            return
        yield from propose(rank, word, attempt[2] | {rank.me}, attempt[1])
        word, attempt = None, None


def shrink(rank: Rank) -> Steps:
    """Everything that came of it: ("freed", attempt) for parts of groups given back, at last ("group", attempt,
    agreement, members) or why not."""
    voted, events = 0, ()
    while True:
        attempt = yield from next_attempt(rank, voted)
        result = (yield from take_part(rank, attempt)) if attempt else "left out"
        if isinstance(result, tuple):
            return *events, ("group", attempt[0], attempt[1], result)
        if result != "failed":
            yield from withdraw(rank)
            return *events, (result,)
        voted, events = attempt[0], (*events, ("freed", attempt[0]))
        attempt, result = None, None


def member(rank: Rank, calls: int) -> Steps:
    """Calls shrink() once or several times on the same old group; then may leave it."""
    results: tuple = ()
    for _turn in range(calls):
        result = yield from shrink(rank)
        results, result = (*results, *result), None
    yield store(("gone", rank.me), 1)  # or is stopped before it does
    return results


def _one_set(results: dict) -> str:
    sets: dict[int, set] = {}
    freed = {(event[1], int(name[5:])) for name, mine in results.items() for event in mine or () if event[0] == "freed"}
    for name, mine in results.items():
        for event in mine or ():
            if event[0] != "group":
                continue
            _, number, since, members = event
            sets.setdefault(since, set()).add(members)
            if int(name[5:]) not in members:
                return f"{name} got a group without itself: {members}"
            if any((number, r) in freed for r in members):
                return f"{name} got a group of {members}, of whom one has given back its part in it"
    return next((f"groups of one agreement differ: {sorted(found)}" for found in sets.values() if len(found) > 1), "")


def agreement(
    without: str = "",
    calls: tuple = (1, 1, 1),
    deaths: int = 0,
    interrupts: bool = False,
    coarse: bool = True,
    hurried: tuple | None = None,
) -> Model:
    """``calls``: how often each rank calls shrink(). ``hurried``: ranks whose deadlines may pass (None: all)."""
    world = len(calls)
    hurried = tuple(range(world)) if hurried is None else hurried
    processes = {
        f"rank {r}": lambda r=r: member(Rank(r, world, without, interrupts and r == 0, r in hurried), calls[r])
        for r in range(world)
    }
    calm = not (hurried or deaths or interrupts)

    def ends(results: dict) -> str:
        if calm and any(event[0] != "group" for mine in results.values() for event in mine):
            return f"somebody got no group although nothing failed: {results}"
        return _one_set(results)

    words: dict = {"word": (0, 0, False)}
    words |= {(word, r): value for r in range(world) for word, value in (("record", Record()), ("gone", 0))}
    extras = [
        f"{deaths} deaths" if deaths else "",
        "an interrupt" if interrupts else "",
        f"{len(hurried)} deadlines",
        without,
    ]
    return Model(
        ", ".join([f"agreement of {world}, {'+'.join(map(str, calls))} calls", *filter(None, extras)]),
        processes, Strong(words), ends, mortal=list(processes), deaths=deaths,
        life=lambda name: ("gone", int(name[5:])), joined=lambda step: coarse and step.kind == "load" and step.place !=
    "word", )  # fmt: skip
