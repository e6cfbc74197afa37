"""Logical shards: the same bits on 1, 2, 4 and 8 ranks, which are those of a tree over all shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import symcomm
from symcomm import errors
from symcomm.collectives.tree import combine
from symcomm.group.shards import PairwiseReduction, share_of
from symcomm.types import DType, RedOpType
from tests.support.reductions import DEFINED, expected, moderate, random_bits, torch_dtype

SHARDS, COUNT, FACTOR = 8, 1032, 0.75


def shard(dtype: DType, number: int) -> torch.Tensor:
    """Of very different sizes, with zeros of either sign, so that another order of additions gives other bits."""
    x = moderate(dtype, COUNT, number)
    if dtype.itemsize > 1 and x.is_floating_point():
        x *= 2.0 ** (number % 5 - 3)
        x[number::7] = -0.0
    return x


def op_of(redop: RedOpType) -> Any:
    return symcomm.ReduceOp.PREMUL_SUM(FACTOR) if redop is RedOpType.PREMUL_SUM else redop


def torch_multiplies(dtype: DType, redop: RedOpType) -> bool:
    return redop is not RedOpType.PREMUL_SUM or (
        dtype.itemsize > 1 and dtype not in (DType.UINT16, DType.UINT32, DType.UINT64)
    )


KINDS = [(d, op) for d, op in DEFINED if torch_multiplies(d, op)]


def reduced(group: Any, kinds: Any, shards: int = SHARDS) -> list[torch.Tensor]:
    got = []
    for dtype, redop in kinds:
        mine = [shard(dtype, k) for k in group.shard_range(shards)]
        whole = torch.empty(COUNT, dtype=torch_dtype(dtype))
        group.all_reduce_shards(whole, mine, shards, op_of(redop))
        piece = torch.empty(COUNT // group.size, dtype=torch_dtype(dtype))
        work = group.reduce_scatter_shards(piece, iter(mine), shards, op_of(redop), async_op=True)
        work.wait()
        got += [whole, piece]
    return got


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def wanted(dtype: DType, redop: RedOpType, shards: int = SHARDS) -> torch.Tensor:
    sources = [shard(dtype, k) for k in range(shards)]
    if redop is RedOpType.PREMUL_SUM:  # the plain all_reduce multiplies in the tensors' own type, too
        return expected(dtype, RedOpType.SUM, [(s * FACTOR).to(s.dtype) for s in sources])
    return expected(dtype, redop, sources, 1.0)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_type_and_operation_has_the_bits_of_the_tree(ranks):
    outcomes = symcomm.spawn(reduced, ranks, (KINDS,), mode="threads", deadline=100)
    for number, (dtype, redop) in enumerate(KINDS):
        want = bits(wanted(dtype, redop))
        assert [bits(got[2 * number]) for got in outcomes] == [want] * ranks, (dtype, redop)
        assert b"".join(bits(got[2 * number + 1]) for got in outcomes) == want, (dtype, redop)


@pytest.mark.parametrize("kind", ["float32", "float64", "int16", "complex64"])
def test_the_tree_in_numpy(kind):
    random = np.random.default_rng(7)
    values = [(random.standard_normal(501) * 10.0 ** (k % 4)).astype(kind) for k in range(SHARDS)]
    want = combine(np.add, values)
    in_turn = sum(values[1:], values[0])
    assert kind == "int16" or want.tobytes() != in_turn.tobytes(), "another order must be seen"

    def on_rank(group: Any) -> np.ndarray:
        total = np.empty(501, kind)
        group.all_reduce_shards(total, (values[k] for k in group.shard_range(SHARDS)), SHARDS)
        return total

    for ranks in (1, 2, 4, 8):
        assert {total.tobytes() for total in symcomm.spawn(on_rank, ranks, mode="threads")} == {want.tobytes()}


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32], ids=lambda d: d.label)
def test_they_are_those_of_as_many_ranks(dtype):
    def on_rank(group: Any) -> torch.Tensor:
        group.all_reduce(x := shard(dtype, group.rank), "avg")
        return x

    [want, *_] = symcomm.spawn(on_rank, SHARDS, mode="threads")
    [[got, _]] = symcomm.spawn(reduced, 1, ([(dtype, RedOpType.AVG)],), mode="threads")
    assert bits(got) == bits(want)


def test_several_hosts_have_them_without_wide_sums():
    kinds = [(dtype, RedOpType.SUM) for dtype in (DType.BFLOAT16, DType.FLOAT8_E5M2, DType.FLOAT32)]
    for hosts in ([2, 2], [1, 1, 1, 1]):
        outcomes = symcomm.spawn(reduced, 4, (kinds,), mode="threads", hosts=hosts, deadline=100)
        for number, (dtype, redop) in enumerate(kinds):
            assert {bits(got[2 * number]) for got in outcomes} == {bits(wanted(dtype, redop))}


@pytest.mark.parametrize("shards", range(1, 20))
def test_any_number_on_one_rank_and_in_one_reduction(shards):
    [[got, _]] = symcomm.spawn(reduced, 1, ([(DType.FLOAT32, RedOpType.SUM)], shards), mode="threads")
    assert bits(got) == bits(wanted(DType.FLOAT32, RedOpType.SUM, shards))


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.FLOAT32], ids=lambda d: d.label)
def test_a_reduction_keeps_few_buffers_and_can_be_used_again(dtype):
    reduction = PairwiseReduction(dtype, RedOpType.SUM, COUNT)
    most = 0
    for _ in range(3):
        for number in range(31):
            source = shard(dtype, number)
            reduction.add(source.data_ptr())
            source.fill_(7)  # it was read
            most = max(most, len(reduction._waiting) + len(reduction._free))
        out = torch.empty(COUNT, dtype=torch_dtype(reduction.kept))
        last = shard(dtype, 31)
        reduction.end(last.data_ptr(), out.data_ptr())
        sources = [shard(dtype, k).to(out.dtype) for k in range(32)]
        assert bits(out) == bits(combine(torch.add, sources))
    assert most <= 6


def test_memory_that_is_used_again_and_layouts():
    """An iterator fills one tensor again and again; the output is the last input, or lies in steps."""

    def on_rank(group: Any) -> list[torch.Tensor]:
        mine = group.shard_range(SHARDS)
        same = torch.empty(COUNT)

        def each() -> Iterator[torch.Tensor]:
            for k in mine:
                yield same.copy_(shard(DType.FLOAT32, k))

        apart = torch.empty(COUNT, 2)[:, 0]
        group.all_reduce_shards(apart, each(), SHARDS)
        inputs = [shard(DType.FLOAT32, k) for k in mine]
        group.all_reduce_shards(inputs[0], inputs, SHARDS)
        last = [shard(DType.FLOAT32, k) for k in mine]
        group.all_reduce_shards(last[-1], last, SHARDS)
        room = torch.empty(COUNT + 3)
        room[3:] = shard(DType.FLOAT32, mine[-1])
        over = [*(shard(DType.FLOAT32, k) for k in mine[:-1]), room[3:]]
        group.all_reduce_shards(room[:COUNT], over, SHARDS)
        return [apart, inputs[0], last[-1], room[:COUNT]]

    want = bits(wanted(DType.FLOAT32, RedOpType.SUM))
    for got in symcomm.spawn(on_rank, 2, mode="threads"):
        assert [bits(x) for x in got] == [want] * 4


def test_an_iterator_that_raises_ends_the_call_on_all():
    """On its own rank with its own error, on the others with one that names it; the group goes on."""

    def each(group: Any) -> Iterator[torch.Tensor]:
        yield torch.ones(4)
        if group.rank == 1:
            raise KeyError("mine")
        yield torch.ones(4)

    def on_rank(group: Any, async_op: bool) -> str:
        with pytest.raises((KeyError, errors.CallRefusedError)) as caught:
            work = group.all_reduce_shards(torch.empty(4), each(group), 4, async_op=async_op)
            work.wait()
        group.all_reduce(total := torch.ones(1))
        assert total.item() == 2.0
        return str(caught.value)

    for async_op in (False, True):
        other, own = symcomm.spawn(on_rank, 2, (async_op,), mode="threads")
        assert own == "'mine'" and "rank 1 refused its call" in other and "KeyError: 'mine'" in other


def test_collectives_between_shards_and_in_sub_groups():
    """An iterator may call the group itself; the shards of a sub-group are split over its own ranks."""

    def on_rank(group: Any) -> Any:
        def each() -> Iterator[torch.Tensor]:
            for k in group.shard_range(8):
                group.all_reduce(x := torch.full((3,), float(k)))
                yield x

        group.all_reduce_shards(total := torch.empty(3), each(), 8)
        part = group.new_group([1, 3])
        if group.rank not in (1, 3):
            return total.tolist(), None
        mine = part.shard_range(4)
        part.all_reduce_shards(own := torch.empty(3), [torch.full((3,), float(k)) for k in mine], 4)
        return total.tolist(), (list(mine), own.tolist())

    found = symcomm.spawn(on_rank, 4, mode="threads")
    whole = 4.0 * sum(range(8))  # shards 0, 2, 4, 6 are added first, then 1, 3, 5, 7; and each on four ranks
    assert [total for total, _ in found] == [[whole] * 3] * 4
    assert [part for _, part in found] == [None, ([0, 1], [6.0] * 3), None, ([2, 3], [6.0] * 3)]


def test_inputs_wait_for_operations_that_write_them():
    def on_rank(group: Any) -> torch.Tensor:
        x = torch.ones(1 << 20)
        work = group.all_reduce(x, async_op=True)
        out = torch.empty_like(x)
        group.all_reduce_shards(out, [x], 2)
        work.wait()
        return out

    for out in symcomm.spawn(on_rank, 2, mode="threads"):
        assert out.eq(4).all()


def test_autograd_knows_of_the_output():
    def on_rank(group: Any) -> None:
        weight = torch.ones(4, requires_grad=True)
        x = torch.zeros(4)
        product = weight * x
        group.all_reduce_shards(x, [torch.ones(4)], group.size)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()

    symcomm.spawn(on_rank, 2, mode="threads")


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "size", "words"),
    [
        (8, 3, "shards must be 3 (the group's ranks) times a power of two, got 8"),
        (6, 4, "shards must be 4 (the group's ranks) times a power of two, got 6"),
        (12, 2, "shards must be 2 (the group's ranks) times a power of two, got 12"),
        (2, 4, "shards must be 4 (the group's ranks) times a power of two, got 2"),
        (0, 1, "shards must be 1 or more, got 0"),
        (-8, 2, "shards must be 2 (the group's ranks) times a power of two, got -8"),
        ("8", 2, "shards must be a number of shards, got"),
        (True, 1, "shards must be a number of shards, got"),
    ],
)
def test_numbers_that_cannot_be_split(shards, size, words):
    with pytest.raises(errors.BadArgumentError) as caught:
        share_of("call", "shards", shards, 0, size)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_ranges():
    assert [share_of("call", "shards", 12, rank, 3) for rank in range(3)] == [range(4), range(4, 8), range(8, 12)]
    assert share_of("call", "shards", 12, 0, 1) == range(12)


WRONG = [
    (lambda x: ([x], 4), "inputs must be as many as this rank has shards, 2, got 1"),
    (lambda x: (iter([x]), 4), "inputs must be as many as this rank has shards, 2, got 1"),
    (lambda x: (iter([x, x, x]), 4), "inputs must be as many as this rank has shards, 2, got 'more than 2'"),
    (lambda x: (x, 4), "inputs must be a list or an iterator of tensors, got"),
    (lambda x: ([x, x[:2]], 4), "inputs[1] must be float32 x 4, as output says, got 'float32 x 2'"),
    (lambda x: ([x, x.double()], 4), "inputs[1] must be float32 x 4, as output says, got 'float64 x 4'"),
    (lambda x: ([x, x], 6), "shards must be 2 (the group's ranks) times a power of two, got 6"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=range(len(WRONG)))
def test_refusals_are_one_sentence_on_every_rank(arguments, words):
    def on_rank(group: Any) -> tuple[str, float]:
        x = torch.ones(4)
        if group.rank == 1:
            with pytest.raises(errors.BadArgumentError) as caught:
                group.all_reduce_shards(torch.empty(4), *arguments(x))
        else:
            with pytest.raises(errors.SymcommError) as caught:
                group.all_reduce_shards(torch.empty(4), [x, x], 4)
        group.all_reduce(total := torch.ones(1))  # the group goes on
        return str(caught.value), total.item()

    said = symcomm.spawn(on_rank, 2, mode="threads")
    assert [total for _, total in said] == [2.0, 2.0]
    assert words in said[1][0] and "rank 1" in said[0][0] and words in said[0][0]


def test_ranks_that_mean_different_numbers_of_shards_are_told():
    def on_rank(group: Any) -> str:
        shards = 4 if group.rank else 2
        x = torch.ones(3)
        with pytest.raises(errors.CollectiveMismatchError) as caught:
            group.all_reduce_shards(torch.empty(3), [x] * (shards // 2), shards)
        return str(caught.value)

    for said in symcomm.spawn(on_rank, 2, mode="threads"):
        assert "rank 0 called all_reduce(float32 x 3, SUM, 2 shards)" in said
        assert "rank 1 called all_reduce(float32 x 3, SUM, 4 shards)" in said


def test_functions_on_the_default_group():
    def on_rank(group: Any) -> Any:
        out, piece = torch.empty(2), torch.empty(1)
        mine = [torch.full((2,), float(k)) for k in symcomm.shard_range(4)]
        symcomm.all_reduce_shards(out, mine, 4)
        symcomm.reduce_scatter_shards(piece, mine, 4, "max")
        return out.tolist(), piece.tolist()

    assert symcomm.spawn(on_rank, 2, mode="threads") == [([6.0, 6.0], [3.0])] * 2


def test_bits_that_are_no_numbers():
    """Infinities and NaNs come through, whichever bits they have."""
    values = [random_bits(DType.FLOAT32, COUNT, k) for k in range(SHARDS)]
    want = combine(torch.add, values)

    def on_rank(group: Any) -> torch.Tensor:
        out = torch.empty(COUNT)
        group.all_reduce_shards(out, [values[k] for k in group.shard_range(SHARDS)], SHARDS)
        return out

    for ranks in (1, 4):
        for got in symcomm.spawn(on_rank, ranks, mode="threads"):
            numbers = ~want.isnan()
            assert torch.equal(got.isnan(), want.isnan()) and bits(got[numbers]) == bits(want[numbers])
