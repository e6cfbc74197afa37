"""The register of a quorum (`membership/quorum_board.py`): whoever learns a standing learns one of a single chain.

Every member answers for itself (``Acceptor``); whoever has a reason changes the standing. Messages lie in the network
until they are delivered, if ever: loss is a delivery that does not happen. Answers are seen by the proposer one by one,
or not at all: it goes on with any quorum of them. A standing is the history of its changes, each of them the ballot in
which it was made, so two standings never mean the same one, and of two that were learned one has to continue the
other. That is what compare-and-swap is to those who agree by it (`tests/model/agreeing.py`)."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator
from itertools import combinations
from typing import Any

from tests.model.explorer import Model, Step, Strong, choose

Steps = Generator[Step, Any, Any]
Ballot = tuple[int, int]
NOTHING: Ballot = (0, -1)

MUTANTS = {
    "forgets what was accepted": "_swap: makes its own change although a promise tells of another that was accepted",
    "takes any accepted standing": "_swap: of several accepted standings it takes the one of the lowest ballot",
    "does not complete what it finds": "_swap: learns a standing that was accepted somewhere, and sends it to nobody",
    "accepts after a higher promise": "on_accept: agrees in a ballot that is lower than one it has promised",
    "promises everything": "on_prepare: promises a ballot that is lower than one it has promised",
    "half is enough": "_is_quorum: any half of the members decides",
}


def is_quorum(ranks: frozenset[int], world: int, without: str = "") -> bool:
    """More than half of the members, or just half of them with rank 0."""
    half = 2 * len(ranks) == world and (0 in ranks or without == "half is enough")
    return 2 * len(ranks) > world or half


class Network(Strong):
    """Memory in which acceptors answer messages: ``send``, ``deliver`` and ``quorum`` are steps of their own."""

    def __init__(self, world: int, ballots: list[Ballot], without: str):
        self.world, self.without = world, without
        words: dict[Hashable, Any] = {("acceptor", r): (NOTHING, (NOTHING, ())) for r in range(world)}
        words |= {(kind, ballot): frozenset() for ballot in ballots for kind in ("promise", "accepted")}
        super().__init__(words | {"network": frozenset()})

    def do(self, state: tuple, who: int, step: Step) -> Iterator[tuple[Any, tuple]]:
        values = dict(zip(self.index, state[0], strict=True))
        if step.kind == "send":
            values["network"] = values["network"] | {(*step.a, r) for r in range(self.world)}
            yield None, self._with(state, values)
        elif step.kind == "deliver":
            for message in values["network"]:
                yield message, self._with(state, self.deliver(values, message))
        elif step.kind == "quorum":
            for some in self.quorums(values[step.place]):
                yield some, self._with(state, values | {step.place: None})  # what comes later changes nothing

    def quorums(self, answers: frozenset) -> Iterator[tuple]:
        """The smallest: whatever a larger one tells, one of those tells too."""
        for size in range(1, len(answers) + 1):
            found = [
                some
                for some in combinations(sorted(answers, key=str), size)
                if is_quorum(frozenset(answer[0] for answer in some), self.world, self.without)
            ]
            yield from found
            if size * 2 > self.world:
                return

    def _with(self, state: tuple, values: dict) -> tuple:
        """Messages that will be refused whenever they come make no difference."""
        if self.without not in ("accepts after a higher promise", "promises everything"):
            values["network"] = frozenset(m for m in values["network"] if m[1] >= values["acceptor", m[3]][0])
        return tuple(values.values()), *state[1:]

    def deliver(self, values: dict, message: tuple) -> dict:
        """Acceptor.on_prepare(), Acceptor.on_accept()"""
        kind, ballot, standing, rank = message
        promised, accepted = values["acceptor", rank]
        values = values | {"network": values["network"] - {message}}
        if kind == "prepare" and (ballot > promised or self.without == "promises everything"):
            values["acceptor", rank] = ballot, accepted
            self.answer(values, ("promise", ballot), (rank, accepted))
        elif kind == "accept" and (ballot >= promised or self.without == "accepts after a higher promise"):
            values["acceptor", rank] = max(ballot, promised), (ballot, standing)
            self.answer(values, ("accepted", ballot), (rank,))
        return values

    @staticmethod
    def answer(values: dict, place: Hashable, what: tuple) -> None:
        if values[place] is not None:
            values[place] = values[place] | {what}


def changer(ballots: list[Ballot], without: str) -> Steps:
    """QuorumBoard._swap(), once for each ballot, from the standing that it knows. Returns those that it has learned."""
    known: tuple = ()
    learned: tuple = ()
    for ballot in ballots:
        yield Step("send", None, ("prepare", ballot, None))
        promises = yield Step("quorum", ("promise", ballot))
        told = sorted(accepted for _, accepted in promises)
        found = told[0 if without == "takes any accepted standing" else -1][1]
        if without == "forgets what was accepted":
            found = ()
        promises, told = None, None
        if len(found) > len(known) and without == "does not complete what it finds":
            known, learned, found = found, (*learned, found), None
            continue
        standing, found = found if len(found) > len(known) else (*known, ballot), None
        yield Step("send", None, ("accept", ballot, standing))
        if (yield choose("waits", "too long")) == "waits":
            yield Step("quorum", ("accepted", ballot))
            known, learned = standing, (*learned, standing)
        standing = None
    return learned


def carrier() -> Steps:
    while True:
        yield Step("deliver")


def deciding(
    without: str = "", world: int = 3, ballots: tuple[tuple[Ballot, ...], ...] = (((1, 0), (3, 0)), ((2, 1),))
) -> Model:
    """``ballots``: those in which each rank changes the standing, one after the other."""
    processes: dict = {f"rank {n}": lambda mine=mine: changer(list(mine), without) for n, mine in enumerate(ballots)}
    processes["network"] = carrier

    def ends(results: dict) -> str:
        learned = sorted(
            {s for name, mine in results.items() if name != "network" and isinstance(mine, tuple) for s in mine},
            key=len,
        )
        for one, other in combinations(learned, 2):
            if other[: len(one)] != one:
                return f"two standings, of which none continues the other: {one}, {other}"
        return ""

    memory = Network(world, [ballot for mine in ballots for ballot in mine], without)
    name = f"register of {world} members, {sum(map(len, ballots))} ballots" + (f", {without}" if without else "")
    return Model(name, processes, memory, ends, stuck=False)
