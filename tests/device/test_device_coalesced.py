"""Many tensors at once: order, dtypes, layouts, buffers and version counters, against plain clones and sums."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._utils import _take_tensors

from symcomm import comm
from symcomm._core import native
from symcomm.device import coalesce, nccl, packing
from symcomm.errors import BadArgumentError

pytestmark = [pytest.mark.torch_versions, pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")]


def refuses(words: str):
    return pytest.raises(BadArgumentError, match=words)


def sparse(rows, columns, entries, dtype=torch.float64):
    indices = torch.stack([torch.randint(rows, (entries,)), torch.randint(columns, (entries,))])
    return torch.sparse_coo_tensor(indices, torch.ones(entries).to(dtype), (rows, columns), check_invariants=True)


def mixture():
    """Dense and sparse, several dtypes, an empty one, a scalar, odd strides."""
    return [
        sparse(2, 3, 1),
        torch.randn(5).long(),
        torch.randn(5),
        sparse(2, 3, 10),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        sparse(3, 3, 7, torch.int64),
        torch.tensor([]).byte(),
        torch.randn(10).int(),
        torch.tensor(3.5),
        torch.randn(4, 6)[:, ::2],
        torch.randn(3, dtype=torch.complex64),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(5).to(torch.bfloat16),
        torch.randn(4, 4).to_sparse_csr(),
        sparse(2, 7, 3).coalesce(),
    ]


def same(a, b) -> bool:
    if a.layout != b.layout or a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.layout is torch.strided:
        return torch.equal(a, b)
    return torch.equal(a.to_dense(), b.to_dense())


# --- broadcast -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer_size", [0, 1, 100, 10 << 20, 2**64 - 1])
def test_broadcast_keeps_order_and_kind(buffer_size):
    tensors = mixture()
    first, second, third = comm.broadcast_coalesced(tensors, ["cpu", "cpu", "cpu"], buffer_size)
    assert all(a is b for a, b in zip(first, tensors, strict=True))
    for copies in (second, third):
        assert all(same(a, b) for a, b in zip(copies, tensors, strict=True))
    assert second[-1].is_coalesced() and not second[3].is_coalesced()
    assert second[4].is_contiguous(memory_format=torch.channels_last)


def test_copies_have_memory_and_versions_of_their_own():
    tensors = [torch.randn(4) for _ in range(3)]
    before = [t.clone() for t in tensors]
    _, second, third = comm.broadcast_coalesced(tensors, ["cpu"] * 3)
    versions = [t._version for t in (*second, *third)]
    for old, copy in zip(versions, (*second, *third), strict=True):
        assert copy._version == old
        copy.zero_()
        assert copy._version == old + 1
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_a_change_of_one_leaves_backward_of_another_alone():
    weight = torch.randn(3, requires_grad=True)
    _, (a, b) = comm.broadcast_coalesced([torch.randn(3), torch.randn(3)], ["cpu", "cpu"])
    product = (weight * a).sum()  # backward needs a
    expected = a.clone()
    b.add_(1)
    product.backward()
    assert torch.equal(weight.grad, expected)


def test_results_are_detached():
    weight = torch.nn.Parameter(torch.randn(3))
    first, second = comm.broadcast_coalesced([weight], ["cpu", "cpu"])
    assert first[0] is weight and first[0].requires_grad
    assert not second[0].requires_grad and type(second[0]) is torch.Tensor


def test_broadcast_to_meta_and_of_nothing():
    there = comm.broadcast_coalesced(mixture()[:6], ["meta", "cpu"])
    assert [t.device.type for t in there[0]] == ["meta"] * 6
    assert all(not t.is_meta for t in there[1])
    assert comm.broadcast_coalesced([], ["cpu", "cpu"]) == [[], []]


def test_broadcast_refusals():
    x = torch.zeros(2)
    with refuses(r"broadcast_coalesced: tensors\[1\] must be on cpu as tensors\[0\] is, got device\(type='meta'\)"):
        comm.broadcast_coalesced([x, x.to("meta")], ["cpu"])
    for size in (-1, 2**64, 1.0, None, "a"):  # TypeError, as from torch.cuda.comm
        with pytest.raises(TypeError, match="buffer_size must be a number of bytes, 0 or more"):
            comm.broadcast_coalesced([x], ["cpu"], size)
    with refuses("devices must be at least one device"):
        comm.broadcast_coalesced([x], [])
    with refuses(r"tensors\[1\] must be a tensor, got <class 'NoneType'>"):
        comm.broadcast_coalesced([x, None], ["cpu"])
    lazy = torch.nn.LazyLinear(3)
    with refuses(r"tensors\[0\] must be a tensor with a shape.*run the module once"):
        comm.broadcast_coalesced(list(lazy.parameters()), ["cpu"])


# --- reduce_add ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lists", [1, 2, 3, 5])
@pytest.mark.parametrize("buffer_size", [-1, 0, 1, 2.5, 10 << 20, 2**64])
def test_sums_keep_order_and_kind(lists, buffer_size):
    tensors = [t for t in mixture() if t.layout is not torch.sparse_csr]  # torch adds these with MKL only
    inputs = [[t.clone() for t in tensors] for _ in range(lists)]
    totals = comm.reduce_add_coalesced(inputs, "cpu", buffer_size)
    for total, tensor in zip(totals, tensors, strict=True):
        expected = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        wide = expected.float() if expected.dtype == torch.bfloat16 else expected
        assert total.layout == tensor.layout and total.dtype == tensor.dtype
        got = total.to_dense() if total.layout is not torch.strided else total
        torch.testing.assert_close(got, (wide * lists).to(tensor.dtype))
    assert all((a is b) == (lists == 1) for a, b in zip(totals, inputs[0], strict=True))


@given(
    counts=st.lists(st.sampled_from([0, 1, 3, 17, 1000, 40000]), min_size=1, max_size=6),
    lists=st.integers(2, 5),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.int32, torch.complex64, torch.bool, torch.float64]),
)
@settings(max_examples=40, deadline=None)
def test_sums_are_those_of_reduce_add(counts, lists, dtype):
    inputs = [[(torch.randn(n) * 4).to(dtype) for n in counts] for _ in range(lists)]
    totals = comm.reduce_add_coalesced(inputs, "cpu")
    for total, column in zip(totals, zip(*inputs, strict=True), strict=True):
        assert torch.equal(total, comm.reduce_add(column))


def test_sums_of_odd_strides_negatives_and_subclasses():
    x = torch.arange(12.0).reshape(3, 4)
    negated = torch.complex(x, x).conj().imag  # a lazily negated view
    assert negated.is_neg()
    inputs = [[x.t(), x[:, ::2], negated, torch.nn.Parameter(x)]] * 3
    totals = comm.reduce_add_coalesced(inputs, "cpu")
    expected = [3 * x.t(), 3 * x[:, ::2], -3 * x, 3 * x]
    assert all(torch.equal(a, b) for a, b in zip(totals, expected, strict=True))
    assert not any(t.requires_grad for t in totals)


def test_float8_is_added_wide():
    x = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    (total,) = comm.reduce_add_coalesced([[x], [x], [x]], "cpu")
    assert total.dtype == x.dtype and total.float().tolist() == [3, 6]


def test_more_lists_than_the_core_adds_at_once():
    counts = comm.reduce_add_coalesced([[torch.ones(2), torch.ones(1, dtype=torch.int32)]] * (coalesce.MOST_LISTS + 1))
    assert [c.tolist() for c in counts] == [[1025, 1025], [1025]]


def test_a_column_of_dense_and_sparse_is_dense():
    x = torch.tensor([[0.0, 1.0]])
    totals = comm.reduce_add_coalesced([[x, x.to_sparse()], [x.to_sparse(), x.to_sparse()]], "cpu")
    assert not totals[0].is_sparse and totals[0].tolist() == [[0, 2]]
    assert totals[1].is_sparse and totals[1].to_dense().tolist() == [[0, 2]]


def test_sums_have_versions_of_their_own():
    totals = comm.reduce_add_coalesced([[torch.ones(2), torch.ones(3)]] * 2, "cpu")
    totals[0].zero_()
    assert totals[0]._version == 1 + totals[1]._version and totals[1].tolist() == [2, 2, 2]


def test_sums_on_meta_are_shapes():
    lists = [[torch.ones(2), torch.ones(3, dtype=torch.int32)]] * 2
    totals = comm.reduce_add_coalesced(lists, "meta")
    assert [(t.device.type, t.shape, t.dtype) for t in totals] == [
        ("meta", (2,), torch.float32),
        ("meta", (3,), torch.int32),
    ]


def test_reduce_refusals():
    x = torch.zeros(2)
    with refuses("inputs must be a list of tensors for each device, got <class 'int'>"):
        comm.reduce_add_coalesced(5)
    with refuses("inputs must be at least one list of tensors"):
        comm.reduce_add_coalesced([])
    with refuses(r"inputs\[1\] must be a list of 2 tensors, as many as in inputs\[0\], got '1 tensors'"):
        comm.reduce_add_coalesced([[x, x], [x]])
    with refuses(r"inputs\[1\]\[1\] must be of the shape \(2,\) of inputs\[0\]\[1\], got \(1, 2\)"):
        comm.reduce_add_coalesced([[x, x], [x, x[None]]])
    with refuses(r"inputs\[1\]\[0\] must be of the dtype torch.float32 of inputs\[0\]\[0\], got torch.int64"):
        comm.reduce_add_coalesced([[x], [x.long()]])
    assert comm.reduce_add_coalesced([[], []]) == ()


# --- packing ---------------------------------------------------------------------------------------------------


@given(
    counts=st.lists(st.integers(0, 50), max_size=30),
    kinds=st.lists(st.sampled_from([torch.float32, torch.int64, torch.uint8]), min_size=30, max_size=30),
    limit=st.integers(1, 300),
)
@settings(max_examples=60, deadline=None)
def test_buckets_hold_everything_once(counts, kinds, limit):
    tensors = [torch.zeros(n, dtype=k) for n, k in zip(counts, kinds, strict=False)]
    groups = packing.buckets(tensors, limit)
    names = {id(t): i for i, t in enumerate(tensors)}
    assert groups == [[names[id(t)] for t in chunk] for chunk in _take_tensors(tensors, limit)]  # as torch does
    assert sorted(i for g in groups for i in g) == list(range(len(tensors)))
    for group in groups:
        members = [tensors[i] for i in group]
        assert len({t.dtype for t in members}) == 1 and group == sorted(group)
        assert sum(t.nbytes for t in members) <= limit or sum(t.nbytes > 0 for t in members) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64], ids=str)
def test_pack_and_parts(dtype):
    tensors = [
        torch.randn(3, 2).to(dtype),
        torch.randn(0).to(dtype),
        torch.randn(2, 3, 2, 2).to(dtype).to(memory_format=torch.channels_last),
        torch.randn(()).to(dtype),
        torch.randn(4, 5).to(dtype).t(),
    ]
    flat = packing.pack(tensors)
    parts = packing.parts_of(flat, tensors)
    for part, tensor in zip(parts, tensors, strict=True):
        assert torch.equal(part, tensor) and part.stride() == tensor.stride()
        assert tensor.numel() == 0 or part.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@pytest.mark.parametrize("limit", [1, 60, 10 << 20])
def test_what_crosses_devices_is_packed_and_split(limit):
    """The way between devices, taken from the CPU to itself."""
    tensors = [t for t in mixture() if t.layout is torch.strided]
    cpu = torch.device("cpu")
    for made in packing.packed_copies(tensors, [cpu, cpu], limit):
        for part, tensor in zip(made, tensors, strict=True):
            assert torch.equal(part, tensor) and part.dtype == tensor.dtype
            assert part._version == 0 and (part.numel() == 0 or part.data_ptr() != tensor.data_ptr())
        assert made[1].is_contiguous(memory_format=torch.channels_last) or made[1].dim() != 4
        made[0].zero_()
        assert [t._version for t in made[:3]] == [1, 0, 0]
    columns = [[t, t.clone(), t.contiguous()] for t in tensors]
    for total, tensor in zip(coalesce.add_packed(cpu, columns, limit), tensors, strict=True):
        torch.testing.assert_close(total, comm.reduce_add([tensor] * 3))


def test_parts_of_one_buffer_have_versions_of_their_own():
    tensors, cpu = [torch.randn(3) for _ in range(3)], torch.device("cpu")
    sums = coalesce.add_packed(cpu, [[t, t] for t in tensors], 1 << 20)
    for parts in (*packing.packed_copies(tensors, [cpu, cpu], 1 << 20), sums):
        assert len({part.untyped_storage().data_ptr() for part in parts}) == 1  # one buffer carried them
        before = [part._version for part in parts]
        parts[1].zero_()
        assert [part._version - old for part, old in zip(parts, before, strict=True)] == [0, 1, 0]


def test_copies_and_sums_by_dtype(monkeypatch):
    """What GPUs do with tensors that stay on them, done by the meta device for shapes and by the CPU for values."""
    tensors = [t for t in mixture() if t.layout is torch.strided]
    monkeypatch.setattr(packing, "_foreach_clone", None)
    for copy, tensor in zip(packing.clones(tensors), tensors, strict=True):
        assert torch.equal(copy, tensor) and (copy.numel() == 0 or copy.data_ptr() != tensor.data_ptr())
    lists = [[t.to("meta") for t in tensors]] * 3
    totals = comm.reduce_add_coalesced(lists)
    assert [(t.shape, t.dtype, t.device.type) for t in totals] == [(t.shape, t.dtype, "meta") for t in tensors]


def test_nccl_carries_buffers_between_gpus(monkeypatch):
    """NCCL needs several GPUs; here a stand-in notes what it is asked for, and CPU tensors play their part."""
    cpu, asked = torch.device("cpu"), []

    def nccl_broadcast(tensor, devices):
        asked.append(("broadcast", tensor.numel(), len(devices)))
        return (tensor, *(tensor.clone() for _ in devices[1:]))

    def nccl_reduce(inputs, output, root):
        asked.append(("reduce", len(inputs), root))
        output.copy_(sum(inputs))

    monkeypatch.setattr(nccl, "can_broadcast", lambda tensor, devices: True)
    monkeypatch.setattr(nccl.torch_comm, "broadcast", nccl_broadcast)
    monkeypatch.setattr(nccl, "can_add", lambda tensors, device: True)
    monkeypatch.setattr(nccl.nccl, "reduce", nccl_reduce)
    tensors = [torch.randn(2, 3), torch.randn(5), torch.arange(4)]
    for made in packing.packed_copies(tensors, [cpu, cpu], 1 << 20):
        assert all(torch.equal(a, b) for a, b in zip(made, tensors, strict=True))
    assert asked == [("broadcast", 11, 3), ("broadcast", 4, 3)]
    asked.clear()
    totals = coalesce.add_packed(cpu, [[t, t] for t in tensors], 1 << 20)
    assert all(torch.equal(a, 2 * b) for a, b in zip(totals, tensors, strict=True))
    assert asked == [("reduce", 2, 0), ("reduce", 2, 0)]


def test_what_nccl_can_carry(monkeypatch):
    """Asked of a stand-in for a tensor on a GPU."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)

    def gpu_tensor(**other):
        facts = {"is_cuda": True, "layout": torch.strided, "is_complex": lambda: False, "device": first, **other}
        return SimpleNamespace(**facts)

    monkeypatch.setattr(nccl, "recorded", lambda tensors: False)
    monkeypatch.setattr(nccl.nccl, "is_available", lambda tensors: True)
    assert nccl.can_broadcast(gpu_tensor(), [first, second])
    for devices in ([first], [first, second, second], [second, torch.device("cuda", 2)], [first, torch.device("cpu")]):
        assert not nccl.can_broadcast(gpu_tensor(), devices)
    odd = [{"is_cuda": False}, {"layout": torch.sparse_coo}, {"is_complex": lambda: True}]
    assert not any(nccl.can_broadcast(gpu_tensor(**facts), [first, second]) for facts in odd)
    pair = [gpu_tensor(), gpu_tensor(device=second)]
    assert nccl.can_add(pair, second) and not nccl.can_add(pair[:1], first)
    assert not nccl.can_add(pair, torch.device("cuda", 2)) and not nccl.can_add(
        [*pair, gpu_tensor(is_cuda=False)], first
    )


def test_the_core_leaves_what_it_does_not_know():
    x = torch.ones(2)
    flat = torch.zeros(4)
    assert native.pack(flat.data_ptr(), [x, x]) and flat.tolist() == [1, 1, 1, 1]
    assert not native.pack(flat.data_ptr(), [x, x.to("meta")])
    assert not native.pack(flat.data_ptr(), ["no tensor"])
    results = [torch.zeros(2), torch.zeros(2), torch.zeros(2)]
    lists = [[x, x, x.int()], [x, x.repeat(2)[::2], x.int()]]
    assert native.add_many(results, lists, 100) == [1, 2]
    assert results[0].tolist() == [2, 2] and results[1].tolist() == [0, 0]
    assert native.add_many(results[:1], [[x], [x]], 1) == [0]  # too long
    with pytest.raises(ValueError, match=r"lists\[1\] must be a list of 1 tensors"):
        native.add_many(results[:1], [[x], []], 100)
    with pytest.raises(ValueError, match="lists must be 1 to 1024 lists, got 0"):
        native.add_many([], [], 100)
