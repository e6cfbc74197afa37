"""Plans that callers wrote (``ProcessGroup.run_plan``), checked against the group and the tensors before ranks meet.

The signature that ranks compare when they arrive includes the plan's name, so a plan never runs against another plan or
a collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from symcomm import errors
from symcomm._core import native
from symcomm.collectives.plan import At, Collective, Copy, Loop, Plan, Reduce, Space
from symcomm.collectives.select import custom_count
from symcomm.group.buffers import Buffer, read_buffer, write_buffer
from symcomm.types import DType, RedOpType

Reach = dict[tuple[Space, int], int]  # how many bytes of the caller's tensors, and of peers', a plan uses


class CustomCall:
    """One call of run_plan."""

    def __init__(self, ranks: tuple[int, int], most: int, name: str, plan: Plan, inputs: Any, outputs: Any):
        """``ranks``: (rank, size); ``most``: the bytes that a plan may stage."""
        if not isinstance(name, str) or not name:
            raise errors.wrong_type("run_plan", "name", name, "a non-empty str, which errors name")
        if not isinstance(plan, Plan):
            raise errors.wrong_type(name, "plan", type(plan).__name__, "a symcomm.collectives.Plan")
        self._rank, self._size = ranks
        self._most, self._name, self._plan = most, name, plan
        self.result = _listed(outputs)
        self.inputs = [read_buffer(name, f"inputs[{i}]", t) for i, t in enumerate(_listed(inputs))]
        self.outputs = [write_buffer(name, f"outputs[{i}]", t) for i, t in enumerate(self.result)]
        # Peers use a direct plan's tensors, so these must have one size on all ranks.
        first = (*self.inputs[:1], *self.outputs[:1]) if plan.direct is not None else ()
        self._sizes = tuple([buffer.nbytes for buffer in first])
        self.key = (name, id(plan), self._sizes)

    def load(self, load_plan: Callable[[Plan], Any]) -> tuple[tuple[Plan, Reach], Any]:
        """((the plan, how many bytes of tensors it uses), the plan as the core runs it).

        The plan is kept because ``key`` holds its id."""
        plan = self._plan
        try:
            # Peers read the first input only, and ranks compare its size.
            ready = dataclasses.replace(
                plan, collective=Collective.CUSTOM, count=self._count(), piece_bytes=0, apart=False
            )
            stage = native.plan_stage_bytes(native.make_plan(ready.encode()))
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            self._refuse("plan", str(error), "one that the core can run safely")
        for field, ours, its in (("world", self._size, plan.world), ("rank", self._rank, plan.rank)):
            if ours != its:
                self._refuse(f"plan.{field}", its, f"the group's, {ours}")
        if stage > self._most:
            self._refuse("plan", f"one that stages {stage} bytes", f"one that stages at most {self._most}")
        moves = list(_moves(plan))
        if any(isinstance(step, Reduce) for step, _ in moves) and not native.reduce_defined(plan.dtype, plan.redop):
            self._refuse("plan.redop", RedOpType(plan.redop).name, f"defined for {DType(plan.dtype).label}")
        return (plan, _reach(moves)), load_plan(ready)

    def _count(self) -> int:
        plan, sizes = self._plan, self._sizes
        told = f"{plan.count}, tensors of {' and '.join(map(str, sizes))} bytes" if sizes else str(plan.count)
        agreed = [self._name, plan.count, int(plan.collective), list(map(int, plan.needs)), plan.attach_bytes, sizes]
        return custom_count(agreed, plan.count, told)

    def check_tensors(self, checked: tuple[Plan, Reach]) -> None:
        """Refuse tensors of another dtype than the plan's, and fewer or smaller ones than it uses."""
        plan, reach = checked
        named: dict[str, list[Buffer]] = {"inputs": self.inputs, "outputs": self.outputs}
        for name, buffers in named.items():
            for i, buffer in enumerate(buffers):
                if buffer.dtype != plan.dtype:
                    self._refuse(f"{name}[{i}]", buffer.dtype.label, f"of the plan's dtype, {DType(plan.dtype).label}")
        for (space, index), nbytes in reach.items():
            is_mine = space in (Space.IN, Space.OUT)
            name = "inputs" if space in (Space.IN, Space.PEER_IN) else "outputs"
            tensors, i = named[name], index if is_mine else 0
            if i >= len(tensors):
                self._refuse(name, f"{len(tensors)} tensors", f"at least {i + 1}, which the plan uses")
            if tensors[i].nbytes < nbytes:
                uses = f"at least the {nbytes} bytes that the plan uses" + ("" if is_mine else f" of rank {index}'s")
                self._refuse(f"{name}[{i}]", f"{tensors[i].nbytes} bytes", uses)

    def _refuse(self, argument: str, got: object, allowed: str) -> NoReturn:
        raise errors.bad_argument(self._name, argument, got, allowed) from None


def _listed(tensors: Any) -> list[Any]:
    """One tensor, or several, as a list."""
    return [tensors] if hasattr(tensors, "shape") else list(tensors)


def _moves(plan: Plan) -> Iterator[tuple[Copy | Reduce, int]]:
    """The steps that move bytes, each with its number of turns."""
    for step in (*plan.head, *plan.staged, *(plan.direct or ())):
        turns, body = (step.turns, step.body) if isinstance(step, Loop) else (1, (step,))
        yield from ((inner, turns) for inner in body if isinstance(inner, (Copy, Reduce)) and turns)


def _reach(moves: Sequence[tuple[Copy | Reduce, int]]) -> Reach:
    reach: Reach = {}
    for step, turns in moves:
        for at in (*step.dst, *(step.src if isinstance(step, Reduce) else (step.src,))):
            if at.space != Space.STAGE:
                place = Space(at.space), at.index
                reach[place] = max(reach.get(place, 0), _end(at, step, turns))
    return reach


def _end(at: At, step: Copy | Reduce, turns: int) -> int:
    if at.mod:
        return at.offset + at.stride * (at.mod - 1) + step.nbytes
    last = at.position(turns - 1) + (step.nbytes if step.last is None else step.last)
    return max(last, at.position(turns - 2) + step.nbytes if turns > 1 else 0)
