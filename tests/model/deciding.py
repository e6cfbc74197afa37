"""Agreement across hosts (`hierarchical/agreement.py`): one value is decided, whatever is lost or late.

Every member answers for itself (``Acceptor``); whoever has a reason proposes. Messages lie in the network until they
are delivered, if ever: loss is a delivery that does not happen. Answers are seen by the proposer one by one, or not at
all: it goes on with any quorum of them. A value is the proposal in which its group was built, so two proposals never
mean the same one."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator
from itertools import combinations
from typing import Any

from tests.model.explorer import Model, Step, Strong, choose

Steps = Generator[Step, Any, Any]
Proposal = tuple[int, int]
NOTHING: Proposal = (0, -1)

MUTANTS = {
    "forgets what was accepted": "_lead: takes its own value although a promise tells of one that was accepted",
    "takes any accepted value": "_lead: of several accepted values it takes the one of the lowest proposal",
    "accepts after a higher promise": "on_accept: agrees to a proposal that is lower than one it has promised",
    "promises everything": "on_prepare: promises a proposal that is lower than one it has promised",
    "half is enough": "_is_quorum: any half of the members decides",
}


def is_quorum(ranks: frozenset[int], world: int, without: str = "") -> bool:
    """More than half of the members, or just half of them with rank 0."""
    half = 2 * len(ranks) == world and (0 in ranks or without == "half is enough")
    return 2 * len(ranks) > world or half


class Network(Strong):
    """Memory in which acceptors answer messages: ``send``, ``deliver`` and ``quorum`` are steps of their own."""

    def __init__(self, world: int, proposals: list[Proposal], without: str):
        self.world, self.without = world, without
        words: dict[Hashable, Any] = {("acceptor", r): (NOTHING, None) for r in range(world)}
        words |= {(kind, proposal): frozenset() for proposal in proposals for kind in ("promise", "accepted")}
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
        kind, proposal, value, rank = message
        promised, accepted = values["acceptor", rank]
        values = values | {"network": values["network"] - {message}}
        if kind == "prepare" and (proposal > promised or self.without == "promises everything"):
            values["acceptor", rank] = proposal, accepted
            self.answer(values, ("promise", proposal), (rank, accepted))
        elif kind == "accept" and (proposal >= promised or self.without == "accepts after a higher promise"):
            values["acceptor", rank] = max(proposal, promised), (proposal, value)
            self.answer(values, ("accepted", proposal), (rank,))
        return values

    @staticmethod
    def answer(values: dict, place: Hashable, what: tuple) -> None:
        if values[place] is not None:
            values[place] = values[place] | {what}


def proposer(proposals: list[Proposal], without: str) -> Steps:
    """Agreement._propose(), _lead() and _decide(), with the next proposal when one takes too long. Returns what it
    decided.
    """
    for proposal in proposals:
        yield Step("send", None, ("prepare", proposal, None))
        promises = yield Step("quorum", ("promise", proposal))
        told = sorted(accepted for _, accepted in promises if accepted)
        value = proposal
        if told and without != "forgets what was accepted":
            value = told[0 if without == "takes any accepted value" else -1][1]
        promises, told = None, None
        yield Step("send", None, ("accept", proposal, value))
        if (yield choose("waits", "too long")) == "waits":
            yield Step("quorum", ("accepted", proposal))
            return value
        value = None
    return None


def carrier() -> Steps:
    while True:
        yield Step("deliver")


def deciding(
    without: str = "", world: int = 3, proposals: tuple[tuple[Proposal, ...], ...] = (((1, 0), (3, 0)), ((2, 1),))
) -> Model:
    """``proposals``: those that each proposer tries, one after the other."""
    processes: dict = {
        f"proposer {n}": lambda mine=mine: proposer(list(mine), without) for n, mine in enumerate(proposals)
    }
    processes["network"] = carrier

    def ends(results: dict) -> str:
        decided = {value for name, value in results.items() if name != "network" and value not in (None, "stuck")}
        return f"decided twice: {sorted(decided)}" if len(decided) > 1 else ""

    memory = Network(world, [proposal for mine in proposals for proposal in mine], without)
    name = f"decision of {world} members, {sum(map(len, proposals))} proposals" + (f", {without}" if without else "")
    return Model(name, processes, memory, ends, stuck=False)
