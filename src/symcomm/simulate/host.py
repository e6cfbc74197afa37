"""What a collective costs on one host: the plans of all its ranks, step by step.

Every rank has a clock. A copy or a reduction moves the clock by what its bytes cost; a signal notes when it was given;
a wait moves the clock to the moment at which the last of its signals is seen. The slowest rank's clock is the answer.

It does not play long loops to their end: after a few turns, every turn takes as long as the previous one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from symcomm import collectives
from symcomm.collectives.plan import ALL, At, Copy, Loop, Plan, Reduce, Signal, Space, Step, Wait
from symcomm.collectives.select import Limits
from symcomm.errors import InternalError
from symcomm.simulate.machine import Machine
from symcomm.types import DType, RedOpType

SETTLED = 8  # turns after which a loop runs evenly; pipelines here are two deep
ELEMENT = DType.FLOAT32


@functools.lru_cache(maxsize=4096)
def host_seconds(collective: str, nbytes: int, ranks: int, machine: Machine, symmetric: bool = False) -> float:
    """A collective of the ranks of one host. ``nbytes``: the whole tensor, of all pieces together where it has pieces.

    With ``symmetric`` the tensors live in symmetric memory, so nothing is staged.
    """
    if ranks == 1:
        return 0.0  # in place, there is nothing to do
    nodes = tuple(machine.node(rank, ranks) for rank in range(ranks))
    return machine.call + plans_seconds(plans_for(collective, nbytes, ranks, nodes), nbytes, machine, symmetric)


@functools.lru_cache(maxsize=64)  # calibration plays the same plans 50 times; making them takes half as long as playing
def plans_for(collective: str, nbytes: int, ranks: int, nodes: tuple[int, ...] = ()) -> list[Plan]:
    """Every rank's plan for float32, as a call of that size gets it. ``nodes``: the NUMA node of each rank."""
    item, limits = ELEMENT.itemsize, Limits().on_nodes(nodes)
    whole, piece = max(1, nbytes // item), (max(1, nbytes // item // ranks),) * ranks
    made = {
        "all_reduce": lambda r: collectives.all_reduce(r, ranks, whole, ELEMENT, RedOpType.SUM, limits),
        "reduce_scatter": lambda r: collectives.reduce_scatter(r, ranks, piece, ELEMENT, RedOpType.SUM, limits=limits),
        "all_gather": lambda r: collectives.all_gather(r, ranks, piece, ELEMENT, limits=limits),
        "broadcast": lambda r: collectives.broadcast(r, ranks, whole, ELEMENT, 0, limits),
        "reduce": lambda r: collectives.reduce(r, ranks, whole, ELEMENT, RedOpType.SUM, 0),
        "gather": lambda r: collectives.gather(r, ranks, piece, ELEMENT, 0),
        "scatter": lambda r: collectives.scatter(r, ranks, piece, ELEMENT, 0),
        "all_to_all": lambda r: collectives.all_to_all(r, ranks, piece[0], ELEMENT),
        "barrier": lambda r: collectives.barrier(r, ranks),
    }
    return [made[collective](rank) for rank in range(ranks)]


def plans_seconds(plans: Sequence[Plan], nbytes: int, machine: Machine, symmetric: bool = False) -> float:
    """Play all ranks' plans; extrapolates the remaining turns of long loops from those played."""
    loops = (step for step in _body(plans[0], symmetric) if isinstance(step, Loop))
    longest = [loop.turns for loop in loops if loop.turns > SETTLED]
    whole = _Host(plans, nbytes, machine, symmetric, SETTLED).play()
    if not longest:
        return whole
    half = _Host(plans, nbytes, machine, symmetric, SETTLED // 2).play()
    turn = (whole - half) / (SETTLED - SETTLED // 2) / len(longest)
    return whole + turn * sum(turns - SETTLED for turns in longest)


def _body(plan: Plan, symmetric: bool) -> list[Step]:
    return plan.direct if symmetric and plan.direct is not None else plan.staged


@dataclass
class _Host:
    """All ranks of a host while they play their plans."""

    plans: Sequence[Plan]
    nbytes: int
    machine: Machine
    symmetric: bool
    most_turns: int
    clocks: list[float] = field(init=False)

    def __post_init__(self) -> None:
        ranks = len(self.plans)
        self.clocks = [0.0] * ranks
        self.signals: list[dict[int, float]] = [{} for _ in range(ranks)]  # value -> when
        # which of the user's tensors are in a cache: small ones stay there from call to call
        self.small = self.nbytes <= self.machine.cache
        self.seen = self.machine.wait(ranks)
        self.moved = False

    def play(self) -> float:
        """When the last rank is done."""
        ranks = len(self.plans)
        for rank, plan in enumerate(self.plans):
            if not (self.symmetric and plan.direct is not None):
                for step in plan.head:
                    self.move(rank, step)
        met = max(self.clocks) + self.seen
        self.clocks = [met] * ranks
        playing = [self.rank(r) for r in range(ranks)]
        while playing:
            self.moved = False
            left = [steps for steps in playing if next(steps, None) is not None]
            if len(left) == len(playing) and not self.moved:
                raise InternalError("symcomm simulate: the plans of a host wait for each other; please report it.")
            playing = left
        return max(self.clocks)

    def rank(self, rank: int) -> Iterator[bool]:
        """Yields whenever this rank must wait for a signal."""
        for step in _body(self.plans[rank], self.symmetric):
            turns, body = (min(step.turns, self.most_turns), step.body) if isinstance(step, Loop) else (1, (step,))
            for turn in range(turns):
                for inner in body:
                    if isinstance(inner, Wait):
                        while (when := self.given(rank, inner.who, inner.value + inner.stride * turn)) is None:
                            yield True
                        self.clocks[rank] = max(self.clocks[rank], when + self.seen)
                    elif isinstance(inner, Signal):
                        self.signals[rank][inner.value + inner.stride * turn] = self.clocks[rank]
                    else:
                        self.move(rank, inner)
                    self.moved = True

    def given(self, rank: int, who: int, value: int) -> float | None:
        """When the last of the signals that a wait asks for was given; None if one is missing."""
        latest = 0.0
        for peer in range(len(self.plans)) if who == ALL else (who,):
            if peer != rank:
                when = self.signals[peer].get(value)
                if when is None:  # a later signal implies this one
                    when = next((at for given, at in self.signals[peer].items() if given > value), None)
                if when is None:
                    return None
                latest = max(latest, when)
        return latest

    def move(self, rank: int, step: Step) -> None:
        """A copy or a reduction: every place costs its bytes, once."""
        assert isinstance(step, Copy | Reduce)
        sources = step.src if isinstance(step, Reduce) else (step.src,)
        ranks, places = len(self.plans), (*sources, *step.dst)
        far = sum(self.is_far(rank, place) for place in places)
        staged = sum(place.space == Space.STAGE and not self.is_far(rank, place) for place in places)
        others = len(places) - staged - far
        self.clocks[rank] += self.machine.cross(far * step.nbytes, ranks)
        self.clocks[rank] += self.machine.touch(staged * step.nbytes, ranks, True)
        self.clocks[rank] += self.machine.touch(others * step.nbytes, ranks, self.small)

    def is_far(self, rank: int, place: At) -> bool:
        """Whether the bytes are on another node than the rank."""
        if self.machine.nodes == 1 or place.space in (Space.IN, Space.OUT):
            return False
        ranks = len(self.plans)
        return self.machine.node(place.index, ranks) != self.machine.node(rank, ranks)
