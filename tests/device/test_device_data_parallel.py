"""DataParallel on the CPU: it trains as the plain module does on the whole batch."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

import symcomm
from symcomm import comm
from symcomm.errors import BadArgumentError

pytestmark = pytest.mark.torch_versions

CPU2 = ["cpu", "cpu"]


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Linear(16, 3)).double()


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 7, 12])
def test_training_is_that_of_the_plain_module(devices, rows):
    plain, wrapped = net(), symcomm.DataParallel(net(), ["cpu"] * devices)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (plain, wrapped)]
    for step in range(4):
        torch.manual_seed(step)
        x, y = torch.randn(rows, 6, dtype=torch.float64), torch.randn(rows, 3, dtype=torch.float64)
        losses = []
        for model, optimizer in zip((plain, wrapped), optimizers, strict=True):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_values_are_torchs_own_where_torch_runs_on_the_cpu():
    """Without accelerators torch's wrapper runs the plain module; ours splits, and gives the same."""
    if torch.accelerator.is_available():
        pytest.skip("needs a machine without an accelerator")
    x = torch.randn(5, 6, dtype=torch.float64)
    torch.testing.assert_close(symcomm.DataParallel(net(), CPU2)(x), nn.DataParallel(net())(x))
    assert symcomm.DataParallel(net()).device_ids == []
    torch.testing.assert_close(symcomm.DataParallel(net())(x), net()(x))
    ours, theirs = symcomm.DataParallel(net(), CPU2).state_dict(), nn.DataParallel(net()).state_dict()
    assert list(ours) == list(theirs)


def test_inputs_get_gradients_too():
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    symcomm.DataParallel(net(), CPU2)(x).sum().backward()
    y = x.detach().clone().requires_grad_()
    net()(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_inputs_may_be_changed_in_place():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    x = torch.ones(4, requires_grad=True)
    out = symcomm.DataParallel(InPlace(), CPU2)(x * 1)
    out.sum().backward()
    assert x.grad.tolist() == [2] * 4


def test_buffers_of_the_first_replica_stay():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    wrapped = symcomm.DataParallel(model, CPU2)
    x = torch.randn(8, 4)
    expected = copy.deepcopy(model)
    expected(x[:4])
    wrapped(x)
    torch.testing.assert_close(model[1].running_mean, expected[1].running_mean)
    assert model[1].num_batches_tracked == 1


class Arguments(nn.Module):
    def forward(self, a, b=None, *, scale=1.0, extra=()):
        out = a * scale
        if b is not None:
            out = out + b["x"][0]
        return {"out": out, "rows": [out.sum(1), (len(extra), None)]}


def test_arguments_and_outputs_of_any_shape():
    a, x = torch.randn(5, 2), torch.randn(5, 2)
    wrapped = symcomm.DataParallel(Arguments(), CPU2)
    for args, kwargs in (
        ((a,), {}),
        ((a, {"x": (x,)}), {"scale": 3.0}),
        ((), {"a": a, "b": {"x": [x]}, "scale": 2}),
        ((a,), {"b": {"x": [x]}, "extra": "xy"}),
    ):
        got, expected = wrapped(*args, **kwargs), Arguments()(*args, **kwargs)
        torch.testing.assert_close(got["out"], expected["out"])
        torch.testing.assert_close(got["rows"][0], expected["rows"][0])
        assert got["rows"][1] == expected["rows"][1]


def test_an_empty_argument_takes_no_rows_from_the_others():
    x = torch.randn(6, 3)
    got = symcomm.DataParallel(Arguments(), CPU2)(x, extra=x[:0])
    assert torch.equal(got["out"], x)
    assert symcomm.DataParallel(nn.Linear(3, 2), CPU2)(x[:0]).shape == (0, 2)


def test_no_arguments_run_once():
    class Constant(nn.Module):
        def forward(self):
            calls.append(1)
            return torch.ones(2)

    calls = []
    assert symcomm.DataParallel(Constant(), CPU2)().tolist() == [1, 1] and len(calls) == 1


def test_other_dimension_and_output_device():
    class Double(nn.Module):
        def forward(self, x):
            return x * 2

    x = torch.randn(3, 5)
    wrapped = symcomm.DataParallel(Double(), CPU2, output_device="meta", dim=1)
    assert wrapped(x).shape == (3, 5) and wrapped(x).device.type == "meta"
    assert wrapped.src_device_obj == torch.device("cpu")
    wrapped = symcomm.DataParallel(Double(), CPU2, output_device=-1, dim=-1)
    torch.testing.assert_close(wrapped(x), 2 * x)


def test_scalar_outputs_become_a_vector():
    class Loss(nn.Module):
        def forward(self, x):
            return x.mean()

    x = torch.tensor([1.0, 3.0, 5.0, 7.0], requires_grad=True)
    with pytest.warns(UserWarning, match="without dimensions"):
        losses = symcomm.DataParallel(Loss(), CPU2)(x)
    assert losses.tolist() == [2, 6]
    losses.mean().backward()
    assert x.grad.tolist() == [0.25] * 4


def test_hooks_run_once_per_replica():
    model = net()
    model[1].inplace = False  # full backward hooks do not allow it, in any module
    shapes, grads = [], []
    model[0].register_forward_hook(lambda m, inputs, output: shapes.append(tuple(output.shape)))
    model[0].register_full_backward_hook(lambda m, gin, gout: grads.append(gout[0].shape))
    model[2].weight.register_hook(lambda g: g * 0)
    symcomm.DataParallel(model, CPU2)(torch.randn(5, 6, dtype=torch.float64)).sum().backward()
    assert sorted(shapes) == [(2, 16), (3, 16)] and len(grads) == 2
    assert not model[2].weight.grad.any()


def test_sparse_embeddings():
    table, wrapped = (nn.Embedding(10, 3, sparse=True) for _ in range(2))
    wrapped.load_state_dict(table.state_dict())
    rows = torch.randint(10, (7, 2))
    table(rows).sum().backward()
    symcomm.DataParallel(wrapped, CPU2)(rows).sum().backward()
    assert wrapped.weight.grad.is_sparse
    torch.testing.assert_close(wrapped.weight.grad.to_dense(), table.weight.grad.to_dense())


def test_recurrent_and_complex_modules():
    lstm = nn.LSTM(3, 4, batch_first=True)
    x = torch.randn(4, 2, 3)
    torch.testing.assert_close(symcomm.DataParallel(lstm, CPU2)(x)[0], lstm(x)[0])

    class Turn(nn.Module):
        def __init__(self):
            super().__init__()
            self.by = nn.Parameter(torch.randn(2, dtype=torch.complex64))

        def forward(self, x):
            return x * self.by

    turn = Turn()
    z = torch.randn(5, 2, dtype=torch.complex64)
    out = symcomm.DataParallel(turn, CPU2)(z)
    torch.testing.assert_close(out, turn(z))
    out.abs().sum().backward()
    assert turn.by.grad.dtype == torch.complex64


def test_a_failure_names_replica_and_device():
    class Picky(nn.Module):
        def forward(self, x):
            if x[0] > 1:
                raise ValueError("too much")
            return x

    with pytest.raises(ValueError, match=r"ValueError in replica 1 on device cpu(.|\n)*in forward(.|\n)*too much"):
        symcomm.DataParallel(Picky(), CPU2)(torch.arange(4.0))


def test_without_grad():
    model = net()
    with torch.no_grad():
        out = symcomm.DataParallel(model, CPU2)(torch.randn(4, 6, dtype=torch.float64))
    assert not out.requires_grad
    with torch.inference_mode():
        assert symcomm.DataParallel(model, CPU2)(torch.randn(4, 6, dtype=torch.float64)).is_inference()


def test_functional_form():
    model, x = net(), torch.randn(5, 6, dtype=torch.float64)
    torch.testing.assert_close(comm.data_parallel(model, x, CPU2), model(x))
    torch.testing.assert_close(comm.data_parallel(model, (x,), ["cpu"]), model(x))
    out = comm.data_parallel(Arguments(), None, CPU2, module_kwargs={"a": x})
    torch.testing.assert_close(out["out"], x)


def test_meta_devices():
    model = net().to("meta")
    wrapped = symcomm.DataParallel(model, ["meta", "meta"])
    out = wrapped(torch.empty(6, 6, device="meta", dtype=torch.float64))
    out.sum().backward()
    assert out.shape == (6, 3) and model[0].weight.grad.is_meta


def test_refusals():
    with pytest.raises(BadArgumentError, match="DataParallel: module must be a torch.nn.Module"):
        symcomm.DataParallel(lambda x: x, CPU2)
    with pytest.raises(BadArgumentError, match="data_parallel: module must be a torch.nn.Module"):
        comm.data_parallel(lambda x: x, torch.ones(2), CPU2)
    with pytest.raises(BadArgumentError, match="device_ids must be at least one device"):
        symcomm.DataParallel(net(), [])
    with pytest.raises(BadArgumentError, match="module.0.weight must be on meta, which is device_ids"):
        symcomm.DataParallel(net(), ["meta", "cpu"])(torch.ones(2, 6))


def test_it_can_be_copied_and_saved():
    wrapped = symcomm.DataParallel(net(), CPU2)
    x = torch.randn(4, 6, dtype=torch.float64)
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        torch.testing.assert_close(other(x), wrapped(x))


def test_no_reference_cycles():
    wrapped = symcomm.DataParallel(net(), CPU2)
    x = torch.randn(4, 6, dtype=torch.float64)
    wrapped(x)
    gc.collect()
    gc.disable()
    try:
        wrapped(x).sum().backward()
        assert gc.collect() == 0
    finally:
        gc.enable()
