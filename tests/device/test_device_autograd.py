"""Derivatives: every copy and sum, as a plain call and as an autograd function, backward, forward and twice."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from symcomm import comm
from symcomm.device import nccl

pytestmark = pytest.mark.torch_versions

CPU2, CPU3 = ["cpu"] * 2, ["cpu"] * 3


def leaf(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


CASES = {
    "broadcast": (lambda a: comm.broadcast(a, CPU2), [(3,)]),
    "broadcast out": (lambda a: comm.broadcast(a, out=[torch.empty(3, dtype=a.dtype)]), [(3,)]),
    "scatter": (lambda a: comm.scatter(a, CPU3), [(4, 2)]),
    "scatter sizes": (lambda a: comm.scatter(a, CPU2, [1, 3], -1), [(2, 4)]),
    "scatter out": (
        lambda a: comm.scatter(a, out=[torch.empty(1, 2, dtype=a.dtype), torch.empty(3, 2, dtype=a.dtype)]),
        [(4, 2)],
    ),
    "gather": (lambda a, b: comm.gather([a, b], 1), [(2, 3), (2, 1)]),
    "gather out": (lambda a, b: comm.gather([a, b], out=torch.empty(5, dtype=a.dtype)), [(2,), (3,)]),
    "reduce_add": (lambda a, b: comm.reduce_add([a, b, a]), [(3,), (3,)]),
    "Broadcast": (lambda a, b: comm.Broadcast.apply(CPU3, a, b), [(3,), (2, 2)]),
    "Broadcast to one": (lambda a: comm.Broadcast.apply(["cpu"], a), [(3,)]),
    "ReduceAddCoalesced": (lambda a, b, c, d: comm.ReduceAddCoalesced.apply("cpu", 2, a, b, c, d), [(2,), (3,)] * 2),
    "ReduceAddCoalesced of one": (lambda a, b: comm.ReduceAddCoalesced.apply("cpu", 2, a, b), [(2,), (3,)]),
    "Scatter": (lambda a: comm.Scatter.apply(CPU2, None, 0, a), [(5, 2)]),
    "Scatter sizes": (lambda a: comm.Scatter.apply(CPU3, [1, 0, 2], -1, a), [(2, 3)]),
    "Gather": (lambda a, b: comm.Gather.apply("cpu", -1, a, b), [(2, 3), (2, 1)]),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_derivatives(name, dtype):
    function, shapes = CASES[name]
    inputs = tuple(leaf(*shape, dtype=dtype) for shape in shapes)
    assert gradcheck(function, inputs, check_forward_ad=True)
    assert gradgradcheck(function, inputs)


def test_gather_of_scalars():
    a, b = leaf(), leaf()
    with pytest.warns(UserWarning, match="without dimensions"):
        out = comm.Gather.apply("cpu", 0, a, b)
    (out * torch.tensor([2.0, 3.0])).sum().backward()
    assert a.grad.item() == 2 and a.grad.dim() == 0 and b.grad.item() == 3
    with forward_ad.dual_level(), pytest.warns(UserWarning, match="without dimensions"):
        dual = forward_ad.make_dual(torch.tensor(1.0), torch.tensor(5.0))
        assert forward_ad.unpack_dual(comm.Gather.apply("cpu", 0, dual, torch.tensor(2.0))).tangent.tolist() == [5, 0]


def test_forward_mode_without_requires_grad():
    a, b = torch.ones(2), torch.ones(3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, torch.full((2,), 4.0))
        outputs = comm.Broadcast.apply(CPU2, dual, b, torch.ones(2, dtype=torch.int64))
        tangents = [forward_ad.unpack_dual(o).tangent for o in outputs]
    assert tangents[0].tolist() == [4, 4] and tangents[3].tolist() == [4, 4]
    assert all(t is None or not t.any() for t in (tangents[1], tangents[2], tangents[4], tangents[5]))


def test_only_what_requires_grad_gets_it():
    weight, fixed, counts = leaf(3), torch.ones(2), torch.ones(2, dtype=torch.int64)
    outputs = comm.Broadcast.apply(CPU2, fixed, weight, counts)
    assert [o.requires_grad for o in outputs] == [False, True, False] * 2
    (outputs[1] * 2 + outputs[4] * 3).sum().backward()
    assert weight.grad.tolist() == [5, 5, 5]
    with torch.no_grad():
        assert not any(o.requires_grad for o in comm.Broadcast.apply(CPU2, weight))


def test_an_output_that_is_not_used_counts_as_zero():
    a, b = leaf(2), leaf(2)
    outputs = comm.Broadcast.apply(CPU2, a, b)
    outputs[2].sum().backward()
    assert a.grad.tolist() == [1, 1] and b.grad.tolist() == [0, 0]


def test_first_output_shares_the_memory():
    weight = leaf(3)
    first, second = comm.Broadcast.apply(CPU2, weight)
    assert first.data_ptr() == weight.data_ptr() != second.data_ptr()


def test_a_change_of_one_output_leaves_backward_of_another_alone():
    a, b = leaf(3), leaf(3)
    outputs = comm.Broadcast.apply(CPU2, a, b)
    squared = outputs[2] * outputs[2]  # backward needs outputs[2]
    with torch.no_grad():
        outputs[3].add_(1)
    squared.sum().backward()
    assert torch.allclose(a.grad, 2 * a)


def test_sparse_gradients_are_added():
    table = torch.randn(6, 2, requires_grad=True)
    first, second = comm.Broadcast.apply(CPU2, table)
    rows = torch.tensor([1, 4])
    total = sum(torch.nn.functional.embedding(rows + i, t, sparse=True).sum() for i, t in enumerate((first, second)))
    total.backward()
    assert table.grad.is_sparse
    assert table.grad.to_dense().sum(1).tolist() == [0, 2, 2, 0, 2, 2]


def test_sparse_leaves():
    table = torch.eye(3).to_sparse().requires_grad_()
    weight = torch.ones(3, requires_grad=True)
    first, _, second, _ = comm.Broadcast.apply(CPU2, table, weight)
    assert first._values().data_ptr() == table._values().data_ptr()
    x = torch.arange(6.0).reshape(3, 2)
    (torch.sparse.mm(first, x) + 2 * torch.sparse.mm(second, x)).sum().backward()
    assert torch.equal(table.grad.to_dense().diag(), 3 * x.sum(1))


def test_meta_goes_through():
    weight = torch.empty(3, device="meta", requires_grad=True)
    outputs = comm.Broadcast.apply(["meta", "meta"], weight)
    joined = comm.Gather.apply("meta", 0, *outputs)
    joined.sum().backward()
    assert joined.shape == (6,) and weight.grad.shape == (3,) and weight.grad.is_meta


def test_cpu_to_meta_and_nothing():
    assert comm.Broadcast.apply(CPU2) == ()
    pieces = comm.Scatter.apply(["cpu", "meta"], None, 0, leaf(4))
    assert [p.device.type for p in pieces] == ["cpu", "meta"]


def test_functional_transforms_agree():
    x = torch.randn(4, dtype=torch.float64)
    jacobian = torch.func.jacrev(lambda v: comm.gather(comm.scatter(v * v, CPU2)))(x)
    assert torch.allclose(jacobian, torch.diag(2 * x))
    jacobian = torch.func.jacfwd(lambda v: comm.reduce_add([v * v, v]))(x)
    assert torch.allclose(jacobian, torch.diag(2 * x + 1))


def test_nccl_gets_nothing_that_is_differentiated():
    x = leaf(2)
    assert nccl.recorded([x]) and not nccl.recorded([x.detach()])
    with torch.no_grad(), forward_ad.dual_level():
        assert not nccl.recorded([x])
        assert nccl.recorded([forward_ad.make_dual(torch.ones(2), torch.ones(2))])
