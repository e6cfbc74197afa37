"""Plans of callers' own: right values, refused on every rank before anybody waits, and compared between ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import symcomm
from symcomm import errors, testing
from symcomm.collectives import Collective, Need, Plan
from symcomm.collectives.plan import ALL, At, Copy, Loop, Reduce, Signal, Space, Wait
from symcomm.group.process_group import ProcessGroup
from symcomm.observe.recorder import records
from symcomm.types import DType, RedOpType
from tests.support.faults import run_group
from tests.support.ranks import returned

FLOAT = DType.FLOAT32
IN, OUT = At(Space.IN), At(Space.OUT)


def ring(rank: int, world: int, count: int) -> Plan:
    """Everybody gets what the rank before it has, in two chunks."""
    chunk, before = 4 * count // 2, (rank - 1) % world
    plan = Plan(Collective.CUSTOM, rank, world, count, FLOAT)
    plan.head = [Loop(2, (Copy((At(Space.STAGE, rank, 0, chunk),), At(Space.IN, 0, 0, chunk), chunk),))]
    plan.staged = [Copy((OUT,), At(Space.STAGE, before), 2 * chunk)]
    plan.direct = [Copy((OUT,), At(Space.PEER_IN, before), 2 * chunk), Signal(2), Wait(ALL, 2)]
    plan.needs = [Need.INPUT] * world
    return plan


@testing.ranks([1, 2, 3], timeout=20, deadline=100)
def test_values(g: ProcessGroup):
    plan, before = ring(g.rank, g.size, 1000), float((g.rank - 1) % g.size)
    symmetric = torch.frombuffer(g.arena.buffer(4000), dtype=torch.float32)
    for source in (torch.zeros(1000), torch.zeros(2000)[::2], symmetric):
        for target in (torch.zeros(1000), torch.zeros(2000)[::2]):
            source.fill_(g.rank)
            g.run_plan("ring", plan, source, [target])
            assert target.tolist() == [before] * 1000
            work = g.run_plan("ring", plan, source, target.zero_(), async_op=True)
            assert work is not None and work.result()[0] is target and target.tolist() == [before] * 1000
    assert g.call_stats()["collectives"]["long"] >= 12


PIECE = 4096


def _attached(g: ProcessGroup, nbytes: int, piece: int, inputs: tuple[int, ...]) -> str:
    """Rings whose ranks read each other's memory, in pieces; ``inputs``: what is passed besides, and not used."""
    plan, before = ring(g.rank, g.size, nbytes // 4), (g.rank - 1) % g.size
    starts = range(0, nbytes, piece)
    reads = [Copy((At(Space.OUT, 0, at),), At(Space.PEER_IN, before, at), min(piece, nbytes - at)) for at in starts]
    plan = replace(plan, direct=[*reads, Signal(2), Wait(ALL, 2)], attach_bytes=piece, piece_bytes=piece)
    source = torch.arange(nbytes // 4, dtype=torch.float32) + g.rank
    target, others = torch.zeros_like(source), [torch.full((n // 4,), 77.0) for n in inputs]
    g.barrier()  # a peer that is not there yet cannot be read
    g.run_plan("ring", plan, [source, *others], target)
    assert torch.equal(target, source - g.rank + before)
    return records.operations_of(g)[g.rank][-1].plan


@pytest.mark.ordinary_memory("it is what peers read by system call")
@pytest.mark.parametrize(
    ("nbytes", "piece", "inputs"),
    [
        (2 * PIECE, PIECE, ()),
        (PIECE + 2048, PIECE, ()),  # the last piece is not whole
        (PIECE, 2 * PIECE, ()),
        (2 * PIECE, PIECE, (4,)),  # as many inputs as ranks, which are not the pieces
        (2 * PIECE, PIECE, (PIECE,)),
    ],
)
def test_peers_read_the_first_input_alone(nbytes: int, piece: int, inputs: tuple[int, ...]):
    assert returned(run_group(_attached, 2, nbytes, piece, inputs)) == ["attached"] * 2


def _copy(g: ProcessGroup, *, nbytes: int = 16, source: At = IN, target: At = OUT) -> Plan:
    return Plan(Collective.CUSTOM, g.rank, g.size, 4, FLOAT, staged=[Copy((target,), source, nbytes)])


def _plan(g: ProcessGroup, **changes: object) -> Plan:
    return replace(_copy(g), **changes)  # type: ignore[arg-type]


HUGE = 1 << 40
# What is passed instead of (plan, inputs, outputs) for a copy of four floats -> words of the refusal
BAD: dict[str, tuple[Callable[[ProcessGroup, torch.Tensor], tuple], str]] = {
    "no plan": (lambda g, t: ("scan", t, t), "mine: plan must be a symcomm.collectives.Plan, got 'str'"),
    "world": (lambda g, t: (_plan(g, world=3), t, t), "plan.world must be the group's, 2, got 3"),
    "rank": (lambda g, t: (_plan(g, rank=1 - g.rank), t, t), r"plan.rank must be the group's, [01], got [01]"),
    "no input": (lambda g, t: (_copy(g), [], t), "inputs must be at least 1, which the plan uses, got '0 tensors'"),
    "second output": (
        lambda g, t: (_copy(g, target=At(Space.OUT, 1)), t, t),
        "outputs must be at least 2, which the plan uses, got '1 tensors'",
    ),
    "too small": (
        lambda g, t: (_copy(g), t, t[:3]),
        r"outputs\[0\] must be at least the 16 bytes that the plan uses, got '12 bytes'",
    ),
    "too small for the last turn": (
        lambda g, t: (_plan(g, staged=[Loop(4, (Copy((At(Space.OUT, 0, 0, 8),), IN, 8, 4),))]), t, t),
        r"outputs\[0\] must be at least the 28 bytes that the plan uses",
    ),
    "peer's": (
        lambda g, t: (_plan(g, direct=[Copy((OUT,), At(Space.PEER_IN, 1, 4), 16)], needs=[Need.INPUT] * 2), t, t),
        r"inputs\[0\] must be at least the 20 bytes that the plan uses of rank 1's, got '16 bytes'",
    ),
    "not promised": (
        lambda g, t: (_plan(g, direct=[Copy((OUT,), At(Space.PEER_IN, 1), 16)], needs=[Need.OUTPUT] * 2), t, t),
        "one that the core can run safely, got .*reads a tensor that nobody promised",
    ),
    "output not promised": (
        lambda g, t: (_plan(g, direct=[Copy((OUT,), At(Space.PEER_OUT, 1), 16)], needs=[Need.INPUT] * 2), t, t),
        "one that the core can run safely, got .*reads a tensor that nobody promised",
    ),
    "dtype": (lambda g, t: (_copy(g), t.double(), t), "must be of the plan's dtype, float32, got 'float64'"),
    "no tensor": (lambda g, t: (_copy(g), [3.0], t), r"inputs\[0\] must be a tensor"),
    "staging": (
        lambda g, t: (_copy(g, target=At(Space.STAGE, g.rank, HUGE)), t, t),
        "plan must be one that stages at most 2097152, got 'one that stages 1099511627792 bytes'",
    ),
    "other's staging": (
        lambda g, t: (_copy(g, target=At(Space.STAGE, 1 - g.rank)), t, t),
        "one that the core can run safely, got .*writes another rank's staging area",
    ),
    "negative": (lambda g, t: (_copy(g, source=At(Space.IN, 0, -4)), t, t), "negative offset"),
    "no step": (lambda g, t: (_plan(g, staged=["copy"]), t, t), "plan must be one that the core can run safely"),
    "no name of an algorithm": (lambda g, t: (_plan(g, name="ring"), t, t), "plan must be one that the core"),
    "undefined": (
        lambda g, t: (_plan(g, redop=RedOpType.BAND, staged=[Reduce((OUT,), (IN,), 16)]), t, t),
        "plan.redop must be defined for float32, got 'BAND'",
    ),
}  # fmt: skip


@testing.ranks(2, timeout=20, deadline=100)
def test_what_is_refused(g: ProcessGroup):
    for which, (make, words) in BAD.items():
        with pytest.raises(errors.BadArgumentError, match=words) as caught:
            g.run_plan("mine", *make(g, torch.ones(4)))
        assert "\n" not in str(caught.value) and str(caught.value).endswith("."), which
        g.barrier()
    with pytest.raises(errors.WrongTypeError, match="run_plan: name must be a non-empty str, which errors name, got 3"):
        g.run_plan(3, _copy(g))  # type: ignore[arg-type]
    out = torch.zeros(4)
    g.run_plan("mine", _copy(g), torch.ones(4), out)
    assert out.tolist() == [1.0] * 4


def _differ(g: ProcessGroup, how: str) -> None:
    t, plan = torch.ones(4), _copy(g)
    if g.rank == 1 and how == "collective":
        g.broadcast(t)
    elif how == "tensors":  # peers would use them in place
        g.run_plan("ring", ring(g.rank, g.size, 4), torch.ones(4 + g.rank), t)
    elif how == "count":
        g.run_plan("mine", _plan(g, count=4 + g.rank), t, t)
    else:
        g.run_plan("other" if g.rank == 1 and how == "name" else "mine", plan, t, t)


DIFFER = {
    "collective": ("rank 0 called mine(float32 x 4) at", "rank 1 called broadcast(float32 x 4, root 0) at"),
    "name": ("rank 0 called mine(float32 x 4) at", "rank 1 called other(float32 x 4) at"),
    "count": ("rank 0 called mine(float32 x 4) at", "rank 1 called mine(float32 x 5) at"),
    "tensors": ("ring(float32 x 4, tensors of 16 and 16 bytes) at", "ring(float32 x 4, tensors of 20 and 16 bytes) at"),
}


@pytest.mark.parametrize("how", DIFFER)
def test_ranks_that_differ(how: str):
    for outcome in run_group(_differ, 2, how):
        assert isinstance(outcome.error, errors.CollectiveMismatchError), str(outcome)
        assert all(words in str(outcome.error) for words in DIFFER[how]), str(outcome.error)
        assert str(outcome.error).count("test_custom_plans.py:") == 2, str(outcome.error)


def _across(g: ProcessGroup) -> str:
    with pytest.raises(errors.ResourceError) as caught:
        g.run_plan("mine", _copy(g))
    return str(caught.value)


def test_groups_across_hosts_refuse():
    for text in symcomm.spawn(_across, 2, mode="threads", hosts=[1, 1], deadline=60):
        assert text.startswith("mine: the ranks of group 'world' are on several hosts"), text
