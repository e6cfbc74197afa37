"""Lists of symmetric tensors that were allocated one by one are used in place, as one tensor is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

np = pytest.importorskip("numpy")  # its memory is ordinary, also with the shared heap
torch = pytest.importorskip("torch")

import symcomm  # noqa: E402
from symcomm import ProcessGroup, ReduceOp, errors, symm_mem  # noqa: E402
from symcomm._core import native  # noqa: E402
from symcomm.collectives import select  # noqa: E402
from symcomm.collectives.plan import At, Copy, Loop, Space  # noqa: E402
from symcomm.types import DType  # noqa: E402

pytestmark = pytest.mark.torch_versions

WORLD = 3
COUNT = 1 << 16  # of a piece: 256 KiB
Lists = list[Any]


def _apart(rank: int) -> Lists:
    """In an order that no tensor of all of them could have."""
    return [symm_mem.empty(COUNT) for _ in range(WORLD)][::-1]


def _in_a_row(rank: int) -> Lists:
    return list(symm_mem.empty(WORLD * COUNT).view(WORLD, COUNT))


def _ordinary(rank: int) -> Lists:
    return [torch.from_numpy(np.empty(COUNT, "f4")) for _ in range(WORLD)]


def _one_ordinary(rank: int) -> Lists:
    return [*_apart(rank)[:-1], *_ordinary(rank)[:1]]


def _twice(rank: int) -> Lists:
    """The same tensor for several ranks."""
    return [symm_mem.empty(COUNT)] * WORLD


MAKE: dict[str, Callable[[int], Lists]] = {
    "apart": _apart, "in a row": _in_a_row, "ordinary": _ordinary, "one ordinary": _one_ordinary, "twice": _twice,
}  # fmt: skip
DIRECT = {"apart", "in a row", "twice"}


def _fill(inputs: Lists, rank: int) -> Lists:
    for place, tensor in enumerate(inputs):
        tensor.copy_(torch.arange(len(tensor)) % 1000 + 1000 * rank + 10_000 * place)
    return [tensor.clone() for tensor in inputs]  # of a tensor that is there twice, what was written last


def _pairs(group: ProcessGroup, mine: str, others: str) -> list[str]:
    """This rank's lists are of the first kind if it is rank 1, else of the second; says what was wrong."""
    rank, wrong = group.rank, []
    kind = mine if rank == 1 else others
    inputs = MAKE[kind](rank)
    values = _fill(inputs, rank)
    all_values = group.all_gather_object(values)

    def check(call: str, kinds: set[str], got: Lists, wanted: Lists, before: dict[str, Any]) -> None:
        if not all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True)):
            wrong.append(f"{call}, {mine} beside {others}: values")
        after = group.copy_stats()
        took = {how for how in after if after[how]["calls"] > before[how]["calls"]} - {"no_plan"}
        if took != kinds:
            wrong.append(f"{call}, {mine} beside {others}: {took}, not {kinds}")

    all_direct = {mine, others} <= DIRECT
    reason = {"ordinary_there"} if kind in DIRECT else {"ordinary_here"}
    here = {"direct"} if all_direct else reason
    outputs = [torch.empty(COUNT) for _ in range(WORLD)]
    for is_async in (False, True):
        before = group.copy_stats()
        work = group.all_to_all(outputs, inputs, async_op=is_async)
        if work is not None:
            work.wait()
        ways = (
            {"direct"} if all_direct else {"attached"} if group.copy_stats()["attached"] != before["attached"] else here
        )
        check("all_to_all", ways, outputs, [all_values[peer][rank] for peer in range(WORLD)], before)
    before = group.copy_stats()
    group.reduce_scatter(outputs[0], inputs, ReduceOp.SUM)
    total = torch.stack([all_values[peer][rank] for peer in range(WORLD)]).sum(0)
    check("reduce_scatter", here, outputs[:1], [total], before)
    before = group.copy_stats()
    group.scatter(outputs[0], inputs if rank == 1 else None, 1)
    from_root = {"direct"} if mine in DIRECT else {"ordinary_here" if rank == 1 else "ordinary_there"}
    if group.copy_stats()["attached"] != before["attached"]:
        from_root = {"attached"} if mine not in DIRECT else set()
    check("scatter", from_root, outputs[:1], [all_values[1][rank]], before)
    return wrong


def _all_pairs(group: ProcessGroup) -> list[str]:
    return [word for mine, others in itertools.product(MAKE, MAKE) for word in _pairs(group, mine, others)]


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_lists_are_direct_wherever_their_tensors_lie(mode, forked_ranks):
    assert symcomm.spawn(_all_pairs, WORLD, mode=mode) == [[]] * WORLD


def _counts(sender: int) -> list[int]:
    """How long a rank's tensors are; one of them is empty."""
    return [[COUNT, 100, 3], [5, 0, COUNT + 1], [COUNT // 2, COUNT, 7]][sender]


def _uneven(group: ProcessGroup) -> list[Any]:
    """Lists of tensors of different sizes, somewhere or as views of one tensor; rank 1's second tensor is empty."""
    rank, found = group.rank, []

    def call(counts: list[list[int]], kind: str, make: Callable[..., Any]) -> None:
        sizes = counts[rank]
        if kind == "apart":
            inputs = [symm_mem.empty(n) if n else torch.empty(0) for n in sizes]
        elif kind == "in a row":
            inputs = list(symm_mem.empty(sum(sizes)).split(sizes))
        else:
            inputs = [torch.from_numpy(np.empty(n, "f4")) for n in sizes]
        all_values = group.all_gather_object(_fill(inputs, rank))
        before = group.copy_stats()["direct"]["calls"]
        got, wanted = make(inputs, all_values)
        right = all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))
        found.append([right, group.copy_stats()["direct"]["calls"] - before])

    def exchange(inputs: Lists, all_values: list[Lists], is_async: bool = False) -> tuple[Lists, Lists]:
        wanted = [values[rank] for values in all_values]
        got = [torch.empty_like(w) for w in wanted]
        work = group.all_to_all(got, inputs, async_op=is_async)
        if work is not None:
            work.wait()
        return got, wanted

    def reduce(inputs: Lists, all_values: list[Lists]) -> tuple[Lists, Lists]:
        wanted = torch.stack([values[rank] for values in all_values]).sum(0)
        group.reduce_scatter(got := torch.empty_like(wanted), inputs, ReduceOp.SUM)
        return [got], [wanted]

    for kind in ("apart", "in a row", "ordinary"):
        call([_counts(sender) for sender in range(WORLD)], kind, exchange)
        call([_counts(sender) for sender in range(WORLD)], kind, lambda *lists: exchange(*lists, is_async=True))
        call([_counts(0)] * WORLD, kind, reduce)
    call([_counts(sender) for sender in range(WORLD)], "ordinary" if rank == 2 else "apart", exchange)
    return found


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_lists_of_different_sizes_are_direct_too(mode, forked_ranks):
    """The small all_gathers by which ranks agree on sizes are not."""
    direct, staged = [[True, 1]] * 3, [[True, 0]] * 3
    assert symcomm.spawn(_uneven, WORLD, mode=mode) == [[*direct, *direct, *staged, [True, 0]]] * WORLD


def _meet(group: ProcessGroup) -> list[Any]:
    """One rank has a list, the others one tensor each."""
    rank, found = group.rank, []
    for who in range(WORLD):
        inputs = (_apart if rank == who else _in_a_row)(rank)
        _fill(inputs, rank)
        output = torch.empty(COUNT)
        before = group.copy_stats()["direct"]["calls"]
        if rank == who:
            group.reduce_scatter(output, inputs, ReduceOp.SUM)
        else:
            group.reduce_scatter_single(output, inputs[0]._base, ReduceOp.SUM)
        direct = group.copy_stats()["direct"]["calls"] - before
        group.reduce_scatter(wanted := torch.empty(COUNT), [tensor.clone() for tensor in inputs], ReduceOp.SUM)
        found.append([torch.equal(output, wanted), direct])
    return found


def test_a_list_meets_single_tensors():
    assert symcomm.spawn(_meet, WORLD, mode="threads") == [[[True, 1]] * WORLD] * WORLD


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"piece_bytes": 0}, "pieces of no list"),
        ({"piece_bytes": 3 << 17}, "across pieces"),
        ({"piece_bytes": 1 << 16}, "across pieces"),
        ({"direct": [Loop(2, (Copy((At(Space.OUT),), At(Space.PEER_IN, 0), 4),))]}, "loops over pieces"),
        ({"direct": [Copy((At(Space.STAGE, 1),), At(Space.PEER_IN, 0), 4)]}, "stages where"),
    ],
)
def test_the_core_refuses_plans_that_could_not_find_pieces(change, why):
    plan = select.all_to_all(1, 4, 1 << 18, DType.INT8, True)
    assert plan.apart and native.make_plan(plan.encode())
    with pytest.raises(ValueError, match=why):
        native.make_plan(replace(plan, attach_bytes=0, **change).encode())


def _refused(group: ProcessGroup) -> list[Any]:
    """One rank refuses its call when the others have told where their pieces are; the next call is right."""
    inputs, outputs = _apart(group.rank), [torch.empty(COUNT) for _ in range(WORLD)]
    _fill(inputs, group.rank)
    with pytest.raises(errors.SymcommError):
        group.reduce_scatter(outputs[0], inputs[: WORLD - (group.rank == 1)], ReduceOp.SUM)
    before = group.copy_stats()["direct"]["calls"]
    found = []
    for _ in range(3):
        inputs = inputs[1:] + inputs[:1]
        for place, tensor in enumerate(inputs):
            tensor.fill_(group.rank + 10 * place)
        group.reduce_scatter(outputs[0], inputs, ReduceOp.SUM)
        found.append(outputs[0].unique().tolist())
    return [found, group.copy_stats()["direct"]["calls"] - before]


def test_a_refused_call_leaves_nothing_behind():
    for rank, (found, direct) in enumerate(symcomm.spawn(_refused, WORLD, mode="threads")):
        assert found == [[3.0 + 30 * rank]] * 3 and direct == 3


def _differ(group: ProcessGroup) -> str:
    inputs, outputs = _apart(group.rank), [torch.empty(COUNT) for _ in range(WORLD)]
    if group.rank == 1:
        inputs = [tensor[:-1] for tensor in inputs]
        outputs = [tensor[:-1] for tensor in outputs]
    kept = _fill(inputs, group.rank)
    try:
        group.reduce_scatter(outputs[0], inputs, ReduceOp.SUM)
    except errors.CollectiveMismatchError as error:
        assert all(torch.equal(one, other) for one, other in zip(inputs, kept, strict=True)), "inputs changed"
        return str(error)
    return ""


def test_a_mismatch_is_named_and_changes_no_input():
    assert all("reduce_scatter" in said for said in symcomm.spawn(_differ, WORLD, mode="threads"))
