"""A group has one host's bits, however many hosts its ranks are on: threads as ranks, pretended hosts, real Gloo."""

from __future__ import annotations

import hashlib

import pytest
import torch

import symcomm
from symcomm import errors
from symcomm._core import native
from symcomm.hierarchical import pipelined, topology
from symcomm.types import DType, RedOpType
from tests.support.plan_cases import tree
from tests.support.reductions import COMPLEX, SMALL_FLOATS, expected, random_bits, torch_dtype

pytestmark = pytest.mark.long

SMALL = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT8_E5M2)
LARGE = (DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.INT32)
OPS = ("sum", "avg", "product", "max", symcomm.ReduceOp.PREMUL_SUM(0.37))
COUNTS = (5, 1500)
ALIKE = ([8], [4, 4], [2, 2, 2, 2], [1] * 8)


def values(dtype: DType, count: int, rank: int) -> torch.Tensor:
    """Of very different sizes, with zeros of either sign, so that another order of additions gives other bits."""
    generator = torch.Generator().manual_seed(rank)
    if dtype == DType.INT32:
        return random_bits(dtype, count, rank)
    real = torch.randn(count, 2, dtype=torch.float64, generator=generator)
    real *= 2.0 ** torch.randint(-4, 4, (count, 2), generator=generator)
    real[:: 1 + rank % 3] *= 2.0**-18
    real[1::4] = -0.0
    if dtype in COMPLEX:
        return torch.view_as_complex(real).to(torch_dtype(dtype))
    return real[:, 0].to(torch_dtype(dtype))


def reduced(group, dtypes) -> list[torch.Tensor]:
    """What this rank gets of reductions of every kind."""
    rank, size = group.rank, group.size
    got = []
    for dtype in dtypes:
        for op in OPS[: 3 if dtype in COMPLEX else 4 if dtype.itemsize == 1 else None]:  # torch cannot multiply those
            for count in COUNTS:
                x = values(dtype, count, rank)
                group.all_reduce(x, op)
                root = values(dtype, count, rank)
                group.reduce(root, size - 1, op)
                piece = torch.empty(count, dtype=torch_dtype(dtype))
                group.reduce_scatter_single(piece, values(dtype, count * size, rank), op)
                got += [x, root if rank == size - 1 else x, piece]
    return got


def run(fn, hosts, *args):
    return symcomm.spawn(fn, sum(hosts), args, mode="threads", hosts=hosts, deadline=100)


def digest(ranks: list[list[torch.Tensor]]) -> str:
    found = hashlib.sha256()
    for tensors in ranks:
        for tensor in tensors:
            found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.fixture(params=["eager", "engine"])
def way(request, monkeypatch):
    """With arrivals, or through the engine in several chunks."""
    if request.param == "engine":
        monkeypatch.setattr(pipelined, "CHUNK", 2048)
        monkeypatch.setattr(topology, "EAGER_MAX", 0)
        monkeypatch.setattr(topology, "EAGER_HOST_MAX", 0)


def test_large_types_have_one_hosts_bits_anyway(way):
    assert len({digest(run(reduced, hosts, LARGE)) for hosts in ALIKE}) == 1
    assert (
        len({digest(run(reduced, hosts, LARGE)) for hosts in ([6], [2, 2, 2], [4, 2])}) == 1
    )  # the last may be smaller


def test_small_types_do_with_wide_sums(way, monkeypatch):
    monkeypatch.setenv("SYMCOMM_WIDE_SUMS", "1")
    assert len({digest(run(reduced, hosts, SMALL)) for hosts in ALIKE}) == 1
    assert len({digest(run(reduced, hosts, SMALL)) for hosts in ([3], [2, 1])}) == 1


def test_they_are_those_of_the_tree():
    [first, *_] = run(reduced, [2, 2], [DType.FLOAT32])
    sources = [values(DType.FLOAT32, COUNTS[0], rank) for rank in range(4)]
    assert torch.equal(first[0], tree(torch.add, sources))
    assert torch.equal(first[0], expected(DType.FLOAT32, RedOpType.SUM, sources))


def test_small_types_differ_without(monkeypatch):
    """Each host rounds what it has: half the bytes, other bits."""
    found = {digest(run(reduced, hosts, [DType.BFLOAT16])) for hosts in ([4], [2, 2])}
    assert len(found) == 2


def test_a_wrong_word_is_refused(monkeypatch):
    monkeypatch.setenv("SYMCOMM_WIDE_SUMS", "yes")
    with pytest.raises(errors.BadArgumentError, match="SYMCOMM_WIDE_SUMS must be 0 or 1, got 'yes'"):
        run(reduced, [1, 1], [])


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=lambda d: d.label)
def test_conversions_are_torchs(dtype):
    codes = torch.arange(256**dtype.itemsize).to({1: torch.uint8, 2: torch.uint16}[dtype.itemsize])
    small = codes.view(torch_dtype(dtype))
    wide = torch.empty(len(codes))
    native.widen(dtype, wide.data_ptr(), small.data_ptr(), len(codes))
    numbers = ~wide.isnan()
    assert torch.equal(wide[numbers], small.float()[numbers]) and torch.equal(wide.isnan(), small.float().isnan())
    random = random_bits(DType.FLOAT32, 5003, 1)
    random[::2] = torch.randn(2502) * 8
    for count in (1, 3, 4, 5, 5003):
        given = random[:count].clone()
        want = torch.empty(count, dtype=small.dtype)
        native.reduce(DType.FLOAT32, RedOpType.SUM, given.data_ptr(), [given.data_ptr()], count)
        native.narrow(dtype, given.data_ptr(), given.data_ptr(), count)  # in place
        got = given.view(torch.uint8)[: count * dtype.itemsize].view(small.dtype)
        limited = random[:count].clamp(-448, 448) if dtype == DType.FLOAT8_E4M3FN else random[:count]
        want = limited.to(small.dtype)
        assert torch.equal(got.float().nan_to_num(7), want.float().nan_to_num(7))


def test_conversions_refuse_other_types():
    with pytest.raises(ValueError, match="dtype must be the number of a float of 8 or 16 bits, got 11"):
        native.widen(DType.FLOAT32, 0, 0, 0)
    with pytest.raises(ValueError, match="count must be 0 or more, got -1"):
        native.narrow(DType.FLOAT16, 0, 0, -1)
